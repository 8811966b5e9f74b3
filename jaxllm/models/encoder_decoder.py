"""Encoder-decoders: a decoder that also attends to an encoder's output."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TypedDict, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxllm.axes import Axes
from jaxllm.config import ModelConfig
from jaxllm.experts.mixture import mixture
from jaxllm.experts.routing import Routing, route
from jaxllm.kernels.native_call import UsedUnits
from jaxllm.kv.cache import KVCache, Past, TokenPositions
from jaxllm.kv.states import Source
from jaxllm.models.layer_params import LayerParams, final_normed
from jaxllm.models.layer_stack import layer_of, over_layers
from jaxllm.models.parameters import ENCODER, Params
from jaxllm.nn.documents import BLOCK_TOKENS, source_self_attention
from jaxllm.nn.layers import AttentionOptions, Heads, activate, cached_attention, normalize, source_attention
from jaxllm.nn.linear import FeedForward, embed, feed_forward, from_units, normed_to_units, to_units

# Runs the second half of a layer of an encoder-decoder: a feed-forward block, or experts with a capacity
# (Switch, arXiv 2101.03961).


class SharedOptions(TypedDict):
    """Options of all products of a block (see `jaxllm.nn.linear`)."""

    used: UsedUnits | None
    live: jax.Array | None
    rowwise: bool


def fed_forward(
    weights: LayerParams,
    x: jax.Array,
    cfg: ModelConfig,
    layer: int,
    valid: jax.Array,
    live: jax.Array | None,
    rowwise: bool = False,
) -> jax.Array:
    """The second half of a layer: a feed-forward block, or experts."""
    norm = weights.norm("ffn_norm", cfg)
    if cfg.is_sparse(layer):
        return _visited(weights, x, cfg, valid, rowwise)
    block = FeedForward(
        up=weights["ffn.up"],
        down=weights["ffn.down"],
        gate=weights["ffn.gate"] if cfg.gated_ffn else None,
        up_bias=weights.vector("ffn.up_bias"),
        down_bias=weights.vector("ffn.down_bias"),
        activation=cfg.activation,
    )
    _, neurons = weights.used
    shared: SharedOptions = {"used": neurons, "live": live, "rowwise": rowwise}
    if not cfg.norm_after:
        return feed_forward(x, norm, block, add_input=True, **shared)
    hidden = activate(to_units(x, block.up, block.up_bias, **shared), cfg.activation)
    mixed = from_units(hidden, block.down, block.down_bias, residual=x, **shared)
    return normalize(mixed, norm)


def _visited(
    weights: LayerParams, x: jax.Array, cfg: ModelConfig, valid: jax.Array, rowwise: bool
) -> jax.Array:
    """The experts of a layer (see `routed`)."""
    routing, taken = routed(weights, x, cfg, valid, rowwise)
    block = FeedForward(up=weights["experts.up"], down=weights["experts.down"], activation=cfg.activation)
    return mixture(x, weights.norm("ffn_norm", cfg), routing, block, add_input=True, live=taken)


def routed(
    weights: LayerParams, x: jax.Array, cfg: ModelConfig, valid: jax.Array, rowwise: bool
) -> tuple[Routing, jax.Array]:
    """The routing of tokens, and which of the T visit their expert: each token the most likely one, unless as
    many earlier tokens as the expert's capacity visit the same. Nodes of a tree (`rowwise`) have no earlier
    tokens, so that the capacity is never exceeded."""
    norm = weights.norm("ffn_norm", cfg)
    routing = route(x, weights["router"], experts_per_token=1, normalize=False, norm=norm)  # pyright: ignore
    real = jnp.arange(x.shape[1], dtype=jnp.int32) < valid
    return routing, real if rowwise else within_capacity(routing, real, cfg)


def within_capacity(routing: Routing, real: jax.Array, cfg: ModelConfig) -> jax.Array:
    """Mask of tokens that visit their expert, `[B, T]` bool: for each expert the first tokens of each row,
    up to its capacity. `real` `[T]` or `[B, T]` bool is False for padding, which needs no capacity."""
    visits = jax.nn.one_hot(routing.ids[..., 0], cfg.experts, dtype=jnp.int32)
    visits = jnp.where(real[..., None], visits, 0)
    rank = jnp.take_along_axis(jnp.cumsum(visits, axis=1), routing.ids, axis=-1)[..., 0]
    return real & (rank <= cfg.expert_capacity)


# Positions in encoder-decoders: learned or sinusoidal ones are added to embeddings; relative ones add a
# learned bias per head and bucket of distance to scores (T5, arXiv 1910.10683).


def embedded(
    params: Params,
    tokens: jax.Array,
    positions: jax.Array,
    *,
    cfg: ModelConfig,
    dtype: DTypeLike,
    live: jax.Array | None,
) -> jax.Array:
    """Input of the first layer `[B, T, D]`."""
    x = embed(tokens, params["embed.tokens"], dtype, live)
    if cfg.embed_scale != 1.0:
        x = x * np.asarray(cfg.embed_scale, x.dtype)
    if cfg.learned_positions:
        x = x + embed(positions, params["embed.positions"], dtype)
    if cfg.sinusoidal_positions:
        x = x + _sinusoids(positions, cfg.hidden_size).astype(dtype)
    return normalize(x, LayerParams(params, "").norm("embed.norm", cfg)) if cfg.embed_norm else x


def bias_both_ways(params: Params, count: int, cfg: ModelConfig) -> jax.Array | None:
    """The bias of `source_self_attention` of an encoder, for `count` tokens."""
    if not cfg.relative_buckets:
        return None
    distance = jnp.arange(1 - count, count, dtype=jnp.int32)
    bias = _biases(params, distance, cfg, both_ways=True)
    return bias.T.reshape(cfg.kv_heads, cfg.group, -1)


def bias_by_distance(params: Params, cfg: ModelConfig) -> jax.Array | None:
    """The decoder's `AttentionOptions.bias`."""
    if not cfg.relative_buckets:
        return None
    # All tokens at least as far as `relative_distance` share a bucket.
    behind = jnp.arange(-cfg.relative_distance, 1, dtype=jnp.int32)
    bias = _biases(params, behind, cfg, both_ways=False)
    return bias.T.reshape(cfg.kv_heads, cfg.group, -1)


