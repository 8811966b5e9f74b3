"""A layer of integer prefill, in stages for two processors or whole for one (mllm-NPU, arXiv 2407.05858,
section 3.2)."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.axes import Axes
from jaxllm.config import ModelConfig
from jaxllm.int8_prefill.shadow import (
    NARROW,
    OUT,
    PRODUCTS,
    PROJECT,
    WIDEN,
    FloatRows,
    added_by_shadow,
    contracts_last_axis,
    matrices_of,
)
from jaxllm.int8_prefill.shadow import feed_forward as feed_forward_shadowed
from jaxllm.int8_prefill.shadow import from_units as from_units_shadowed
from jaxllm.int8_prefill.shadow import normed_to_units as normed_to_units_shadowed
from jaxllm.kernels.native_call import value
from jaxllm.kv.cache import Past, TokenPositions
from jaxllm.models.features import require_room
from jaxllm.models.layer import attend_cache, normed_heads
from jaxllm.models.layer_stack import LayerParams, layer_of
from jaxllm.models.parameters import Params
from jaxllm.nn.layers import activate, normalize
from jaxllm.nn.linear import FeedForward, add_normed, feed_forward, from_units, normed_to_units
from jaxllm.quant import Adapted, BlockedArray

# The stages of a layer in integer prefill (mllm-NPU, arXiv 2407.05858, section 3.2).
#
# Static stages depend only on the length of a chunk: one bucket serves all chunks of all prompts, and all
# layers of one shape. Only attention depends on the cache, and has a bucket for each cache length. Weights,
# steps and float rows are arguments.
#
# `schedule.py` lists them, and their processors and order. On a single processor a layer is one step
# (`pass_layer`), equal to all of these stages.


# Product -> the norm of its input.
_NORMS = {PROJECT: "attn_norm", WIDEN: "ffn_norm"}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerCalibration:
    """The calibration of one layer.

    Attributes:
      steps: `[4]` float32, per product of `PRODUCTS`.
      rows: per product of `PRODUCTS`, the float rows of channels with outliers; None if the layer has no
        shadow.
    """

    steps: jax.Array
    rows: tuple[FloatRows, ...] | None = None

    @property
    def shadowed(self) -> bool:
        """Whether the layer has a shadow."""
        return self.rows is not None

    def check(self, axes: Axes) -> None:
        """Asserts the shapes above at trace time."""
        axes.check(jnp.float32, "4", steps=self.steps)
        for rows in self.rows or ():
            axes.check(jnp.int32, "*", place=rows.place)


def require_integer_prefill(cfg: ModelConfig) -> None:
    """Raises ConfigError unless the model can have integer prefill."""
    require_room(cfg, "integer prefill")


def project(
    params: Params, calibration: LayerCalibration, x: jax.Array, *, cfg: ModelConfig, layer: int
) -> list[jax.Array]:
    """Queries `[1, T, K, G·H]`, keys and values `[1, T, K, H]` of a layer's input `[1, T, D]`."""
    check_stage("project", calibration, cfg, x=x)
    return _products(layer_of(params, layer), calibration, PROJECT, x, cfg, layer)


def project_shadow(
    params: Params, calibration: LayerCalibration, x: jax.Array, *, cfg: ModelConfig, layer: int
) -> tuple[list[jax.Array], jax.Array]:
    """The shadow of the products of `project`, and the number of channels with an outlier."""
    check_stage("project_shadow", calibration, cfg, x=x)
    return _normed_shadow(layer_of(params, layer), calibration, PROJECT, x, cfg)


class Projected(NamedTuple):
    """Inputs of attention from the preceding stages.

    Attributes:
      heads: results of `project`.
      shadows: results of `project_shadow`; None if the layer has no shadow.
    """

    heads: Sequence[jax.Array]
    shadows: Sequence[jax.Array] | None = None


