"""Computes attention without a cache: over packed documents, with branches that share a beginning, and over
a source.

Several documents are packed one after the other into one sequence of T tokens. Training uses packed
documents; scoring uses branches, so that a question is computed once for all of its possible answers.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.axes import Axes
from jaxllm.kernels import fused_attention as kernel
from jaxllm.kernels.fused_attention import fused_attention, log_fallback
from jaxllm.nn.layers import MASKED, AttentionOptions, attention, attention_by, causal_mask

# Queries per block on the XLA path: keys after a block are left out of its product. Sequences of more blocks
# than `UNROLLED_BLOCKS` use larger ones in a loop, whose code does not grow, and which attend to all keys.
BLOCK, UNROLLED_BLOCKS, LOOP_BLOCK = 128, 8, 512


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Branches:
    """Documents that share a beginning: a trunk, followed by branches that do not attend to each other.

    Attributes:
      trunk_ends: `[B, T]` int32, per token the index in the sequence right after the trunk of its document.
      starts: `[B, T]` int32, per token the index in the sequence of the beginning of its branch; for a
        token of a trunk, the end of its trunk.
    """

    trunk_ends: jax.Array
    starts: jax.Array

    def check(self, axes: Axes) -> None:
        """Asserts the shapes above at trace time."""
        axes.check(jnp.int32, "B T", trunk_ends=self.trunk_ends, branch_starts=self.starts)


def document_positions(starts: jax.Array, branches: Branches | None = None) -> jax.Array:
    """Positions `[B, T]` of tokens in their documents; a branch continues the positions of its trunk."""
    positions = jnp.arange(starts.shape[1], dtype=jnp.int32) - starts
    # Between the trunk and a token's branch are the other branches, which have the same positions.
    return positions if branches is None else positions - (branches.starts - branches.trunk_ends)


def document_mask(
    starts: jax.Array, window: int, branches: Branches | None = None, rows: jax.Array | None = None
) -> jax.Array:
    """Returns the mask `[B, T, T]` bool (query, key), True = attend; with `rows` `[n]` int32 only that of
    these queries, `[B, n, T]`. The other arguments are those of `document_attention`."""
    count = starts.shape[1]
    places = jnp.arange(count, dtype=jnp.int32)

    def of_queries(each: jax.Array) -> jax.Array:
        return (each if rows is None else each[:, rows])[:, :, None]

    queries = places if rows is None else rows
    if branches is None:
        return causal_mask(queries, count, window) & (places >= of_queries(starts))
    mask = causal_mask(queries, count, 0) & (places >= of_queries(starts))
    mask = mask & ((places < of_queries(branches.trunk_ends)) | (places >= of_queries(branches.starts)))
    if window:
        positions = document_positions(starts, branches)
        mask = mask & (positions[:, None, :] > of_queries(positions) - window)
    return mask


def document_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    starts: jax.Array,
    *,
    options: AttentionOptions,
    branches: Branches | None = None,
) -> jax.Array:
    """Causal attention within packed documents.

    Args:
      q: queries `[B, T, K, G, H]`, already rotated.
      k, v: keys and values `[B, T, K, H]`, keys already rotated.
      starts: `[B, T]` int32, per token the index in the sequence of its document's beginning: the token's
        own index or the start of the preceding token. The native kernel rejects other values at run time.
      options: options of the layer, without a bias.
      branches: branches of the documents; None for none.

    Returns:
      `[B, T, K, G, H]` in q's dtype; differentiable in q, k, v and sink logits.
    """
    by_xla = functools.partial(_by_xla, options=options, branches=branches)
    if not q.size:
        return q
    # Branches are scored, not trained.
    if branches is not None:
        return by_xla(q, k, v, starts)
    if options.sink_logits is not None or not q.dtype == k.dtype == v.dtype:
        for platform in ("gpu", "tpu"):
            log_fallback(platform, "the kernel has no sinks, and one dtype for queries, keys and values")
        return by_xla(q, k, v, starts)
    scale, window, softcap = options.scale, options.window, options.softcap
    if not window and not softcap and kernel.fits(q):
        return kernel.document_attention(q, k, v, starts, scale, by_xla)
    return fused_attention(q, k, v, starts, scale=scale, window=window, softcap=softcap, elsewhere=by_xla)


def _by_xla(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    starts: jax.Array,
    *,
    options: AttentionOptions,
    branches: Branches | None = None,
) -> jax.Array:
    """Computes `document_attention` by blocks of queries, each against the keys that any of its queries
    attends to."""
    keys, values = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    tokens, window, attend = q.shape[1], options.window, attention_by(options)
    if tokens <= UNROLLED_BLOCKS * BLOCK:
        mask, outs = document_mask(starts, window, branches), []
        for first in range(0, tokens, BLOCK):
            last = min(tokens, first + BLOCK)
            # The window of a branch reaches back by positions, which are not indices in the sequence.
            oldest = max(0, first + 1 - window) if window and branches is None else 0
            own, seen = q[:, first:last], slice(oldest, last)
            outs.append(attend(own, keys[:, :, seen], values[:, :, seen], mask[:, first:last, seen]))
        return jnp.concatenate(outs, axis=1)
    blocks = -(-tokens // LOOP_BLOCK)

    # The backward pass recomputes the scores.
    @jax.checkpoint
    def block(q: jax.Array, first: jax.Array) -> jax.Array:
        # Some queries of the last block may be padding, and attend as the last token does.
        rows = jnp.minimum(first + jnp.arange(LOOP_BLOCK, dtype=jnp.int32), jnp.int32(tokens - 1))
        return attend(q, keys, values, document_mask(starts, window, branches, rows))

    padded = jnp.pad(q, ((0, 0), (0, blocks * LOOP_BLOCK - tokens)) + ((0, 0),) * 3)
    parts = padded.reshape(q.shape[0], blocks, LOOP_BLOCK, *q.shape[2:]).swapaxes(0, 1)
    firsts = jnp.arange(blocks, dtype=jnp.int32) * jnp.int32(LOOP_BLOCK)
    outs = jax.lax.map(lambda each: block(*each), (parts, firsts))
    return outs.swapaxes(0, 1).reshape(q.shape[0], -1, *q.shape[2:])[:, :tokens]


# Attention of the tokens of a source to each other, in both directions, by blocks of queries.
#
# Scores of all pairs of tokens, with relative position biases, would be the largest arrays of an encoder: at
# 512 tokens and 16 heads 17 MB per copy. A block only has those of its own queries.


# Number of queries whose scores are in memory together.
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
    """Grouped-query attention of all tokens to all valid ones.

    Args:
      q: queries `[B, T, K, G, H]`.
      k, v: keys and values `[B, K, T, H]`; those of padding are finite.
      bias: `[K, G, 2·T-1]` float32, added to scores by the distance of key from query: first for the key
        T-1 tokens before it, last for that T-1 after it. None for none.
      valid: int32 scalar, number of valid tokens among the T.
      block_tokens: queries of a block; 0 for all in one, without a loop.

    Returns:
      `[B, T, K, G, H]` in q's dtype; undefined for padding.
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

    # No token attends to padding, whose blocks are left out.
    used = (valid + np.int32(size - 1)) // np.int32(size)
    return jax.lax.fori_loop(0, used, block, jnp.zeros_like(rows))[:, :count]


def _added(bias: jax.Array | None, first: jax.Array, queries: int, keys: int, valid: jax.Array) -> jax.Array:
    """Returns the mask of `attention` for the queries from `first` on."""
    real = jnp.arange(keys, dtype=jnp.int32) < valid
    if bias is None:
        return jnp.broadcast_to(real, (queries, keys))
    # Each query's biases begin one entry before those of the preceding query. Copies of all entries of the
    # block, concatenated, are cut into rows that are one entry shorter: no single entry is looked up.
    width = keys + queries
    padded = jnp.pad(bias, [(0, 0), (0, 0), (queries, 1)])
    window = jax.lax.dynamic_slice_in_dim(padded, keys - first, width, axis=2)
    lead = bias.shape[:2]
    rows = jnp.broadcast_to(window[:, :, None], (*lead, queries, width)).reshape(*lead, queries * width)
    rows = rows[:, :, queries - 1 : queries - 1 + queries * (width - 1)]
    rows = rows.reshape(1, -1, queries, width - 1)[..., :keys]
    return rows + jnp.where(real, np.float32(0), np.float32(MASKED))
