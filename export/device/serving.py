"""Serves the programs of a folder by the one server: scheduler, engine's thread, limits, sockets, metrics.

    run(ServerOptions(http="127.0.0.1:8000", batch_rows=()), lambda: OpenedPrograms(service))

Requires the packages of `pip install 'jaxllm[serve]'`, and no JAX.
"""

import dataclasses
import functools
import time
from collections.abc import Collection
from typing import Any

from jaxllm.errors import ConfigError
from jaxllm.export.device.contexts import ProgramContextCall, ProgramContexts, name_of_context
from jaxllm.export.device.opening import longest_cache_bytes, needed_bytes, weights_bytes
from jaxllm.export.device.service import ProgramService
from jaxllm.export.programs.model import ProgramModel
from jaxllm.serving.server.backend import Backend
from jaxllm.serving.server.calls import AdapterFacts, AdapterGone
from jaxllm.serving.server.context_turns import ContextTurns
from jaxllm.serving.server.executor import Executor
from jaxllm.serving.server.job import ContextTurn
from jaxllm.serving.server.memory import ServiceMemory
from jaxllm.serving.server.scheduler import SchedulerOptions

_PREFIX_BYTES = 64 << 20
# Maximum number of answers that run at a time: each has caches of its own.
_RUNNING = 4


class ProgramAdapters:
    """Adapters that were exported with a model (see `jaxllm.serving.server.opening.Adapters`)."""

    def __init__(self, model: ProgramModel) -> None:
        self._adapters, inputs = model.executor.adapters, model.executor.manifest.adapters
        self._bytes, self._opened_s = 0 if inputs is None else inputs.file_bytes, time.time()

    @property
    def names(self) -> tuple[str, ...]:
        """See `Adapters`."""
        return self._adapters.names

    @property
    def size_bytes(self) -> int:
        """See `Adapters`."""
        return self._bytes * len(self.names)

    def facts(self) -> list[AdapterFacts]:
        """See `Adapters`."""
        digest, opened_s = self._adapters.digest, self._opened_s
        return [
            AdapterFacts(name=name, digest=digest(name), size_bytes=self._bytes, created_s=opened_s)
            for name in self.names
        ]

    def require(self, name: str) -> None:
        """See `Adapters`."""
        try:
            self._adapters.require(name)
        except ConfigError as error:
            raise AdapterGone(str(error)) from None

    def read(self, name: str, folder: str) -> Any:
        """Refuses: adapters are exported with the model."""
        raise ConfigError(
            "programs have the adapters that they were exported with; export the model with --adapter-input"
        )

    def add(self, name: str, loaded: Any) -> AdapterFacts:
        """Refuses: see `read`."""
        return self.read(name, "")

    def unload(self, name: str) -> Collection[tuple[int, int]]:
        """Refuses: they are the folder's."""
        self.require(name)
        raise ConfigError(f"the adapter {name!r:.80} was exported with the programs, and stays")

    def use(self, name: str) -> None:
        """See `Adapters`."""
        self.require(name)
        self._adapters.use(name)

    def name_of(self, digest: str) -> str:
        """Name of the adapter of a digest; the digest itself if the folder has none with it."""
        found = self._adapters.name_of(digest)
        return digest if found is None else found

    def of_context(self, digest: str, context: str, asked: str) -> str:
        """Returns the adapter of a context's turn (see `jaxllm.serving.server.opening.Adapters.of_context`).

        Raises:
          ContextGone: it was not exported.
          ConfigError: the call requests another one.
        """
        self.require(asked)
        name = name_of_context(self._adapters, digest, context)
        if asked not in ("", name):
            made = f"the adapter {name!r}" if name else "no adapter"
            raise ConfigError(
                f"the context {context} was made with {made}, and its cache is of no use to {asked!r:.80}; "
                "leave the adapter out, or make another context"
            )
        return name


@dataclasses.dataclass
class OpenedPrograms:
    """Open programs that are ready to be served (see `jaxllm.serving.server.daemon.Opened`).

    Attributes:
      service: plans and answers.
      memory_bytes: maximum bytes of weights, caches and logits; 0 for no limit. It bounds the number of
        concurrent answers.
      model_sampling: whether calls without sampling options use those that the model's authors recommend.
      queued: maximum number of calls that wait.
    """

    service: ProgramService
    memory_bytes: int = 0
    model_sampling: bool = True
    queued: int = SchedulerOptions.queued

    def start(self, backend: Backend) -> None:
        """See `Opened`."""
        service, engine = self.service, self.service.engine
        adapters, contexts = ProgramAdapters(engine.model), None
        if service.contexts is not None:
            turn_call = functools.partial(_turn_call, service.contexts)
            contexts = ContextTurns(service, turn_call, adapters, backend.limits_of)
        # With a limit all memory is for running answers.
        memory = ServiceMemory(
            prefix_bytes=0 if self.memory_bytes else _PREFIX_BYTES,
            weights_bytes=lambda: weights_bytes(engine.model.executor.manifest),
            app_bytes=lambda app: backend.limits_of(app).prefix_bytes,
        )
        executor = Executor(
            service,
            self._scheduler(),
            memory=memory,
            contexts=contexts,
            adapters=adapters,
            on_dispatch=backend.metrics.report,
        )
        backend.opened(executor, model_sampling=self.model_sampling)
        executor.start()

    def _scheduler(self) -> SchedulerOptions:
        manifest, running = self.service.engine.model.executor.manifest, _RUNNING
        if self.memory_bytes:
            staged = self.service.engine.model.stages is not None
            spare = self.memory_bytes - needed_bytes(manifest, staged=staged)
            running = max(1, min(running, 1 + spare // longest_cache_bytes(manifest)))
        return SchedulerOptions(
            queued=self.queued,
            app_queued=self.queued,
            running=running,
            background_running=max(1, running - 1),
            reserved_running=min(1, running - 1),
            batch_rows=1,
        )


def _turn_call(contexts: ProgramContexts, turns: ContextTurns, turn: ContextTurn) -> ProgramContextCall:
    """The lifecycle of a turn in a context over programs."""
    del turns
    if turn.forks:
        raise ConfigError(
            f"the context {turn.record.name} has {len(turn.record.tokens)} tokens or is answering, and "
            f"the call continues the first {turn.before}: contexts over programs are not forked; make a "
            "new one"
        )
    return ProgramContextCall(contexts, turn.record, turn.record, most_tokens=turn.most_tokens)
