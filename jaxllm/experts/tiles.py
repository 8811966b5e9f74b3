"""Sorts pairs of tokens and experts by expert, and cuts them into tiles."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tiles:
    """Pairs sorted by expert and cut into tiles, with M tokens, P = M·k pairs and n tiles, the first `count`
    in use.

    Attributes:
      token: `[n, tile]` int32, the token of each row; rows without a pair repeat some token.
      expert: `[n]` int32, the expert of each tile.
      start: `[n]` int32, index of a tile's first row among the sorted pairs; P for tiles that are not in use.
      size: `[n]` int32, number of rows with a pair, which are the first ones.
      place: `[M, k]` int32, index of each pair in the sorted order, in `[0, P)`; pairs without an expert come
        last.
      count: int32 scalar, number of tiles in use.
    """

    token: jax.Array
    expert: jax.Array
    start: jax.Array
    size: jax.Array
    place: jax.Array
    count: jax.Array


def tiles_of(ids: jax.Array, experts: int, *, rows: int, padded: bool = True) -> Tiles:
    """Tiles of `rows` rows for choices `ids` `[M, k]` int32. Ids of `experts` and above, which stand for
    padding, get no tile; without `padded` there are none."""
    pairs, choices = ids.size, ids.shape[-1]
    chosen = ids.reshape(-1)
    if rows == 1 and pairs <= experts and not padded:
        # A decode step: each pair is a tile, unsorted.
        place = jnp.arange(pairs, dtype=jnp.int32)
        count = jnp.full((), pairs, jnp.int32)
        token, size = place[:, None] // np.int32(choices), jnp.ones_like(place)
        return Tiles(token, chosen, place, size, place.reshape(ids.shape), count)
    most = (pairs + (rows - 1) * min(experts, pairs)) // rows
    order = jnp.argsort(chosen, stable=True).astype(jnp.int32)
    sizes = jnp.bincount(chosen, length=experts).astype(jnp.int32)
    tiles = -(-sizes // np.int32(rows))
    ends, before = jnp.cumsum(tiles), jnp.cumsum(sizes) - sizes
    number = jnp.arange(most, dtype=jnp.int32)
    expert = jnp.minimum(jnp.searchsorted(ends, number, side="right"), experts - 1).astype(jnp.int32)
    # Per tile, rows of its expert in earlier tiles.
    done = (number - (ends - tiles)[expert]) * np.int32(rows)
    used = number < ends[-1]
    start = jnp.where(used, before[expert] + done, np.int32(pairs))
    size = jnp.where(used, jnp.minimum(sizes[expert] - done, np.int32(rows)), np.int32(0))
    at = jnp.minimum(start[:, None] + jnp.arange(rows, dtype=jnp.int32), np.int32(pairs - 1))
    place = jnp.zeros(pairs, jnp.int32).at[order].set(jnp.arange(pairs, dtype=jnp.int32))
    return Tiles(
        token=order[at] // np.int32(choices),
        expert=expert,
        start=start,
        size=size,
        # Pairs without an expert come last; no tile writes their visits, which stay zero.
        place=place.reshape(ids.shape),
        count=ends[-1].astype(jnp.int32),
    )
