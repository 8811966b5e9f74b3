"""Says how several runs take one dispatch; `serving.batch` is one way, one by one another."""

from collections.abc import Sequence
from typing import Protocol

from serving.run import Run
from serving.step import step


class Together(Protocol):
    """How several runs take one dispatch."""

    def batchable(self, run: Run, /) -> bool:
        """Whether the next step of a run may be one with others'."""
        ...

    def decode_together(self, runs: Sequence[Run], /) -> None:
        """Takes one dispatch of several runs; a run that fails has ended, with `Run.closed_because`."""
        ...


class OneByOne:
    """Decodes each run by itself (see `Together`)."""

    def batchable(self, run: Run, /) -> bool:
        """See `Together`."""
        del run
        return False

    def decode_together(self, runs: Sequence[Run], /) -> None:
        """See `Together`."""
        for run in runs:
            step(run)
