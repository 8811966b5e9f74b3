"""Attention over packed documents without a cache, with branches where documents share a beginning.

Several documents are packed one after the other into one sequence of T tokens. Training uses packed
documents; scoring uses branches, so that a question is computed once for all of its possible answers.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jaxllm.axes import Axes
from jaxllm.kernels import document_attention as kernel
from jaxllm.kernels.fused_attention import fused_attention
from jaxllm.nn.layers import AttentionOptions, attention, causal_mask

# Queries per block on the XLA path: keys after a block are left out of its product. Sequences of more blocks
# than `UNROLLED_BLOCKS` take larger ones in a loop, whose code does not grow, and which see all keys.
BLOCK, UNROLLED_BLOCKS, LOOP_BLOCK = 128, 8, 512


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Branches:
    """Documents that share a beginning: a trunk, followed by branches that do not attend to each other.

    Attributes:
      trunk_ends: `[B, T]` int32, per token the index in the sequence right after the trunk of its document.
      starts: `[B, T]` int32, per token the index in the sequence where its branch begins; for a token of a
        trunk, where its trunk ends.
    """

    trunk_ends: jax.Array
    starts: jax.Array

    def check(self, axes: Axes) -> None:
        """Asserts the shapes above, where a step that takes the branches is traced."""
        axes.check(jnp.int32, "B T", trunk_ends=self.trunk_ends, branch_starts=self.starts)


def document_positions(starts: jax.Array, branches: Branches | None = None) -> jax.Array:
    """Positions `[B, T]` of tokens in their documents; a branch continues the positions of its trunk."""
    positions = jnp.arange(starts.shape[1], dtype=jnp.int32) - starts
    # Between the trunk and a token's branch are the other branches, which have the same positions.
    return positions if branches is None else positions - (branches.starts - branches.trunk_ends)


def document_mask(
    starts: jax.Array, window: int, branches: Branches | None = None, rows: jax.Array | None = None
) -> jax.Array:
    """Mask `[B, T, T]` bool (query, key), True = attend; with `rows` `[n]` int32 that of these queries alone,
    `[B, n, T]`. The other arguments are those of `document_attention`."""
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
    """Causal attention within documents that are packed one after the other.

    Args:
      q: queries `[B, T, K, G, H]`, already rotated.
      k, v: keys and values `[B, T, K, H]`, keys already rotated.
      starts: `[B, T]` int32, per token the index in the sequence where its document begins: the token's own
        index or the start of the token before. The native kernel refuses any other value when it runs.
      options: of the layer, without a bias.
      branches: where documents branch; None if they do not.

    Returns:
      `[B, T, K, G, H]` in q's dtype; differentiable in q, k, v and sink logits.
    """
    scale, sinks = options.scale, options.sink_logits
    plain = not options.softcap and not options.window and branches is None and sinks is None
    if plain and q.dtype == k.dtype == v.dtype:
        by_xla = functools.partial(_by_xla, options=options)
        if kernel.fits(q):
            return kernel.document_attention(q, k, v, starts, scale, by_xla)
        return fused_attention(q, k, v, starts, scale, by_xla)
    return _by_xla(q, k, v, starts, options=options, branches=branches)


def _by_xla(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    starts: jax.Array,
    *,
    options: AttentionOptions,
    branches: Branches | None = None,
) -> jax.Array:
    """`document_attention` by blocks of queries, each against the keys that any of its queries attends to."""
    if q.shape[1] > UNROLLED_BLOCKS * BLOCK:
        return _in_loop(q, k, v, starts, options=options, branches=branches)
    window = options.window
    mask = document_mask(starts, window, branches)
    keys, values = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    tokens, outs = q.shape[1], []
    for first in range(0, tokens, BLOCK):
        last = min(tokens, first + BLOCK)
        # The window of a branch reaches back by positions, which are not indices in the sequence.
        oldest = max(0, first + 1 - window) if window and branches is None else 0
        part = attention(
            q[:, first:last],
            keys[:, :, oldest:last],
            values[:, :, oldest:last],
            mask[:, first:last, oldest:last],
            scale=options.scale,
            softcap=options.softcap,
            sink_logits=options.sink_logits,
        )
        outs.append(part)
    return jnp.concatenate(outs, axis=1)


def _in_loop(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    starts: jax.Array,
    *,
    options: AttentionOptions,
    branches: Branches | None,
) -> jax.Array:
    """`_by_xla` by a loop over blocks of queries, whose scores the backward pass computes again."""
    keys, values = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    tokens = q.shape[1]
    blocks = -(-tokens // LOOP_BLOCK)

    @jax.checkpoint
    def block(q: jax.Array, first: jax.Array) -> jax.Array:
        # Of the last block some queries may be padding, which sees what the last token sees.
        rows = jnp.minimum(first + jnp.arange(LOOP_BLOCK, dtype=jnp.int32), jnp.int32(tokens - 1))
        mask = document_mask(starts, options.window, branches, rows)
        scale, softcap, sinks = options.scale, options.softcap, options.sink_logits
        return attention(q, keys, values, mask, scale=scale, softcap=softcap, sink_logits=sinks)

    padded = jnp.pad(q, ((0, 0), (0, blocks * LOOP_BLOCK - tokens)) + ((0, 0),) * 3)
    parts = padded.reshape(q.shape[0], blocks, LOOP_BLOCK, *q.shape[2:]).swapaxes(0, 1)
    firsts = jnp.arange(blocks, dtype=jnp.int32) * jnp.int32(LOOP_BLOCK)
    outs = jax.lax.map(lambda each: block(*each), (parts, firsts))
    return outs.swapaxes(0, 1).reshape(q.shape[0], -1, *q.shape[2:])[:, :tokens]
