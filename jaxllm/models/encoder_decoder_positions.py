"""Positions in encoder-decoders: learned or sinusoidal ones are added to embeddings; relative ones add a
learned bias per head and bucket of distance to scores (T5, arXiv 1910.10683)."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.models.layer_params import LayerParams
from jaxllm.models.parameters import Params
from jaxllm.nn.linear import embed
from jaxllm.nn.norms import normalize


def embedded(
    params: Params,
    tokens: jax.Array,
    positions: jax.Array,
    *,
    cfg: ModelConfig,
    dtype: jnp.dtype,
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

    Half of the buckets are for one token each, the others for ranges that grow logarithmically, up to `most`
    tokens; those farther away share the last one. With `both_ways` each direction has half of the buckets,
    else tokens that come later share bucket 0.
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
