"""Streams an answer: a run whose pieces of text are iterated."""

from collections.abc import Iterator
from typing import Self

from serving.host.forked import require_not_forked
from serving.run import Run
from serving.step import step


class Answer(Run, Iterator[str]):
    """A streaming answer: iterate over its pieces of text, then read its attributes (see `Run`).

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
        # Dropped before its end: its context must be released for others.
        if self.stage != "ended":
            self.lifecycle.dropped(self)