def relative_buckets(distance: jax.Array, *, buckets: int, most: int, both_ways: bool) -> jax.Array:
    """The bucket in [0, buckets) of each distance, int32, from a token to the one it attends to.

    Half of the buckets are for one distance each, the others for ranges that grow logarithmically, up to
    `most`; larger distances share the last one. With `both_ways` each direction has half of the buckets,
    else later tokens share bucket 0.
    """
    lead = jnp.zeros_like(distance)
    if both_ways:
        buckets //= 2
        lead = jnp.where(distance > 0, np.int32(buckets), np.int32(0))
        distance = jnp.abs(distance)
    else:
        distance = jnp.maximum(-distance, 0)
    exact = buckets // 2
    # In this order, and in float32, as checkpoints were trained: a distance at a boundary stays on its side.
    growth = jnp.log(jnp.maximum(distance, 1).astype(jnp.float32) / exact) / np.float32(np.log(most / exact))
    far = jnp.minimum(exact + (growth * (buckets - exact)).astype(jnp.int32), buckets - 1)
    return lead + jnp.where(distance < exact, distance, far)


def _biases(params: Params, distance: jax.Array, cfg: ModelConfig, *, both_ways: bool) -> jax.Array:
    """Biases `[..., N]` float32 of distances (see `relative_buckets`)."""
    biases = LayerParams(params, "").vector("relative_positions")
    assert biases is not None
    own = {"buckets": cfg.relative_buckets, "most": cfg.relative_distance, "both_ways": both_ways}
    return biases.astype(jnp.float32)[relative_buckets(distance, **own)]


def _sinusoids(positions: jax.Array, width: int) -> jax.Array:
    """`[T, D]` float32: sines in the first half of the dimensions, cosines in the other (Marian)."""
    frequencies = 10000.0 ** -(np.arange(0, width, 2, dtype=np.float64) / width)
    angles = positions.astype(jnp.float32)[:, None] * frequencies.astype(np.float32)
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


# Encoder-decoders: a decoder that also attends to the outputs of an encoder, which reads a source once.
#
# `encode` computes the source's hidden states, `with_source` projects them to keys and values of each
# decoder layer (`jaxllm.kv.states`), and `forward_at` is the one of `decoder.py` for such a decoder. Both
# sides differ from the shared decoder only in `ModelConfig`: relative position biases and no scale (T5,
# arXiv 1910.10683), or norms after each sum (BART, arXiv 1910.13461), or experts with a capacity (Switch,
# arXiv 2101.03961).


