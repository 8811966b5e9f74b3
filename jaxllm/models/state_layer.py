"""Computes a state layer, whose first half has a recurrent state instead of attention (see `StateConfig`).

Parameters of a short convolution, by their names within a layer:

    state.input_gate [D, D]  .output_gate [D, D]  .value [D, D]  .conv [D, taps]  .o [D, D]   (+ biases)

and of a delta rule, with k key heads, v value heads and g = v/k:

    state.q [k, key_dim, D]  .k [k, key_dim, D]  .v [k, g·value_dim, D]  .gate [k, g·value_dim, D]
    state.conv [channels of q, k and v, taps]     .correction [v, D]  .decay [v, D]
    state.decay_bias [v]  .decay_log [v]          .norm.scale [value_dim]  .o [k, g·value_dim, D]
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.experts.routing import Routing
from jaxllm.kv.cache import TokenPositions
from jaxllm.kv.states import StateNodes, States, no_states
from jaxllm.layer_configs import StateConfig
from jaxllm.models.layer import ALL_ROWS, Rows, fed_forward
from jaxllm.models.layer_stack import LayerParams
from jaxllm.nn.layers import normalize
from jaxllm.nn.linear import from_units, normed_to_units, to_units
from jaxllm.nn.states import (
    DeltaInputs,
    gated_delta_rule,
    short_convolution,
    tree_convolution,
    tree_delta_rule,
)

# Of the squared length of a query or key, as in flash-linear-attention.
_LENGTH_EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class StateTokens:
    """Tokens that update states.

    Attributes:
      starts: `[B, T]` int32, per token the index where its document begins; None for one sequence.
      ancestors: `[T, T]` bool, ancestors of tree nodes, including themselves; None for one sequence.
    """

    rows: Rows = ALL_ROWS
    starts: jax.Array | None = None
    ancestors: jax.Array | None = None


def cached_state_layer(
    weights: LayerParams,
    x: jax.Array,
    at: TokenPositions,
    state: States,
    *,
    cfg: ModelConfig,
    layer: int,
) -> tuple[jax.Array, States]:
    """A state layer over new tokens.

    Args:
      x: `[B, T, D]`, the layer's input.
      at: consecutive positions, those after the state's tokens; or those of all nodes of a tree.
      state: state of the tokens before, zeros before position 0; for a tree with room for its nodes.
      layer: index of the layer, or of an equal one.

    Returns:
      The next layer's input `[B, T, D]`, and the state after the valid tokens; after a tree the same state
      with its nodes (see `jaxllm.nn.states.after_path`).

    Raises:
      ConfigError: the positions are those of a part of a tree, or of recomputed tokens.
    """
    tree, rows = at.tree, Rows.at(at)
    whole = tree is not None and state.nodes is not None and tree.mask.shape == (x.shape[1],) * 2
    if not at.consecutive and not whole:
        raise ConfigError(f"the states of {cfg.model_type} take one token after another, or a whole tree")
    tokens = StateTokens(rows, ancestors=None if tree is None else tree.mask)
    mixed, state = mixed_by_state(weights, x, state, tokens, cfg=cfg)
    return fed_forward(weights, mixed, x, cfg, layer, rows=rows)[0], state


def document_state_layer(
    weights: LayerParams,
    x: jax.Array,
    starts: jax.Array,
    *,
    cfg: ModelConfig,
    layer: int,
    differentiable: bool = False,
) -> tuple[jax.Array, Routing | None]:
    """A state layer of whole documents `[B, T, D]`: the next layer's input, and the routing if it is sparse;
    for `starts` see `StateTokens`."""
    state = jax.tree.map(lambda each: each[0], no_states(cfg, x.shape[0]))
    mixed, _ = mixed_by_state(weights, x, state, StateTokens(starts=starts), cfg=cfg)
    return fed_forward(weights, mixed, x, cfg, layer, differentiable=differentiable)


def mixed_by_state(
    weights: LayerParams, x: jax.Array, state: States, tokens: StateTokens, *, cfg: ModelConfig
) -> tuple[jax.Array, States]:
    """The input of the feed-forward block of `x` `[B, T, D]`, and the state after the tokens.

    Args:
      state: state after the preceding tokens.
    """
    assert cfg.states is not None
    mix = _short_conv if cfg.states.kind == "short_conv" else _delta_rule
    out, state = mix(weights, x, state, tokens, cfg)
    bias = weights.vector("state.o_bias")
    how = {"valid_rows": tokens.rows.valid_rows(x), "batch_invariant": tokens.rows.batch_invariant}
    return from_units(out.astype(x.dtype), weights["state.o"], bias, residual=x, **how), state


def _short_conv(
    weights: LayerParams, x: jax.Array, state: States, tokens: StateTokens, cfg: ModelConfig
) -> tuple[jax.Array, States]:
    """Output gate · convolution(input gate · value), `[B, T, D]` (LFM2, arXiv 2511.23404)."""
    names = ("input_gate", "output_gate", "value")
    input_gate, output_gate, value = _products(weights, x, names, tokens, cfg)
    out, state = _convolved(weights, input_gate * value, state, tokens)
    bias = weights.vector("state.conv_bias")
    out = out if bias is None else out + bias
    return output_gate * out, state


def _delta_rule(
    weights: LayerParams, x: jax.Array, state: States, tokens: StateTokens, cfg: ModelConfig
) -> tuple[jax.Array, States]:
    states = cfg.states
    assert states is not None
    *mixed, gate = _products(weights, x, ("q", "k", "v", "gate"), tokens, cfg)
    flat = jnp.concatenate([each.reshape(*x.shape[:2], -1) for each in mixed], axis=-1)
    flat, state = _convolved(weights, flat, state, tokens)
    normed = normalize(x, weights.norm("state_norm", cfg))
    of = _delta_inputs(weights, jax.nn.silu(flat), normed, tokens, states)
    assert state.matrix is not None
    if tokens.ancestors is None:
        out, matrix = gated_delta_rule(of, state.matrix, tokens.starts)
        state = dataclasses.replace(state, matrix=matrix)
    else:
        assert state.nodes is not None
        out = tree_delta_rule(of, state.matrix, tokens.ancestors)
        nodes = StateNodes(state.nodes.inputs, of.k, of.v, of.log_decay, of.correction)
        state = dataclasses.replace(state, nodes=nodes)
    out = normalize(out, weights.norm("state.norm", cfg))
    out = out * jax.nn.silu(gate.astype(jnp.float32)).reshape(out.shape)
    return out.reshape(gate.shape), state


def _products(
    weights: LayerParams, x: jax.Array, names: Sequence[str], tokens: StateTokens, cfg: ModelConfig
) -> list[jax.Array]:
    """The first products of a layer, of the normalized input, by the names of their matrices."""
    return normed_to_units(
        x,
        weights.norm("state_norm", cfg),
        [weights[f"state.{name}"] for name in names],
        [weights.vector(f"state.{name}_bias") for name in names],
        valid_rows=tokens.rows.valid_rows(x),
        batch_invariant=tokens.rows.batch_invariant,
    )


def _convolved(
    weights: LayerParams, x: jax.Array, state: States, tokens: StateTokens
) -> tuple[jax.Array, States]:
    """The convolution of a layer, and the state with its inputs, of a tree as nodes."""
    kernel = weights.vector("state.conv")
    assert kernel is not None
    valid = jnp.asarray(x.shape[1], jnp.int32) if tokens.rows.valid is None else tokens.rows.valid
    if tokens.ancestors is None:
        out, inputs = short_convolution(x, state.inputs, kernel, valid, tokens.starts)
        return out, dataclasses.replace(state, inputs=inputs)
    out = tree_convolution(x, state.inputs, kernel, tokens.ancestors)
    return out, dataclasses.replace(state, nodes=StateNodes(x.astype(jnp.float32)))


def _delta_inputs(
    weights: LayerParams, mixed: jax.Array, normed: jax.Array, tokens: StateTokens, states: StateConfig
) -> DeltaInputs:
    """From the convolved queries, keys and values `[B, T, C]`, and the layer's normalized input."""
    batch, keys = mixed.shape[:2], states.key_heads * states.key_dim
    q, k, v = jnp.split(mixed, [keys, 2 * keys], axis=-1)
    heads = (each.reshape(*batch, -1, states.key_dim) for each in (q, k))
    of_length_one = (
        each * jax.lax.rsqrt(jnp.sum(each * each, axis=-1, keepdims=True) + np.float32(_LENGTH_EPS))
        for each in heads
    )
    q, k = (jnp.repeat(each, states.group, axis=2) for each in of_length_one)
    score, step = (
        to_units(normed, weight).astype(jnp.float32)
        for weight in (weights.vector("state.correction"), weights.vector("state.decay"))
        if weight is not None
    )
    bias, rate = weights.vector("state.decay_bias"), weights.vector("state.decay_log")
    assert bias is not None
    assert rate is not None
    log_decay = -jnp.exp(rate.astype(jnp.float32)) * jax.nn.softplus(step + bias)
    correction, v = jax.nn.sigmoid(score), v.reshape(*batch, -1, states.value_dim)
    if tokens.rows.valid is not None:
        real = (jnp.arange(batch[1], dtype=jnp.int32) < tokens.rows.valid)[:, None]
        # Selected, because products leave undefined values in padding.
        log_decay, correction = jnp.where(real, log_decay, 0), jnp.where(real, correction, 0)
        k, v = jnp.where(real[..., None], k, 0), jnp.where(real[..., None], v, 0)
    q = q * np.float32(states.key_dim**-0.5)
    return DeltaInputs(q=q, k=k, v=v, log_decay=log_decay, correction=correction)
