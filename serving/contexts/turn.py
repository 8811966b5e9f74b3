"""The state of one call in a context, from its restore until it is stored or abandoned."""

import dataclasses
from collections.abc import Callable, Sequence

from jaxllm.serving.contexts.record import Record
from jaxllm.serving.engine.request import Session
from jaxllm.serving.ground.plan import Restoration


@dataclasses.dataclass(kw_only=True, eq=False)
class Turn:
    """A call that runs. The answer has the only strong reference, so that a call whose answer is gone is
    over, wherever it was interrupted.

    Attributes:
      record: of the context, as it is stored while the call runs.
      base: the record that the call goes on from: `record`, or the rest of it after sliding.
      session: the call's cache, and the tokens in it.
      restoration: how the context was restored.
      counted_from: the position from which the cache counts attention, where that is not the first token that
        the call fed.
      over: whether the call has ended.
      sequence: tokens that the call begins with, of the context and its prompt; empty where they come later.
      source: the context that has the chunks of `base`; empty for its own.
      most_bytes: that chunks of the context may come to take in memory.
      stop: gives a function that ends the answer and keeps its tokens; None where the caller of `begin` does
        that.
    """

    record: Record
    base: Record
    session: Session
    restoration: Restoration = dataclasses.field(default_factory=Restoration)
    counted_from: int | None = None
    over: bool = False
    most_bytes: int = 0
    sequence: Sequence[int] = ()
    source: str = ""
    stop: Callable[[], Callable[[], object] | None] = lambda: None
