"""Runs layers that differ in size, share keys and values, and have per-layer inputs (see `MixedLayers`).

A layer that shares the keys and values of another receives those of the new tokens before rotation, and
overwrites them with equal values: it attends like every other layer.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.experts.mixture import mixture
from jaxllm.experts.routing import route
from jaxllm.layer_configs import layer_config, shares_kv
from jaxllm.models.layer import Attend, Kept, Rows, attended, dense_block, expert_block, fed_forward
from jaxllm.models.layer_stack import LayerParams
from jaxllm.models.parameters import Params
from jaxllm.nn.layers import Heads, Norm, activate, by_sequence, normalize
from jaxllm.nn.linear import add_normed, embed, from_units, normed_to_units, to_units

Pair = tuple[jax.Array, jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SharedKV:
    """Values passed between layers besides the residual stream.

    Attributes:
      pairs: keys and values `[B, T, K, H]` of the new tokens, by whether layers have a window, of the last
        layer of this kind that has any.
      inputs: `[B, T, L, P]`, the tokens' inputs of each layer; None if layers have none.
    """

    pairs: dict[bool, Pair]
    inputs: jax.Array | None


def first_shared(params: Params, tokens: jax.Array, x: jax.Array, cfg: ModelConfig, rows: Rows) -> SharedKV:
    """The first layer's `SharedKV`, given embeddings `x` `[B, T, D]`."""

    def none(slides: bool) -> Pair:
        # Without layers of a kind, these are not used.
        likes = (each for each in range(cfg.layers) if (cfg.attention_windows[each] > 0) == slides)
        own: ModelConfig = layer_config(cfg, next(likes, 0))
        zeros = jnp.zeros((*tokens.shape, own.kv_heads, own.head_dim), x.dtype)
        return zeros, zeros

    pairs = {slides: none(slides) for slides in (False, True)}
    assert cfg.mixed is not None
    size, valid_rows, batch_invariant = cfg.mixed.layer_input_size, rows.valid_rows(x), rows.batch_invariant
    if not size:
        return SharedKV(pairs, None)
    # Of each token an embedding, and a normalized product of `x`.
    shape = (*tokens.shape, cfg.layers, size)
    own = embed(tokens, params["embed.layer_inputs"], x.dtype, valid_rows).reshape(shape)
    projected = to_units(
        x, params["embed.input_projection"], batch_invariant=batch_invariant, valid_rows=valid_rows
    ).astype(x.dtype)
    projected = (projected * np.asarray(cfg.hidden_size**-0.5, x.dtype)).reshape(shape)
    projected = normalize(
        projected, LayerParams(params, "").norm("embed.input_norm", cfg), batch_invariant=batch_invariant
    )
    inputs = (projected + own * np.asarray(size**0.5, x.dtype)) * np.asarray(2**-0.5, x.dtype)
    return SharedKV(pairs, inputs)


def run_mixed_layer(
    weights: LayerParams,
    x: jax.Array,
    shared: SharedKV,
    attend: Attend[Kept],
    *,
    cfg: ModelConfig,
    like: int,
    number: jax.Array | int,
    rows: Rows,
) -> tuple[jax.Array, SharedKV, Kept]:
    """One layer of `x` `[B, T, D]`: its output, values for later layers, and the state from `attend`. `like`
    is the layer or an equal one; only its `number`, for its inputs, may be unknown at trace time."""
    valid_rows, batch_invariant = rows.valid_rows(x), rows.batch_invariant
    how = {"valid_rows": valid_rows, "batch_invariant": batch_invariant}
    heads, shared = _heads(weights, x, shared, cfg, like, rows)
    x, kept = attended(weights, x, cfg, attend, heads=heads, rows=rows)
    own: ModelConfig = layer_config(cfg, like)
    if cfg.experts:
        x = add_normed(
            x, _dense_and_experts(weights, x, own, rows), weights.norm("ffn_post_norm", cfg), **how
        )
    else:
        x, _ = fed_forward(weights, x, x, own, like, rows=rows)
    if shared.inputs is not None:
        given = jax.lax.dynamic_index_in_dim(shared.inputs, number, axis=2, keepdims=False)
        gate = to_units(x, weights["layer_input.gate"], **how)

        def gated(gate: jax.Array, given: jax.Array) -> jax.Array:
            return activate(gate, cfg.activation) * given

        added = from_units(
            by_sequence(gated, gate, given, batch_invariant=batch_invariant), weights["layer_input.o"], **how
        )
        x = add_normed(x, added, weights.norm("layer_input_norm", cfg), **how)
    scale = weights.vector("output.scale")
    assert scale is not None
    return x * scale.astype(x.dtype), shared, kept


def _dense_and_experts(weights: LayerParams, x: jax.Array, own: ModelConfig, rows: Rows) -> jax.Array:
    """The sum of a feed-forward block and of experts of `x` `[B, T, D]`, each normalized."""

    def normed(name: str, out: jax.Array) -> jax.Array:
        return normalize(out, weights.norm(f"{name}_post_norm", own), batch_invariant=rows.batch_invariant)

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
    real = None if rows.valid is None else jnp.arange(x.shape[1], dtype=jnp.int32) < rows.valid
    out = mixture(x, weights.norm("experts_norm", own), routing, expert_block(weights, own), valid_rows=real)
    return normed("dense", dense_block(weights, x, own, rows)) + normed("experts", out)


def _heads(
    weights: LayerParams, x: jax.Array, shared: SharedKV, cfg: ModelConfig, like: int, rows: Rows
) -> tuple[Heads, SharedKV]:
    """Inputs of attention, and values for later layers, including the layer's keys and values, if any."""
    mixed, batch_invariant, slides = cfg.mixed, rows.batch_invariant, cfg.attention_windows[like] > 0
    assert mixed is not None
    names = ["q"] if shares_kv(cfg, like) else ["q", "k", "v"]
    if mixed.keys_as_values and not slides:
        names = names[:2]
    matrices, norm = [weights[f"attn.{name}"] for name in names], weights.norm("attn_norm", cfg)
    how = {"valid_rows": rows.valid_rows(x), "batch_invariant": batch_invariant}
    q, *own = normed_to_units(x, norm, matrices, [None] * len(names), **how)
    if own:
        k, v = own[0], own[-1]
        # Values are normalized without a scale.
        ones = Norm(jnp.ones(v.shape[-1], jnp.float32), None, cfg.norm_eps)
        k = normalize(k, weights.norm("attn.k_norm", cfg), batch_invariant=batch_invariant).astype(x.dtype)
        v = normalize(v, ones, batch_invariant=batch_invariant).astype(x.dtype)
        shared = dataclasses.replace(shared, pairs={**shared.pairs, slides: (k, v)})
    k, v = shared.pairs[slides]
    q = q.reshape(*q.shape[:3], -1, k.shape[-1])
    return Heads(
        normalize(q, weights.norm("attn.q_norm", cfg), batch_invariant=batch_invariant), k, v
    ), shared