Kept = TypeVar("Kept")
# (queries, keys and values of new tokens; used kv groups) -> (attention outputs, the layer's state, such as
# the cache).
_Attend = Callable[[Sequence[jax.Array], UsedUnits | None], tuple[jax.Array, Kept]]


def encoder_params(params: Params) -> Params:
    """The parameters of the encoder, with the names of a separate model."""
    own = {name.removeprefix(ENCODER): each for name, each in params.items() if name.startswith(ENCODER)}
    return {"embed.tokens": params["embed.tokens"], **own}


def encode(
    params: Params,
    tokens: jax.Array,
    valid: jax.Array,
    *,
    cfg: ModelConfig,
    dtype: DTypeLike = jnp.float32,
    block_tokens: int = BLOCK_TOKENS,
) -> jax.Array:
    """The encoder's hidden states of a source.

    Args:
      params: parameters of the encoder (see `encoder_params`); leaves may be quantized.
      tokens: `[B, T]` int32, ids in [0, V).
      valid: int32 scalar, number of valid tokens of T; no token attends to the others.
      cfg: config of the encoder, `ModelConfig.encoder` of the model.
      dtype: dtype of the activations.
      block_tokens: see `source_self_attention`.

    Returns:
      Hidden states `[B, T, D]`; those of padding are undefined.
    """
    x, bias = begin_encoder(params, tokens, valid, cfg=cfg, dtype=dtype)

    def layer(x: jax.Array, own: Params, like: int, number: jax.Array | int) -> jax.Array:
        del number
        return encoder_layer(own, x, bias, valid, cfg=cfg, layer=like, block_tokens=block_tokens)

    return final_normed(params, over_layers(params, cfg, layer, x), cfg=cfg)


def begin_encoder(
    params: Params, tokens: jax.Array, valid: jax.Array, *, cfg: ModelConfig, dtype: DTypeLike = jnp.float32
) -> tuple[jax.Array, jax.Array | None]:
    """`encode` before its first layer; see there.

    Returns:
      The first layer's input `[B, T, D]`; and the bias of all layers' scores, `[K, G, 2·T-1]` float32 (see
      `source_self_attention`), None without relative positions.
    """
    axes = Axes("begin_encoder")
    axes.check(jnp.int32, "B T", tokens=tokens)
    axes.check(jnp.int32, "", valid=valid)
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    x = embedded(params, tokens, positions, cfg=cfg, dtype=dtype, live=_live(tokens, valid))
    return x, bias_both_ways(params, tokens.shape[1], cfg)


def encoder_layer(
    params: Params,
    x: jax.Array,
    bias: jax.Array | None,
    valid: jax.Array,
    *,
    cfg: ModelConfig,
    layer: int,
    block_tokens: int = BLOCK_TOKENS,
) -> jax.Array:
    """One layer of `encode`.

    Args:
      params: parameters for `layer_of`.
      x: `[B, T, D]`, its input.
      bias: see `begin_encoder`.
      valid, block_tokens: see `encode`.
      cfg: config of the encoder.
      layer: index of the layer, or of an equal one.
    """
    weights, live = layer_of(params, layer), _live(x, valid)
    x = _self_attended(weights, x, bias, valid, cfg, block_tokens)
    return fed_forward(weights, x, cfg, layer, valid, live)


def encoder_to_experts(
    params: Params, x: jax.Array, bias: jax.Array | None, valid: jax.Array, *, cfg: ModelConfig, layer: int
) -> tuple[jax.Array, Routing, jax.Array]:
    """`encoder_layer` of a sparse layer up to its experts: their input, the routing of the tokens, and which
    of them visit their expert, `[B, T]` bool."""
    weights = layer_of(params, layer)
    x = _self_attended(weights, x, bias, valid, cfg, BLOCK_TOKENS)
    return x, *routed(weights, x, cfg, valid, rowwise=False)


def with_source(
    params: Params, hidden: jax.Array, valid: jax.Array, source: Source, *, cfg: ModelConfig
) -> Source:
    """The keys and values of a source in all layers of the decoder.

    Args:
      params: parameters of the decoder.
      hidden: `[B, T, D]`, outputs of the encoder; T is at most the capacity of `source`.
      valid: int32 scalar, number of valid tokens of T.
      source: source whose rows are replaced.
      cfg: config of the model.
    """

    def layer(source: Source, own: Params, like: int, number: jax.Array | int) -> Source:
        return source_layer(own, hidden, valid, source.in_layer(number), layer=like).in_layer(None)

    return dataclasses.replace(over_layers(params, cfg, layer, source), length=valid)


