"""Opens the model of a service with its low-rank adapters, and warms it up: nothing compiles afterwards.
Measures its full profile while it is idle, and describes its memory that can be resized.

    adapters = Adapters(model, ServerOptions(adapter={"mail": Path("adapters/mail")}, adapter_rank=8))
    adapters.use("mail")       before a dispatch, in the engine's thread; "" for none

All adapters have the same shapes, so that the model's buckets serve each of them: loading one, and switching
between two dispatches, compiles nothing.
"""

import contextlib
import dataclasses
import functools
import logging
import math
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import jax

from jaxllm.bundle.images import has_image_encoder
from jaxllm.checkpoints.tokenizer_folder import with_chat_template
from jaxllm.config import FULL_LEVEL
from jaxllm.errors import BudgetExceeded, ConfigError, ContextGone, JaxllmError
from jaxllm.models.lora import TARGETS, LoraConfig, adapted_parameters, adapter_shapes
from jaxllm.serving.contexts.chunk_io import chunk_io_of
from jaxllm.serving.contexts.context import ContextCall, fork
from jaxllm.serving.contexts.manager import Contexts
from jaxllm.serving.elastic.objectives import SafetyMargin
from jaxllm.serving.elastic.profile import save_profile
from jaxllm.serving.elastic.profiling import Measurement, known_profile, profile_path
from jaxllm.serving.engine.run import Run
from jaxllm.serving.experts.weights import ExpertWeights
from jaxllm.serving.ground.bundles import find_model, levels_of, open_model
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.ground.speculation_options import SpeculationOptions
from jaxllm.serving.host.allocator import STAGES, give_back_large_blocks, give_back_memory, resident_bytes
from jaxllm.serving.host.process_memory import give_back_libraries
from jaxllm.serving.host.progress import Progress
from jaxllm.serving.images.encoder import ImageEncoder
from jaxllm.serving.opening.engine import Engine
from jaxllm.serving.opening.loading import LoadedModel
from jaxllm.serving.server.backend import Backend
from jaxllm.serving.server.calls import AdapterBusy, AdapterFacts, AdapterGone
from jaxllm.serving.server.context_turns import ContextTurns
from jaxllm.serving.server.executor import Executor
from jaxllm.serving.server.job import ContextTurn
from jaxllm.serving.server.limits import AppLimits, require_room
from jaxllm.serving.server.memory import Holding, ServiceMemory, contexts_holding
from jaxllm.serving.server.service import LLMService, engine_options, planner_of
from jaxllm.serving.server.service_options import ServerOptions
from jaxllm.serving.server.sockets import require_name
from jaxllm.serving.server.start import LaterBuckets, StartProgress, later_buckets
from jaxllm.serving.weights.model_level import LoadedAdapter, rank_of, read_adapter_of


