"""What a layer of integer prefill is cut into (mllm-NPU, arXiv 2407.05858, section 3.2).

Static subgraphs depend on nothing but the length of a chunk: one compiled graph serves all chunks of all
prompts, and all layers of one shape. Attention alone depends on what is in the cache, and is compiled for
each of its lengths. Weights, steps and float rows are arguments.

A layer without outliers is three subgraphs, of which the integer processor runs two:

    project   norm, quantize, products of queries, keys and values
    attend    attention over the cache, in floats
    finish    product of what was attended to, the feed-forward block

A layer whose outliers count is cut at every product, so that the float processor multiplies what is clipped
(`shadow.py`) while the integer processor multiplies the rest; the two are added where they meet:

    project        project_shadow     ->  attend (adds both; multiplies its own output's excess)
    widen                                 product of what was attended to, norm, first products of the block
    narrow         widen_shadow       ->  (adds both) activation, last product of the block
                   narrow_shadow          adds the excess of what the last product took

One processor that runs everything runs a layer as one graph (`whole_layer.py`), which is all of these.

Where subgraphs run, and in which order, is for `schedule.py`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

import jax

from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.kv.cache import Places
from jaxllm.layers import activate, normalize
from jaxllm.linear import FeedForward, add_normed, feed_forward, from_units, normed_to_units
from jaxllm.models.block import attend_cache, normed_heads
from jaxllm.models.layer_params import LayerParams
from jaxllm.models.parameters import Params
from jaxllm.prefill.products import NARROW, OUT, PROJECT, WIDEN, contracts_last_axis, matrices_of
from jaxllm.prefill.shadow import FloatRows, added_by_shadow
from jaxllm.used_units import used_in_layer

Stage = Literal[
    "project",
    "attend",
    "finish",
    "project_shadow",
    "widen",
    "widen_shadow",
    "narrow",
    "narrow_shadow",
    "layer",
]
# In the order in which one processor would run them.
PLAIN_STAGES: tuple[Stage, ...] = ("project", "attend", "finish")
SHADOWED_STAGES: tuple[Stage, ...] = (
    "project", "project_shadow", "attend", "widen", "widen_shadow", "narrow", "narrow_shadow",
)  # fmt: skip
INTEGER_STAGES: frozenset[Stage] = frozenset(("project", "finish", "widen", "narrow"))
# What the names of a subgraph's parameters begin with, within the layer.
STAGE_PARAMETERS: Mapping[Stage, tuple[str, ...]] = {
    "project": ("attn_norm.", "attn.q", "attn.k", "attn.v"),
    "project_shadow": ("attn_norm.", "attn.q", "attn.k", "attn.v"),
    "attend": ("attn.q_norm.", "attn.k_norm.", "attn.o"),
    "finish": ("attn.o", "attn_post_norm.", "ffn_norm.", "ffn.", "ffn_post_norm."),
    "widen": ("attn.o", "attn_post_norm.", "ffn_norm.", "ffn.gate", "ffn.up"),
    "widen_shadow": ("ffn_norm.", "ffn.gate", "ffn.up"),
    "narrow": ("ffn.down",),
    "narrow_shadow": ("ffn.down", "ffn_post_norm."),
    "layer": ("",),
}
# Of products that take what a norm gives.
_NORMS = {PROJECT: "attn_norm", WIDEN: "ffn_norm"}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerCalibration:
    """What integer prefill knows of a layer.

    Attributes:
      steps: `[4]` float32, of each of `PRODUCTS`.
      rows: for each of `PRODUCTS` the float rows of channels with outliers; None where the layer has no
        shadow.
    """

    steps: jax.Array
    rows: tuple[FloatRows, ...] | None = None

    @property
    def shadowed(self) -> bool:
        """Whether what is clipped is multiplied in floats."""
        return self.rows is not None


def require_integer_prefill(cfg: ModelConfig) -> None:
    """Raises ConfigError unless the model's layers can be cut so."""
    if cfg.experts:
        raise ConfigError(
            "a mixture of experts has no integer prefill: which products a token needs depends on the token"
        )


def stages_of(shadowed: bool) -> tuple[Stage, ...]:
    """The subgraphs of a layer, for two processors."""
    return SHADOWED_STAGES if shadowed else PLAIN_STAGES


def project(
    params: Params, calibration: LayerCalibration, x: jax.Array, *, cfg: ModelConfig, layer: int
) -> list[jax.Array]:
    """Queries `[1, T, K, G·H]`, keys and values `[1, T, K, H]` of a layer's input `[1, T, D]`."""
    return _products(layer_weights(params, layer), calibration, PROJECT, x, cfg, layer)


def project_shadow(
    params: Params, calibration: LayerCalibration, x: jax.Array, *, cfg: ModelConfig, layer: int
) -> tuple[list[jax.Array], jax.Array]:
    """What outliers add to the results of `project`, and how many channels have one."""
    return _normed_shadow(layer_weights(params, layer), calibration, PROJECT, x, cfg)


