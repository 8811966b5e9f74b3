"""Lifecycle of answers in a context: restores the context before the answer, and stores it afterwards."""

import dataclasses
import time
import weakref
from collections.abc import Callable

from jaxllm.errors import ConfigError, JaxllmError
from jaxllm.serving.contexts.manager import Contexts
from jaxllm.serving.contexts.record import Record
from jaxllm.serving.contexts.turn import Turn
from jaxllm.serving.engine.run import Lifecycle, Run
from jaxllm.serving.engine.step import close


class ContextCall(Lifecycle):
    """Restores a context before an answer, and stores it afterwards.

    If an error or an interrupt ends the answer, the tokens so far are stored and the error is raised; an
    error of storing them is raised by the context's next call.

    Attributes:
      record: record of the context before the answer.
      restoration: restoration of the context; the default before the first step.
      finish_ms: time to make room in memory for new chunks, and to compress and store them after the answer.
    """

    def __init__(self, contexts: Contexts, record: Record, base: Record, *, most_tokens: int) -> None:
        """See the class.

        Args:
          contexts: contexts of all apps.
          record: see the class.
          base: `record`, or its rest after sliding.
          most_tokens: maximum number of tokens of the context after the answer.
        """
        self.record, self._contexts, self._base, self._most_tokens = record, contexts, base, most_tokens
        self._turn: Turn | None = None

    def begin(self, run: Run) -> None:
        """See `Lifecycle`."""
        record, contexts, source = self.record, self._contexts, run.request.source
        base = None if self._base is record else self._base
        if source is not None:
            base = dataclasses.replace(base or record, source=source)
        if contexts.record(record.app, record.name).tokens != record.tokens:
            raise ConfigError(f"the context {record.name} went on since this answer was asked for; ask again")
        self._turn = contexts.begin(
            record.app,
            record.name,
            run.session,
            prompt_tokens=len(run.sequence),
            most_tokens=self._most_tokens,
            base=base,
            prompt=run.sequence,
            rows=run.request.rows,
        )
        self._turn.stop = _stop(weakref.ref(run), record.name)
        self.restoration = self._turn.restoration

    def stepped(self, run: Run) -> None:
        """See `Lifecycle`."""
        if self._turn is None:
            return
        began = time.perf_counter()
        self._contexts.grow(self._turn, len(run.sequence))
        self.finish_ms += 1000 * (time.perf_counter() - began)

    def sliding(self, run: Run) -> None:
        """See `Lifecycle`."""
        self._contexts.leaving(run.session, run.reused_tokens)

    def finish(self, run: Run) -> None:
        """See `Lifecycle`."""
        turn = self._turn
        if turn is None:
            return
        # First: a later interrupt finds the turn ended.
        turn.over = True
        self._turn = None
        if not run.tokens:
            self._contexts.abandon(turn)
            return
        began = time.perf_counter()
        self._contexts.finish(turn, run.sequence, run.reused_tokens)
        self.finish_ms += 1000 * (time.perf_counter() - began)

    def failed(self, run: Run) -> None:
        """See `Lifecycle`."""
        try:
            self.finish(run)
        except JaxllmError as error:
            self._contexts.pending_errors.note(self.record.name, error)

    def dropped(self, run: Run) -> None:
        """See `Lifecycle`."""
        # In a forked child the turn belongs to the parent.
        if self._turn is not None and not self._contexts.forked:
            self.failed(run)


def _stop(run_ref: weakref.ref[Run], name: str) -> Callable[[], Callable[[], None] | None]:
    """`Turn.stop` of a run. It references neither the run nor its lifecycle, so that answers can be
    dropped."""

    def stop() -> Callable[[], None] | None:
        run = run_ref()
        if run is None:
            return None
        error = ConfigError(
            f"the answer in the context {name} was ended by its service; its tokens so far are kept"
        )
        return lambda: close(run, error)

    return stop