def attend(
    params: Params,
    calibration: LayerCalibration,
    projected: Projected,
    at: TokenPositions,
    past: Past,
    mass: jax.Array | None,
    *,
    cfg: ModelConfig,
    layer: int,
) -> tuple[jax.Array, jax.Array | None, Past, jax.Array | None, jax.Array | None]:
    """Attention of a chunk over the cache.

    Args:
      params: the layer's, among them the norms of heads and the weight of the output product.
      calibration: calibration of the layer.
      projected: queries, keys and values, and their shadows.
      at, past, mass, cfg, layer: see `decoder.forward_layer`; past and mass are donated.

    Returns:
      Attention outputs `[1, T, K, G·H]`; the shadow of the output product `[1, T, D]`, or None without a
      shadow; the updated keys and values; the updated mass; and the number of channels with outliers, or
      None.
    """
    axes = check_stage("attend", calibration, cfg)
    for q, k, v in (projected.heads, *([] if projected.shadows is None else [projected.shadows])):
        axes.check(jnp.floating, "1 T K *", queries=q)
        axes.check(jnp.floating, "1 T K H", keys=k, values=v)
    check_past(axes, at, past, mass)
    weights = layer_of(params, layer)
    heads, shadows = projected
    q, k, v = heads if shadows is None else _sums(heads, shadows)
    new = normed_heads(weights, q, k, v, cfg)
    groups, _ = weights.used
    out, (past, mass) = attend_cache(new, groups, cfg=cfg, layer=layer, at=at, past=past, mass=mass)
    real = jnp.arange(out.shape[1], dtype=jnp.int32)[:, None, None] < at.valid
    # Outputs of padding are undefined, and outliers in them would be counted.
    out = jnp.where(real, out.reshape(*out.shape[:3], -1), jnp.zeros((), out.dtype))
    if not calibration.shadowed:
        return out, None, past, mass, None
    used = out if groups is None else groups.only(out, 2)
    (added,), count = _shadow(weights, calibration, OUT, used.reshape(*out.shape[:2], -1), cfg)
    return out, added, past, mass, count


def finish(
    params: Params,
    calibration: LayerCalibration,
    x: jax.Array,
    out: jax.Array,
    *,
    cfg: ModelConfig,
    layer: int,
) -> jax.Array:
    """The next layer's input `[1, T, D]`, from the layer's input and the attention outputs."""
    axes = check_stage("finish", calibration, cfg, x=x)
    axes.check(jnp.floating, "1 T K *", out=out)
    weights = layer_of(params, layer)
    x = _added_output(weights, calibration, x, out, None, cfg, layer)
    _, neurons = weights.used
    steps = calibration.steps[WIDEN], calibration.steps[NARROW]
    mixed = feed_forward(
        x,
        weights.norm("ffn_norm", cfg),
        block_weights(weights, cfg),
        add_input=not cfg.post_norms,
        used=neurons,
        steps=steps,
    )
    return add_normed(x, mixed, weights.norm("ffn_post_norm", cfg)) if cfg.post_norms else mixed


def widen(
    params: Params,
    calibration: LayerCalibration,
    x: jax.Array,
    out: jax.Array,
    added: jax.Array,
    *,
    cfg: ModelConfig,
    layer: int,
) -> tuple[jax.Array, list[jax.Array]]:
    """Input of the feed-forward block `[1, T, D]`, and its first products, each `[1, T, F]`; `added` is the
    shadow from `attend`."""
    axes = check_stage("widen", calibration, cfg, x=x, added=added)
    axes.check(jnp.floating, "1 T K *", out=out)
    weights = layer_of(params, layer)
    x = _added_output(weights, calibration, x, out, added, cfg, layer)
    return x, _products(weights, calibration, WIDEN, x, cfg, layer)


def widen_shadow(
    params: Params, calibration: LayerCalibration, x: jax.Array, *, cfg: ModelConfig, layer: int
) -> tuple[list[jax.Array], jax.Array]:
    """The shadow of the products of `widen`, from the block's input; and the number of channels with an
    outlier."""
    check_stage("widen_shadow", calibration, cfg, x=x)
    return _normed_shadow(layer_of(params, layer), calibration, WIDEN, x, cfg)


def narrow(
    params: Params,
    calibration: LayerCalibration,
    x: jax.Array,
    products: Sequence[jax.Array],
    shadows: Sequence[jax.Array],
    *,
    cfg: ModelConfig,
    layer: int,
) -> tuple[jax.Array, jax.Array]:
    """Output of the feed-forward block `[1, T, D]` (with x added, unless a norm follows), and the input of
    its last product `[1, T, F]`."""
    axes = check_stage("narrow", calibration, cfg, x=x)
    for each, shadow in zip(products, shadows, strict=True):
        axes.check(jnp.floating, "1 T F", product=each, shadow=shadow)
    weights = layer_of(params, layer)
    hidden = _hidden(_sums(products, shadows), cfg)
    _, neurons = weights.used
    out = from_units(
        hidden,
        weights["ffn.down"],
        weights.vector("ffn.down_bias"),
        residual=None if cfg.post_norms else x,
        used=neurons,
        step=calibration.steps[NARROW],
    )
    return out, hidden


