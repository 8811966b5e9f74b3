"""Relative positions: a learned bias of scores per head and bucket of distance (T5, arXiv 1910.10683)."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.models.layer_stack import LayerParams
from jaxllm.models.parameters import Params


def position_bias(params: Params, cfg: ModelConfig, both_ways: int = 0) -> jax.Array | None:
    """The decoder's `AttentionOptions.bias`; or with `both_ways` above 0 an encoder's bias for so many tokens
    (see `source_self_attention`). None without relative positions."""
    if not cfg.relative_buckets:
        return None
    # All earlier tokens at least as far as `relative_distance` share a bucket.
    first, end = (1 - both_ways, both_ways) if both_ways else (-cfg.relative_distance, 1)
    distance = jnp.arange(first, end, dtype=jnp.int32)
    bias = position_biases(params, distance, cfg, both_ways=both_ways > 0)
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


def position_biases(
    params: Params, distance: jax.Array, cfg: ModelConfig, *, both_ways: bool, lookup: bool = True
) -> jax.Array:
    """Biases `[..., N]` float32 of distances (see `relative_buckets`), looked up or by a product, whose
    gradient is faster."""
    biases = LayerParams(params, "").vector("relative_positions")
    assert biases is not None
    own = {"buckets": cfg.relative_buckets, "most": cfg.relative_distance, "both_ways": both_ways}
    bucket = relative_buckets(distance, **own)
    if lookup:
        return biases.astype(jnp.float32)[bucket]
    return jax.nn.one_hot(bucket, cfg.relative_buckets, dtype=jnp.float32) @ biases.astype(jnp.float32)
