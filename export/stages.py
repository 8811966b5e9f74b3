"""Makes the two models of stage programs: one that an NPU computes in integers, and one that a CPU or GPU
computes in floats meanwhile (mllm-NPU, arXiv 2407.05858, section 3.4).

Both are of the whole model at w8a8. Every program is one stage of one layer (see
`jaxllm.int8_prefill.schedule`), because a TFLite model's weights are constants; each chunk length has
programs of its own over the same weights.

A step accepts weights and inputs by name, and returns results by name, for one chunk of T tokens. `x` `[1,
T, D]` is a layer's input and output, `q`, `k`, `v`, `gate`, `up` are products, and `*_shadow` their
shadows. `keys` and `values` `[1, K, S, H]` are the layer's cache, and `input_pos` `[T]` int32 is that of
`run_step`. The parameters define how a product is computed: those of the integer processor clip their
inputs, and those of the float processor's shadows multiply the clipped excess.
"""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import FULL_LEVEL, ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.export.converter import Traced, convert, traced, write_model
from jaxllm.export.folder_format.parts import EMBED, STAGE_FILES, StageFacts, stage_inputs, stage_name
from jaxllm.export.placed import PlacedMatrices, described_weights
from jaxllm.export.quantized import StaticProduct, annotated
from jaxllm.export.signatures import ExportPlan
from jaxllm.export.steps.exported import Arrays
from jaxllm.export.subject import Subject
from jaxllm.int8_prefill.schedule import (
    PROCESSORS,
    STAGE_PARAMETERS,
    Processor,
    Stage,
    natural_place,
    stages_of,
)
from jaxllm.int8_prefill.shadow import OUT, PROJECT, WIDEN, matrices_of
from jaxllm.int8_prefill.subgraphs import block_weights
from jaxllm.kv.cache import Past, TokenPositions
from jaxllm.models.decoder import embed_tokens
from jaxllm.models.features import require_feature
from jaxllm.models.layer import LayerParams, attend_cache, normed_heads
from jaxllm.models.layer_stack import layer_of
from jaxllm.models.parameters import Params
from jaxllm.nn.layers import activate, gated
from jaxllm.nn.linear import add_normed, feed_forward, from_units, normed_to_units
from jaxllm.quant import Weight

Shapes = dict[str, jax.ShapeDtypeStruct]
SHADOW = "_shadow"
_EMBEDDING = "embed."
_HEADS = ("q", "k", "v")


def stage_facts(subject: Subject, plan: ExportPlan) -> StageFacts:
    """Returns the manifest's facts about the stages of a resolved plan.

    Raises:
      ConfigError: the model cannot be divided so, or accepts adapters as an input.
    """
    require_feature(subject.cfg, "integer prefill")
    if subject.adapters is not None:
        raise ConfigError("stages take no adapters as an input; leave --stages or --adapter-input out")
    calibration = None if plan.without_shadow else subject.calibration
    shadowed = (False,) * subject.cfg.layers if calibration is None else calibration.shadowed
    return StageFacts(chunk_tokens=plan.chunk_tokens, shadowed=tuple(map(bool, shadowed)))


def write_stages(
    folder: Path,
    subject: Subject,
    products: Mapping[str, StaticProduct],
    facts: StageFacts,
    scales: Mapping[str, np.ndarray],
    stored: Subject,
    *,
    cache_tokens: int,
) -> None:
    """Writes the models of both processors into a folder.

    Args:
      subject, products: results of `quantized.static_level`, of the whole model.
      facts: facts of the stages.
      stored: the subject before its matrices were quantized.
      cache_tokens: length of caches (S).
    """
    cfg, weights = subject.cfg, described_weights(subject, FULL_LEVEL, scales)
    made: dict[Processor, list[Traced]] = {each: [] for each in PROCESSORS}
    # For each weight, a function that makes its product on a processor.
    static: Mapping[Processor, Mapping[str, Callable[[Mapping[str, Weight]], Any]]] = {
        "integer": {name: lambda _, each=each: each.clipped for name, each in products.items()},
        "float": {name: functools.partial(each.shadow, name) for name, each in products.items()},
    }

    def add(processor: Processor, name: str, prefixes: tuple[str, ...], shapes: Shapes, step: Any) -> None:
        def run(weights: Arrays, inputs: Arrays) -> Any:
            own = {each: scales[each] for each in weights if each in scales}
            return step(annotated(dict(weights), cfg, scales=own, static=static[processor]), inputs)

        own = {each: array for each, array in weights.items() if each.startswith(prefixes)}
        made[processor].append(traced(name, run, own, shapes))

    def embed(params: Params, inputs: Arrays) -> Arrays:
        return {"x": embed_tokens(params, inputs["tokens"], inputs["input_pos"], cfg=cfg)}

    for tokens in facts.chunk_tokens:
        row = (1, tokens)
        positions = {"input_pos": jax.ShapeDtypeStruct((tokens,), np.int32)}
        inputs = {"tokens": jax.ShapeDtypeStruct(row, np.int32), **positions}
        add("float", f"{EMBED}_{tokens}", (_EMBEDDING,), inputs, embed)
        for layer, shadowed in enumerate(facts.shadowed):
            units, width, query = cfg.units(layer), cfg.head_dim, cfg.heads // cfg.kv_heads * cfg.head_dim
            heads = units.kv_heads
            sizes: Mapping[str, tuple[int, ...]] = {
                **dict.fromkeys(("x", "mixed", "added"), (*row, cfg.hidden_size)),
                **dict.fromkeys(("q", "out"), (*row, heads, query)),
                **dict.fromkeys(("k", "v"), (*row, heads, width)),
                **dict.fromkeys(("gate", "up", "hidden"), (*row, units.neurons)),
                **dict.fromkeys(("keys", "values"), (1, heads, cache_tokens, width)),
            }
            for stage in stages_of(shadowed):
                names = stage_inputs(stage, shadowed=shadowed, gated=cfg.gated_ffn)
                shapes = {
                    name: positions[name]
                    if name in positions
                    else jax.ShapeDtypeStruct(sizes[name.removesuffix(SHADOW)], jnp.float32)
                    for name in names
                }
                step = functools.partial(run_stage, stage=stage, layer=layer, shadowed=shadowed, cfg=cfg)
                prefixes = tuple(f"layers.{layer}.{each}" for each in STAGE_PARAMETERS[stage])
                add(natural_place(layer, stage), stage_name(stage, layer, tokens), prefixes, shapes, step)
    for each, of in made.items():
        write_model(folder / STAGE_FILES[each], convert(of), PlacedMatrices(stored, "w8a8"))


