"""Loads a model for serving: places a bundle's weights and makes a runner for each level."""

import dataclasses
import functools
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from jaxllm.bundle import Bundle, WeightFormat
from jaxllm.bundle.elastic import require_level
from jaxllm.config import WHOLE
from jaxllm.errors import BudgetExceeded, ConfigError
from jaxllm.kernels import native
from jaxllm.models.lora import Adapter, adapter_digest, padded
from jaxllm.models.parameters import Params
from jaxllm.models.rooms import Room, require_room
from jaxllm.quant import Weight
from jaxllm.text.tokenizer_files import MAX_START_TOKENS
from serving.bundles import open_model
from serving.host.forked import require_not_forked, watch_for_forks
from serving.host.machine import give_back_memory
from serving.host.progress import Progress, loading
from serving.host.tokenizer_verdicts import open_tokenizer
from serving.images.encoder import ImageEncoder
from serving.options import EngineOptions
from serving.runners.level_runner import LevelRunner
from serving.runners.make import make_runners
from serving.runners.resident import ResidentRunner
from serving.speculation.options import SpeculationOptions
from serving.weights.adapters import LoadedAdapter, factor_bytes, rank_of, read_adapter_of
from serving.weights.footprint import drafter_bytes, streamed_weights
from serving.weights.levels import Levels

if TYPE_CHECKING:
    from serving.speculation.speculation import Speculation

_log = logging.getLogger("jaxllm")

# Smaller weights in memory are read from the processor's caches, where half of their bytes saves nothing.
_LEAST_DRAFTING_BYTES = 48 * 2**20


