"""An encoder-decoder over batches of pairs: each row has a source and a target of its own length.

The model is that of `jaxllm.models.encoder_decoder`, which serves one source; here all rows run at once, all
of a target at once, with dropout, and experts can be differentiated.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.experts.mixture import mixture
from jaxllm.experts.routing import Routing, route
from jaxllm.models.encoder_decoder import encoder_params, relative_buckets
from jaxllm.models.layer_params import LayerParams
from jaxllm.models.parameters import Params
from jaxllm.nn.layers import MASKED, activate, attention
from jaxllm.nn.linear import FeedForward, embed, from_units, to_units
from jaxllm.nn.norms import normalize

# Adds dropout at a place of the model, by its number.
Drop = Callable[[jax.Array, int], jax.Array]
# Keys and values `[B, K, S, H]`.
KeysValues = tuple[jax.Array, jax.Array]
# Places of dropout in a layer.
_PLACES = 4


@dataclasses.dataclass(frozen=True)
class Encoded:
    """What the decoder attends to.

    Attributes:
      hidden: `[B, S, D]`.
      tokens: `[B]` int32, how many of them are real.
    """

    hidden: jax.Array
    tokens: jax.Array


def no_drop(x: jax.Array, place: int) -> jax.Array:
    """Leaves everything as it is."""
    del place
    return x


def dropout(key: jax.Array, share: float) -> Drop:
    """Sets a share of all numbers to zero (in steps of 1/256), and scales the others up.

    Args:
      key: of all places.
      share: in [0, 1).
    """
    lost = round(share * 256)
    factor = np.float32(256 / (256 - lost))
    # Drawing random bits is no small part of a step on a CPU: so a byte for each number, taken from whole
    # words, and of XLA's own generator.
    own = jax.random.wrap_key_data(jax.random.bits(key, (4,), jnp.uint32), impl="rbg")
    shifts = np.arange(0, 32, 8, dtype=np.uint32)

    def drop(x: jax.Array, place: int) -> jax.Array:
        words = jax.random.bits(jax.random.fold_in(own, place), (*x.shape[:-1], -(-x.shape[-1] // 4)))
        drawn = (words[..., None] >> shifts) & np.uint32(255)
        kept = drawn.reshape(*words.shape[:-1], -1)[..., : x.shape[-1]] >= np.uint32(lost)
        return x * jnp.where(kept, factor, np.float32(0)).astype(x.dtype)

    return drop if lost else no_drop


def encode_rows(
    params: Params,
    tokens: jax.Array,
    valid: jax.Array,
    *,
    cfg: ModelConfig,
    dtype: jnp.dtype = jnp.float32,
    drop: Drop = no_drop,
) -> tuple[Encoded, list[Routing]]:
    """What the encoder says of a source in each row.

    Args:
      params: of the model.
      tokens: `[B, S]` int32.
      valid: `[B]` int32, how many of each row's tokens are real, at least 1.
      cfg: the model.
      dtype: of the activations.
      drop: where training drops.

    Returns:
      Hidden states, undefined for padding; and the routing of each layer with experts.
    """
    assert cfg.encoder is not None
    own, side = encoder_params(params), cfg.encoder
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    bias = _relative(own, positions, positions, side, both_ways=True) + _padding(valid, tokens.shape[1])
    x = drop(embed(tokens, own["embed.tokens"], dtype), 0)
    routings: list[Routing] = []
    for layer in range(side.layers):
        weights, first = LayerParams(own, f"layers.{layer}."), 1 + layer * _PLACES
        normed = normalize(x, weights.norm("attn_norm", side))
        x = x + drop(_attended(weights, "attn", normed, _keys_values(weights, "attn", normed), bias), first)
        x = x + drop(_fed_forward(weights, x, side, layer, routings, drop, first + 2), first + 3)
    ended = drop(normalize(x, LayerParams(own, "").norm("final_norm", side)), 1 + side.layers * _PLACES)
    return Encoded(ended, valid), routings


def decode_rows(
    params: Params,
    tokens: jax.Array,
    encoded: Encoded,
    *,
    cfg: ModelConfig,
    dtype: jnp.dtype = jnp.float32,
    drop: Drop = no_drop,
) -> tuple[jax.Array, list[Routing]]:
    """The decoder over whole targets `[B, T]` int32: hidden states `[B, T, D]` after the final norm, and the
    routing of each layer with experts. For the other arguments see `encode_rows`."""
    count = tokens.shape[1]
    positions = jnp.arange(count, dtype=jnp.int32)
    causal = jnp.where(positions[None, :] <= positions[:, None], np.float32(0), np.float32(MASKED))
    bias = _relative(params, positions, positions, cfg, both_ways=False) + causal[None, :, None, :]
    mask = _padding(encoded.tokens, encoded.hidden.shape[1])
    # After the encoder's places.
    offset = 1000
    x = drop(embed(tokens, params["embed.tokens"], dtype), offset)
    routings: list[Routing] = []
    for layer in range(cfg.layers):
        weights, first = LayerParams(params, f"layers.{layer}."), offset + 1 + layer * _PLACES
        normed = normalize(x, weights.norm("attn_norm", cfg))
        x = x + drop(_attended(weights, "attn", normed, _keys_values(weights, "attn", normed), bias), first)
        normed, source = (
            normalize(x, weights.norm("cross_norm", cfg)),
            _keys_values(weights, "cross", encoded.hidden),
        )
        x = x + drop(_attended(weights, "cross", normed, source, mask), first + 1)
        x = x + drop(_fed_forward(weights, x, cfg, layer, routings, drop, first + 2), first + 3)
    final = normalize(x, LayerParams(params, "").norm("final_norm", cfg))
    return drop(final, offset + 1 + cfg.layers * _PLACES), routings


def _relative(
    params: Params, queries: jax.Array, keys: jax.Array, cfg: ModelConfig, *, both_ways: bool
) -> jax.Array:
    """What relative positions add to scores, `[K, T, 1, S]` float32."""
    number = relative_buckets(
        keys[None, :] - queries[:, None],
        buckets=cfg.relative_buckets,
        most=cfg.relative_distance,
        both_ways=both_ways,
    )
    biases = LayerParams(params, "").vector("relative_positions")
    assert biases is not None
    # A product, whose gradient is a product too: that of an indexed table is a slow scatter.
    chosen = jax.nn.one_hot(number, cfg.relative_buckets, dtype=jnp.float32)
    return jnp.einsum("tsb,bk->kts", chosen, biases.astype(jnp.float32))[:, :, None, :]


def _padding(valid: jax.Array, count: int) -> jax.Array:
    """What hides padding from scores, `[B, 1, 1, 1, S]` float32."""
    real = jnp.arange(count, dtype=jnp.int32)[None, :] < valid[:, None]
    return jnp.where(real, np.float32(0), np.float32(MASKED))[:, None, None, None, :]


def _keys_values(weights: LayerParams, name: str, x: jax.Array) -> KeysValues:
    keys, values = (to_units(x, weights[f"{name}.{part}"]).transpose(0, 2, 1, 3) for part in "kv")
    return keys, values


def _attended(
    weights: LayerParams, name: str, normed: jax.Array, kept: KeysValues, bias: jax.Array
) -> jax.Array:
    """The output `[B, T, D]` of an attention, with `bias` added to its scores, which T5 does not scale."""
    queries = to_units(normed, weights[f"{name}.q"])
    out = attention(queries[:, :, :, None], *kept, jnp.broadcast_to(bias, _scores(queries, kept)), scale=1.0)
    return from_units(out.reshape(queries.shape), weights[f"{name}.o"])


def _scores(queries: jax.Array, kept: KeysValues) -> tuple[int, ...]:
    """The shape `[B, K, T, 1, S]` of scores."""
    batch, new, heads, _ = queries.shape
    return (batch, heads, new, 1, kept[0].shape[2])


def _fed_forward(
    weights: LayerParams,
    x: jax.Array,
    cfg: ModelConfig,
    layer: int,
    routings: list[Routing],
    drop: Drop,
    place: int,
) -> jax.Array:
    """The output `[B, T, D]` of a feed-forward block, or of experts, whose routing is added to `routings`."""
    norm = weights.norm("ffn_norm", cfg)
    if cfg.is_sparse(layer):
        routing = route(
            x, weights["router"], experts_per_token=1, normalize=False, norm=norm, differentiable=True
        )
        routings.append(routing)
        block = FeedForward(weights["experts.up"], weights["experts.down"], activation=cfg.activation)
        return mixture(x, norm, routing, block, differentiable=True)
    normed = normalize(x, norm)
    hidden = to_units(normed, weights["ffn.gate" if cfg.gated_ffn else "ffn.up"])
    hidden = activate(hidden, cfg.activation)
    if cfg.gated_ffn:
        hidden = hidden * to_units(normed, weights["ffn.up"])
    return from_units(drop(hidden, place), weights["ffn.down"])
