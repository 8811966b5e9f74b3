"""Runs an encoder-decoder on batches of pairs: each row has a source and a target of its own length.

The model is that of `jaxllm.models.encoder_decoder`, which serves one source; here all rows run at once,
all tokens of a target at once, with dropout, and experts can be differentiated.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxllm.config import ModelConfig
from jaxllm.experts.mixture import mixture
from jaxllm.experts.routing import Routing, route
from jaxllm.models.encoder_decoder import encoder_params, relative_buckets, within_capacity
from jaxllm.models.layer_params import LayerParams
from jaxllm.models.parameters import Params, head_name
from jaxllm.models.scanned_layers import Remat, remembering
from jaxllm.nn.layers import MASKED, activate, normalize
from jaxllm.nn.linear import FeedForward, embed, from_units, to_units
from jaxllm.training.data.rows import Batch
from jaxllm.training.loop.losses import Outputs, outputs_of, outputs_of_hidden
from jaxllm.training.seq2seq.batches import PairBatch

# Adds dropout at a place of the model, by its number.
Drop = Callable[[jax.Array, int], jax.Array]
# Keys and values `[B, K, S, H]`.
KeysValues = tuple[jax.Array, jax.Array]
# Places of dropout in a layer, and the first place of the decoder.
_PLACES, _DECODER = 4, 1000


@dataclasses.dataclass(frozen=True)
class Encoded:
    """Encoded sources that the decoder attends to.

    Attributes:
      hidden: `[B, S, D]`.
      tokens: `[B]` int32, number of valid tokens of each row.
    """

    hidden: jax.Array
    tokens: jax.Array


@dataclasses.dataclass(frozen=True)
class Side:
    """Inputs that the decoder's layers share.

    Attributes:
      bias: bias of the scores of its own tokens, `[K, T, S]` float32.
      sources: function from a layer to the keys and values of the sources.
      mask: bias of the scores of the sources, `[B, 1, 1, S]` float32.
    """

    bias: jax.Array
    sources: Callable[[int], KeysValues]
    mask: jax.Array


def no_drop(x: jax.Array, place: int) -> jax.Array:
    """Changes nothing."""
    del place
    return x


def dropout(key: jax.Array, share: float) -> Drop:
    """Sets a share of all numbers to zero (in steps of 1/256), and scales the others up.

    Args:
      key: PRNG key of all places.
      share: dropped share in [0, 1).
    """
    lost = round(share * 256)
    factor = np.float32(256 / (256 - lost))
    # Random bits are no small part of a step on a CPU: so one byte for each number, cut from words of XLA's
    # own generator.
    own = jax.random.wrap_key_data(jax.random.bits(key, (4,), jnp.uint32), impl="rbg")
    shifts = np.arange(0, 32, 8, dtype=np.uint32)

    def drop(x: jax.Array, place: int) -> jax.Array:
        words = jax.random.bits(jax.random.fold_in(own, place), (*x.shape[:-1], -(-x.shape[-1] // 4)))
        drawn = (words[..., None] >> shifts) & np.uint32(255)
        kept = drawn.reshape(*words.shape[:-1], -1)[..., : x.shape[-1]] >= np.uint32(lost)
        # In float32: in bfloat16 XLA's CPU backend generates the bits again for the gradient.
        return (x.astype(jnp.float32) * jnp.where(kept, factor, np.float32(0))).astype(x.dtype)

    return drop if lost else no_drop


def target_hidden(
    params: Params,
    batch: PairBatch,
    *,
    cfg: ModelConfig,
    dtype: DTypeLike = jnp.float32,
    drop: Drop = no_drop,
    remat: Remat = "none",
) -> tuple[dict[str, Any], jax.Array, list[Routing]]:
    """Runs the model on a batch's sources and targets.

    Args:
      params: floats, or frozen weights of any format, also with adapters; a level has the counts of its
        units (see `jaxllm.training.elastic.job`).
      batch: the pairs.
      cfg: config of the whole model.
      dtype: dtype of the activations.
      drop: dropout of the training.
      remat: rematerialization of the layers in the backward pass.

    Returns:
      The parameters in the dtypes of the computation; hidden states `[B, T, D]` of the targets after the
      final norm; and the routing of each layer with experts.
    """
    options: dict[str, Any] = {"cfg": cfg, "dtype": dtype, "drop": drop, "remat": remat}
    computed = as_computed(params, dtype)
    source = jnp.asarray(batch.read), jnp.asarray(batch.read_tokens)
    encoded, routings = encode_rows(computed, *source, **options)
    hidden, others = decode_rows(computed, jnp.asarray(batch.tokens), encoded, **options)
    # An embedding is looked up unrounded, but a head tied to it is a product.
    head = computed[head_name(cfg)]
    if isinstance(head, jax.Array):
        computed[head_name(cfg)] = head.astype(dtype)
    return computed, hidden, [*routings, *others]


def as_computed(params: Params, dtype: DTypeLike) -> dict[str, Any]:
    """Casts matrices to the dtype of activations, once for all their products. Embeddings, whose gradient
    is a sum over many tokens, routers, biases of positions, vectors, and frozen weights of other formats
    stay unchanged."""
    apart = ("embed.tokens", ".router", "relative_positions")

    def cast(name: str, weight: Any) -> Any:
        matrix = isinstance(weight, jax.Array) and weight.ndim > 1 and not name.endswith(apart)
        return weight.astype(dtype) if matrix else weight

    return {name: cast(name, weight) for name, weight in params.items()}


def encode_rows(
    params: Params,
    tokens: jax.Array,
    valid: jax.Array,
    *,
    cfg: ModelConfig,
    dtype: DTypeLike = jnp.float32,
    drop: Drop = no_drop,
    remat: Remat = "none",
) -> tuple[Encoded, list[Routing]]:
    """Runs the encoder on a source in each row.

    Args:
      params: parameters of the model.
      tokens: `[B, S]` int32.
      valid: `[B]` int32, number of each row's valid tokens, at least 1.
      cfg: config of the model.
      dtype: dtype of the activations.
      drop: dropout of the training.
      remat: rematerialization of the layers in the backward pass.

    Returns:
      Hidden states, undefined for padding; and the routing of each layer with experts.
    """
    assert cfg.encoder is not None
    own, side = encoder_params(params), cfg.encoder
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    bias = _relative(own, positions, positions, side, both_ways=True) + _padding(valid, tokens.shape[1])
    x = drop(embed(tokens, own["embed.tokens"], dtype), 0)

    def block(x: jax.Array, *, layer: int) -> tuple[jax.Array, list[Routing]]:
        weights, first = LayerParams(own, f"layers.{layer}."), 1 + layer * _PLACES
        normed = normalize(x, weights.norm("attn_norm", side))
        x = x + drop(_attended(weights, "attn", normed, _keys_values(weights, "attn", normed), bias), first)
        fed, routing = _fed_forward(weights, x, side, layer, drop, first + 2, valid)
        return x + drop(fed, first + 3), routing

    x, routings = _through(block, x, side.layers, remat)
    ended = drop(normalize(x, LayerParams(own, "").norm("final_norm", side)), 1 + side.layers * _PLACES)
    return Encoded(ended, valid), routings


def decode_rows(
    params: Params,
    tokens: jax.Array,
    encoded: Encoded,
    *,
    cfg: ModelConfig,
    dtype: DTypeLike = jnp.float32,
    drop: Drop = no_drop,
    remat: Remat = "none",
) -> tuple[jax.Array, list[Routing]]:
    """The decoder over whole targets `[B, T]` int32: hidden states `[B, T, D]` after the final norm, and the
    routing of each layer with experts. For the other arguments see `encode_rows`."""
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    side = Side(
        bias=_causal(params, positions, positions, cfg),
        sources=functools.partial(_source_keys_values, params, encoded),
        mask=_padding(encoded.tokens, encoded.hidden.shape[1]),
    )

    def keys_values(layer: int, weights: LayerParams, normed: jax.Array) -> KeysValues:
        del layer
        return _keys_values(weights, "attn", normed)

    x = embed(tokens, params["embed.tokens"], dtype)
    return _decoded(params, x, side, keys_values, cfg, drop, remat)


def decode_next(
    params: Params,
    tokens: jax.Array,
    position: jax.Array,
    past: list[KeysValues],
    sources: list[KeysValues],
    read_tokens: jax.Array,
    *,
    cfg: ModelConfig,
) -> tuple[jax.Array, list[KeysValues]]:
    """The decoder over one more token of each row.

    Args:
      params: parameters of the model.
      tokens: `[B]` int32.
      position: int32 scalar, number of preceding tokens of each row.
      past: keys and values of each layer, with room for all tokens of an answer.
      sources: see `source_keys_values`.
      read_tokens: `[B]` int32, number of valid tokens of each source.
      cfg: the model.

    Returns:
      Hidden states `[B, D]` after the final norm, and `past` with the new token.
    """
    grown: list[KeysValues] = []

    def keys_values(layer: int, weights: LayerParams, normed: jax.Array) -> KeysValues:
        new = _keys_values(weights, "attn", normed)
        keys, values = (
            jax.lax.dynamic_update_slice_in_dim(old, each, position, axis=2)
            for old, each in zip(past[layer], new, strict=True)
        )
        grown.append((keys, values))
        return keys, values

    room = jnp.arange(past[0][0].shape[2], dtype=jnp.int32)
    side = Side(
        bias=_causal(params, position[None], room, cfg),
        sources=sources.__getitem__,
        mask=_padding(read_tokens, sources[0][0].shape[2]),
    )
    x = embed(tokens[:, None], params["embed.tokens"], jnp.dtype(jnp.float32))
    hidden, _ = _decoded(params, x, side, keys_values, cfg, no_drop)
    return hidden[:, 0], grown


def source_keys_values(params: Params, encoded: Encoded, *, cfg: ModelConfig) -> list[KeysValues]:
    """The keys and values of the sources in each layer of the decoder."""
    return [_source_keys_values(params, encoded, layer) for layer in range(cfg.layers)]


def _source_keys_values(params: Params, encoded: Encoded, layer: int) -> KeysValues:
    return _keys_values(LayerParams(params, f"layers.{layer}."), "cross", encoded.hidden)


def _through(
    block: Callable[..., tuple[jax.Array, list[Routing]]], x: jax.Array, layers: int, remat: Remat
) -> tuple[jax.Array, list[Routing]]:
    """`x` after all layers, and their routings."""
    routings: list[Routing] = []
    for layer in range(layers):
        x, own = remembering(functools.partial(block, layer=layer), remat)(x)
        routings += own
    return x, routings


def _decoded(
    params: Params,
    x: jax.Array,
    side: Side,
    keys_values: Callable[[int, LayerParams, jax.Array], KeysValues],
    cfg: ModelConfig,
    drop: Drop,
    remat: Remat = "none",
) -> tuple[jax.Array, list[Routing]]:
    """Runs the decoder on embedded tokens `[B, T, D]`; `keys_values` returns those of a layer's tokens."""

    def block(x: jax.Array, *, layer: int) -> tuple[jax.Array, list[Routing]]:
        weights, first = LayerParams(params, f"layers.{layer}."), _DECODER + 1 + layer * _PLACES
        normed = normalize(x, weights.norm("attn_norm", cfg))
        kept = keys_values(layer, weights, normed)
        x = x + drop(_attended(weights, "attn", normed, kept, side.bias), first)
        normed = normalize(x, weights.norm("cross_norm", cfg))
        x = x + drop(_attended(weights, "cross", normed, side.sources(layer), side.mask), first + 1)
        fed, routing = _fed_forward(weights, x, cfg, layer, drop, first + 2)
        return x + drop(fed, first + 3), routing

    x, routings = _through(block, drop(x, _DECODER), cfg.layers, remat)
    final = normalize(x, LayerParams(params, "").norm("final_norm", cfg))
    return drop(final, _DECODER + 1 + cfg.layers * _PLACES), routings