class Adapters:
    """The adapters of one service. Methods are for the engine's thread unless noted."""

    def __init__(self, model: LoadedModel, options: ServerOptions | None = None) -> None:
        """Loads the given adapters.

        Raises:
          ConfigError, CheckpointError: one cannot be read, or does not fit the model or the options.
          BudgetExceeded: they exceed their number or memory limit.
        """
        self._model, self.options = model, options or ServerOptions()
        # Replaced, never mutated: other threads read it.
        self._named: Mapping[str, tuple[AdapterFacts, LoadedAdapter]] = {}
        self._used = ""
        for name, folder in self.options.adapter.items():
            self.add(name, self._read(folder))

    # -- from any thread --------------------------------------------------------------------------

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all loaded adapters."""
        return tuple(self._named)

    def facts(self) -> list[AdapterFacts]:
        """Facts of all loaded adapters."""
        return [facts for facts, _ in self._named.values()]

    @property
    def size_bytes(self) -> int:
        """Memory of their factors."""
        return sum(each.size_bytes for each in self.facts())

    def require(self, name: str) -> None:
        """Checks that an adapter is loaded; "" means none. Raises AdapterGone if no adapter has this name."""
        if name and name not in self._named:
            known = ", ".join(map(repr, self.names[:20])) or "none"
            raise AdapterGone(f"the model has no adapter {name!r:.80}; it has {known}")

    def require_addable(self, name: str) -> None:
        """Checks that an adapter may be added under this name.

        Raises:
          ConfigError: the name is not valid.
          AdapterBusy: the name is in use.
          BudgetExceeded: the maximum number is loaded.
        """
        require_name(name, "an adapter")
        if name in self._named:
            raise AdapterBusy(f"there is an adapter {name!r}; delete it first, or choose another name")
        if len(self._named) >= self.options.adapter_count:
            count = len(self._named)
            raise BudgetExceeded(f"{count} adapters are loaded, the limit; delete one or raise adapter_count")

    def read(self, name: str, folder: str) -> LoadedAdapter:
        """Reads an adapter from the folder of adapters, for `add`. Answers continue meanwhile. Raises
        ConfigError, CheckpointError, AdapterBusy, BudgetExceeded (see `Backend.load_adapter`)."""
        self.require_addable(name)
        if self.options.adapters is None:
            raise ConfigError("the service loads no adapters at runtime; start it with --adapters FOLDER")
        try:
            own = self.options.adapters.resolve(strict=True)
            # Resolve links before checking the place.
            found = (own / folder).resolve(strict=True)
        except (OSError, ValueError, RuntimeError):
            raise ConfigError(f"there is no folder {folder!r:.80} in the folder of adapters") from None
        if own not in found.parents or not found.is_dir():
            raise ConfigError(f"{folder!r:.80} is no folder in the folder of adapters")
        return self._read(found)

    def _read(self, folder: Path) -> LoadedAdapter:
        if (modes := self._model.runners.modes) is not None:
            modes.require_adaptable()
        return self._model.load_adapter(folder)

    def name_of(self, digest: str) -> str:
        """The name of the adapter with a digest; the digest itself if it is not loaded, empty for none."""
        return self._name(digest) or digest

    def of_context(self, digest: str, context: str, asked: str) -> str:
        """The adapter of a context's turn. The context was made with the adapter of `digest`, empty for none;
        a call requests the one named `asked`, empty for the context's own. If that is no longer loaded, the
        context continues with the requested one.

        Raises:
          ContextGone: the context's adapter is not loaded, and the call requests none.
          ConfigError: the call requests another adapter.
          AdapterGone: the requested adapter is no longer loaded.
        """
        self.require(asked)
        name = self._name(digest)
        if name is None:
            if asked:
                return asked
            raise ContextGone(
                f"the context {context} was made with an adapter that is not loaded ({digest}); load it "
                "again, or name another one in the call, which then computes the context's tokens again"
            )
        if asked and self._named[asked][0].digest != digest:
            own = f"the adapter {name!r}" if name else "no adapter"
            raise ConfigError(
                f"the context {context} was made with {own}, and its cache is of no use to {asked!r:.80}; "
                "leave the adapter out, or make another context"
            )
        return asked or name

    # -- the engine's thread ----------------------------------------------------------------------

    def use(self, name: str) -> None:
        """Applies an adapter to the model at negligible cost; "" for none. Raises AdapterGone if it is no
        longer loaded."""
        if name == self._used:
            return
        self.require(name)
        self._model.use_adapter(self._named[name][1] if name else None)
        self._used = name

    def add(self, name: str, loaded: LoadedAdapter) -> AdapterFacts:
        """Makes a read adapter available to calls.

        Raises:
          ConfigError, AdapterBusy, BudgetExceeded: see `require_addable`.
          BudgetExceeded: also if all adapters together would need too much memory.
        """
        self.require_addable(name)
        size, limit = self.size_bytes + loaded.size_bytes, self.options.adapter_memory
        if size > limit:
            message = f"the adapters would need {size:,} bytes of at most {limit:,} (adapter_memory)"
            raise BudgetExceeded(f"{message}; delete one first")
        facts = AdapterFacts(
            name=name, digest=loaded.digest, size_bytes=loaded.size_bytes, created_s=time.time()
        )
        self._named = {**self._named, name: (facts, loaded)}
        return facts

    def unload(self, name: str) -> Collection[tuple[int, int]]:
        """Unloads an adapter that no call uses. Raises AdapterGone if no adapter has this name.

        Returns:
          The versions of weights with it, whose caches are stale.
        """
        self.require(name)
        if self._used == name:
            self.use("")
        _, loaded = self._named[name]
        self._named = {other: kept for other, kept in self._named.items() if other != name}
        return loaded.versions

    def _name(self, digest: str) -> str | None:
        """The name of the adapter with a digest; empty for none, None if it is not loaded."""
        if not digest:
            return ""
        return next((name for name, (facts, _) in self._named.items() if facts.digest == digest), None)


_log = logging.getLogger(__name__)


@dataclasses.dataclass
class OpenedService:
    """An open model, ready to be served (see `jaxllm.serving.server.daemon.Opened`).

    Attributes:
      service: planner and engine.
      adapters: its adapters.
      options: options of the service.
      later: buckets that are compiled after the start; None before.
    """

    service: LLMService
    adapters: Adapters
    options: ServerOptions
    later: LaterBuckets | None = None

    def start(self, backend: Backend) -> None:
        """See `Opened`."""
        service, options = self.service, self.options
        rows = max(options.batch_rows, default=1)
        refinement = ProfileRefinement(service)
        executor = Executor(
            service,
            dataclasses.replace(options.scheduler, batch_rows=min(options.scheduler.batch_rows, rows)),
            memory=service_memory(
                service,
                options.memory,
                prefix_bytes=options.prefix_memory,
                follow_pressure=options.follow_pressure,
                app_bytes=lambda app: backend.limits_of(app).prefix_bytes,
            ),
            contexts=live_turns(service, self.adapters, backend.limits_of),
            adapters=self.adapters,
            on_dispatch=backend.metrics.report,
            idle_work=refinement,
        )
        backend.opened(
            executor, options.model_name, profile=refinement.facts,
            storage=lambda: storage_figures(service.engine.model), model_sampling=options.model_sampling,
        )  # fmt: skip
        self.later = later_buckets(service.engine, copies=options.prefix_memory > 0)
        # Last: after an error there is no thread to stop.
        executor.start()
        self.later.start()

    def close(self) -> None:
        """See `Opened`."""
        if self.later is not None:
            self.later.close()
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
            require_room(self._turns.limits_of(record.app), self._turns.listed(record.app), new=True)
            self.record = fork(self._contexts, record, self._source.before)
            self._forked = True
            self._base = self.record
        super().begin(run)

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
                self._contexts.pending_errors.pop(self.record.name, None)

    def failed(self, run: Run) -> None:
        """See `Lifecycle`."""
        super().failed(run)
        if self._deleted:
            self._contexts.pending_errors.pop(self.record.name, None)


def live_turns(
    service: LLMService, adapters: Adapters, limits_of: Callable[[str], AppLimits]
) -> ContextTurns | None:
    """The turns in a service's contexts; None if it has none."""
    if service.contexts is None:
        return None
    return ContextTurns(service, functools.partial(LiveTurnCall, service.contexts), adapters, limits_of)


