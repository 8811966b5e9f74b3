"""An answer as it comes: a request that runs, as a stream of its text."""

from collections.abc import Iterator
from typing import Self

from serving.host.forked import require_not_forked
from serving.run import Run
from serving.step import step


class Answer(Run, Iterator[str]):
    """An answer as it comes: iterate for pieces of text, then read the rest (see `Run`).

    Each step takes the model's lock (`Runner.lock`), which is free between steps: answers of several threads,
    or several of one, take turns.
    """

    def __next__(self) -> str:
        require_not_forked()
        try:
            while not self.pieces:
                if self.closed_because is not None:
                    raise self.closed_because
                if self.stage == "ended":
                    raise StopIteration
                step(self)
            piece = self.pieces.popleft()
            self.text += piece
            return piece
        except StopIteration:
            raise
        except BaseException:
            self.fail()
            raise

    def result(self) -> Self:
        """Runs to the end and returns itself."""
        self.taken_whole = self.stage == "begin"
        for _ in self:
            pass
        return self

    def __del__(self) -> None:
        # Dropped in the middle: others must be able to go on.
        if self.stage != "ended":
            self.lifecycle.dropped(self)
