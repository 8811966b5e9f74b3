"""Makes the two models of stage programs: one that an NPU computes in integers, and one that a CPU or GPU
computes in floats meanwhile (mllm-NPU, arXiv 2407.05858, section 3.4).

Both are of the whole model at w8a8. Every program is one stage of one layer, because a TFLite model's
weights are constants; each chunk length has programs of its own over the same weights.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.export
import numpy as np

from jaxllm.config import WHOLE, ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.export.flatbuffer import share_buffers
from jaxllm.export.folder_format.stages import EMBED, StageFacts, stage_name
from jaxllm.export.mlir import Traced, convert, exported_step, result_names
from jaxllm.export.quantized import annotated
from jaxllm.export.signatures import ExportPlan
from jaxllm.export.static_products import StaticProduct
from jaxllm.export.steps.exported_stages import run_embed, run_stage, stage_shapes
from jaxllm.export.subject import Subject
from jaxllm.int8_prefill.schedule import (
    PROCESSORS,
    STAGE_PARAMETERS,
    Processor,
    Stage,
    natural_place,
    stages_of,
)
from jaxllm.models.features import require_room
from jaxllm.models.parameters import Params
from jaxllm.quant import Weight

_EMBEDDING = "embed."


def stage_facts(subject: Subject, plan: ExportPlan) -> StageFacts:
    """Returns the manifest's facts about the stages of a resolved plan.

    Raises:
      ConfigError: the model cannot be divided so, or accepts adapters as an input.
    """
    require_room(subject.cfg, "integer prefill")
    if subject.adapters is not None:
        raise ConfigError("stages take no adapters as an input; leave --stages or --adapter-input out")
    calibration = None if plan.without_shadow else subject.calibration
    shadowed = (False,) * subject.cfg.layers if calibration is None else calibration.shadowed
    return StageFacts(chunk_tokens=plan.chunk_tokens, shadowed=tuple(map(bool, shadowed)))


def stage_models(
    subject: Subject,
    facts: StageFacts,
    products: Mapping[str, StaticProduct],
    scales: Mapping[str, np.ndarray],
    *,
    cache_tokens: int,
) -> dict[Processor, bytes]:
    """The models by processor.

    Args:
      subject: result of `static_products.static_level`, of the whole model.
      facts: facts of the stages.
      products: products of its weights.
      scales: scales of its weights.
      cache_tokens: length of caches (S).
    """
    cfg, found = subject.cfg, {}
    traced: dict[Processor, list[Traced]] = {each: [] for each in PROCESSORS}
    weights = subject.weights(WHOLE)
    embedding = {name: each for name, each in weights.items() if name.startswith(_EMBEDDING)}
    for tokens in facts.chunk_tokens:
        shapes = {
            "tokens": jax.ShapeDtypeStruct((1, tokens), np.int32),
            "input_pos": jax.ShapeDtypeStruct((tokens,), np.int32),
        }
        embed = functools.partial(run_embed, cfg=cfg)
        traced["float"].append(_traced(f"{EMBED}_{tokens}", embed, embedding, shapes, cfg, scales, {}))
        for layer, shadowed in enumerate(facts.shadowed):
            for stage in stages_of(shadowed):
                step = functools.partial(run_stage, stage=stage, layer=layer, shadowed=shadowed, cfg=cfg)
                shapes = stage_shapes(
                    stage, cfg, shadowed=shadowed, layer=layer, tokens=tokens, cache_tokens=cache_tokens
                )
                own, name = _weights(weights, stage, layer), stage_name(stage, layer, tokens)
                multiplied = _multiplied(stage, products)
                place = natural_place(layer, stage)
                traced[place].append(_traced(name, step, own, shapes, cfg, scales, multiplied))
    halves = [each for each in subject.arrays.values() if each.dtype == np.float16]
    for processor, each in traced.items():
        found[processor] = share_buffers(convert(each), halves)[0]
    return found


def _weights(weights: Mapping[str, np.ndarray], stage: Stage, layer: int) -> dict[str, np.ndarray]:
    prefixes = tuple(f"layers.{layer}.{each}" for each in STAGE_PARAMETERS[stage])
    return {name: each for name, each in weights.items() if name.startswith(prefixes)}


def _multiplied(
    stage: Stage, products: Mapping[str, StaticProduct]
) -> dict[str, Callable[[Mapping[str, Weight]], Any]]:
    """Returns, for each weight, a function that makes its product on a stage's processor."""
    if natural_place(0, stage) == "integer":
        return {name: lambda _, each=each: each.clipped for name, each in products.items()}
    return {name: functools.partial(each.shadow, name) for name, each in products.items()}


def _traced(
    name: str,
    step: Callable[..., Any],
    weights: Mapping[str, np.ndarray],
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    cfg: ModelConfig,
    scales: Mapping[str, np.ndarray],
    products: Mapping[str, Callable[[Mapping[str, Weight]], Any]],
) -> Traced:
    def run(weights: Mapping[str, jax.Array], inputs: Mapping[str, jax.Array]) -> Any:
        own = {each: scales[each] for each in weights if each in scales}
        params: Params = annotated(dict(weights), cfg, scales=own, static=products)
        return step(params, inputs)

    given = {each: jax.ShapeDtypeStruct(array.shape, array.dtype) for each, array in weights.items()}
    exported = exported_step(run, given, dict(shapes))
    return Traced(
        name,
        exported.mlir_module_serialized,
        [weights[each] for each in sorted(weights)],
        sorted(shapes),
        result_names(exported),
    )
