"""One call in a context, from when the context comes back until what was said is kept or given up."""

import dataclasses
from collections.abc import Callable

from serving.contexts.record import Record
from serving.contexts.restore import Restoration
from serving.request import Session


@dataclasses.dataclass(kw_only=True, eq=False)
class Turn:
    """A call that runs. Whoever answers holds it, and a call that nobody holds is over: none runs for ever,
    wherever it was interrupted.

    Attributes:
      record: of the context, as it is stored while the call runs.
      base: the record that the call goes on from: `record`, or what is left of it where the context slid.
      session: the call's cache, and the tokens that this holds.
      restoration: how the context came back.
      counted_from: the position from which on the cache counts what is attended to, where that is not the
        first token that the call fed.
      over: whether the call has ended.
      stop: gives what ends the answer and keeps what was said; nothing where whoever began the call sees to
        that.
    """

    record: Record
    base: Record
    session: Session
    restoration: Restoration = dataclasses.field(default_factory=Restoration)
    counted_from: int | None = None
    over: bool = False
    stop: Callable[[], Callable[[], object] | None] = lambda: None