def open_service(
    options: ServerOptions,
    speculation: SpeculationOptions | None = None,
    progress: Progress | None = None,
) -> OpenedService:
    """Opens the model of a service and its adapters. Raises JaxllmError if the model or an adapter cannot be
    opened."""
    contexts, stages = options.context_options(), progress or StartProgress()
    give_back_large_blocks()
    give_back_libraries()
    # Found once, so that every part of the opening reads the same revision.
    model = find_model(options.model or None, stages)
    rank, targets, adapter_bytes = engine_shape(dataclasses.replace(options, model=str(model)))
    memory, image_bytes = engine_bytes(options.memory), 0
    if options.images:
        with open_model(model) as bundle:
            encoder = ImageEncoder.of(bundle) if has_image_encoder(bundle) else None
            image_bytes = 0 if encoder is None else encoder.size_bytes
    left = memory - adapter_bytes - image_bytes
    if memory and left <= 0:
        raise BudgetExceeded(
            f"a memory budget of {options.memory:,} bytes leaves no room for a model after its adapters "
            f"({adapter_bytes:,}) and image encoder ({image_bytes:,}); raise --memory, give fewer "
            "adapters, or serve without images (images = false)"
        )
    engine_of = EngineOptions(
        context_tokens=options.context_tokens, memory_bytes=left if memory else 0,
        prompt_embeddings=image_bytes > 0, batch_rows=options.batch_rows, adapter_rank=rank,
        adapter_targets=targets, spare_memory=True,
    )  # fmt: skip
    engine_of = engine_options(model, options.levels or None, engine_of, contexts)
    # Requires a codec, which is known now.
    engine_of = dataclasses.replace(engine_of, attend_quantized_kv=options.attend_quantized_kv)
    with contextlib.ExitStack() as opened:
        engine = Engine.open(model, options=engine_of, speculation=speculation, progress=stages)
        opened.callback(engine.close)
        if options.chat_template is not None:
            engine.model.tokenizer = with_chat_template(engine.tokenizer, options.chat_template)
        if engine.options.prompt_embeddings and engine.model.images is not None:
            engine.model.images.prepare()
        profile = known_profile(engine, coarse=True, progress=stages)
        planner = planner_of(engine, profile, margin=SafetyMargin(), progress=stages)
        # Before the rehearsal, which brings back what answers need.
        give_back_memory()
        give_back_libraries()
        STAGES.end("service")
        service = LLMService.of_engine(engine, planner, profile, contexts)
        opened.callback(service.close)
        found = OpenedService(service, Adapters(engine.model, options), options)
        opened.pop_all()
    window, whole = engine.options.context_tokens, engine.cfg.window_tokens
    if window < whole:
        _log.info("prompts with answers may have %d of the model's %d tokens (--context)", window, whole)
    return found