def narrow_shadow(
    params: Params,
    calibration: LayerCalibration,
    x: jax.Array,
    out: jax.Array,
    hidden: jax.Array,
    *,
    cfg: ModelConfig,
    layer: int,
) -> tuple[jax.Array, jax.Array]:
    """The next layer's input `[1, T, D]`, with the shadow of `hidden` `[1, T, F]` added; and the number of
    channels with an outlier."""
    axes = check_stage("narrow_shadow", calibration, cfg, x=x, out=out)
    axes.check(jnp.floating, "1 T F", hidden=hidden)
    weights = layer_of(params, layer)
    _, neurons = weights.used
    used = hidden if neurons is None else neurons.only(hidden, 2)
    (added,), count = _shadow(weights, calibration, NARROW, used, cfg)
    out = out + added
    return add_normed(x, out, weights.norm("ffn_post_norm", cfg)) if cfg.post_norms else out, count


def check_stage(step: str, calibration: LayerCalibration, cfg: ModelConfig, **hidden: jax.Array) -> Axes:
    """Asserts the calibration and the arrays `[1, T, D]` of a stage at trace time."""
    axes = Axes(step, D=cfg.hidden_size, H=cfg.head_dim)
    calibration.check(axes)
    axes.check(jnp.floating, "1 T D", **hidden)
    return axes


def check_past(axes: Axes, at: TokenPositions, past: Past, mass: jax.Array | None) -> None:
    """Asserts positions and the part of the cache that a stage uses, at trace time."""
    at.check(axes)
    past.check(axes)
    axes.check(jnp.float32, "1 S", mass=mass)


def block_weights(weights: LayerParams, cfg: ModelConfig) -> FeedForward:
    """The weights, biases and activation of a layer's feed-forward block."""
    first, biases = matrices_of(weights, WIDEN, cfg)
    return FeedForward(
        up=first[-1],
        down=weights["ffn.down"],
        gate=first[0] if cfg.gated_ffn else None,
        up_bias=biases[-1],
        down_bias=weights.vector("ffn.down_bias"),
        gate_bias=biases[0] if cfg.gated_ffn else None,
        activation=cfg.activation,
    )


def _added_output(
    weights: LayerParams,
    calibration: LayerCalibration,
    x: jax.Array,
    out: jax.Array,
    added: jax.Array | None,
    cfg: ModelConfig,
    layer: int,
) -> jax.Array:
    """A layer's input with its output product and that product's shadow added."""
    groups, _ = weights.used
    mixed = from_units(
        out,
        weights["attn.o"],
        weights.vector("attn.o_bias"),
        residual=None if cfg.post_norms else x,
        used=groups,
        step=calibration.steps[OUT],
    )
    mixed = mixed if added is None else mixed + added
    return add_normed(x, mixed, weights.norm("attn_post_norm", cfg)) if cfg.post_norms else mixed


def _hidden(products: Sequence[jax.Array], cfg: ModelConfig) -> jax.Array:
    if not cfg.gated_ffn:
        return activate(products[0], cfg.activation)
    gate, up = products
    return activate(gate, cfg.activation) * up


def _products(
    weights: LayerParams,
    calibration: LayerCalibration,
    product: int,
    x: jax.Array,
    cfg: ModelConfig,
    layer: int,
) -> list[jax.Array]:
    """Products of the normalized `x`: of heads, or the first of the feed-forward block."""
    matrices, biases = matrices_of(weights, product, cfg)
    groups, neurons = weights.used
    used = groups if product == PROJECT else neurons
    norm = weights.norm(_NORMS[product], cfg)
    return normed_to_units(x, norm, matrices, biases, used=used, step=calibration.steps[product])


def _normed_shadow(
    weights: LayerParams, calibration: LayerCalibration, product: int, x: jax.Array, cfg: ModelConfig
) -> tuple[list[jax.Array], jax.Array]:
    """The shadow of `_products`, and the number of channels with an outlier."""
    normed = normalize(x, weights.norm(_NORMS[product], cfg))
    return _shadow(weights, calibration, product, normed, cfg)


def _sums(results: Sequence[jax.Array], shadows: Sequence[jax.Array]) -> list[jax.Array]:
    return [each + shadow.astype(each.dtype) for each, shadow in zip(results, shadows, strict=True)]


def _shadow(
    weights: LayerParams, calibration: LayerCalibration, product: int, x: jax.Array, cfg: ModelConfig
) -> tuple[list[jax.Array], jax.Array]:
    """The shadow of a product's input `[1, T, inputs]` for each of its results."""
    assert calibration.rows is not None
    matrices, _ = matrices_of(weights, product, cfg)
    last = contracts_last_axis(product)
    return added_by_shadow(x, calibration.steps[product], matrices, calibration.rows[product], last=last)


# The calibration of integer prefill next to a layer's parameters, in their weight table.


