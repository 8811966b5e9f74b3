"""Opens the model of a service and warms it up: nothing compiles afterwards."""

import contextlib
import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxllm.bundle.images import has_image_encoder
from jaxllm.config import WHOLE
from jaxllm.errors import BudgetExceeded, ConfigError, JaxllmError
from jaxllm.models.lora import TARGETS, LoraConfig, adapted_parameters, adapter_shapes
from jaxllm.serving.buckets.bucket import Bucket
from jaxllm.serving.contexts.answer import ContextCall
from jaxllm.serving.contexts.context import fork
from jaxllm.serving.contexts.manager import Contexts
from jaxllm.serving.elastic.objectives import SafetyMargin
from jaxllm.serving.elastic.profile import DeviceProfile
from jaxllm.serving.elastic.profiling import known_profile
from jaxllm.serving.engine.run import Run
from jaxllm.serving.ground.bundles import levels_of, open_model
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.ground.speculation_options import SpeculationOptions
from jaxllm.serving.images.encoder import ImageEncoder
from jaxllm.serving.opening.engine import Engine
from jaxllm.serving.opening.loading import LoadedModel
from jaxllm.serving.runners.scorer import Scorer
from jaxllm.serving.server.adapters import AdapterOptions, Adapters
from jaxllm.serving.server.backend import EngineBackend
from jaxllm.serving.server.context_turns import ContextTurns
from jaxllm.serving.server.executor import Executor
from jaxllm.serving.server.holdings import engine_bytes, service_memory, storage_figures
from jaxllm.serving.server.idle_work import ProfileRefinement
from jaxllm.serving.server.job import ContextTurn
from jaxllm.serving.server.limits import AppLimits, require_context
from jaxllm.serving.server.service import LLMService, engine_options, planner_of
from jaxllm.serving.server.service_options import ServerOptions
from jaxllm.serving.weights.model_level import rank_of, read_adapter_of

_log = logging.getLogger(__name__)


@dataclasses.dataclass
class OpenedService:
    """An open model, ready to be served (see `jaxllm.serving.server.daemon.Opened`).

    Attributes:
      service: planner and engine.
      adapters: its adapters.
      options: options of the service.
    """

    service: LLMService
    adapters: Adapters
    options: ServerOptions

    def start(self, backend: EngineBackend) -> None:
        """See `Opened`."""
        service, options = self.service, self.options
        rows = options.batch_rows
        scheduler = dataclasses.replace(
            options.scheduler, batch_rows=min(options.scheduler.batch_rows, rows[-1] if rows else 1)
        )
        contexts = live_turns(service, self.adapters, backend.limits_of)

        def use(profile: DeviceProfile) -> None:
            service.use_profile(profile)
            if contexts is not None:
                contexts.use_profile(profile)

        refinement = ProfileRefinement(service, use)
        memory = service_memory(
            service, options.memory_options(), app_bytes=lambda app: backend.limits_of(app).prefix_bytes
        )
        executor = Executor(
            service,
            scheduler,
            memory=memory,
            contexts=contexts,
            adapters=self.adapters,
            on_dispatch=backend.metrics.dispatched,
            idle_work=[refinement],
        )
        executor.start()
        backend.opened(
            executor,
            options.model_name,
            profile=refinement.facts,
            storage=lambda: storage_figures(service.engine.model),
            model_sampling=options.model_sampling,
        )

    def resize_contexts(self, budget_bytes: int) -> None:
        """See `Opened`."""
        self.service.resize(budget_bytes)

    def close(self) -> None:
        """See `Opened`."""
        self.service.close()


class LiveTurnCall(ContextCall):
    """Forks a context before an answer, or changes its level, if the call asks for it; stores it
    afterwards. A fork is deleted if its answer does not end normally: no client knows its name."""

    def __init__(self, contexts: Contexts, turns: ContextTurns, turn: ContextTurn) -> None:
        super().__init__(contexts, turn.record, turn.record, most_tokens=turn.most_tokens)
        self._turns, self._source = turns, turn
        self._forked = self._deleted = False

    def begin(self, run: Run) -> None:
        """See `Lifecycle`."""
        if self._source.forks:
            record = self._source.record
            require_context(self._turns.limits_of(record.app), self._turns.listed(record.app))
            self.record = fork(self._contexts, record, self._source.before)
            self._forked = True
        app, name, level = self.record.app, self.record.name, run.request.level
        moved = self._contexts.moving(app, name, level)
        self.record = self._base = self._contexts.at_level(app, name, level)
        super().begin(run)
        self.restoration = dataclasses.replace(self.restoration, moved=moved)

    def finish(self, run: Run) -> None:
        """See `Lifecycle`."""
        kept = False
        try:
            super().finish(run)
            kept = run.finish_reason is not None
        finally:
            if self._forked and not kept and not self._deleted:
                self._deleted = True
                with contextlib.suppress(JaxllmError):
                    self._contexts.delete(self.record.name)
                self._contexts.pending_errors.forget(self.record.name)

    def failed(self, run: Run) -> None:
        """See `Lifecycle`."""
        super().failed(run)
        if self._deleted:
            self._contexts.pending_errors.forget(self.record.name)


