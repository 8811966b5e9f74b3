"""Runs layers that differ in size, share keys and values, and have per-layer inputs (see `MixedLayers`).

A layer that shares the keys and values of another receives those of the new tokens before rotation, and
overwrites them with equal values: it attends like every other layer.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.experts.mixture import mixture
from jaxllm.experts.routing import route
from jaxllm.layer_configs import layer_config, shares_kv
from jaxllm.models.layer import (
    Attend,
    Kept,
    Rows,
    attended,
    dense_block,
    expert_block,
    fed_forward,
    live_rows,
)
from jaxllm.models.layer_stack import LayerParams
from jaxllm.models.parameters import Params
from jaxllm.nn.layers import Heads, Norm, activate, by_sequence, normalize
from jaxllm.nn.linear import add_normed, embed, from_units, normed_to_units, to_units

Pair = tuple[jax.Array, jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HandedOn:
    """Values passed between layers besides the residual stream.

    Attributes:
      sliding, full: keys and values `[B, T, K, H]` of the new tokens, of the last layer of its kind that
        has any.
      inputs: `[B, T, L, P]`, the tokens' inputs of each layer; None if layers have none.
    """

    sliding: Pair
    full: Pair
    inputs: jax.Array | None

    def of(self, slides: bool) -> Pair:
        """Keys and values of layers with a window, or without."""
        return self.sliding if slides else self.full

    def with_pair(self, slides: bool, pair: Pair) -> "HandedOn":
        """With other keys and values of one kind of layers."""
        return dataclasses.replace(self, **{"sliding" if slides else "full": pair})


@dataclasses.dataclass(frozen=True)
class MixedLayer:
    """Facts of a layer, of which only the number may be unknown at trace time.

    Attributes:
      like: the layer, or an equal one.
      number: its number, for its inputs.
      valid: number of valid tokens, int32 scalar; None for all.
      rowwise: see `linear.py`.
    """

    cfg: ModelConfig
    like: int
    number: jax.Array | int
    valid: jax.Array | None = None
    rowwise: bool = False

    @property
    def slides(self) -> bool:
        """Whether it has an attention window."""
        return self.cfg.attention_windows[self.like] > 0


def require_tokens_alone(cfg: ModelConfig) -> None:
    """Refuses prompt embeddings if layers read the tokens themselves.

    Raises:
      ConfigError: layers read the tokens.
    """
    if cfg.mixed is not None and cfg.mixed.layer_input_size:
        raise ConfigError(
            f"rows in place of tokens are not for models whose layers have inputs of each token, as "
            f"{cfg.model_type} has; give tokens"
        )


def first_handed(
    params: Params, tokens: jax.Array, x: jax.Array, cfg: ModelConfig, live: jax.Array | None, rowwise: bool
) -> HandedOn:
    """The first layer's `HandedOn`, given embeddings `x` `[B, T, D]`."""

    def none(layers: list[int]) -> Pair:
        # Without layers of a kind, these are not used.
        own: ModelConfig = layer_config(cfg, layers[0]) if layers else cfg
        rows = jnp.zeros((*tokens.shape, own.kv_heads, own.head_dim), x.dtype)
        return rows, rows

    slides = [layer for layer in range(cfg.layers) if cfg.attention_windows[layer]]
    others = [layer for layer in range(cfg.layers) if not cfg.attention_windows[layer]]
    return HandedOn(none(slides), none(others), _layer_inputs(params, tokens, x, cfg, live, rowwise))


def _layer_inputs(
    params: Params, tokens: jax.Array, x: jax.Array, cfg: ModelConfig, live: jax.Array | None, rowwise: bool
) -> jax.Array | None:
    """The inputs of all layers `[B, T, L, P]`: of each token an embedding, and a normalized product of
    `x`."""
    assert cfg.mixed is not None
    size = cfg.mixed.layer_input_size
    if not size:
        return None
    shape = (*tokens.shape, cfg.layers, size)
    own = embed(tokens, params["embed.layer_inputs"], x.dtype, live).reshape(shape)
    projected = to_units(x, params["embed.input_projection"], rowwise=rowwise, live=live).astype(x.dtype)
    projected = (projected * np.asarray(cfg.hidden_size**-0.5, x.dtype)).reshape(shape)
    projected = normalize(projected, LayerParams(params, "").norm("embed.input_norm", cfg), apart=rowwise)
    return (projected + own * np.asarray(size**0.5, x.dtype)) * np.asarray(2**-0.5, x.dtype)