def run_stage(
    params: Params, inputs: Arrays, *, stage: Stage, layer: int, shadowed: bool, cfg: ModelConfig
) -> Arrays:
    """Runs a stage of a layer.

    Args:
      params: parameters of the layer, in the form that the stage's processor multiplies by.
      inputs: see `jaxllm.export.folder_format.parts.stage_inputs`.
      shadowed: whether the layer has a shadow.

    Returns:
      The stage's results by name.
    """
    weights = layer_of(params, layer)
    if stage in ("project", "project_shadow"):
        return _products(weights, PROJECT, inputs, cfg, shadow=stage == "project_shadow")
    if stage == "attend":
        q, k, v = (inputs[each] + inputs[f"{each}{SHADOW}"] if shadowed else inputs[each] for each in _HEADS)
        position = inputs["input_pos"]
        count = position.shape[0]
        real = position == position[0] + jnp.arange(count, dtype=jnp.int32)
        at = TokenPositions.after(position[0], count, jnp.sum(real, dtype=jnp.int32))
        new, past = normed_heads(weights, q, k, v, cfg), Past(inputs["keys"], inputs["values"])
        out, (past, _) = attend_cache(new, None, cfg=cfg, layer=layer, at=at, past=past, mass=None)
        found = {"out": out.reshape(*out.shape[:3], -1), "keys": past.keys, "values": past.values}
        if shadowed:
            ((matrix,), _) = matrices_of(weights, OUT, cfg)
            found["added"] = from_units(found["out"], matrix)
        return found
    if stage == "finish":
        x = _with_output(weights, inputs, cfg)
        mixed = feed_forward(
            x, weights.norm("ffn_norm", cfg), block_weights(weights, cfg), add_input=not cfg.post_norms
        )
        return {"x": _after_block(weights, x, mixed, cfg)}
    if stage == "widen":
        x = _with_output(weights, inputs, cfg)
        return {"x": x, **_products(weights, WIDEN, {"x": x}, cfg, shadow=False)}
    if stage == "widen_shadow":
        return _products(weights, WIDEN, inputs, cfg, shadow=True)
    if stage == "narrow":
        first, *more = (inputs[each] + inputs[f"{each}{SHADOW}"] for each in ("gate", "up") if each in inputs)
        hidden = gated(first, more[0], cfg.activation) if more else activate(first, cfg.activation)
        residual = None if cfg.post_norms else inputs["x"]
        bias = weights.vector("ffn.down_bias")
        return {"hidden": hidden, "mixed": from_units(hidden, weights["ffn.down"], bias, residual)}
    mixed = inputs["mixed"] + from_units(inputs["hidden"], weights["ffn.down"])
    return {"x": _after_block(weights, inputs["x"], mixed, cfg)}


def _products(
    weights: LayerParams, product: int, inputs: Arrays, cfg: ModelConfig, *, shadow: bool
) -> dict[str, jax.Array]:
    """Products of the normalized `x`, or their shadows, which have no biases."""
    matrices, biases = matrices_of(weights, product, cfg)
    norm = weights.norm("attn_norm" if product == PROJECT else "ffn_norm", cfg)
    biases = [None] * len(matrices) if shadow else biases
    found = normed_to_units(inputs["x"], norm, matrices, biases)
    names = _HEADS if product == PROJECT else ("gate", "up")[-len(matrices) :]
    suffix = SHADOW if shadow else ""
    return {f"{name}{suffix}": each for name, each in zip(names, found, strict=True)}


def _with_output(weights: LayerParams, inputs: Arrays, cfg: ModelConfig) -> jax.Array:
    """Returns the layer's input plus attention's output product, and its shadow if there is one."""
    ((matrix,), (bias,)) = matrices_of(weights, OUT, cfg)
    x, residual = inputs["x"], None if cfg.post_norms else inputs["x"]
    mixed = from_units(inputs["out"], matrix, bias, residual)
    mixed = mixed + inputs["added"] if "added" in inputs else mixed
    return add_normed(x, mixed, weights.norm("attn_post_norm", cfg)) if cfg.post_norms else mixed


def _after_block(weights: LayerParams, x: jax.Array, mixed: jax.Array, cfg: ModelConfig) -> jax.Array:
    return add_normed(x, mixed, weights.norm("ffn_post_norm", cfg)) if cfg.post_norms else mixed
