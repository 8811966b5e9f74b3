"""Serves the programs of a folder by the one server: scheduler, engine's thread, limits, sockets, metrics.

    run(device_options(), lambda _: OpenedPrograms(service))

Requires the packages of `pip install 'jaxllm[serve]'`, and no JAX.
"""

import dataclasses
from pathlib import Path

from jaxllm.errors import ConfigError
from jaxllm.export.device.opening import longest_cache_bytes, needed_bytes, weights_bytes
from jaxllm.export.device.service import ProgramService
from jaxllm.serving.contexts.context import ContextCall
from jaxllm.serving.host.allocator import give_back_memory
from jaxllm.serving.host.process_memory import give_back_libraries
from jaxllm.serving.server.backend import Backend
from jaxllm.serving.server.context_turns import ContextTurns
from jaxllm.serving.server.executor import Executor
from jaxllm.serving.server.job import ContextTurn
from jaxllm.serving.server.memory import ServiceMemory, contexts_holding
from jaxllm.serving.server.scheduler import SchedulerOptions
from jaxllm.serving.server.service_options import ServerOptions, read_options

_PREFIX_BYTES = 32 << 20
# Maximum number of answers that run at a time: each has caches of its own.
_RUNNING = 4


# Options of the service that programs have; others are of a bundle's engine, or of the command line.
_OPTIONS = frozenset({
    "http", "socket", "socket_mode", "remote", "keys", "api_key", "hosts", "origins", "localhost_pages",
    "apps", "strict_fields", "log_level", "drain_s", "limits", "objectives",
})  # fmt: skip


def device_options(path: Path | None = None) -> ServerOptions:
    """Options of a service of programs, of a TOML file if there is one (see `read_options`).

    Raises:
      ConfigError: see `read_options`; or the file has an option that programs do not.
    """
    # Programs have a batch of one.
    plain = ServerOptions(batch_rows=())
    if path is None:
        return plain
    try:
        options = read_options(path, batch_rows=())
    except ImportError as error:  # Of what checks options of engines.
        raise ConfigError(
            f"{path}: exported programs have neither batches nor adapters as options"
        ) from error
    for field in dataclasses.fields(plain):
        if field.name not in _OPTIONS and getattr(options, field.name) != getattr(plain, field.name):
            raise ConfigError(
                f"{path}: exported programs have no option {field.name}; a file of options for them has "
                f"{', '.join(sorted(_OPTIONS))}"
            )
    return options


@dataclasses.dataclass
class OpenedPrograms:
    """Open programs that are ready to be served (see `jaxllm.serving.server.daemon.Opened`).

    Attributes:
      service: plans and answers.
      memory_bytes: maximum bytes of weights, caches and logits; 0 for no limit. It bounds the number of
        concurrent answers.
      model_sampling: whether calls without sampling options use those that the model's authors recommend.
    """

    service: ProgramService
    memory_bytes: int = 0
    model_sampling: bool = True

    def close(self) -> None:
        """See `Opened`."""
        self.service.close()

    def start(self, backend: Backend) -> None:
        """See `Opened`."""
        service, engine = self.service, self.service.engine
        adapters, stored, contexts = engine.model.executor.adapters, service.contexts, None
        if stored is not None:

            def turn_call(turns: ContextTurns, turn: ContextTurn) -> ContextCall:
                del turns
                if turn.forks:
                    raise ConfigError(
                        f"the context {turn.record.name} has {len(turn.record.tokens)} tokens or is "
                        f"answering, and the call continues the first {turn.before}: contexts over programs "
                        "are not forked; make a new one"
                    )
                return ContextCall(stored, turn.record, turn.record, most_tokens=turn.most_tokens)

            contexts = ContextTurns(service, turn_call, adapters, backend.limits_of)
        # With a limit all memory is for running answers.
        memory = ServiceMemory(
            prefix_bytes=0 if self.memory_bytes else _PREFIX_BYTES,
            holdings=[] if stored is None else [contexts_holding(stored, stored.chunk_ios)],
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
        # What only the start has used.
        give_back_memory()
        give_back_libraries()

    def _scheduler(self) -> SchedulerOptions:
        manifest, running = self.service.engine.model.executor.manifest, _RUNNING
        if self.memory_bytes:
            staged = self.service.engine.model.stages is not None
            spare = self.memory_bytes - needed_bytes(manifest, staged=staged)
            running = max(1, min(running, 1 + spare // longest_cache_bytes(manifest)))
        return SchedulerOptions(
            app_queued=SchedulerOptions.queued,
            running=running,
            background_running=max(1, running - 1),
            reserved_running=min(1, running - 1),
            batch_rows=1,
        )
