"""An answer in a context: what was said before comes back when it begins, and all is stored when it ends."""

import time
import weakref
from typing import Any

from jaxllm.errors import ConfigError, JaxllmError
from serving.answer import Answer
from serving.contexts.manager import Contexts
from serving.contexts.record import Record
from serving.contexts.restore import Restoration
from serving.contexts.turn import Turn
from serving.run import Lifecycle, Run


class ContextCall(Lifecycle):
    """Restores a context before an answer, and stores it behind.

    Where an error or an interrupt ends the answer, what was said as far as it had come is stored: the error
    comes out, and what storing may raise beside it comes out of the context's next call.

    Attributes:
      restoration: how the context came back; before the first step, nothing.
      finish_ms: what it took to make room in memory for what was said, and to compress and store it when the
        answer had ended.
    """

    def __init__(self, contexts: Contexts, record: Record, base: Record, *, most_tokens: int) -> None:
        """See the class.

        Args:
          contexts: of all apps.
          record: of the context, when the answer was asked for.
          base: `record`, or what is left of it where it slid.
          most_tokens: that the context may have when the answer ends.
        """
        self.restoration, self.finish_ms = Restoration(), 0.0
        self._contexts, self._record, self._base, self._most_tokens = contexts, record, base, most_tokens
        self._turn: Turn | None = None

    def begin(self, run: Run) -> None:
        """See `Lifecycle`."""
        record, contexts = self._record, self._contexts
        if contexts.record(record.app, record.name).tokens != record.tokens:
            raise ConfigError(f"the context {record.name} went on since this answer was asked for; ask again")
        self._turn = contexts.begin(
            record.app,
            record.name,
            run.session,
            prompt_tokens=run.prompt_tokens,
            most_tokens=self._most_tokens,
            base=None if self._base is record else self._base,
        )
        # Weak, because the contexts hold what stops the answer, and one that nobody holds is over.
        held = weakref.ref(run)
        self._turn.stop = lambda: None if (there := held()) is None else lambda: self._stop(there)
        self.restoration = self._turn.restoration

    def stepped(self, run: Run) -> None:
        """See `Lifecycle`."""
        assert self._turn is not None
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
        # First: an interrupt behind it keeps nobody waiting.
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
            self._contexts.unheard.note(self._record.name, error)

    def dropped(self, run: Run) -> None:
        """See `Lifecycle`."""
        # A forked child's copy is its parent's.
        if self._turn is not None and not self._contexts.forked:
            self.failed(run)

    def _stop(self, run: Run) -> None:
        run.close(
            ConfigError(
                f"the answer in the context {self._record.name} was ended by its service; what it had said "
                "is kept"
            )
        )


class ContextAnswer(Answer):
    """An answer in a context: iterate for pieces of text, then read the rest.

    When it has ended, was closed or dropped, what was said is part of the context and stored.
    """

    def __init__(self, *args: Any, call: ContextCall, **more: Any) -> None:
        """See `Answer`; `call` is its lifecycle."""
        super().__init__(*args, lifecycle=call, **more)
        self._call = call

    @property
    def restoration(self) -> Restoration:
        """How the context came back (see `ContextCall`)."""
        return self._call.restoration

    @property
    def finish_ms(self) -> float:
        """What storing took (see `ContextCall`)."""
        return self._call.finish_ms
