"""What a mixture of experts computes: every token through its own experts, no more and none dropped.

Each (token, chosen expert) is a pair. Pairs are sorted by expert and cut into tiles: up to `tile` pairs
of one expert each, so that a tile is an ordinary feed-forward block over a few rows. There are at most
`pairs/tile + E` tiles whatever the router chooses, which makes shapes static without a capacity that
could overflow (MegaBlocks, arXiv 2211.15841, has the idea on block-sparse kernels). Two ways to run them:

- all at once, as products with a batch axis over tiles: differentiable, for training;
- one after the other, as many as there are: only chosen experts are read, however their weights are
  stored, so a decode step reads k of E.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import Activation
from jaxllm.experts.routing import Routing
from jaxllm.layers import Norm, activate, normalize
from jaxllm.linear import FeedForward, feed_forward
from jaxllm.quant import Adapted, Apart, Weight, dequantize, stack_entry, unit_at

# Rows of a tile. Larger ones make better products and read weights less often; on average half a tile of
# each expert is padding.
_MOST_ROWS = 256


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tiles:
    """Pairs by expert. With M tokens, P = M·k pairs and n tiles, of which the first `count` are in use:

    Attributes:
      token: `[n, tile]` int32, the token of each row; rows without a pair repeat some token.
      expert: `[n]` int32, the expert of each tile.
      row: `[M, k]` int32, the row (in `[0, n·tile)`) of each pair.
      count: int32 scalar.
    """

    token: jax.Array
    expert: jax.Array
    row: jax.Array
    count: jax.Array


def mixture(
    x: jax.Array,
    norm: Norm,
    routing: Routing,
    experts: FeedForward,
    activation: Activation,
    *,
    live: jax.Array | None = None,
    differentiable: bool = False,
    rowwise: bool = False,
) -> jax.Array:
    """The weighted sum of what each token's experts make of `norm(x)`.

    Args:
      x: `[B, T, D]`.
      norm: of the block.
      routing: of these tokens, made from `norm(x)`.
      experts: weights `[E, F, D]`, gated, without biases; all together, or all apart.
      activation: of the gate.
      live: `[T]` bool, False for padding: it visits no expert, and its output is zero.
      differentiable: whether gradients may be asked for; then all experts are converted to floats first.
      rowwise: see `linear.py`; for one by one alone.

    Returns:
      `[B, T, D]` in the type of x.
    """
    total, rows = experts.up.shape[0], x.reshape(-1, x.shape[-1])
    tiles, weights = tiles_and_weights(routing, total, live=live, differentiable=differentiable)
    if differentiable:
        out = _all_at_once(normalize(rows, norm), tiles, experts, activation)
    else:
        out = _one_by_one(rows, norm, tiles, experts, activation, rowwise)
    return weighted_sum(out, tiles, weights).reshape(x.shape)


def tiles_and_weights(
    routing: Routing, experts: int, *, live: jax.Array | None = None, differentiable: bool = False
) -> tuple[Tiles, jax.Array]:
    """The tiles of B·T tokens, and what the outputs of their pairs are multiplied by, `[B·T, k]` float32.

    Args:
      routing: of tokens `[B, T]`.
      experts: how many there are (E).
      live, differentiable: see `mixture`.
    """
    count, choices = routing.ids.size, routing.ids.shape[-1]
    ids, weights = routing.ids.reshape(-1, choices), routing.weights.reshape(-1, choices)
    if live is not None:
        alive = jnp.broadcast_to(live, routing.ids.shape[:-1]).reshape(-1, 1)
        ids = jnp.where(alive, ids, np.int32(experts))
        weights = jnp.where(alive, weights, np.float32(0))
    # Differentiated: smaller tiles, because each has its own copy of an expert and the padding is computed
    # too. Else twice an expert's mean share, so that most have one tile: each tile fetches its expert anew.
    rows = _rows(count // (4 * experts) if differentiable else 2 * count // experts)
    return tiles_of(ids, experts, rows=rows), weights


def weighted_sum(out: jax.Array, tiles: Tiles, weights: jax.Array) -> jax.Array:
    """Of each token the sum of its pairs' rows in `out` `[n, tile, D]`, by weights `[M, k]`: `[M, D]`."""
    rows = out.reshape(-1, out.shape[-1])[tiles.row]
    return jnp.einsum("mkd,mk->md", rows, weights.astype(out.dtype))


