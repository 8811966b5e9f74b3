"""Loads a model for serving: places a bundle's weights and makes a runner for each level."""

import functools
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from jaxllm.bundle import Bundle
from jaxllm.bundle.levels import require_level
from jaxllm.config import FULL_LEVEL
from jaxllm.errors import ConfigError
from jaxllm.kernels import native
from jaxllm.models.features import Feature, require_feature
from jaxllm.models.lora import Adapter, adapter_digest, padded
from jaxllm.models.parameters import Params
from jaxllm.serving.buckets.bucket import Bucket
from jaxllm.serving.elastic.levels import Levels
from jaxllm.serving.ground.bundles import open_tokenizer
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.host.allocator import STAGES, give_back_memory
from jaxllm.serving.host.machine import require_not_forked, watch_for_forks
from jaxllm.serving.host.progress import Progress, loading
from jaxllm.serving.opening.make_runners import make_runners
from jaxllm.serving.opening.weight_source import streamed_weights
from jaxllm.serving.runners.level_runner import LevelRunner
from jaxllm.serving.runners.resident import ResidentRunner
from jaxllm.serving.weights.model_level import LoadedAdapter, factor_bytes, read_adapter_of
from jaxllm.text.tokenizer_files import MAX_START_TOKENS

if TYPE_CHECKING:
    from jaxllm.serving.images.encoder import ImageEncoder

# Length of an answer that fits the shortest cache, and needs more than the first token's buckets.
_SHORT_ANSWER = 2
_log = logging.getLogger("jaxllm")


