"""An answer: a running request as a stream of text."""

from collections.abc import Iterator
from typing import Self

from jaxllm.errors import JaxllmError
from jaxllm.serving.engine.run import Run
from jaxllm.serving.engine.step import close, fail, step
from jaxllm.serving.host.forked import require_not_forked


class Answer(Run, Iterator[str]):
    """A streamed answer: iterate for pieces of text, then read its attributes (see `Run`).

    Each dispatch acquires the model's lock (`Runner.lock`), which is free between dispatches: answers of
    one or several threads take turns. Another thread may close an answer.
    """

    def __next__(self) -> str:
        require_not_forked()
        try:
            while (piece := self._next_piece()) is None:
                step(self)
            return piece
        except StopIteration:
            raise
        except BaseException:
            fail(self)
            raise

    def result(self) -> Self:
        """Runs to the end and returns itself."""
        if self.stage == "begin":
            self.taken_whole = True
        for _ in self:
            pass
        return self

    def close(self, because: JaxllmError | None = None) -> None:
        """Ends the answer; the tokens so far stay in the session.

        Args:
          because: error to raise on further iteration; None to end the iteration.
        """
        close(self, because)

    def _next_piece(self) -> str | None:
        """The next piece of text; None if another step is needed first.

        Raises:
          StopIteration: the answer has ended.
          JaxllmError: it was closed because of this error.
        """
        with self.runner.lock:
            if self.pieces:
                piece = self.pieces.popleft()
                self.text += piece
                return piece
            if self.closed_because is not None:
                raise self.closed_because
            if self.stage == "ended":
                raise StopIteration
        return None

    def __del__(self) -> None:
        # Release what the answer locks, wherever it was dropped or interrupted.
        self.lifecycle.dropped(self)