class LoadedModel:
    """A bundle whose weights are loaded or streamed, with a runner for each level.

    Attributes:
      bundle: the open model file.
      options: resolved options.
      tokenizer: the model's tokenizer.
      streamed: reads the weights while the model runs; None where all are in memory.
      adapter_digest: hex digest of the model's adapter; empty where there is none.
      load_ms: time to open the bundle and place its weights.
    """

    def __init__(
        self,
        bundle: Bundle,
        options: EngineOptions | None = None,
        progress: Progress | None = None,
        *,
        reserved_bytes: int = 0,
        drafting_level: int = 0,
        high_planes: bool = False,
        read_ahead: bool = True,
    ) -> None:
        """Places a bundle's weights, and makes a runner for each level.

        Args:
          bundle: open.
          options: shapes of buckets and caches.
          progress: called with (stage, done, total).
          reserved_bytes: bytes of `EngineOptions.memory_bytes` that others take.
          drafting_level: a level whose weights stay in memory, to draft with; 0 for none.
          high_planes: whether the high planes of nested weights stay in memory, to draft with.
          read_ahead: whether the first buckets are read from disk meanwhile.
        """
        require_not_forked()
        watch_for_forks()
        began = time.perf_counter()
        self.bundle = bundle
        quantized = bundle.layout.weights not in ("f32", "bf16")
        self.options = (options or EngineOptions()).resolve(bundle.cfg, quantized=quantized)
        _require_served(bundle, self.options)
        if quantized and jax.default_backend() == "cpu" and native.kernels().missing:
            _say_once(
                f"native CPU kernels are not in use ({native.kernels().reason}): XLA computes quantized "
                "products, several times slower; install jaxllm again where there is a C++ compiler (g++ or "
                "clang++)"
            )
        staying = require_level(bundle, drafting_level) if drafting_level else None
        self.streamed = streamed_weights(
            bundle,
            self.options,
            progress,
            reserved_bytes=reserved_bytes,
            level=staying,
            high_planes=high_planes,
        )
        # Weights that are used in place are checked while buckets are read.
        checked_later = self.streamed is None and bundle.read_in_place
        if self.streamed is not None:
            self._frozen = self.streamed.frozen()
        else:
            self._frozen = bundle.unchecked() if checked_later else _load(bundle, self.options, progress)
        self.adapter_digest = ""
        self._levels = Levels(bundle, self.options.levels, self._frozen)
        self.runners = make_runners(bundle, self.options, self._levels, self._adapted({}, 1.0), self.streamed)
        self._plain = LoadedAdapter(
            "", {level: each.model.current for level, each in self.runners.by_level.items()}
        )
        try:
            if read_ahead:
                self.runners.read_ahead()
            self.tokenizer = open_tokenizer(bundle.tokenizer_files())
            if checked_later:
                _check(bundle, progress)
        except BaseException:
            self.close()
            raise
        self.load_ms = 1000 * (time.perf_counter() - began)

    @property
    def name(self) -> str:
        """The model's name, for people."""
        return self.bundle.layout.name

    @property
    def levels(self) -> tuple[int, ...]:
        """Levels that have runners, in percent, ascending."""
        return self.runners.levels

    @property
    def images(self) -> ImageEncoder | None:
        """Encodes images, from the first use on; None where the bundle has no encoder of them."""
        if not hasattr(self, "_images"):
            self._images = ImageEncoder.of(self.bundle, self.runners.buckets.store())
        return self._images

    def runner(self, level: int) -> LevelRunner:
        """The runner of a level.

        Raises:
          ConfigError: the model was not opened for this level.
        """
        return self.runners.at(level)

    def resident_runner(self, level: int) -> ResidentRunner:
        """The runner of a level, where all weights are in memory.

        Raises:
          ConfigError: weights are streamed, or the model was not opened for this level.
        """
        return self.runners.resident_at(level)

    # -- getting ready ----------------------------------------------------------------------------

    def warm_up(
        self,
        level: int,
        speculation: "Speculation | None",
        *,
        prompt_tokens: int | None,
        max_tokens: int,
        progress: Progress | None,
    ) -> None:
        """Gets buckets ready (see `serving.engine.Engine.warm_up`); of all levels where `level` is the whole
        model."""
        runner, tokens = self.runner(level), None
        if prompt_tokens is None:
            self.runners.prepare_all(self.levels if level == WHOLE else (level,), progress)
            # Loading and compiling buckets leaves gaps in memory.
            give_back_memory()
        elif 0 < prompt_tokens <= self.options.context_tokens:
            answer = max_tokens if speculation is None else speculation.cache_tokens(max_tokens)
            runner.prepare(prompt_tokens, answer, progress)
            # A source is not in the cache of tokens.
            begins = prompt_tokens if self.bundle.cfg.encoder is None else MAX_START_TOKENS
            tokens = begins + max_tokens if max_tokens else None
        else:
            return
        if speculation is not None:
            room = None if tokens is None else speculation.cache_tokens(tokens)
            runner.prepare_trees(speculation.options.trees.nodes, progress, tokens=room)
            speculation.drafter.warm_up(progress, tokens=tokens)

    def facts(self) -> dict[str, Any]:
        """Counts as plain data: the buckets that were read from disk and compiled, and the weights that were
        read from storage."""
        buckets = self.runners.buckets
        built = {
            "loaded_buckets": len(buckets.loaded),
            "compiled_buckets": len(buckets.bucket_ms.keys() - buckets.loaded),
        }
        return built if self.streamed is None else {**built, "memory": self.streamed.facts()}

    def close(self) -> None:
        """Ends the threads that stream weights and the processors of prefill, if there are any, and releases
        buckets."""
        if self.streamed is not None:
            self.streamed.close()
        self.runners.close()
        # Compiling leaves gaps in memory, which grow with every model.
        give_back_memory()

    # -- adapters ---------------------------------------------------------------------------------

    def load_adapter(self, folder: str | Path) -> LoadedAdapter:
        """Reads a low-rank adapter, and makes the parameters of all levels with it, to be put there by
        `use_adapter`. What answers meanwhile goes on as it is.

        Raises:
          ConfigError, CheckpointError: see `serving.engine.Engine.set_adapter`.
        """
        self._require_adaptable()
        lora, adapter = read_adapter_of(self.bundle, folder)
        return self._loaded(adapter, lora.scaling)

    def use_adapter(self, adapter: LoadedAdapter | None) -> None:
        """Puts an adapter on all levels, in place of the one before; None for none. Takes no time. A sequence
        goes on with the adapter that its cache was computed with, and with no other."""
        adapter = self._plain if adapter is None else adapter
        with self.runner(WHOLE).lock:
            self.runners.put(adapter.levels, adapted=bool(adapter.digest))
            self.adapter_digest = adapter.digest

    def set_adapter(self, folder: str | Path | None) -> None:
        """Puts a low-rank adapter on all levels (see `serving.engine.Engine.set_adapter`)."""
        self._require_adaptable()
        # Answers go on while the files are read.
        self.use_adapter(None if folder is None else self.load_adapter(folder))

    def put_adapter(self, adapter: Adapter, scaling: float) -> None:
        """`set_adapter` with an adapter that was read."""
        self.use_adapter(self._loaded(adapter, scaling))

    def _require_adaptable(self) -> None:
        if not self.options.adapter_rank:
            raise ConfigError("this engine takes no adapters; open it with EngineOptions(adapter_rank=...)")

    def _loaded(self, adapter: Adapter, scaling: float) -> LoadedAdapter:
        params = self._adapted(adapter, scaling)
        # All levels' parameters are made before the first changes: an adapter that does not fit changes
        # nothing.
        levels = self.runners.prepared(params)
        size = factor_bytes(params.values())
        return LoadedAdapter(adapter_digest(adapter, scaling) if adapter else "", levels, size)

    def _adapted(self, adapter: Adapter, scaling: float) -> dict[int, Params]:
        """The parameters of all levels with this adapter, padded to the rank of the options, if they have
        one."""
        rank, targets = self.options.adapter_rank, self.options.adapter_targets
        filled = padded(self.bundle.cfg, adapter, targets, rank) if rank else {}
        return self._levels.params(self._frozen, filled, scaling)