def _causal(params: Params, queries: jax.Array, keys: jax.Array, cfg: ModelConfig) -> jax.Array:
    """Bias of the scores of the decoder's own tokens, `[K, T, S]` float32."""
    hidden = jnp.where(keys[None, :] <= queries[:, None], np.float32(0), np.float32(MASKED))
    return _relative(params, queries, keys, cfg, both_ways=False) + hidden


def _relative(
    params: Params, queries: jax.Array, keys: jax.Array, cfg: ModelConfig, *, both_ways: bool
) -> jax.Array:
    """Bias of scores by relative positions, `[K, T, S]` float32."""
    number = relative_buckets(
        keys[None, :] - queries[:, None],
        buckets=cfg.relative_buckets,
        most=cfg.relative_distance,
        both_ways=both_ways,
    )
    biases = LayerParams(params, "").vector("relative_positions")
    assert biases is not None
    # A product has a product as gradient; that of a lookup is a slow scatter.
    chosen = jax.nn.one_hot(number, cfg.relative_buckets, dtype=jnp.float32)
    return jnp.einsum("tsb,bk->kts", chosen, biases.astype(jnp.float32))


def _padding(valid: jax.Array, count: int) -> jax.Array:
    """Mask of padding for scores, `[B, 1, 1, S]` float32."""
    real = jnp.arange(count, dtype=jnp.int32)[None, :] < valid[:, None]
    return jnp.where(real, np.float32(0), np.float32(MASKED))[:, None, None, :]