_STEPS, _PLACE, _ROWS = "int8.steps", "int8.place", "int8.rows"


def can_be_addressed(weights: Params, cfg: ModelConfig) -> bool:
    """Whether native kernels compute all layers, shadows included, from addresses: 8-bit blocks with a scale
    per output, and norms without biases."""
    blocks = [each.base if isinstance(each, Adapted) else each for each in weights.values()]
    formats = {(each.bits, each.group) for each in blocks if isinstance(each, BlockedArray)}
    return cfg.norm == "rms" and formats == {(8, 0)}


def calibration_arrays(calibration: LayerCalibration) -> dict[str, Any]:
    """A layer's calibration as arrays by name."""
    found: dict[str, Any] = {_STEPS: np.asarray(calibration.steps)}
    for product, rows in enumerate(calibration.rows or ()):
        found[f"{_PLACE}.{product}"] = np.asarray(rows.place)
        for number, each in enumerate(rows.rows):
            found[f"{_ROWS}.{product}.{number}"] = np.asarray(each)
    return found


def calibration_of(weights: LayerParams) -> LayerCalibration:
    """The calibration from `calibration_arrays` among a layer's parameters."""
    steps = weights.operand(_STEPS)
    assert steps is not None
    rows = tuple(_rows_of(weights, product) for product in range(len(PRODUCTS)))
    return LayerCalibration(value(steps), rows if all(each is not None for each in rows) else None)  # pyright: ignore


def _rows_of(weights: LayerParams, product: int) -> FloatRows | None:
    place, found = weights.operand(f"{_PLACE}.{product}"), []
    while (each := weights.operand(f"{_ROWS}.{product}.{len(found)}")) is not None:
        found.append(each)
    return None if place is None else FloatRows(place, tuple(found))  # pyright: ignore[reportArgumentType]


# A layer of integer prefill as one step, for a processor that computes all of it (mllm-NPU, arXiv
# 2407.05858).
#
# The result is that of the layer's stages but for the order of sums: here the products add
# their shadow themselves (`shadow.py`).


def pass_layer(
    params: Params,
    calibration: LayerCalibration,
    x: jax.Array,
    at: TokenPositions,
    past: Past,
    mass: jax.Array | None,
    *,
    cfg: ModelConfig,
    layer: int,
) -> tuple[jax.Array, Past, jax.Array | None, jax.Array | None]:
    """One layer over a chunk.

    Args:
      params: the layer's.
      calibration: calibration of the layer.
      x: `[1, T, D]`, its input.
      at, past, mass, cfg, layer: see `decoder.forward_layer`; past and mass are donated.

    Returns:
      The next layer's input, the updated keys and values, the updated mass; and if the layer has a shadow the
      number of channels with outliers of each of `PRODUCTS`, `[4]` int32, else None.
    """
    check_past(check_stage("pass_layer", calibration, cfg, x=x), at, past, mass)
    steps, rows = calibration.steps, calibration.rows
    plain = LayerCalibration(steps)
    if rows is None:
        heads = project(params, plain, x, cfg=cfg, layer=layer)
        out, _, past, mass, _ = attend(params, plain, Projected(heads), at, past, mass, cfg=cfg, layer=layer)
        return finish(params, plain, x, out, cfg=cfg, layer=layer), past, mass, None
    weights = layer_of(params, layer)
    groups, neurons = weights.used
    heads, projected = normed_to_units_shadowed(
        x,
        weights.norm("attn_norm", cfg),
        *matrices_of(weights, PROJECT, cfg),
        steps[PROJECT],
        rows[PROJECT],
        used=groups,
        live=at.valid,
    )
    out, _, past, mass, _ = attend(params, plain, Projected(heads), at, past, mass, cfg=cfg, layer=layer)
    residual = None if cfg.post_norms else x
    mixed, attended = from_units_shadowed(
        out,
        weights["attn.o"],
        weights.vector("attn.o_bias"),
        steps[OUT],
        rows[OUT],
        residual=residual,
        used=groups,
        live=at.valid,
    )
    x = add_normed(x, mixed, weights.norm("attn_post_norm", cfg), at.valid) if cfg.post_norms else mixed
    mixed, both = feed_forward_shadowed(
        x,
        weights.norm("ffn_norm", cfg),
        block_weights(weights, cfg),
        (steps[WIDEN], steps[NARROW]),
        (rows[WIDEN], rows[NARROW]),
        add_input=not cfg.post_norms,
        used=neurons,
        live=at.valid,
    )
    x = add_normed(x, mixed, weights.norm("ffn_post_norm", cfg), at.valid) if cfg.post_norms else mixed
    return x, past, mass, jnp.concatenate([projected, attended, both])