def load_model(
    model: str | Path | None = None,
    *,
    weights: WeightFormat | None = None,
    options: EngineOptions | None = None,
    adapter: str | Path | None = None,
    level: int = WHOLE,
    speculation: SpeculationOptions | None = None,
    progress: Progress | None = None,
) -> tuple[LoadedModel, SpeculationOptions | None]:
    """Opens a model by name or path, with the options that a level and speculation need (see `Engine.open`).

    Returns:
      The model, and the speculation that it can have: None where an optional one does not fit.

    Raises:
      JaxllmError: the model cannot be opened, or the options do not fit it.
    """
    bundle = open_model(model, weights=weights, progress=progress)
    options = _with_levels(options or EngineOptions(), [level])
    if speculation is not None:
        speculation = speculation.within(options.context_tokens or bundle.cfg.window_tokens)
    if speculation is None or not speculation.optional:
        return _loaded(bundle, options, adapter, level, speculation, progress), speculation
    if not drafts_by_itself(bundle, level, options):
        return _loaded(bundle, options, adapter, level, None, progress), None
    try:
        return _loaded(bundle, options, adapter, level, speculation, progress), speculation
    except BudgetExceeded:
        _log.info("%s does not draft: the memory has no room for its high planes", bundle.path)
        return _loaded(bundle, options, adapter, level, None, progress), None