def source_layer(
    params: Params, hidden: jax.Array, valid: jax.Array, source: Source, *, layer: int
) -> Source:
    """`with_source` for one layer of the decoder, that of `source`.

    Args:
      params: parameters for `layer_of`.
      hidden, valid: see `with_source`.
      source: source of the layer; its length is not changed.
      layer: index of the layer, or of an equal one.
    """
    assert source.layer is not None
    hidden, weights = _zeroed(hidden, valid), layer_of(params, layer)
    groups, _ = weights.used
    keys, values = (
        to_units(hidden, weights[f"cross.{name}"], weights.vector(f"cross.{name}_bias"), used=groups)
        for name in "kv"
    )
    return source.with_layer(source.layer, keys.transpose(0, 2, 1, 3), values.transpose(0, 2, 1, 3))


def read_source(
    params: Params,
    encoder: Params,
    tokens: jax.Array,
    valid: jax.Array,
    cache: KVCache,
    *,
    cfg: ModelConfig,
    dtype: DTypeLike = jnp.float32,
) -> KVCache:
    """An empty cache with a source: encodes the tokens, and projects the outputs.

    Args:
      params: parameters of the decoder.
      encoder: parameters of the encoder (see `encoder_params`).
      tokens, valid, dtype: see `encode`.
      cache: cache with room for a source.
      cfg: config of the model.
    """
    assert cfg.encoder is not None
    assert cache.source is not None
    hidden = encode(encoder, tokens, valid, cfg=cfg.encoder, dtype=dtype)
    return dataclasses.replace(cache, source=with_source(params, hidden, valid, cache.source, cfg=cfg))


def forward_at(
    params: Params,
    tokens: jax.Array,
    cache: KVCache,
    at: TokenPositions,
    *,
    cfg: ModelConfig,
    dtype: DTypeLike = jnp.float32,
    row: jax.Array | None = None,
) -> tuple[jax.Array, KVCache]:
    """`decoder.forward_at` for a decoder whose cache has a source."""
    live = _live(tokens, at.valid) if at.padded else None
    x = embedded(params, tokens, at.positions, cfg=cfg, dtype=dtype, live=live)
    attending = _attending(params, at, cache.capacity_tokens, cfg)

    def layer(
        carry: tuple[jax.Array, KVCache], own: Params, like: int, number: jax.Array | int
    ) -> tuple[jax.Array, KVCache]:
        (x, cache), weights = carry, layer_of(own, like)
        x, past, mass = attending(weights, x, cache.past(like, number), cache.mass)
        x = fed_forward(weights, x, cfg, like, at.valid, live, at.tree is not None)
        return x, dataclasses.replace(cache.with_past(like, past), mass=mass)

    x, cache = over_layers(params, cfg, layer, (x, cache))
    if row is not None:
        x = jax.lax.dynamic_slice_in_dim(x, row, 1, axis=1)
    return final_normed(params, x, cfg=cfg), cache


def forward_layer(
    params: Params,
    x: jax.Array,
    at: TokenPositions,
    past: Past,
    mass: jax.Array | None,
    *,
    cfg: ModelConfig,
    layer: int,
) -> tuple[jax.Array, Past, jax.Array | None]:
    """`decoder.forward_layer` for a decoder that also attends to the source of `past`.

    Args:
      params: parameters for `layer_of`, and "relative_positions" if the model has them.
      x, at, past, mass, cfg, layer: see there.
    """
    weights, live = layer_of(params, layer), _live(x, at.valid) if at.padded else None
    x, past, mass = _attending(params, at, past.capacity_tokens, cfg)(weights, x, past, mass)
    x = fed_forward(weights, x, cfg, layer, at.valid, live, at.tree is not None)
    return x, past, mass


def forward_to_experts(
    params: Params,
    x: jax.Array,
    at: TokenPositions,
    past: Past,
    mass: jax.Array | None,
    *,
    cfg: ModelConfig,
    layer: int,
) -> tuple[jax.Array, Routing, jax.Array, Past, jax.Array | None]:
    """`forward_layer` of a sparse layer up to its experts: their input, the routing of the tokens, which of
    them visit their expert, `[B, T]` bool, the updated keys and values, and the mass."""
    weights, rowwise = layer_of(params, layer), at.tree is not None
    x, past, mass = _attending(params, at, past.capacity_tokens, cfg)(weights, x, past, mass)
    return x, *routed(weights, x, cfg, at.valid, rowwise), past, mass


