"""A context of an app over exported programs, and its answers."""

import contextlib
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from jaxllm.errors import BudgetExceeded, CheckpointError, ConfigError, JaxllmError, Unreadable
from jaxllm.export.device.contexts import ProgramContexts, Restored
from jaxllm.serving.contexts.record import Record, turn_ids
from jaxllm.serving.engine.answer import Answer
from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.serving.engine.run import Lifecycle, Run


class ProgramContext:
    """Context of an app.

    Attributes:
      app: app that owns it.
      name: name, unique in the store; finds the context again after a restart.
    """

    def __init__(self, contexts: ProgramContexts, record: Record) -> None:
        self._contexts, self.app, self.name = contexts, record.app, record.name

    @property
    def record(self) -> Record:
        """The stored record.

        Raises:
          ContextGone: see `ProgramContexts.record`.
        """
        return self._contexts.record(self.app, self.name)

    @property
    def tokens(self) -> tuple[int, ...]:
        """All tokens of the context."""
        return self.record.tokens

    @property
    def adapter(self) -> str:
        """Name of the low-rank adapter that answers in it; empty for none."""
        return self._contexts.adapter_of(self.record)

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        instruction: str = "",
        config: GenerationConfig | None = None,
    ) -> "ProgramContextAnswer":
        """Answers a prompt that follows the context's tokens.

        Args:
          prompt: the user's text; or token ids, unchanged.
          instruction: system instruction before everything; only in the first call.
          config: length, stops and sampling of the answer.

        Raises:
          ContextGone: see `ProgramContexts.record`.
          ConfigError: the prompt is empty or malformed, or an instruction comes after the first call.
          ContextOverflow: the context and the prompt exceed the programs' caches.
        """
        contexts = self._contexts
        engine, record = contexts.engine, contexts.record(self.app, self.name)
        if isinstance(prompt, str):
            tokenizer = engine.tokenizer.limited(engine.options.context_tokens)
            prompt = turn_ids(tokenizer, record.tokens, prompt, instruction, now=datetime.now())
        elif instruction:
            raise ConfigError("an instruction comes with a prompt of text, not with token ids")
        config = config or GenerationConfig()
        request = engine.request([*record.tokens, *prompt], config, level=record.origin.level)
        call = ProgramContextCall(contexts, record, most_tokens=len(request.prompt) + config.max_tokens)
        return ProgramContextAnswer(engine.decoding(request), engine.tokenizer, request, call=call)

    def delete(self) -> None:
        """Removes it from memory and storage.

        Raises:
          ContextGone: it was deleted before.
          ConfigError: it is answering.
        """
        self._contexts.delete(self._contexts.record(self.app, self.name).name)


class ProgramContextAnswer(Answer):
    """An answer in a context. When it has ended or was closed, its tokens are part of the context."""

    def __init__(self, *args: Any, call: "ProgramContextCall", **more: Any) -> None:
        """See `Answer`; `call` is its lifecycle."""
        super().__init__(*args, lifecycle=call, **more)
        self._call = call

    @property
    def restoration(self) -> Restored:
        """Restoration of the context, once the answer has begun."""
        return self._call.restoration


class ProgramContextCall(Lifecycle):
    """Restores a context before an answer, and stores it afterwards.

    Attributes:
      record: record of the context at the time of the request.
      restoration: result of the restoration; the default before the first step.
    """

    def __init__(self, contexts: ProgramContexts, record: Record, *, most_tokens: int) -> None:
        self.restoration, self._began, self._before = Restored(), False, ""
        self._contexts, self.record, self._most_tokens = contexts, record, most_tokens

    def begin(self, run: Run) -> None:
        """See `Lifecycle`."""
        record = self.record
        if run.request.level != record.origin.level:
            self.record = record = self._contexts.at_level(record, run.request.level)
        if self._contexts.record(record.app, record.name).tokens != record.tokens:
            raise ConfigError(f"the context {record.name} went on since this answer was asked for; ask again")
        adapters = self._contexts.engine.model.executor.adapters
        self._before = adapters.used
        adapters.use(self._contexts.adapter_of(record))
        self.restoration = self._contexts.begin(record, run.session, most_tokens=self._most_tokens)
        self._began = True

    def finish(self, run: Run) -> None:
        """See `Lifecycle`."""
        if not self._began:
            return
        # First: a later interrupt leaves the call ended.
        self._began = False
        self._contexts.engine.model.executor.adapters.use(self._before)
        if run.tokens:
            self._contexts.finish(self.record, run.session, run.sequence)
        else:
            self._contexts.end(self.record)

    def failed(self, run: Run) -> None:
        """See `Lifecycle`: stores the tokens so far, if storage accepts them; the error is raised in any
        case."""
        with contextlib.suppress(BudgetExceeded, CheckpointError, Unreadable):
            self.finish(run)

    def dropped(self, run: Run) -> None:
        """See `Lifecycle`. If the contexts were already closed, the error has no receiver."""
        with contextlib.suppress(JaxllmError):
            self.finish(run)