# Rank of adapters loaded at runtime, if the options name none.
_RANK = 16


def engine_shape(options: ServerOptions) -> tuple[int, tuple[str, ...], int]:
    """The shape of a service's adapters by its options, else by the given adapters. Raises JaxllmError if the
    model or an adapter cannot be read.

    Returns:
      `EngineOptions.adapter_rank` and `adapter_targets`, and the memory of the given adapters at all levels.
    """
    if not options.adapter and options.adapters is None:
        return 0, (), 0
    model = options.model or None
    with open_model(model) as bundle:
        found = [read_adapter_of(bundle, each) for each in options.adapter.values()]
        cfg = bundle.cfg
    others = options.adapters is not None
    rank = options.adapter_rank or max([rank_of(adapter) for _, adapter in found] + [_RANK] * others)
    wanted = {each for lora, _ in found for each in lora.targets} | {*(LoraConfig.targets * others)}
    targets = options.adapter_targets or tuple(each for each in TARGETS if each in wanted)
    names = adapted_parameters(cfg, targets)
    factors = [shape for name in names for shape in adapter_shapes(cfg, name, rank)]
    size = 4 * sum(map(math.prod, factors))
    served = {*(options.levels or levels_of(model)), FULL_LEVEL}
    return rank, targets, size * len(served) * len(found)


# Calls often come in bursts: measure only after this time without calls.
_QUIET_S = 2.0


class ProfileRefinement:
    """Measures the full profile of a service that has a coarse one, while the service is idle; does nothing
    if the profile is full. In the engine's thread, except `facts`.

    A first start should not wait for the minutes that a full profile requires. One dispatch is measured at a
    time, so that a call waits for one dispatch at most. A run that a call has interrupted is repeated,
    because the device was not idle. The full profile is used for plans at once, and stored for later starts.
    """

    def __init__(self, service: LLMService, clock: Callable[[], float] = time.monotonic) -> None:
        self._service, self._clock = service, clock
        self._measurement = Measurement([service.engine]) if service.profile.coarse else None
        self._from_s = clock() + _QUIET_S
        if self._measurement is not None:
            _log.info(
                "plans are made by a coarse profile of this device; the whole one is measured while there is "
                "nothing to answer, in %d runs",
                self._measurement.total,
            )

    def facts(self) -> dict[str, Any]:
        """The profile in use: its `kind`, "whole", or "coarse" until it is refined, and the progress of
        measuring the full one, `runs_done` of `runs`, 0 if there is none. From any thread."""
        if (measurement := self._measurement) is None:
            return {"kind": "coarse" if self._service.profile.coarse else "whole", "runs_done": 0, "runs": 0}
        return {"kind": "coarse", "runs_done": measurement.done, "runs": measurement.total}

    def step(self) -> bool:
        """Measures at most about as long as a dispatch takes; raises nothing.

        Returns:
          Whether it did something: if not, the thread may sleep for a while.
        """
        measurement = self._measurement
        if measurement is None or self._clock() < self._from_s:
            return False
        try:
            if measurement.step():
                return True
            (profile,) = measurement.profiles()
            self._service.use_profile(profile)
            engine = self._service.engine
            save_profile(profile, profile_path(engine.model.bundle, engine.options))
            _log.info("plans are made by the whole profile of this device from here on")
        except JaxllmError as error:
            # Answers continue with the coarse profile.
            _log.error("the device's profile is not refined any further: %s", error)
        except Exception:
            _log.exception("the device's profile is not refined any further")
        self._measurement = None
        return True

    def interrupt(self) -> None:
        """Called when a call arrives: drops an unfinished run."""
        if self._measurement is not None:
            self._measurement.interrupt()
            self._from_s = self._clock() + _QUIET_S