# A layer's parameters, its input, keys and values, mass -> the input of its second half, and the others.
_Attending = Callable[
    [LayerParams, jax.Array, Past, jax.Array | None], tuple[jax.Array, Past, jax.Array | None]
]


def _self_attended(
    weights: LayerParams,
    x: jax.Array,
    bias: jax.Array | None,
    valid: jax.Array,
    cfg: ModelConfig,
    block_tokens: int,
) -> jax.Array:
    """The first half of a layer of the encoder (see `encoder_layer`)."""

    def attend(heads: Sequence[jax.Array], used: UsedUnits | None) -> tuple[jax.Array, None]:
        del used
        q, k, v = heads[0], *(_zeroed(each, valid) for each in heads[1:])
        keys, values = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
        scale = cfg.attention_scale
        return source_self_attention(
            q, keys, values, bias, valid, scale=scale, block_tokens=block_tokens
        ), None

    return _attended(weights, x, cfg, "attn", attend, _live(x, valid))[0]


def _attending(params: Params, at: TokenPositions, capacity: int, cfg: ModelConfig) -> _Attending:
    """Function that runs the first half of each decoder layer over tokens at positions of a cache of
    `capacity` tokens: attention to them, then to the source."""
    mask, rowwise = at.visible(capacity, 0), at.tree is not None
    options = AttentionOptions(scale=cfg.attention_scale, bias=bias_by_distance(params, cfg))

    def attend(heads: Sequence[jax.Array], used: UsedUnits | None, past: Past, mass: jax.Array | None):
        new = Heads(*heads)
        out, past, mass = cached_attention(new, None, past, mask, at, mass, options=options, used=used)
        return out, (past, mass)

    def attend_source(heads: Sequence[jax.Array], used: UsedUnits | None, source: Source):
        return source_attention(heads[0], source, at, scale=cfg.attention_scale, used=used)

    def run(weights: LayerParams, x: jax.Array, past: Past, mass: jax.Array | None):
        assert past.source is not None
        source, live = past.source, _live(x, at.valid) if at.padded else None
        own = functools.partial(attend, past=past, mass=mass)
        x, (past, mass) = _attended(weights, x, cfg, "attn", own, live, rowwise)
        x, source = _attended(
            weights, x, cfg, "cross", functools.partial(attend_source, source=source), live, rowwise
        )
        return x, dataclasses.replace(past, source=source), mass

    return run


def _zeroed(x: jax.Array, valid: jax.Array) -> jax.Array:
    """`[B, T, ...]` with zeros after the first `valid` tokens: undefined values may be NaN, which attention
    masks do not remove."""
    real = jnp.arange(x.shape[1], dtype=jnp.int32) < valid
    return jnp.where(real.reshape(-1, *(1,) * (x.ndim - 2)), x, jnp.zeros((), x.dtype))


def _live(x: jax.Array, valid: jax.Array) -> jax.Array | None:
    """Number of computed tokens of `[B, T, ...]` (see `linear.py`)."""
    return valid if x.shape[0] == 1 else None


def _attended(
    weights: LayerParams,
    x: jax.Array,
    cfg: ModelConfig,
    name: str,
    attend: _Attend[Kept],
    live: jax.Array | None,
    rowwise: bool = False,
) -> tuple[jax.Array, Kept]:
    """Attention of `x` `[B, T, D]` to its own tokens (`name` "attn"), or to the source ("cross"), for which
    only queries are new; and the state from `attend`."""
    norm, parts = weights.norm(f"{name}_norm", cfg), "qkv" if name == "attn" else "q"
    groups, _ = weights.used
    shared: SharedOptions = {"used": groups, "live": live, "rowwise": rowwise}
    products = [weights[f"{name}.{part}"] for part in parts]
    biases = [weights.vector(f"{name}.{part}_bias") for part in parts]
    if cfg.norm_after:
        pairs = zip(products, biases, strict=True)
        heads = [to_units(x, *each, **shared) for each in pairs]
    else:
        heads = normed_to_units(x, norm, products, biases, **shared)
    queries = heads[0].reshape(*heads[0].shape[:3], cfg.group, cfg.head_dim)
    out, kept = attend([queries, *heads[1:]], groups)
    out = out.reshape(*out.shape[:3], -1)
    o_bias = weights.vector(f"{name}.o_bias")
    mixed = from_units(out, weights[f"{name}.o"], o_bias, residual=x, **shared)
    return (normalize(mixed, norm) if cfg.norm_after else mixed), kept
