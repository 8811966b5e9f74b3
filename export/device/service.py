"""Serves the programs of a folder to the apps of a device, as `jaxllm.serving.server.service.LLMService`
serves a bundle.

service = ProgramService.open(open_device(Path("programs")))
service.bind("mail", Slo.parse("<40,70>"))
for piece in service.call("Is this a complaint? ...", app="mail"): ...
"""

import contextlib
from pathlib import Path
from typing import Self

from jaxllm.contexts.codecs import RAW
from jaxllm.errors import ConfigError
from jaxllm.export.device.contexts import ProgramContexts
from jaxllm.export.device.opening import device_profile
from jaxllm.export.programs.model import ProgramModel
from jaxllm.serving.contexts.context import Context
from jaxllm.serving.elastic.objectives import CONFIDENCE, SafetyMargin
from jaxllm.serving.elastic.planned_service import PlannedService
from jaxllm.serving.elastic.planner import Planner
from jaxllm.serving.elastic.profile import DeviceProfile
from jaxllm.serving.elastic.tiny_proposer import TinyProposer
from jaxllm.serving.engine.engine import Engine
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
        contexts: ProgramContexts | None = None,
    ) -> None:
        """See `open`; calls are planned by the profile and by the folder's tiny LM. Without one, prompts
        stay whole."""
        model, proposer = engine.model, None
        if model.tiny_lm is not None:
            # Ready before they are timed.
            signatures = model.executor.manifest.signatures
            model.executor.prepare([each for each in signatures if each.kind == "tiny_lm"])
            lengths = model.executor.manifest.sizes("tiny_lm")
            proposer = TinyProposer(model.tiny_lm, lengths, model.run_tiny_lm, engine.levels)
        planner = Planner(profile, engine.levels, proposer, safety_margin=SafetyMargin(CONFIDENCE))
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
        """Closes the contexts, which releases their store, and the engine. For errors see
        `Contexts.close`."""
        with contextlib.closing(self.engine):
            if self.contexts is not None:
                self.contexts.close()

    def set_adapter(self, name: str | None) -> None:
        """Puts an adapter of the folder on all levels; None for none. Takes no time, and compiles nothing.

        Raises:
          ConfigError: it was not exported with the model.
        """
        self.engine.set_adapter(name)

    def new_context(
        self, app: str, *, level: int | None = None, pinned: bool = False, adapter: str = ""
    ) -> Context:
        """Creates a context of an app (see `Contexts.create`), with an adapter for all answers in it, which
        is also put on all levels (see `set_adapter`); empty for none."""
        contexts = self._kept()
        self.set_adapter(adapter or None)
        return Context(contexts, contexts.create(app, level=level, pinned=pinned))

    def context(self, app: str, name: str) -> Context:
        """Opens a context that an app created earlier, perhaps in another process (see `Contexts.record`),
        and puts its adapter on all levels.

        Raises:
          ContextGone: its adapter was not exported; or see `Contexts.record`.
        """
        contexts = self._kept()
        digest = contexts.store.record(name, app).origin.adapter
        self.set_adapter(self.engine.model.executor.adapters.of_context(digest, name) or None)
        return Context(contexts, contexts.record(app, name))

    def _kept(self) -> ProgramContexts:
        if self.contexts is None:
            raise ConfigError("this service keeps no contexts; open it with a folder for them")
        return self.contexts