def attend(
    params: Params,
    calibration: LayerCalibration,
    heads: Sequence[jax.Array],
    shadows: Sequence[jax.Array] | None,
    at: Places,
    past: tuple[jax.Array, jax.Array],
    mass: jax.Array | None,
    *,
    cfg: ModelConfig,
    layer: int,
) -> tuple[jax.Array, jax.Array | None, tuple[jax.Array, jax.Array], jax.Array | None, jax.Array | None]:
    """Attention of a chunk over the cache.

    Args:
      params: the layer's, norms of heads and the output product's rows among them.
      calibration: of the layer.
      heads: of `project`.
      shadows: of `project_shadow`, where the layer has a shadow.
      at, past, mass, cfg, layer: see `decoder.forward_layer`; past and mass are donated.

    Returns:
      What was attended to, `[1, T, K, G·H]`; where the layer has a shadow what its outliers add to the output
      product, `[1, T, D]`, else None; keys and values, mass; and how many channels have outliers, or None.
    """
    weights = layer_weights(params, layer)
    q, k, v = heads if shadows is None else _sums(heads, shadows)
    q, k, v = normed_heads(weights, q, k, v, cfg)
    groups, _ = used_in_layer(weights.counts, layer)
    out, (*past_after, mass) = attend_cache(
        q, k, v, groups, cfg=cfg, layer=layer, at=at, past=past, mass=mass
    )
    out = out.reshape(*out.shape[:3], -1)
    keys, values = past_after
    if not calibration.shadowed:
        return out, None, (keys, values), mass, None
    used = out if groups is None else groups.only(out, 2)
    (added,), count = _shadow(weights, calibration, OUT, used.reshape(*out.shape[:2], -1), cfg)
    return out, added, (keys, values), mass, count


def finish(
    params: Params,
    calibration: LayerCalibration,
    x: jax.Array,
    out: jax.Array,
    *,
    cfg: ModelConfig,
    layer: int,
) -> jax.Array:
    """The next layer's input `[1, T, D]`, of the layer's own and what was attended to."""
    weights = layer_weights(params, layer)
    x = _added_output(weights, calibration, x, out, None, cfg, layer)
    _, neurons = used_in_layer(weights.counts, layer)
    steps = calibration.steps[WIDEN], calibration.steps[NARROW]
    mixed = feed_forward(
        x,
        weights.norm("ffn_norm", cfg),
        block_weights(weights, cfg),
        cfg.activation,
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
    """The block's input `[1, T, D]`, and its first products `[1, T, F]` each; `added` is of `attend`."""
    weights = layer_weights(params, layer)
    x = _added_output(weights, calibration, x, out, added, cfg, layer)
    return x, _products(weights, calibration, WIDEN, x, cfg, layer)


def widen_shadow(
    params: Params, calibration: LayerCalibration, x: jax.Array, *, cfg: ModelConfig, layer: int
) -> tuple[list[jax.Array], jax.Array]:
    """What outliers add to the products of `widen`, of the block's input; how many channels have one."""
    return _normed_shadow(layer_weights(params, layer), calibration, WIDEN, x, cfg)


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
    """The block's output `[1, T, D]` (with its input x, unless a norm follows), and what its last product
    took, `[1, T, F]`."""
    weights = layer_weights(params, layer)
    hidden = _hidden(_sums(products, shadows), cfg)
    _, neurons = used_in_layer(weights.counts, layer)
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
    """The next layer's input `[1, T, D]`, with what outliers of `hidden` add; how many channels have one."""
    weights = layer_weights(params, layer)
    _, neurons = used_in_layer(weights.counts, layer)
    used = hidden if neurons is None else neurons.only(hidden, 2)
    (added,), count = _shadow(weights, calibration, NARROW, used, cfg)
    out = out + added
    return add_normed(x, out, weights.norm("ffn_post_norm", cfg)) if cfg.post_norms else out, count


def layer_weights(params: Params, layer: int) -> LayerParams:
    """A layer's parameters by their names within it."""
    return LayerParams(params, f"layers.{layer}.")


def block_weights(weights: LayerParams, cfg: ModelConfig) -> FeedForward:
    """The weights and biases of a layer's feed-forward block."""
    first, biases = matrices_of(weights, WIDEN, cfg)
    return FeedForward(
        up=first[-1],
        down=weights["ffn.down"],
        gate=first[0] if cfg.gated_ffn else None,
        up_bias=biases[-1],
        down_bias=weights.vector("ffn.down_bias"),
        gate_bias=biases[0] if cfg.gated_ffn else None,
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
    """A layer's input with its output product added, and the shadow's part of that."""
    groups, _ = used_in_layer(weights.counts, layer)
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
    """The products behind a norm of `x`: of heads, or the block's first."""
    matrices, biases = matrices_of(weights, product, cfg)
    groups, neurons = used_in_layer(weights.counts, layer)
    used = groups if product == PROJECT else neurons
    norm = weights.norm(_NORMS[product], cfg)
    return normed_to_units(x, norm, matrices, biases, used=used, step=calibration.steps[product])


def _normed_shadow(
    weights: LayerParams, calibration: LayerCalibration, product: int, x: jax.Array, cfg: ModelConfig
) -> tuple[list[jax.Array], jax.Array]:
    """What outliers add to `_products`, and how many channels have one."""
    normed = normalize(x, weights.norm(_NORMS[product], cfg))
    return _shadow(weights, calibration, product, normed, cfg)


def _sums(results: Sequence[jax.Array], shadows: Sequence[jax.Array]) -> list[jax.Array]:
    return [each + shadow.astype(each.dtype) for each, shadow in zip(results, shadows, strict=True)]


def _shadow(
    weights: LayerParams, calibration: LayerCalibration, product: int, x: jax.Array, cfg: ModelConfig
) -> tuple[list[jax.Array], jax.Array]:
    """What the outliers of a product's input `[1, T, inputs]` add to each of its results."""
    assert calibration.rows is not None
    matrices, _ = matrices_of(weights, product, cfg)
    last = contracts_last_axis(product)
    return added_by_shadow(x, calibration.steps[product], matrices, calibration.rows[product], last=last)
