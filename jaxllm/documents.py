"""Documents without a cache: packed one behind the other in a row, branching where they share a beginning.

Training reads packed documents, and scoring reads a question once for all of its possible answers.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxllm.layers import attention, causal_mask


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
      q: queries `[B, T, K, G, H]`.
      k, v: keys and values `[B, T, K, H]`.
      starts: `[B, T]` int32, where in its row the document of each token begins.
      scale, softcap: see `attention`.
      window: see `causal_mask`.
      branches: where documents branch; None: they do not.

    Returns:
      `[B, T, K, G, H]` in q's dtype.
    """
    count = q.shape[1]
    mask = document_mask(starts, window, branches)
    k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    outs = []
    for first in range(0, count, 128):
        last = min(first + 128, count)
        outs.append(
            attention(
                q[:, first:last],
                k[:, :, :last],
                v[:, :, :last],
                mask[:, first:last, :last],
                scale=scale,
                softcap=softcap,
            )
        )
    return jnp.concatenate(outs, axis=1)
