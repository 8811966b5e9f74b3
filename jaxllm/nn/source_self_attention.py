"""Attention of the tokens of a source to each other, before and behind them, by blocks of queries.

Scores of all pairs of tokens, and what relative positions add to them, would be the most memory that an
encoder takes: of 512 tokens and 16 heads 17 MB for each copy. A block has those of its own queries alone.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.nn.layers import MASKED, attention

# Queries whose scores are in memory together.
BLOCK_TOKENS = 64


def source_self_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    bias: jax.Array | None,
    valid: jax.Array,
    *,
    scale: float,
    block_tokens: int = BLOCK_TOKENS,
) -> jax.Array:
    """Grouped-query attention of all tokens to all that are real.

    Args:
      q: queries `[B, T, K, G, H]`.
      k, v: keys and values `[B, K, T, H]`; those of padding are numbers.
      bias: `[K, G, 2·T-1]` float32, added to scores by how far behind its query a key stands: first for the
        key T-1 tokens before it, last for that T-1 behind it. None for nothing.
      valid: int32 scalar, how many of the T tokens are real.
      scale: multiplies the scores.
      block_tokens: queries of a block; 0 for all in one, without a loop.

    Returns:
      `[B, T, K, G, H]` in q's dtype; undefined for tokens that are not real.
    """
    count, size = q.shape[1], block_tokens
    if not 0 < size < count:
        return attention(q, k, v, _added(bias, jnp.int32(0), count, count, valid), scale=scale)
    blocks = -(-count // size)
    rows = jnp.pad(q, [(0, 0), (0, blocks * size - count), *[(0, 0)] * 3])

    def block(number: jax.Array, out: jax.Array) -> jax.Array:
        first = number * np.int32(size)
        own = jax.lax.dynamic_slice_in_dim(rows, first, size, axis=1)
        found = attention(own, k, v, _added(bias, first, size, count, valid), scale=scale)
        return jax.lax.dynamic_update_slice_in_dim(out, found, first, axis=1)

    # No token attends to those of padding, whose blocks are left out.
    used = (valid + np.int32(size - 1)) // np.int32(size)
    return jax.lax.fori_loop(0, used, block, jnp.zeros_like(rows))[:, :count]


def _added(bias: jax.Array | None, first: jax.Array, queries: int, keys: int, valid: jax.Array) -> jax.Array:
    """What `attention` takes as its mask, for the queries from `first` on."""
    real = jnp.arange(keys, dtype=jnp.int32) < valid
    if bias is None:
        return jnp.broadcast_to(real, (queries, keys))
    # Each query's biases begin one entry before those of the query before it. Copies of all entries of the
    # block, end to end, are cut into rows that are one entry shorter: no entry is looked up by itself.
    width = keys + queries
    padded = jnp.pad(bias, [(0, 0), (0, 0), (queries, 1)])
    window = jax.lax.dynamic_slice_in_dim(padded, keys - first, width, axis=2)
    lead = bias.shape[:2]
    rows = jnp.broadcast_to(window[:, :, None], (*lead, queries, width)).reshape(*lead, queries * width)
    rows = rows[:, :, queries - 1 : queries - 1 + queries * (width - 1)]
    rows = rows.reshape(*lead, queries, width - 1)[..., :keys].transpose(0, 2, 1, 3)
    return rows + jnp.where(real, np.float32(0), np.float32(MASKED))
