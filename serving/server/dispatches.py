"""Tells what the engine's thread dispatches, and what it does while it has no calls."""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from serving.run import DispatchKind
from serving.server.job import Job


class IdleWork(Protocol):
    """What the engine's thread does while it has no calls."""

    def step(self) -> bool:
        """Does a piece that takes at most about as long as a dispatch; raises nothing.

        Returns:
          Whether it did something: if not, the thread may sleep for a while.
        """
        ...

    def interrupt(self) -> None:
        """There is a call now; what is not done by now may be dropped, and done again."""
        ...


class NoWork:
    """Does nothing (see `IdleWork`)."""

    def step(self) -> bool:
        """See `IdleWork`."""
        return False

    def interrupt(self) -> None:
        """See `IdleWork`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dispatch:
    """A dispatch that has ended well.

    Attributes:
      kind: what it did, see `serving.run.Dispatched`.
      rows: answers in it.
      took_ms: for which it ran.
      tokens: that it gave to answers; none for a chunk of a prompt but the last.
      chunk_tokens: length of the chunk of a prompt that was fed, padding included; 0 for other kinds.
      mode: arithmetic of the chunk's products, "int8" or "float"; empty for other kinds.
    """

    kind: DispatchKind
    rows: int
    took_ms: float
    tokens: int = 0
    chunk_tokens: int = 0
    mode: str = ""


class DispatchObserver(Protocol):
    """Who is told of each dispatch."""

    def dispatched(self, dispatch: Dispatch, /) -> None:
        """Called in the engine's thread, which waits: returns soon, and raises nothing."""
        ...


def dispatch_of(jobs: Sequence[Job], took_ms: float) -> Dispatch | None:
    """The dispatch that jobs have just had, before they tell of it; None where it failed for all of them."""
    done = [job.run.dispatched for job in jobs if job.run is not None and job.run.dispatched is not None]
    if not done:
        return None
    chunk = done[0].chunk
    return Dispatch(
        kind=done[0].kind,
        rows=len(done),
        took_ms=took_ms,
        tokens=sum(job.untold_tokens for job in jobs),
        chunk_tokens=0 if chunk is None else chunk.tokens,
        mode="" if chunk is None else chunk.mode,
    )