class LoadedModel:
    """A bundle whose weights are loaded or streamed, with a runner for each level.

    Attributes:
      streamed: streamed weights; None if all are resident.
      adapter_digest: hex digest of the model's adapter; empty without one.
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
          bundle: an open bundle.
          options: shapes of buckets and caches.
          progress: callback for (stage, done, total).
          reserved_bytes: bytes of `EngineOptions.memory_bytes` reserved for others.
          drafting_level: a level whose weights stay resident, to draft with; 0 for none.
          high_planes: whether the high planes of nested weights stay resident, to draft with.
          read_ahead: whether the first buckets are loaded from disk meanwhile.
        """
        require_not_forked()
        watch_for_forks()
        STAGES.end("modules")
        began = time.perf_counter()
        self.bundle = bundle
        quantized = bundle.layout.weights not in ("f32", "bf16")
        self.options = (options or EngineOptions()).resolve(bundle.cfg, quantized=quantized)
        rooms: dict[Feature, Any] = {
            "contexts": self.options.kv_codec,
            "adapters": self.options.adapter_rank,
            "separate experts": bundle.layout.experts_apart,
        }
        for feature, wanted in rooms.items():
            if wanted:
                require_feature(bundle.cfg, feature)
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
        # Check weights that are used in place while buckets are loaded.
        checked_later = self.streamed is None and bundle.read_in_place
        loaded = loading(progress, bundle.weight_bytes)
        if self.streamed is not None:
            self._frozen = self.streamed.frozen()
        elif checked_later:
            self._frozen = bundle.unchecked()
        else:
            stacked = stacks_layers(bundle, self.options)
            self._frozen = bundle.load(stacked=stacked, on_segment=lambda _, size: loaded(size))
        self.adapter_digest = ""
        self._levels = Levels(bundle, self.options.levels, self._frozen)
        self.runners = make_runners(bundle, self.options, self._levels, self._adapted({}, 1.0), self.streamed)
        self._plain = LoadedAdapter(
            "", {level: each.model.current for level, each in self.runners.by_level.items()}
        )
        try:
            runner = self.runner(FULL_LEVEL)
            if read_ahead and runner.resident:
                # The buckets of a short request, which nearly every start needs.
                runner.buckets.read_ahead(runner.buckets_for(1, _SHORT_ANSWER))
            STAGES.end("weights")
            self.tokenizer = open_tokenizer(bundle.tokenizer_files())
            if self.options.spare_memory:
                # Of its text and what was parsed from it.
                give_back_memory()
            STAGES.end("tokenizer")
            if checked_later:
                bundle.verify_weights(on_segment=lambda _, size: loaded(size))
        except BaseException:
            self.close()
            raise
        self.load_ms = 1000 * (time.perf_counter() - began)

    @property
    def name(self) -> str:
        """Display name of the model."""
        return self.bundle.layout.name

    @property
    def levels(self) -> tuple[int, ...]:
        """Levels with runners, in percent, ascending."""
        return tuple(sorted(self.runners.by_level))

    @property
    def images(self) -> "ImageEncoder | None":
        """The image encoder, made at the first use; None if the bundle has none."""
        if not hasattr(self, "_images"):
            from jaxllm.serving.images.encoder import ImageEncoder

            self._images = ImageEncoder.of(self.bundle, self.runners.buckets.store())
        return self._images

    def runner(self, level: int) -> LevelRunner:
        """The runner of a level.

        Raises:
          ConfigError: the model was not opened for this level.
        """
        found = self.runners.by_level.get(level)
        if found is None:
            raise ConfigError(
                f"level {level} is not served; the engine was opened for "
                f"{', '.join(map(str, self.levels))}: name it in EngineOptions.levels"
            )
        return found

    def resident_runner(self, level: int) -> ResidentRunner:
        """The runner of a level with resident weights.

        Raises:
          ConfigError: weights are streamed, or the model was not opened for this level.
        """
        found: Any = self.runner(level)
        if not found.resident:
            raise ConfigError("this requires resident weights; raise --memory")
        return found

    def beside(self, bundle: Bundle, options: EngineOptions, progress: Progress | None) -> "LoadedModel":
        """Opens another model, such as a drafter for this one."""
        return LoadedModel(bundle, options, progress)

    # -- getting ready ----------------------------------------------------------------------------

    def warm_up(
        self,
        level: int,
        speculation: Any,
        *,
        prompt_tokens: int | None,
        max_tokens: int,
        progress: Progress | None,
    ) -> None:
        """Prepares buckets (see `jaxllm.serving.engine.engine.Engine.warm_up`); for all levels if `level`
        is the whole model."""
        runner, tokens = self.runner(level), None
        trees = () if speculation is None else speculation.options.trees.nodes
        if prompt_tokens is None:
            runners = [self.runner(each) for each in (self.levels if level == FULL_LEVEL else (level,))]
            needed = [bucket for each in runners for bucket in each.buckets_for()]
            needed += runner.buckets_for(trees=trees)
            runner.fill(needed, progress)
            # One of the levels that share buckets, if possible with integer prefill, too.
            runners.sort(key=lambda each: each.int8 is not None and each.int8.possible)
            for each in {each.model.bucket_level: each for each in runners}.values():
                each.rehearse()
            # Imported here: a command of one prompt has no whole warm-up.
            from jaxllm.serving.host.process_memory import give_back_libraries

            # Loading and compiling buckets leaves gaps in memory, and pages that only a start needs.
            give_back_memory()
            give_back_libraries()
            STAGES.end("buckets")
        elif 0 < prompt_tokens <= self.options.context_tokens:
            answer = max_tokens if speculation is None else speculation.cache_tokens(max_tokens)
            runner.prepare(prompt_tokens, answer, progress, trees=trees)
            # A source is not in the cache of tokens.
            begins = prompt_tokens if self.bundle.cfg.encoder is None else MAX_START_TOKENS
            tokens = begins + max_tokens if max_tokens else None
        else:
            return
        if speculation is not None:
            speculation.drafter.warm_up(progress, tokens=tokens)

    def later_buckets(self) -> list[Bucket]:
        """See `LevelRunner`, for all levels."""
        return [each for level in self.levels for each in self.runner(level).later_buckets()]

    def facts(self) -> dict[str, Any]:
        """Counts as plain data: loaded and compiled buckets, and weights read from storage."""
        buckets = self.runners.buckets
        built = {
            "loaded_buckets": len(buckets.loaded),
            "compiled_buckets": len(buckets.bucket_ms.keys() - buckets.loaded),
        }
        return built if self.streamed is None else {**built, "memory": self.streamed.facts()}

    def close(self) -> None:
        """Stops the threads that stream weights and the processors of prefill, if any, and releases
        buckets."""
        if self.streamed is not None:
            self.streamed.close()
        if self.runners.processors is not None:
            self.runners.processors.close()
        self.runners.buckets.close()
        # Compiling leaves gaps in memory, which grow with every model.
        give_back_memory()

    # -- adapters ---------------------------------------------------------------------------------

    def load_adapter(self, folder: str | Path) -> LoadedAdapter:
        """Reads a low-rank adapter, and makes the parameters of all levels with it, for `use_adapter`.
        Running answers are not affected.

        Raises:
          ConfigError, CheckpointError: see `jaxllm.serving.engine.engine.Engine.set_adapter`.
        """
        self._require_adaptable()
        lora, adapter = read_adapter_of(self.bundle, folder)
        return self._loaded(adapter, lora.scaling)

    def use_adapter(self, adapter: LoadedAdapter | None) -> None:
        """Replaces the adapter of all levels at negligible cost; None for none. A sequence can only
        continue with the adapter of its cache."""
        adapter, modes = self._plain if adapter is None else adapter, self.runners.modes
        adapted = bool(adapter.digest)
        with self.runner(FULL_LEVEL).lock:
            if modes is not None and adapted:
                modes.require_adaptable()
            for level, weights in adapter.levels.items():
                self.runner(level).model.put(weights)
            if modes is not None:
                modes.adapt(adapted)
            self.adapter_digest = adapter.digest

    def set_adapter(self, folder: str | Path | None) -> None:
        """Puts a low-rank adapter on all levels (see `jaxllm.serving.engine.engine.Engine.set_adapter`)."""
        self._require_adaptable()
        # Answers go on while the files are read.
        self.use_adapter(None if folder is None else self.load_adapter(folder))

    def put_adapter(self, adapter: Adapter, scaling: float) -> None:
        """`set_adapter` with a loaded adapter."""
        self.use_adapter(self._loaded(adapter, scaling))

    def _require_adaptable(self) -> None:
        if not self.options.adapter_rank:
            raise ConfigError("this engine takes no adapters; open it with EngineOptions(adapter_rank=...)")

    def _loaded(self, adapter: Adapter, scaling: float) -> LoadedAdapter:
        params = self._adapted(adapter, scaling)
        # Make all levels' parameters before changing any: an adapter that does not fit changes nothing.
        levels = {level: self.runner(level).model.prepared(each) for level, each in params.items()}
        size = factor_bytes(params.values())
        return LoadedAdapter(adapter_digest(adapter, scaling) if adapter else "", levels, size)

    def _adapted(self, adapter: Adapter, scaling: float) -> dict[int, Params]:
        """The parameters of all levels with this adapter, padded to the rank of the options, if they have
        one."""
        rank, targets = self.options.adapter_rank, self.options.adapter_targets
        filled = padded(self.bundle.cfg, adapter, targets, rank) if rank else {}
        return self._levels.params(self._frozen, filled, scaling)


def stacks_layers(bundle: Bundle, options: EngineOptions) -> bool:
    """Whether the arrays of layers are stacked when they are loaded, for buckets with code per kind of layer.

    On a CPU a slice of a stack is copied before a product, unless it is converted block by block. 32-bit
    floats are not, and bfloat16 weights alias the mapped file, so both are not stacked. The stages of two
    processors need separate weights.
    """
    if options.prefill.processors > 1:
        return False
    quantized = bundle.layout.weights not in ("f32", "bf16")
    return jax.default_backend() != "cpu" or (quantized and not native.kernels().native)


@functools.cache
def _say_once(message: str) -> None:
    _log.warning(message)