def tiles_of(ids: jax.Array, experts: int, *, rows: int) -> Tiles:
    """Tiles of `rows` rows for choices `ids` `[M, k]` int32; ids of `experts` and above get no tile (their
    pairs point to some row)."""
    pairs, choices = ids.size, ids.shape[-1]
    chosen = ids.reshape(-1)
    if rows == 1 and pairs <= experts:
        # A decode step: each pair is a tile, in the order they are in.
        row = jnp.arange(pairs, dtype=jnp.int32)
        kept = jnp.minimum(chosen, np.int32(experts - 1))
        return Tiles(row[:, None] // choices, kept, row.reshape(ids.shape), jnp.full((), pairs, jnp.int32))
    most = (pairs + (rows - 1) * min(experts, pairs)) // rows
    order = jnp.argsort(chosen, stable=True).astype(jnp.int32)
    sizes = jnp.bincount(chosen, length=experts).astype(jnp.int32)
    tiles = -(-sizes // np.int32(rows))
    ends = jnp.cumsum(tiles)
    expert = jnp.searchsorted(ends, jnp.arange(most, dtype=jnp.int32), side="right")
    # Of each pair in sorted order, its row: where its expert's tiles start, and its place among them.
    by_order = jnp.minimum(chosen[order], np.int32(experts - 1))
    place = jnp.arange(pairs, dtype=jnp.int32) - (jnp.cumsum(sizes) - sizes)[by_order]
    row_of = (ends - tiles)[by_order] * np.int32(rows) + place
    # Pairs without an expert come last in that order: dropped here, and their weight is zero.
    row_of = jnp.where(chosen[order] < experts, row_of, np.int32(most * rows))
    pair = jnp.zeros(most * rows, jnp.int32).at[row_of].set(order, mode="drop")
    row = jnp.zeros(pairs, jnp.int32).at[order].set(jnp.minimum(row_of, np.int32(most * rows - 1)))
    return Tiles(
        token=(pair // np.int32(choices)).reshape(most, rows),
        expert=jnp.minimum(expert, experts - 1).astype(jnp.int32),
        row=row.reshape(ids.shape),
        count=ends[-1].astype(jnp.int32),
    )


def _all_at_once(x: jax.Array, tiles: Tiles, experts: FeedForward, activation: Activation) -> jax.Array:
    """Outputs of all rows `[n, tile, D]`, given normed tokens `x` `[M, D]`."""

    def of_tiles(weight: Weight | None) -> jax.Array:
        assert weight is not None
        return jnp.asarray(dequantize(weight, x.dtype))[tiles.expert]

    rows = x[tiles.token]
    gate = jnp.einsum("ntd,nfd->ntf", rows, of_tiles(experts.gate))
    up = jnp.einsum("ntd,nfd->ntf", rows, of_tiles(experts.up))
    return jnp.einsum("ntf,nfd->ntd", activate(gate, activation) * up, of_tiles(experts.down))


def _one_by_one(
    x: jax.Array, norm: Norm, tiles: Tiles, experts: FeedForward, activation: Activation, rowwise: bool
) -> jax.Array:
    """Outputs of the rows in use `[n, tile, D]`, zeros elsewhere, given tokens `x` `[M, D]`."""

    apart = isinstance(experts.up.base if isinstance(experts.up, Adapted) else experts.up, Apart)

    def tile(i: jax.Array, out: jax.Array) -> jax.Array:
        expert = tiles.expert[i]
        if not apart:
            block = _each_weight(experts, lambda stack: unit_at(stack, expert))
            return run_tile(x, norm, tiles, i, out, block, activation, rowwise=rowwise)

        def run(number: int, i: jax.Array, out: jax.Array) -> jax.Array:
            block = _each_weight(experts, lambda stack: stack_entry(stack, number))
            return run_tile(x, norm, tiles, i, out, block, activation, rowwise=rowwise)

        branches = [functools.partial(run, number) for number in range(experts.up.shape[0])]
        return jax.lax.switch(expert, branches, i, out)

    return jax.lax.fori_loop(0, tiles.count, tile, no_rows(x, tiles))


def no_rows(x: jax.Array, tiles: Tiles) -> jax.Array:
    """The outputs `[n, tile, D]` of tokens `[M, D]` before any tile has run: zeros."""
    return jnp.zeros((*tiles.token.shape, x.shape[-1]), x.dtype)


def run_tile(
    x: jax.Array,
    norm: Norm,
    tiles: Tiles,
    number: jax.Array,
    out: jax.Array,
    expert: FeedForward,
    activation: Activation,
    *,
    rowwise: bool = False,
) -> jax.Array:
    """The outputs of all tiles `[n, tile, D]` with those of one more in its place.

    Args:
      x: tokens `[M, D]`.
      norm: of the block.
      tiles: of these tokens.
      number: which tile: int32 scalar.
      out: so far.
      expert: the tile's, weights `[F, D]`.
      activation: of the gate.
      rowwise: see `linear.py`.
    """
    rows = x[tiles.token[number]]
    made = feed_forward(rows, norm, expert, activation, add_input=False, rowwise=rowwise)
    return jax.lax.dynamic_update_index_in_dim(out, made, number, axis=0)


def _each_weight(experts: FeedForward, take: Callable[[Weight], Weight]) -> FeedForward:
    """One expert `[F, D]` of a stack, taken out of each of its weights."""
    gate = None if experts.gate is None else take(experts.gate)
    return FeedForward(up=take(experts.up), down=take(experts.down), gate=gate)


def _rows(pairs: int) -> int:
    """Rows of a tile: the power of two at or below so many pairs, within bounds."""
    return min(_MOST_ROWS, 1 << (max(1, pairs).bit_length() - 1))
