"""The state of one call in a context, from its restore until it is stored or abandoned."""

import dataclasses
from collections.abc import Callable, Sequence

from jaxllm.serving.contexts.record import Record
from jaxllm.serving.engine.request import Session
from jaxllm.serving.ground.plan import Restoration


@dataclasses.dataclass(kw_only=True, eq=False)
class Turn:
    """A running call. The answer has the only strong reference, so that a call whose answer is gone is over,
    wherever it was interrupted.

    Attributes:
      record: record of the context, as stored while the call runs.
      base: record that the call continues: `record`, or its rest after sliding.
      session: the call's cache, and the tokens in it.
      restoration: restoration of the context.
      counted_from: position from which the cache counts attention, if it is not the first token that the
        call fed.
      over: whether the call has ended.
      sequence: initial tokens of the context and its prompt; empty if they come later.
      source: context with the chunks of `base`; empty for its own.
      most_bytes: maximum memory of the context's chunks.
      stop: returns a function that ends the answer and stores its tokens; None if the caller of `begin`
        does that.
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