def _loaded(
    bundle: Bundle,
    options: EngineOptions,
    adapter: str | Path | None,
    level: int,
    speculation: SpeculationOptions | None,
    progress: Progress | None,
) -> LoadedModel:
    """`load_model` of an open bundle, with a certain speculation."""
    if speculation is not None:
        options = dataclasses.replace(options, trees=speculation.trees)
        options = _with_levels(options, [speculation.level] if speculation.level else [])
    lora, arrays = (None, {}) if adapter is None else read_adapter_of(bundle, adapter)
    if lora is not None and not options.adapter_rank:
        options = dataclasses.replace(options, adapter_rank=rank_of(arrays), adapter_targets=lora.targets)
    reserved, drafting_level = 0, 0
    if high_planes := speculation is not None and speculation.drafter == "nested":
        require_nested(bundle)
    if speculation is not None and options.memory_bytes:
        reserved = drafter_bytes(speculation, options.context_tokens, bundle.cfg)
        drafting_level = 0 if high_planes else speculation.level
    loaded = LoadedModel(
        bundle,
        options,
        progress,
        reserved_bytes=reserved,
        drafting_level=drafting_level,
        high_planes=high_planes,
    )
    try:
        if lora is not None:
            loaded.put_adapter(arrays, lora.scaling)
        if level != WHOLE and loaded.runners.modes is not None:
            loaded.runners.modes.require(level)
    except BaseException:
        loaded.close()
        raise
    return loaded


def drafts_by_itself(bundle: Bundle, level: int, options: EngineOptions) -> bool:
    """Whether a bundle's high planes can draft for a level, and may pay: for the whole model, whose shape
    they have, unless all weights are in memory and about as small as the processor's caches. They do not
    attend to stored chunks where they lie."""
    nested = bundle.layout.weights == "int8-nested" and bundle.read_in_place
    large = bundle.weight_bytes >= _LEAST_DRAFTING_BYTES or options.memory_bytes > 0
    alone = bundle.cfg.encoder is None and bundle.cfg.states is None and not options.attend_coded
    return alone and nested and large and level == WHOLE and not bundle.layout.experts_apart


def _require_served(bundle: Bundle, options: EngineOptions) -> None:
    """Raises ConfigError if the options ask for what a model cannot have."""
    rooms: dict[Room, Any] = {
        "contexts": options.kv_codec,
        "adapters": options.adapter_rank,
        "experts apart": bundle.layout.experts_apart,
    }
    for room, wanted in rooms.items():
        if wanted:
            require_room(bundle.cfg, room)


def require_nested(bundle: Bundle) -> None:
    """Raises ConfigError unless the high planes of a bundle's weights can be read alone, to draft."""
    weights = bundle.layout.weights
    if weights != "int8-nested" or not bundle.read_in_place:
        reason = f"it has {weights} weights" if weights != "int8-nested" else "there are no native kernels"
        raise ConfigError(
            f"{bundle.path} cannot draft or predict by its high planes, because {reason}; prepare the model "
            "with --weights int8-nested, on a CPU with native kernels, or draft with a model, level or ngram"
        )


def _with_levels(options: EngineOptions, levels: Sequence[int]) -> EngineOptions:
    """Options that also serve these levels."""
    missing = {each for each in levels if each != WHOLE} - {*options.levels}
    if not missing:
        return options
    return dataclasses.replace(options, levels=tuple(sorted({*options.levels, *missing})))


def _load(bundle: Bundle, options: EngineOptions, progress: Progress | None) -> dict[str, Weight]:
    loaded = loading(progress, bundle.weight_bytes)
    stacked = stacks_layers(bundle, options)
    return bundle.load(stacked=stacked, on_segment=lambda _, size: loaded(size))


def _check(bundle: Bundle, progress: Progress | None) -> None:
    checked = loading(progress, bundle.weight_bytes)
    bundle.verify_weights(on_segment=lambda _, size: checked(size))


def stacks_layers(bundle: Bundle, options: EngineOptions) -> bool:
    """Whether the arrays of layers are stacked when they are loaded, for buckets with code per kind of layer.

    On a CPU a slice of a stack is copied before a product, unless it is converted block by block. Floats of
    32 bits are not, and bfloat16 weights alias the mapped file, so that both stay as they are. The stages of
    two processors take weights one by one.
    """
    if options.prefill.processors > 1:
        return False
    quantized = bundle.layout.weights not in ("f32", "bf16")
    return jax.default_backend() != "cpu" or (quantized and not native.kernels().native)


@functools.cache
def _say_once(message: str) -> None:
    _log.warning(message)