def live_turns(
    service: LLMService, adapters: Adapters, limits_of: Callable[[str], AppLimits]
) -> ContextTurns | None:
    """The turns in a service's contexts; None if it has none."""
    contexts = service.contexts
    if contexts is None:
        return None
    return ContextTurns(
        contexts,
        service.profile,
        functools.partial(LiveTurnCall, contexts),
        adapters,
        limits_of,
        margin=service.planner.safety_margin,
    )


def open_service(options: ServerOptions, speculation: SpeculationOptions | None = None) -> OpenedService:
    """Opens the model of a service and its adapters.

    Raises:
      JaxllmError: the model or an adapter cannot be opened.
    """
    contexts, stages = options.context_options(), _Stages()
    model = options.model or None
    adapters = engine_shape(options.adapter_options(), model, options.levels)
    memory = engine_bytes(options.memory)
    if memory and adapters.given_bytes >= memory:
        raise BudgetExceeded(
            f"a memory budget of {options.memory:,} bytes leaves no room for a model beside its adapters; "
            "give more"
        )
    image_bytes = _image_bytes(model) if options.images else 0
    if memory and adapters.given_bytes + image_bytes >= memory:
        raise BudgetExceeded(
            f"a memory budget of {options.memory:,} bytes leaves no room for a model beside its encoder of "
            "images; give more, or serve without images (images = false)"
        )
    asked = EngineOptions(
        context_tokens=options.context_tokens,
        memory_bytes=memory - adapters.given_bytes - image_bytes if memory else 0,
        prompt_rows=image_bytes > 0,
        batch_rows=options.batch_rows,
        adapter_rank=adapters.rank,
        adapter_targets=adapters.targets,
    )
    whole = engine_options(model, options.levels or None, asked, contexts)
    # Requires a codec, which is known now.
    whole = dataclasses.replace(whole, attend_coded=options.attend_coded)
    with contextlib.ExitStack() as opened:
        engine = Engine.open(model, options=whole, speculation=speculation, progress=stages)
        opened.callback(engine.close)
        _prepare(engine, stages, forks=bool(options.prefix_memory))
        profile = known_profile(engine, coarse=True, progress=stages)
        planner = planner_of(engine, profile, margin=SafetyMargin())
        service = LLMService.of_engine(engine, planner, profile, contexts)
        opened.callback(service.close)
        found = OpenedService(service, Adapters(engine.model, options.adapter_options()), options)
        opened.pop_all()
    return found


def _image_bytes(model: str | None) -> int:
    """Bytes of a model's image encoder in memory; 0 if it has none."""
    with open_model(model) as bundle:
        encoder = ImageEncoder.of(bundle) if has_image_encoder(bundle) else None
        return 0 if encoder is None else encoder.size_bytes


def _prepare(engine: Engine[LoadedModel], stages: "_Stages", *, forks: bool) -> None:
    """Prepares what only some requests need: embeddings, copies of caches, images."""
    buckets: list[Bucket] = []
    with contextlib.suppress(ConfigError):
        # Streamed weights do not support embeddings; requests for them are refused.
        buckets += Scorer(engine.runner).embedding_buckets()
    if forks:
        buckets += [each for level in engine.levels for each in engine.runner_at(level).fork_buckets()]
    engine.runner.fill(buckets, stages)
    if engine.options.prompt_rows and (encoder := engine.model.images) is not None:
        encoder.prepare()


class _Stages:
    """Logs the stages of opening a model."""

    def __init__(self) -> None:
        self._stage = ""

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage != self._stage:
            self._stage = stage
            _log.info("opening the model: %s", stage)


# Rank of adapters loaded at runtime, if the options name none.
_RANK = 16


class EngineShape(NamedTuple):
    """Requirements on the engine for a service's adapters.

    Attributes:
      rank: `EngineOptions.adapter_rank`.
      targets: `EngineOptions.adapter_targets`.
      given_bytes: memory of the given adapters at all levels.
    """

    rank: int = 0
    targets: tuple[str, ...] = ()
    given_bytes: int = 0


def engine_shape(
    options: AdapterOptions, model: str | Path | None, levels: Sequence[int] = ()
) -> EngineShape:
    """The shape of adapters by the options, else by the given adapters.

    Args:
      options: options of the adapters.
      model: model of the service.
      levels: served levels, in percent; empty for all of the model.

    Raises:
      JaxllmError: the model or an adapter cannot be read.
    """
    if not options.any:
        return EngineShape()
    with open_model(model) as bundle:
        found = [read_adapter_of(bundle, each) for each in options.given.values()]
        cfg = bundle.cfg
    others = options.folder is not None
    rank = options.rank or max([rank_of(adapter) for _, adapter in found] + [_RANK] * others)
    wanted = {each for lora, _ in found for each in lora.targets} | {*(LoraConfig.targets * others)}
    targets = options.targets or tuple(each for each in TARGETS if each in wanted)
    names = adapted_parameters(cfg, targets)
    factors = [shape for name in names for shape in adapter_shapes(cfg, name, rank)]
    size = 4 * sum(map(math.prod, factors))
    served = {*(levels or levels_of(model)), WHOLE}
    return EngineShape(rank, targets, size * len(served) * len(found))
