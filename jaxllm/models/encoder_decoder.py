"""Encoder-decoders: the encoder, and the source that a decoder attends to.

`encode` computes the source's hidden states once, and `with_source` projects them to keys and values of each
decoder layer (`jaxllm.kv.states`). Layers are those of `layer.py`; both sides differ from the shared decoder
only in `ModelConfig`: relative position biases and no scale (T5, arXiv 1910.10683), or norms after each sum
(BART, arXiv 1910.13461), or experts with a capacity (Switch, arXiv 2101.03961).
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxllm.axes import shaped
from jaxllm.config import ModelConfig
from jaxllm.kernels.native_call import UsedUnits
from jaxllm.kv.cache import KVCache
from jaxllm.kv.states import Source
from jaxllm.models.decoder import embed_tokens, final_normed
from jaxllm.models.layer import Attend, Rows, run_layer
from jaxllm.models.layer_stack import layer_of
from jaxllm.models.parameters import ENCODER, Params
from jaxllm.models.relative_positions import position_bias
from jaxllm.models.scanned_layers import over_layers
from jaxllm.nn.documents import BLOCK_TOKENS, source_self_attention
from jaxllm.nn.layers import Heads
from jaxllm.nn.linear import to_units


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
      block_tokens: see `source_self_attention`.

    Returns:
      Hidden states `[B, T, D]`; those of padding are undefined.
    """
    x, bias = begin_encoder(params, tokens, valid, cfg=cfg, dtype=dtype)

    def layer(x: jax.Array, own: Params, like: int, _: jax.Array | int) -> jax.Array:
        return encoder_layer(own, x, bias, valid, cfg=cfg, layer=like, block_tokens=block_tokens)

    return final_normed(params, over_layers(params, cfg, layer, x), cfg=cfg)


@shaped(tokens="int32 B T", valid="int32")
def begin_encoder(
    params: Params, tokens: jax.Array, valid: jax.Array, *, cfg: ModelConfig, dtype: DTypeLike = jnp.float32
) -> tuple[jax.Array, jax.Array | None]:
    """`encode` before its first layer; see there.

    Returns:
      The first layer's input `[B, T, D]`; and the bias of all layers' scores, `[K, G, 2·T-1]` float32 (see
      `source_self_attention`), None without relative positions.
    """
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    valid_rows = valid if tokens.shape[0] == 1 else None
    x = embed_tokens(params, tokens, positions, cfg=cfg, dtype=dtype, valid_rows=valid_rows)
    return x, position_bias(params, cfg, both_ways=tokens.shape[1])


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
      layer: index of the layer, or of an equal one.
    """
    attend = source_attending(bias, valid, cfg, block_tokens)
    return run_layer(layer_of(params, layer), x, cfg, layer, attend, rows=source_rows(x, valid))[0]


def source_rows(x: jax.Array, valid: jax.Array) -> Rows:
    """Rows of `x` `[B, T, D]` of an encoder: a single token is valid."""
    return Rows(valid if x.shape[1] > 1 else None)


def source_attending(
    bias: jax.Array | None, valid: jax.Array, cfg: ModelConfig, block_tokens: int = BLOCK_TOKENS
) -> Attend[None]:
    """The attention of a layer of the encoder (see `encoder_layer`)."""

    def attend(new: Heads, used: UsedUnits | None) -> tuple[jax.Array, None]:
        del used
        keys, values = (_zeroed(each, valid).transpose(0, 2, 1, 3) for each in (new.k, new.v))
        how = {"scale": cfg.attention_scale, "block_tokens": block_tokens}
        return source_self_attention(new.q, keys, values, bias, valid, **how), None

    return attend


def with_source(
    params: Params, hidden: jax.Array, valid: jax.Array, source: Source, *, cfg: ModelConfig
) -> Source:
    """The keys and values of a source in all layers of the decoder.

    Args:
      hidden: `[B, T, D]`, outputs of the encoder; T is at most the capacity of `source`.
      valid: int32 scalar, number of valid tokens of T.
      source: source whose rows are replaced.
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
      encoder: parameters of the encoder (see `encoder_params`).
      tokens, valid, dtype: see `encode`.
      cache: cache with room for a source.
    """
    assert cfg.encoder is not None
    assert cache.source is not None
    hidden = encode(encoder, tokens, valid, cfg=cfg.encoder, dtype=dtype)
    return dataclasses.replace(cache, source=with_source(params, hidden, valid, cache.source, cfg=cfg))


def _zeroed(x: jax.Array, valid: jax.Array) -> jax.Array:
    """`[B, T, ...]` with zeros after the first `valid` tokens: undefined values may be NaN, which attention
    masks do not remove."""
    real = jnp.arange(x.shape[1], dtype=jnp.int32) < valid
    return jnp.where(real.reshape(-1, *(1,) * (x.ndim - 2)), x, jnp.zeros((), x.dtype))
