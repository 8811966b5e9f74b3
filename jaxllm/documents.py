"""Documents without a cache: packed one behind the other in a row, branching where they share a beginning.

Training reads packed documents, and scoring reads a question once for all of its possible answers.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jaxllm.kernels import document_attention as kernel
from jaxllm.layers import attention, causal_mask

# Queries that XLA takes at a time: keys behind them cost it nothing.
BLOCK = 128


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Branches:
    """Documents that share their beginning: a trunk, and behind it branches that do not see each other.

    Attributes:
      trunk_ends: `[B, T]` int32, the place in its row behind the trunk of each token's document.
      starts: `[B, T]` int32, where in its row the branch of each token begins; for a token of a trunk, where
        its trunk ends.
    """

    trunk_ends: jax.Array
    starts: jax.Array


def document_positions(starts: jax.Array, branches: Branches | None = None) -> jax.Array:
    """Positions `[B, T]` of tokens in their documents, a branch's counted on from its trunk's last."""
    positions = jnp.arange(starts.shape[1], dtype=jnp.int32) - starts
    # What stands between the trunk and a token's own branch are other branches.
    return positions if branches is None else positions - (branches.starts - branches.trunk_ends)


def document_mask(starts: jax.Array, window: int, branches: Branches | None = None) -> jax.Array:
    """Which places of its row a token may attend to: `[B, T, T]` bool (see `document_attention`)."""
    count = starts.shape[1]
    places = jnp.arange(count, dtype=jnp.int32)
    if branches is None:
        return causal_mask(places, count, window) & (places >= starts[:, :, None])
    mask = causal_mask(places, count, 0) & (places >= starts[:, :, None])
    mask = mask & ((places < branches.trunk_ends[:, :, None]) | (places >= branches.starts[:, :, None]))
    if window:
        positions = document_positions(starts, branches)
        mask = mask & (positions[:, None, :] > positions[:, :, None] - window)
    return mask


def document_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    starts: jax.Array,
    *,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    branches: Branches | None = None,
) -> jax.Array:
    """Causal attention within documents that are packed one behind the other.

    Args:
      q: queries `[B, T, K, G, H]`, already rotated.
      k, v: keys and values `[B, T, K, H]`, keys already rotated.
      starts: `[B, T]` int32, where in its row a token's document begins: its own position or the start of the
        token before. The native kernel refuses others when it runs.
      scale, softcap: see `attention`.
      window: see `causal_mask`.
      branches: where documents branch; None: they do not.

    Returns:
      `[B, T, K, G, H]` in q's dtype; differentiable in q, k and v.
    """
    plain = softcap == 0.0 and window == 0 and branches is None
    if plain and q.dtype == k.dtype == v.dtype and kernel.fits(q):
        return kernel.document_attention(q, k, v, starts, scale, functools.partial(_by_xla, scale=scale))
    return _by_xla(q, k, v, starts, scale=scale, softcap=softcap, window=window, branches=branches)


def _by_xla(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    starts: jax.Array,
    *,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    branches: Branches | None = None,
) -> jax.Array:
    """Blocks of queries, each against the keys that any of it may see."""
    mask = document_mask(starts, window, branches)
    keys, values = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    tokens, outs = q.shape[1], []
    for first in range(0, tokens, BLOCK):
        last = min(tokens, first + BLOCK)
        # A branch's window reaches back by positions, not by places.
        oldest = max(0, first + 1 - window) if window and branches is None else 0
        part = attention(
            q[:, first:last],
            keys[:, :, oldest:last],
            values[:, :, oldest:last],
            mask[:, first:last, oldest:last],
            scale=scale,
            softcap=softcap,
        )
        outs.append(part)
    return jnp.concatenate(outs, axis=1)
