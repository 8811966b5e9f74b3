"""Steps of sparse layers whose experts are loaded one by one."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.axes import Axes, shaped
from jaxllm.config import ModelConfig
from jaxllm.experts.mixture import Tiles, no_visits, run_tile, sum_visits, tiles_and_weights
from jaxllm.kernels.native_products import StoredExperts, stored_visits
from jaxllm.kv.cache import Past, TokenPositions
from jaxllm.kv.chunks import LayerChunks
from jaxllm.models import decoder
from jaxllm.models.encoder_decoder import source_attending, source_rows
from jaxllm.models.layer import Rows, attended, chosen_experts, expert_biases, visiting_tokens, with_room
from jaxllm.models.layer_stack import LayerParams, layer_of
from jaxllm.models.parameters import Params
from jaxllm.models.relative_positions import position_bias
from jaxllm.nn.linear import FeedForward
from jaxllm.steps.layers import loaded_layer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AtExperts:
    """T tokens of one sequence before the experts of a layer.

    Attributes:
      x: `[1, T, D]`.
      tiles: tiles of the pairs of token and expert.
      weights: `[T, k]` float32, factors of the outputs of pairs.
      ids: `[T, k]` int32, the visited experts; undefined for padding.
      ahead: `[n, E]` float32, probabilities of the experts of the next n sparse layers by their routers, the
        mean over valid tokens.
    """

    x: jax.Array
    tiles: Tiles
    weights: jax.Array
    ids: jax.Array
    ahead: jax.Array

    def check(self, axes: Axes) -> None:
        """Asserts the shapes above at trace time."""
        axes.check(jnp.floating, "1 T D", x=self.x)
        axes.check(jnp.float32, "T k", weights=self.weights)
        axes.check(jnp.int32, "T k", ids=self.ids)
        axes.check(jnp.float32, "n E", ahead=self.ahead)


@dataclasses.dataclass(frozen=True)
class SparseLayer:
    """Static properties of a sparse layer.

    Attributes:
      loss: see `tiles_and_weights`.
    """

    cfg: ModelConfig
    layer: int
    loss: float = 0.0


@shaped(x="float B T D", B=1)
def attend_layer(
    params: Params,
    next_routers: Sequence[Params],
    x: jax.Array,
    at: TokenPositions,
    past: Past,
    mass: jax.Array | None,
    *,
    of: SparseLayer,
) -> tuple[AtExperts, jax.Array, Past, jax.Array | None]:
    """A sparse layer up to its experts.

    The next routers are applied to this layer's hidden states: the residual stream changes so little from
    layer to layer that their choices are mostly those of the next layers.

    Args:
      next_routers: "router" and "ffn_norm" of the next sparse layers, nearest first.
      x, at, past, mass: see `decoder.forward_layer`; x, past and mass are donated.

    Returns:
      The tokens before the experts, a buffer for the outputs of all tiles, keys and values, the mass.
    """
    cfg, weights, count = of.cfg, layer_of(params, of.layer), x.shape[1]
    how: Any = {"cfg": cfg, "layer": of.layer, "order": position_bias(params, cfg)}
    x, past, mass = decoder.attend_layer(weights, x, at, past, mass, **how)
    valid_rows = jnp.arange(count, dtype=jnp.int32) < at.valid if count > 1 else None
    following = [chosen_experts(LayerParams(each, ""), x, cfg).probs[0] for each in next_routers]
    real = jnp.ones((count, 1), jnp.bool_) if valid_rows is None else valid_rows[:, None]
    # Probabilities of padding are undefined, perhaps NaN.
    sums = jnp.sum(jnp.where(real, jnp.stack(following), 0.0), axis=1)
    tokens, out = _at_experts(weights, x, Rows.at(at), of, sums / jnp.sum(real, dtype=jnp.float32))
    return tokens, out, past, mass


def _at_experts(
    weights: LayerParams, x: jax.Array, rows: Rows, of: SparseLayer, ahead: jax.Array
) -> tuple[AtExperts, jax.Array]:
    routing = chosen_experts(weights, x, of.cfg)
    visiting = visiting_tokens(routing, of.cfg, rows)
    tiles, shares = tiles_and_weights(routing, of.cfg.experts, valid_rows=visiting, loss=of.loss)
    tokens = AtExperts(x=x, tiles=tiles, weights=shares, ids=routing.ids[0], ahead=ahead)
    return tokens, no_visits(x.reshape(-1, x.shape[-1]), tiles)


def attend_encoder(
    params: Params, x: jax.Array, bias: jax.Array | None, valid: jax.Array, *, of: SparseLayer, ahead: int
) -> tuple[AtExperts, jax.Array]:
    """A sparse layer of an encoder up to its experts.

    Args:
      x, bias, valid: see `encoder_decoder.encoder_layer`; x is donated.
      of: the layer, of the encoder.
      ahead: number of layers for which `AtExperts` has probabilities; here zeros.

    Returns:
      The tokens before the experts, and a buffer for the outputs of all tiles.
    """
    weights, rows = layer_of(params, of.layer), source_rows(x, valid)
    x, _ = attended(weights, x, of.cfg, source_attending(bias, valid, of.cfg), rows=rows)
    return _at_experts(weights, x, rows, of, jnp.zeros((ahead, of.cfg.experts), jnp.float32))


def attend_restored(
    params: Params,
    next_routers: Sequence[Params],
    x: jax.Array,
    at: TokenPositions,
    past: Past,
    chunks: LayerChunks,
    *,
    of: SparseLayer,
) -> tuple[AtExperts, jax.Array, Past]:
    """`restore_layer` of a sparse layer up to its experts; see there and `attend_layer`."""
    past = loaded_layer(params, past, chunks, of.layer)
    of = dataclasses.replace(of, cfg=with_room(of.cfg, x.shape[1]))
    tokens, out, past, _ = attend_layer(params, next_routers, x, at, past, None, of=of)
    return tokens, out, past


@shaped(number="int32")
def expert_tile(
    expert: Params,
    norm: Params,
    tokens: AtExperts,
    number: jax.Array,
    out: jax.Array,
    *,
    cfg: ModelConfig,
) -> jax.Array:
    """Runs one tile of tokens through its expert.

    Args:
      expert: "gate", "up" and "down" `[F, D]`.
      norm: "ffn_norm" of the layer, and the biases of all its experts if they have any.
      tokens: tokens before the experts.
      number: index of the tile, int32 scalar.
      out: the outputs of all tiles so far; donated.
    """
    # An expert's number plus E denotes only its high plane.
    chosen = tokens.tiles.expert[number] % np.int32(cfg.experts)
    beside = LayerParams(norm, "")
    biases = {name: None if each is None else each[chosen] for name, each in expert_biases(beside).items()}
    block = FeedForward(
        up=expert["up"], down=expert["down"], gate=expert.get("gate"), activation=cfg.activation, **biases
    )
    rows = tokens.x.reshape(-1, tokens.x.shape[-1])
    return run_tile(rows, beside.norm("ffn_norm", cfg), tokens.tiles, number, out, block)


@shaped(actions="int32 m")
def stored_tiles(
    weights: StoredExperts,
    norm: Params,
    tokens: AtExperts,
    actions: jax.Array,
    out: jax.Array,
    begun: jax.Array,
    *,
    cfg: ModelConfig,
) -> tuple[jax.Array, jax.Array]:
    """Runs some tiles of tokens through their experts, in one call of a native kernel.

    Args:
      weights: the experts of the layer; those of the tiles are in memory.
      norm: "ffn_norm" of the layer.
      tokens: tokens before the experts.
      actions: `[m]` int32, action for each tile (see `native_experts.stored_visits`).
      out: the outputs of all tiles so far; donated.
      begun: partial results of begun tiles; donated.
    """
    tiles, before = tokens.tiles, LayerParams(norm, "").norm("ffn_norm", cfg)
    found, begun = stored_visits(
        tokens.x.reshape(-1, tokens.x.shape[-1]).astype(jnp.float32),
        (tiles.token, tiles.expert, tiles.size, tiles.count),
        actions,
        weights,
        out.astype(jnp.float32),
        begun,
        activation=cfg.activation,
        norm_scale=before.scale,
        norm_eps=before.eps,
    )
    return found.astype(out.dtype), begun


@shaped()
def combine_experts(tokens: AtExperts, out: jax.Array) -> jax.Array:
    """The layer's output `[1, T, D]`: the weighted sum of its experts' outputs and the residual."""
    rows = tokens.x.reshape(-1, tokens.x.shape[-1])
    return sum_visits(out, tokens.tiles, tokens.weights, rows).reshape(tokens.x.shape)
