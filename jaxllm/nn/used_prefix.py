"""Attention over no more than a prefix of a cache, for programs on CPUs, which call no native kernels.

Shapes are static in XLA: of a few lengths, each a branch, the shortest one that holds all rows in use is
computed. There is another reason for a branch: XLA fuses nothing with it. Without one, its fusions write a
step's new rows once more where attention reads them, into copies of the whole cache.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

# Each length has a branch, which takes time to compile: a token at a time is what programs run most.
_TOKEN_LENGTHS, _CHUNK_LENGTHS, _SHORTEST = 8, 4, 64

# (queries, keys [B, K, n, H], values, what they see [..., n]) -> outputs in the shape of the queries.
Attend = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


def prefix_lengths(capacity: int, tokens: int) -> tuple[int, ...]:
    """Lengths of prefixes of a cache of `capacity` rows for so many queries, ascending; the last is the
    whole."""
    parts = _TOKEN_LENGTHS if tokens == 1 else _CHUNK_LENGTHS
    lengths = [capacity * part // parts for part in range(1, parts)]
    return (*(each for each in lengths if each >= _SHORTEST), capacity)


def over_used_prefix(
    attend: Attend, q: jax.Array, keys: jax.Array, values: jax.Array, visible: jax.Array, used: jax.Array
) -> jax.Array:
    """Attends to the shortest of `prefix_lengths` that holds the rows in use.

    Args:
      attend: over rows of any number.
      q: queries `[B, T, ...]`.
      keys, values: `[B, K, S, H]`.
      visible: `[..., S]`, which of them a query sees, or what is added to its scores; of rows from `used` on
        nothing is seen.
      used: int32 scalar, at most S: how many rows may be seen.
    """
    lengths = prefix_lengths(keys.shape[2], q.shape[1])
    if len(lengths) == 1:
        return attend(q, keys, values, visible)

    def of(length: int) -> Attend:
        return lambda q, keys, values, visible: attend(
            q, keys[:, :, :length], values[:, :, :length], visible[..., :length]
        )

    shortest = sum((used > each).astype(jnp.int32) for each in lengths[:-1])
    return jax.lax.switch(shortest, [of(each) for each in lengths], q, keys, values, visible)