def storage_figures(model: LoadedModel) -> dict[str, Any]:
    """Counts of visited experts, and of bytes read from storage, since the start; empty for resident
    weights."""
    streamed = model.streamed
    if streamed is None:
        return {}
    if not isinstance(streamed, ExpertWeights):
        return {"read_bytes": {"weights": streamed.counts.read_bytes}}
    counts = streamed.counts
    experts = {"visits": counts.visits, "hits": counts.hits, "foreseen": counts.foreseen}
    experts |= {"hit_rate": counts.hits / counts.visits} if counts.visits else {}
    return {"experts": experts, "read_bytes": {"experts": counts.read_bytes}}


def engine_bytes(limit_bytes: int) -> int:
    """The part of the process's budget that is left for a model to be opened: 0 for no limit. Raises
    BudgetExceeded if nothing is left, and ConfigError if the system does not report the process's memory."""
    if not limit_bytes:
        return 0
    # Initialize the backend first: it needs memory for any model.
    jax.default_backend()
    taken = resident_bytes()
    if taken >= limit_bytes:
        raise BudgetExceeded(
            f"a memory budget of {limit_bytes:,} bytes is too small: the process uses {taken:,} before a "
            "model is opened; give more"
        )
    return limit_bytes - taken


def service_memory(service: LLMService, limit_bytes: int = 0, **options: Any) -> ServiceMemory:
    """The memory of an open service; `limit_bytes` and `options`: see `ServiceMemory`."""
    model = service.engine.model
    streamed, weight_bytes = model.streamed, model.bundle.weight_bytes
    return ServiceMemory(
        limit_bytes,
        holdings=holdings(service),
        weights_bytes=lambda: weight_bytes if streamed is None else streamed.staying_bytes,
        weights_files=[str(model.bundle.path.resolve())],
        **options,
    )


def holdings(service: LLMService) -> list[Holding]:
    """Reclaimable memory of a service besides its prefixes: chunks of contexts, with room for the longest one
    besides running and pinned ones; a drafter, which drafts only while all of its memory is granted; and of
    weights on storage the resident layers or experts, of these at least what one layer requires."""
    engine, found = service.engine, list[Holding]()
    if (contexts := service.contexts) is not None:
        chunk_ios = [chunk_io_of(engine.runner_at(level)) for level in engine.levels]
        found.append(contexts_holding(contexts, chunk_ios))
    if (speculation := engine.speculation) is not None and speculation.drafter.most_bytes:
        drafts = speculation.drafter

        def draft(limit_bytes: int) -> None:
            with engine.runner.lock:
                speculation.draft(limit_bytes >= drafts.most_bytes)

        found.append(Holding("drafts", lambda: drafts.size_bytes, draft, most=lambda: drafts.most_bytes))
    streamed = engine.model.streamed
    if isinstance(streamed, ExpertWeights):
        cache = streamed.cache
        found.append(
            Holding(
                "experts", lambda: cache.taken_bytes, cache.resize, most=lambda: streamed.budget_bytes,
                least=streamed.store.least_bytes, limit=lambda: cache.budget_bytes,
            )
        )  # fmt: skip
    elif streamed is not None and streamed.resizable:

        def resize(limit_bytes: int) -> None:
            with engine.runner.lock:
                streamed.resize(limit_bytes)

        most = streamed.plan.resident_bytes
        found.append(Holding("layers", lambda: streamed.resident_bytes, resize, most=lambda: most))
    return found
