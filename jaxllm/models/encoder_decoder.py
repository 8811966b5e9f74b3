"""Encoder-decoders: a decoder that also attends to what an encoder said of a source once.

`encode` computes the source's hidden states, `with_source` projects them to keys and values of each decoder
layer (`jaxllm.kv.source`), and `forward_at` is that of `decoder.py` for such a decoder. Both sides differ
from the shared decoder in `ModelConfig` alone: relative position biases and no scale (T5, arXiv 1910.10683),
or norms after each sum (BART, arXiv 1910.13461), or experts with a capacity (Switch, arXiv 2101.03961).
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp

from jaxllm.axes import Axes
from jaxllm.config import ModelConfig
from jaxllm.experts.routing import Routing
from jaxllm.kernels.used_units import UsedUnits
from jaxllm.kv.cache import KVCache, Past
from jaxllm.kv.positions import TokenPositions
from jaxllm.kv.source import Source
from jaxllm.models.encoder_decoder_blocks import SharedOptions, fed_forward, routed
from jaxllm.models.encoder_decoder_positions import bias_both_ways, bias_by_distance, embedded
from jaxllm.models.layer_params import LayerParams
from jaxllm.models.layer_stack import layer_of, over_layers
from jaxllm.models.parameters import ENCODER, Params
from jaxllm.nn.layers import AttentionOptions, Heads, cached_attention, source_attention
from jaxllm.nn.linear import from_units, normed_to_units, to_units
from jaxllm.nn.norms import normalize
from jaxllm.nn.source_self_attention import BLOCK_TOKENS, source_self_attention

Kept = TypeVar("Kept")
# (queries, keys and values of new tokens; used kv groups) -> (attention outputs, what the layer keeps, such
# as the cache).
_Attend = Callable[[Sequence[jax.Array], UsedUnits | None], tuple[jax.Array, Kept]]


def encoder_params(params: Params) -> Params:
    """The parameters of the encoder, named as those of a model by itself."""
    own = {name.removeprefix(ENCODER): each for name, each in params.items() if name.startswith(ENCODER)}
    return {"embed.tokens": params["embed.tokens"], **own}


def encode(
    params: Params,
    tokens: jax.Array,
    valid: jax.Array,
    *,
    cfg: ModelConfig,
    dtype: jnp.dtype = jnp.float32,
    block_tokens: int = BLOCK_TOKENS,
) -> jax.Array:
    """What the encoder says of a source.

    Args:
      params: of the encoder (see `encoder_params`); leaves may be quantized.
      tokens: `[B, T]` int32, ids in [0, V).
      valid: int32 scalar, how many of the T tokens are real; no token attends to the others.
      cfg: the encoder, `ModelConfig.encoder` of the model.
      dtype: of the activations.
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
    params: Params, tokens: jax.Array, valid: jax.Array, *, cfg: ModelConfig, dtype: jnp.dtype = jnp.float32
) -> tuple[jax.Array, jax.Array | None]:
    """`encode` before its first layer; see there.

    Returns:
      The first layer's input `[B, T, D]`; and what all layers add to scores, `[K, G, 2·T-1]` float32 (see
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
      params: that `layer_of` takes.
      x: `[B, T, D]`, its input.
      bias: see `begin_encoder`.
      valid, block_tokens: see `encode`.
      cfg: the encoder.
      layer: its index, or that of a layer that equals it.
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
      params: of the decoder.
      hidden: `[B, T, D]`, what the encoder said; T is at most the capacity of `source`.
      valid: int32 scalar, how many of the T tokens are real.
      source: whose rows are replaced.
      cfg: the model.
    """

    def layer(source: Source, own: Params, like: int, number: jax.Array | int) -> Source:
        return source_layer(own, hidden, valid, source.in_layer(number), layer=like).in_layer(None)

    return dataclasses.replace(over_layers(params, cfg, layer, source), length=valid)


def source_layer(
    params: Params, hidden: jax.Array, valid: jax.Array, source: Source, *, layer: int
) -> Source:
    """`with_source` of one layer of the decoder, that of `source`.

    Args:
      params: that `layer_of` takes.
      hidden, valid: see `with_source`.
      source: of the layer; its length is not changed.
      layer: its index, or that of a layer that equals it.
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
    dtype: jnp.dtype = jnp.float32,
) -> KVCache:
    """An empty cache with a source: encodes the tokens, and projects what was said.

    Args:
      params: of the decoder.
      encoder: of the encoder (see `encoder_params`).
      tokens, valid, dtype: see `encode`.
      cache: with room for a source.
      cfg: the model.
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
    dtype: jnp.dtype = jnp.float32,
    row: jax.Array | None = None,
) -> tuple[jax.Array, KVCache]:
    """`decoder.forward_at` of a decoder whose cache has a source."""
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
    """`decoder.forward_layer` of a decoder that attends to a source, too, that of `past`.

    Args:
      params: that `layer_of` takes, and "relative_positions" if the model has them.
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
    """What runs the first half of each layer of the decoder over tokens at positions of a cache of `capacity`
    tokens: attention to them, then to the source."""
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


def final_normed(params: Params, x: jax.Array, *, cfg: ModelConfig) -> jax.Array:
    """What an encoder or a decoder says, from its last layer's output: after the final norm, if there is
    one."""
    return normalize(x, LayerParams(params, "").norm("final_norm", cfg)) if cfg.final_norm else x


def _zeroed(x: jax.Array, valid: jax.Array) -> jax.Array:
    """`[B, T, ...]` with zeros after the first `valid` tokens: what is undefined may not be a number, which
    no mask of attention takes away."""
    real = jnp.arange(x.shape[1], dtype=jnp.int32) < valid
    return jnp.where(real.reshape(-1, *(1,) * (x.ndim - 2)), x, jnp.zeros((), x.dtype))


def _live(x: jax.Array, valid: jax.Array) -> jax.Array | None:
    """How many tokens of `[B, T, ...]` are computed (see `linear.py`)."""
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
    only queries are new; and what `attend` keeps."""
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


def with_room(cfg: ModelConfig, tokens: int) -> ModelConfig:
    """The decoder with experts that take so many tokens: those of a context, when they are computed again,
    had come a few at a time, and no expert had too many."""
    most = max(cfg.expert_capacity, tokens)
    return dataclasses.replace(cfg, expert_capacity=most) if cfg.expert_capacity else cfg
