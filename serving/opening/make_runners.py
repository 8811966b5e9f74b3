"""Makes a runner for each level of a model, by the location of its weights and the mode of its prefill."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax.numpy as jnp

from jaxllm.bundle import Bundle
from jaxllm.config import FULL_LEVEL
from jaxllm.errors import ConfigError
from jaxllm.kernels import native
from jaxllm.models.parameters import Params
from jaxllm.serving.buckets.bucket_table import BucketStore, BucketTable, CompiledBucketFolder
from jaxllm.serving.elastic.levels import Levels
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.runners.level_runner import LevelRunner
from jaxllm.serving.runners.resident import ResidentRunner
from jaxllm.serving.weights.model_level import ModelLevel

if TYPE_CHECKING:
    from jaxllm.serving.int8_prefill.modes import PrefillModes
    from jaxllm.serving.int8_prefill.processors import TwoProcessors
    from jaxllm.serving.int8_prefill.runner import Int8Shared
    from jaxllm.serving.opening.weight_source import Streamed


@dataclasses.dataclass(frozen=True)
class Runners:
    """The runners of a model's levels, and their shared parts.

    Attributes:
      by_level: level in percent -> runner, including 100.
      modes: the prefill mode of each prompt; None if all prefill is in floats.
      processors: processors for stages of integer prefill; None for this process's device.
    """

    by_level: Mapping[int, LevelRunner]
    buckets: BucketTable
    modes: "PrefillModes | None" = None
    processors: "TwoProcessors | None" = None


def make_runners(
    bundle: Bundle,
    options: EngineOptions,
    levels: Levels,
    params: Mapping[int, Params],
    streamed: "Streamed | None",
) -> Runners:
    """Makes a runner for each level.

    Args:
      bundle: an open bundle.
      options: options resolved for the bundle.
      levels: configs of its levels.
      params: parameters of all levels.
      streamed: streamed weights; None if all are resident.

    Raises:
      ConfigError: integer prefill is requested and not possible.
      BundleError: the calibration is malformed.
    """
    whole = ModelLevel(bundle.cfg, params[FULL_LEVEL], options)
    models = {FULL_LEVEL: whole}
    for level, cfg in levels.cfgs.items():
        sharing = whole if levels.counted else None
        models[level] = ModelLevel(cfg, params[level], options, level=level, whole=sharing)
    modes = None
    if options.prefill.resolved_mode != "float":
        # Features of few models are imported on demand, here and below, because startup waits for imports.
        from jaxllm.serving.int8_prefill.modes import chosen_prefill

        modes = chosen_prefill(bundle, options, (*levels.cfgs, FULL_LEVEL), streamed=streamed is not None)
    if options.attend_quantized_kv:
        _require_addresses(options, streamed=streamed is not None, integers=modes is not None)
    buckets = _make_buckets(bundle, models)
    if bundle.read_in_place or streamed is not None:
        buckets.guard(bundle.file.require_unchanged)
    int8 = None if modes is None else _share_int8(bundle, whole, modes)
    runners = {level: _runner(model, buckets, streamed, int8) for level, model in models.items()}
    return Runners(runners, buckets, modes, None if int8 is None else int8.processors)


def _require_addresses(options: EngineOptions, *, streamed: bool, integers: bool) -> None:
    from jaxllm.kv.chunks import reads_addresses

    native_cache = reads_addresses(jnp.dtype(options.cache_dtype))
    because = {
        "its weights are streamed": streamed,
        "it prefills in integers": integers,
        f"no native kernels here attend to caches of {options.cache_dtype}": not native_cache,
    }
    for reason, applies in because.items():
        if applies:
            raise ConfigError(
                f"attend_quantized_kv: the model cannot attend to stored chunks, because {reason}; leave it "
                "out"
            )


def _runner(
    model: ModelLevel, buckets: BucketTable, streamed: "Streamed | None", int8: "Int8Shared | None"
) -> LevelRunner:
    if streamed is None:
        if int8 is None:
            return ResidentRunner(model, buckets)
        from jaxllm.serving.int8_prefill.runner import Int8Prefill

        return ResidentRunner(model, buckets, Int8Prefill(model, buckets, int8))
    from jaxllm.serving.experts.expert_layers import ExpertRunner
    from jaxllm.serving.experts.weights import ExpertWeights
    from jaxllm.serving.runners.layerwise import StreamedRunner

    if isinstance(streamed, ExpertWeights):
        return ExpertRunner(model, buckets, streamed)
    return StreamedRunner(model, buckets, streamed)


def _make_buckets(bundle: Bundle, models: Mapping[int, ModelLevel]) -> BucketTable:
    whole, store = models[FULL_LEVEL], None
    folder = CompiledBucketFolder.of_user(limit_bytes=whole.options.buckets_bytes or 0)
    if folder is not None:
        store = BucketStore.of_model(
            folder, cfg=bundle.cfg, options=whole.options, params=whole.params, kernels=repr(native.kernels())
        )
    buckets = BucketTable(whole.shapes, store)
    for level, model in models.items():
        if model.bucket_level == level != FULL_LEVEL:
            own = None if store is None else store.of(model.cfg, model.params)
            buckets.add_level(level, model.shapes, own)
    return buckets


def _share_int8(bundle: Bundle, whole: ModelLevel, modes: "PrefillModes") -> "Int8Shared":
    """The shared parts of integer prefill; the bundle's memory of the calibration is released."""
    from jaxllm.bundle.calibrations import release_prefill
    from jaxllm.serving.int8_prefill.buckets import IntegerStageBucket
    from jaxllm.serving.int8_prefill.processor_pair import SubgraphTimes
    from jaxllm.serving.int8_prefill.processors import TwoProcessors
    from jaxllm.serving.int8_prefill.runner import Int8Shared, placed_stages, times_path

    prefill, shared = whole.options.prefill, Int8Shared(modes)
    if prefill.processors > 1:
        shared.placed = placed_stages(whole, modes)
        shared.measured = SubgraphTimes(times_path(bundle, whole.options), IntegerStageBucket)
        shared.processors = TwoProcessors(prefill.integer_device)
    release_prefill(bundle)
    return shared