def _keys_values(weights: LayerParams, name: str, x: jax.Array) -> KeysValues:
    keys, values = (to_units(x, weights[f"{name}.{part}"]).transpose(0, 2, 1, 3) for part in "kv")
    return keys, values


def _attended(
    weights: LayerParams, name: str, normed: jax.Array, kept: KeysValues, bias: jax.Array
) -> jax.Array:
    """The output `[B, T, D]` of an attention, with `bias` added to its scores, which T5 does not scale."""
    queries, (keys, values) = to_units(normed, weights[f"{name}.q"]), kept
    scores = jnp.einsum("btkh,bksh->bkts", queries, keys, preferred_element_type=jnp.float32)
    shares = jax.nn.softmax(scores + bias, axis=-1).astype(values.dtype)
    groups, _ = weights.used
    return from_units(jnp.einsum("bkts,bksh->btkh", shares, values), weights[f"{name}.o"], used=groups)


def _fed_forward(
    weights: LayerParams,
    x: jax.Array,
    cfg: ModelConfig,
    layer: int,
    drop: Drop,
    place: int,
    valid: jax.Array | None = None,
) -> tuple[jax.Array, list[Routing]]:
    """Returns the output `[B, T, D]` of a feed-forward block, or of experts, and then their routing.

    Experts have a capacity if `valid` `[B]`, the number of valid tokens of each row, is given: for sources.
    Served targets come one token at a time and never exceed a capacity.
    """
    norm = weights.norm("ffn_norm", cfg)
    if cfg.is_sparse(layer):
        routing = route(
            x, weights["router"], experts_per_token=1, normalize=False, norm=norm, differentiable=True
        )
        block = FeedForward(weights["experts.up"], weights["experts.down"], activation=cfg.activation)
        mixed = mixture(x, norm, routing, block, differentiable=True)
        if valid is None or cfg.expert_capacity >= x.shape[1]:
            return mixed, [routing]
        real = jnp.arange(x.shape[1], dtype=jnp.int32)[None, :] < valid[:, None]
        taken = within_capacity(routing, real, cfg)
        return jnp.where(taken[..., None], mixed, jnp.zeros_like(mixed)), [routing]
    normed = normalize(x, norm)
    hidden = to_units(normed, weights["ffn.gate" if cfg.gated_ffn else "ffn.up"])
    hidden = activate(hidden, cfg.activation)
    if cfg.gated_ffn:
        hidden = hidden * to_units(normed, weights["ffn.up"])
    _, neurons = weights.used
    return from_units(drop(hidden, place), weights["ffn.down"], used=neurons), []


AnyBatch = Batch | PairBatch


def outputs_of_any(
    params: Params,
    batch: AnyBatch,
    *,
    cfg: ModelConfig,
    dtype: DTypeLike = jnp.float32,
    remat: Remat = "none",
) -> Outputs:
    """Returns a model's outputs for the targets of a batch; for `remat` see `decoder.forward_documents`."""
    if not isinstance(batch, PairBatch):
        return outputs_of(params, batch, cfg=cfg, dtype=dtype, remat=remat)
    computed, hidden, _ = target_hidden(params, batch, cfg=cfg, dtype=dtype, remat=remat)
    return outputs_of_hidden(computed, hidden, cfg=cfg)
