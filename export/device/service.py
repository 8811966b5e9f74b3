"""Serves the programs of a folder to the apps of a device, as `jaxllm.serving.server.service.LLMService`
serves a bundle.

service = ProgramService.open(open_device(Path("programs")))
service.bind("mail", Slo.parse("<40,70>"))
for piece in service.call("Is this a complaint? ...", app="mail"): ...
"""

import contextlib
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Self

from jaxllm.contexts.codecs import RAW
from jaxllm.errors import BudgetExceeded, CheckpointError, ConfigError, JaxllmError, Unreadable
from jaxllm.export.device.contexts import ProgramContexts
from jaxllm.export.device.opening import device_profile
from jaxllm.export.programs.model import ProgramModel, TinyLmPrograms
from jaxllm.serving.contexts.record import Record, turn_ids
from jaxllm.serving.elastic.objectives import CONFIDENCE, SafetyMargin
from jaxllm.serving.elastic.planned_service import PlannedService
from jaxllm.serving.elastic.planner import Planner
from jaxllm.serving.elastic.profile import DeviceProfile
from jaxllm.serving.elastic.tiny_proposer import TinyProposer
from jaxllm.serving.engine.answer import Answer
from jaxllm.serving.engine.engine import Engine
from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.serving.engine.run import Lifecycle, Run
from jaxllm.serving.host.progress import Progress


class ProgramService(PlannedService):
    """Answers the calls of all apps over exported programs. Not thread-safe: one call at a time.

    Attributes:
      contexts: contexts of all apps; None if the service stores none.
    """

    def __init__(
        self,
        engine: Engine[ProgramModel],
        profile: DeviceProfile,
        *,
        confidence: float = CONFIDENCE,
        contexts: ProgramContexts | None = None,
    ) -> None:
        """See `open`; calls are planned by the profile and by the folder's tiny LM. Without one, prompts
        stay whole."""
        proposer = _proposer(engine)
        planner = Planner(profile, engine.levels, proposer, safety_margin=SafetyMargin(confidence))
        super().__init__(engine, profile, planner)
        self.contexts = contexts

    @classmethod
    def open(
        cls,
        engine: Engine[ProgramModel],
        *,
        threads: int = 0,
        contexts: Path | None = None,
        budget_bytes: int = 256 << 20,
        context_bits: int = RAW,
        progress: Progress | None = None,
    ) -> Self:
        """Serves an engine of `open_device`; measures a coarse profile of this device if there is none.

        Args:
          engine: engine that answers, closed with the service.
          threads: number of threads that it computes with; 0 for all cores of this process.
          contexts: folder of contexts that outlive calls; None for no contexts.
          budget_bytes: maximum bytes of contexts' chunks in memory.
          context_bits: bits of their values (see `ProgramContexts`).
          progress: callback for (stage, done, total).

        Raises:
          JaxllmError: see `ProgramContexts`.
        """
        profile = device_profile(engine, threads=threads, progress=progress)
        with contextlib.ExitStack() as opened:
            kept = None
            if contexts is not None:
                kept = ProgramContexts(engine, contexts, budget_bytes=budget_bytes, bits=context_bits)
                opened.callback(kept.close)
            service = cls(engine, profile, contexts=kept)
            service.rehearse()
            opened.pop_all()
        return service

    def close(self) -> None:
        """Closes the contexts, which releases their store, and the engine."""
        if self.contexts is not None:
            self.contexts.close()
        self.engine.close()

    def set_adapter(self, name: str | None) -> None:
        """Puts an adapter of the folder on all levels for calls without a context; None for none. Takes no
        time, and compiles nothing.

        Raises:
          ConfigError: it was not exported with the model.
        """
        self.engine.set_adapter(name)

    def new_context(
        self, app: str, *, level: int | None = None, pinned: bool = False, adapter: str = ""
    ) -> "ProgramContext":
        """Creates a context of an app (see `ProgramContexts.create`)."""
        contexts = self._kept()
        return ProgramContext(contexts, contexts.create(app, level=level, pinned=pinned, adapter=adapter))

    def context(self, app: str, name: str) -> "ProgramContext":
        """Opens a context that an app created earlier, perhaps in another process (see
        `ProgramContexts.record`)."""
        contexts = self._kept()
        return ProgramContext(contexts, contexts.record(app, name))

    def _kept(self) -> ProgramContexts:
        if self.contexts is None:
            raise ConfigError("this service keeps no contexts; open it with a folder for them")
        return self.contexts


def _proposer(engine: Engine[ProgramModel]) -> TinyProposer | None:
    """Makes a proposer of levels and prompt ratios by the folder's tiny LM; None if it has none."""
    tiny, executor = engine.model.tiny_lm, engine.model.executor
    if tiny is None:
        return None
    # Ready before they are timed.
    executor.prepare([each for each in executor.manifest.signatures if each.kind == "tiny_lm"])
    programs = TinyLmPrograms(executor)
    return TinyProposer(tiny, programs.lengths, programs.run, engine.levels)


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
    ) -> Answer:
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
        return Answer(engine.decoding(request), engine.tokenizer, request, lifecycle=call)

    def delete(self) -> None:
        """Removes it from memory and storage.

        Raises:
          ContextGone: it was deleted before.
          ConfigError: it is answering.
        """
        self._contexts.delete(self._contexts.record(self.app, self.name).name)


class ProgramContextCall(Lifecycle):
    """Restores a context before an answer, and stores it afterwards.

    Attributes:
      record: record of the context at the time of the request.
      restoration: result of the restoration; the default before the first step.
    """

    def __init__(self, contexts: ProgramContexts, record: Record, *, most_tokens: int) -> None:
        self._began, self._before = False, ""
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