def run_layer(
    weights: LayerParams, x: jax.Array, handed: HandedOn, of: MixedLayer, attend: Attend[Kept]
) -> tuple[jax.Array, HandedOn, Kept]:
    """One layer of `x` `[B, T, D]`: its output, values for later layers, and the state from `attend`."""
    cfg, live = of.cfg, live_rows(x, of.valid)
    how = {"live": live, "rowwise": of.rowwise}
    new, handed = _heads(weights, x, handed, of, live)
    x, kept = attended(weights, x, cfg, attend, heads=new, rows=Rows(of.valid, of.rowwise))
    own: ModelConfig = layer_config(cfg, of.like)
    if cfg.experts:
        x = add_normed(x, _dense_and_experts(weights, x, own, of), weights.norm("ffn_post_norm", cfg), **how)
    else:
        x, _ = fed_forward(weights, x, x, own, of.like, valid=of.valid, rowwise=of.rowwise)
    if handed.inputs is not None:
        given = jax.lax.dynamic_index_in_dim(handed.inputs, of.number, axis=2, keepdims=False)
        gate = to_units(x, weights["layer_input.gate"], **how)

        def gated(gate: jax.Array, given: jax.Array) -> jax.Array:
            return activate(gate, cfg.activation) * given

        added = from_units(by_sequence(gated, gate, given, apart=of.rowwise), weights["layer_input.o"], **how)
        x = add_normed(x, added, weights.norm("layer_input_norm", cfg), live, rowwise=of.rowwise)
    scale = weights.vector("output.scale")
    assert scale is not None
    return x * scale.astype(x.dtype), handed, kept


def _dense_and_experts(weights: LayerParams, x: jax.Array, own: ModelConfig, of: MixedLayer) -> jax.Array:
    """The sum of a feed-forward block and of experts of `x` `[B, T, D]`, each normalized."""

    def normed(name: str, out: jax.Array) -> jax.Array:
        return normalize(out, weights.norm(f"{name}_post_norm", own), apart=of.rowwise)

    scale, factors = weights.vector("router_norm.scale"), weights.vector("router_output.scale")
    assert scale is not None
    assert factors is not None
    routing = route(
        x,
        weights["router"],
        experts_per_token=own.experts_per_token,
        normalize=True,
        norm=Norm(scale * np.asarray(own.hidden_size**-0.5, scale.dtype), None, own.norm_eps),
    )
    routing = dataclasses.replace(routing, weights=routing.weights * factors[routing.ids])
    real = None if of.valid is None else jnp.arange(x.shape[1], dtype=jnp.int32) < of.valid
    out = mixture(x, weights.norm("experts_norm", own), routing, expert_block(weights, own), live=real)
    dense = dense_block(weights, x, own, of.rowwise, live_rows(x, of.valid))
    return normed("dense", dense) + normed("experts", out)


def _heads(
    weights: LayerParams, x: jax.Array, handed: HandedOn, of: MixedLayer, live: jax.Array | None
) -> tuple[Heads, HandedOn]:
    """Inputs of attention, and values for later layers, including the layer's keys and values, if any."""
    cfg, mixed = of.cfg, of.cfg.mixed
    assert mixed is not None
    names = ["q"] if shares_kv(cfg, of.like) else ["q", "k", "v"]
    if mixed.keys_as_values and not of.slides:
        names = names[:2]
    q, *own = normed_to_units(
        x,
        weights.norm("attn_norm", cfg),
        [weights[f"attn.{name}"] for name in names],
        [None] * len(names),
        live=live,
        rowwise=of.rowwise,
    )
    if own:
        k, v = own[0], own[-1]
        # Values are normalized without a scale.
        ones = Norm(jnp.ones(v.shape[-1], jnp.float32), None, cfg.norm_eps)
        k = normalize(k, weights.norm("attn.k_norm", cfg), apart=of.rowwise)
        v = normalize(v, ones, apart=of.rowwise)
        handed = handed.with_pair(of.slides, (k.astype(x.dtype), v.astype(x.dtype)))
    k, v = handed.of(of.slides)
    q = q.reshape(*q.shape[:3], -1, k.shape[-1])
    return Heads(normalize(q, weights.norm("attn.q_norm", cfg), apart=of.rowwise), k, v), handed
