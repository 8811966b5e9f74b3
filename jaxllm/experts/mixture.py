"""Computes a mixture of experts: every token goes through exactly its chosen experts, none is dropped.

Each (token, chosen expert) is a pair. Pairs are sorted by expert and cut into tiles of up to `tile` pairs
of one expert, so that a tile is an ordinary feed-forward block over a few tokens. There are at most
`pairs/tile + E` tiles whatever the router chooses, which makes shapes static without a capacity that could
overflow (the idea of MegaBlocks, arXiv 2211.15841, there with block-sparse kernels). The outputs of a
tile, its visits, are stored in the order of pairs, so that visits take no more memory than pairs. Tiles
run in one of two modes:

- all at once, differentiably, for training (`differentiable_visits`);
- one after the other: only chosen experts are read, whatever the storage type of their weights, so that a
  decode step reads k of E. Native kernels run all tiles in one call if experts are stored separately. A
  token's output does not depend on other tokens, nor on how many share its tile: products are always
  `batch_invariant` (see `linear.py`), so that prefill, tree and decode give it bit for bit the same.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import RaggedDotDimensionNumbers

from jaxllm.experts.routing import Routing, high_alone
from jaxllm.kernels import native_products
from jaxllm.kernels.converted import natively
from jaxllm.nn.layers import Norm, activate, gated, normalize
from jaxllm.nn.linear import FeedForward, feed_forward
from jaxllm.quant import (
    Adapted,
    BlockedArray,
    ByForm,
    PerExpert,
    Weight,
    by_form,
    dequantize,
    entry_of_form,
    unit_at,
)
from jaxllm.quant.parts import part_entry


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
    """Tiles of `rows` rows for choices `ids` `[M, k]` int32. Ids of `experts` and above are padding, and
    get no tile; without `padded` there are none."""
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


# Of rows `[P, D]` and weights `[E, F, D]` to `[P, F]`, and of `[P, F]` and `[E, F, D]` to `[P, D]`.
_TO_UNITS, _TO_WIDTH = (
    RaggedDotDimensionNumbers(
        dot_dimension_numbers=(([1], [contracted]), ([], [])),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[0],
    )
    for contracted in (2, 1)
)


def differentiable_visits(x: jax.Array, tiles: Tiles, experts: FeedForward) -> jax.Array:
    """The visits `[P, D]`, in the order of pairs by expert, given normed tokens `x` `[M, D]` and weights
    `[E, F, D]`; undefined for pairs without an expert, whose weight is zero.

    On CPUs tiles run all at once, as products with a batch axis over tiles. Elsewhere
    `jax.lax.ragged_dot_general` multiplies each expert's pairs with its weights: no expert is copied for a
    tile, and no row is padding. On CPUs XLA would compute that with every expert for every pair.
    """
    if tiles.token.shape[1] == 1 and tiles.place.size <= experts.up.shape[0]:
        # Few pairs are not sorted.
        return in_tiles(x, tiles, experts)
    return jax.lax.platform_dependent(x, tiles, experts, cpu=in_tiles, default=by_groups)


def in_tiles(x: jax.Array, tiles: Tiles, experts: FeedForward) -> jax.Array:
    """`differentiable_visits` by products with a batch axis over tiles, each with a copy of its expert."""

    def product(equation: str, values: jax.Array, weight: Weight) -> jax.Array:
        return jnp.einsum(equation, values, jnp.asarray(dequantize(weight, x.dtype))[tiles.expert])

    def biases(bias: jax.Array) -> jax.Array:
        return bias[tiles.expert][:, None]

    out = _block(
        x[tiles.token],
        experts,
        functools.partial(product, "ntd,nfd->ntf"),
        functools.partial(product, "ntf,nfd->ntd"),
        biases,
    )
    places = jnp.arange(tiles.place.size, dtype=jnp.int32)
    tile = jnp.maximum(jnp.searchsorted(tiles.start, places, side="right") - 1, 0)
    row = jnp.minimum(places - tiles.start[tile], np.int32(tiles.token.shape[1] - 1))
    return out[tile, jnp.maximum(row, 0)]


def by_groups(x: jax.Array, tiles: Tiles, experts: FeedForward) -> jax.Array:
    """`differentiable_visits` by products of the groups of pairs of one expert."""
    place = tiles.place
    sizes = jnp.zeros(experts.up.shape[0], jnp.int32).at[tiles.expert].add(tiles.size)
    token = jnp.arange(place.size, dtype=jnp.int32) // np.int32(place.shape[-1])
    rows = x[jnp.zeros_like(token).at[place.reshape(-1)].set(token)]

    def product(dims: RaggedDotDimensionNumbers, values: jax.Array, weight: Weight) -> jax.Array:
        return jax.lax.ragged_dot_general(values, jnp.asarray(dequantize(weight, x.dtype)), sizes, dims)

    def biases(bias: jax.Array) -> jax.Array:
        return jnp.repeat(bias, sizes, axis=0, total_repeat_length=len(rows))

    to_units, to_width = (functools.partial(product, dims) for dims in (_TO_UNITS, _TO_WIDTH))
    return _block(rows, experts, to_units, to_width, biases)


def _block(
    rows: jax.Array,
    experts: FeedForward,
    to_units: Callable[[jax.Array, Weight], jax.Array],
    to_width: Callable[[jax.Array, Weight], jax.Array],
    biases: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """The experts' blocks over rows, given products with each row's expert, and each row's bias."""

    def biased(out: jax.Array, bias: jax.Array | None) -> jax.Array:
        return out if bias is None else out + biases(bias).astype(out.dtype)

    # In the order in which weights are stored.
    gate = None if experts.gate is None else biased(to_units(rows, experts.gate), experts.gate_bias)
    up, kind = biased(to_units(rows, experts.up), experts.up_bias), experts.activation
    hidden = activate(up, kind) if gate is None else gated(gate, up, kind)
    return biased(to_width(hidden, experts.down), experts.down_bias)


# Maximum number of rows of a tile. Larger tiles make faster products and read weights less often; on
# average half a tile per expert is padding.
_MOST_ROWS = 256


def mixture(
    x: jax.Array,
    norm: Norm,
    routing: Routing,
    experts: FeedForward,
    *,
    add_input: bool = False,
    valid_rows: jax.Array | None = None,
    differentiable: bool = False,
) -> jax.Array:
    """The weighted sum of the outputs of each token's experts for `norm(x)`, plus x if `add_input`.

    Args:
      x: `[B, T, D]`.
      routing: routing of these tokens, computed from `norm(x)`.
      experts: weights `[E, F, D]`, all joined, or all separate; biases `[E, F]` and `[E, D]`.
      add_input: whether to add x.
      valid_rows: `[T]` bool, False for padding, which visits no expert.
      differentiable: whether gradients may be computed; then all experts are converted to floats first.

    Returns:
      `[B, T, D]` in the dtype of x.
    """
    total, rows = experts.up.shape[0], x.reshape(-1, x.shape[-1])
    tiles, weights = tiles_and_weights(routing, total, valid_rows=valid_rows, differentiable=differentiable)
    if differentiable:
        visits = differentiable_visits(normalize(rows, norm), tiles, experts)
    else:
        visits = _one_by_one(rows, norm, tiles, experts)
    residual = rows if add_input else None
    out = sum_visits(visits, tiles, weights, residual, differentiable=differentiable)
    return out.reshape(x.shape)


def tiles_and_weights(
    routing: Routing,
    experts: int,
    *,
    valid_rows: jax.Array | None = None,
    differentiable: bool = False,
    loss: float = 0.0,
) -> tuple[Tiles, jax.Array]:
    """The tiles of B·T tokens, and the weights of their pairs, `[B·T, k]` float32.

    Args:
      routing: routing of tokens `[B, T]`.
      valid_rows, differentiable: see `mixture`.
      loss: for nested experts, maximum share of a token's mixture to compute with only high planes (see
        `high_alone`). An expert's number plus E denotes only its high plane, in separate tiles.
    """
    count, choices = routing.ids.size, routing.ids.shape[-1]
    ids, weights = routing.ids.reshape(-1, choices), routing.weights.reshape(-1, choices)
    numbers = experts
    if loss:
        numbers = 2 * experts
        ids = jnp.where(high_alone(weights, loss), ids + np.int32(experts), ids)
    if valid_rows is not None:
        alive = jnp.broadcast_to(valid_rows, routing.ids.shape[:-1]).reshape(-1, 1)
        ids = jnp.where(alive, ids, np.int32(numbers))
        weights = jnp.where(alive, weights, np.float32(0))
    # Smaller tiles if differentiable: each has a copy of its expert, and padding is computed too.
    rows = _rows(count // (4 * experts)) if differentiable else _tile_rows(count, experts)
    return tiles_of(ids, numbers, rows=rows, padded=valid_rows is not None), weights


def sum_visits(
    visits: jax.Array,
    tiles: Tiles,
    weights: jax.Array,
    residual: jax.Array | None = None,
    *,
    differentiable: bool = False,
) -> jax.Array:
    """Each token's sum of its pairs' `visits` `[P, D]` by weights `[M, k]`, plus `residual` `[M, D]` if
    given: `[M, D]`. Native kernels add in the order of pairs, so that a token gets bit for bit what it gets
    alone; they have no gradient."""

    def by_xla(
        visits: jax.Array, place: jax.Array, weights: jax.Array, residual: jax.Array | None
    ) -> jax.Array:
        out = jnp.einsum("mkd,mk->md", visits[place], weights.astype(visits.dtype))
        return out if residual is None else residual + out

    def by_kernel(
        visits: jax.Array, place: jax.Array, weights: jax.Array, residual: jax.Array | None
    ) -> jax.Array:
        wide = None if residual is None else residual.astype(jnp.float32)
        return native_products.sum_visits(visits, place, weights.astype(jnp.float32), wide)

    operands = (visits, tiles.place, weights, residual)
    return by_xla(*operands) if differentiable else natively(by_kernel, by_xla, *operands)


def visit_rows(pairs: int, experts: int) -> int:
    """Rows of the visits of `pairs` pairs, if tiles run one after the other (see `no_visits`)."""
    return pairs + _tile_rows(pairs, experts) - 1


def no_visits(x: jax.Array, tiles: Tiles) -> jax.Array:
    """Visits `[P + tile - 1, D]` of tokens `[M, D]` before any tile has run: zeros. A tile is written whole,
    hence the rows after the last pair."""
    return jnp.zeros((tiles.place.size + tiles.token.shape[1] - 1, x.shape[-1]), x.dtype)


def run_tile(
    x: jax.Array,
    norm: Norm,
    tiles: Tiles,
    number: jax.Array,
    out: jax.Array,
    expert: FeedForward,
) -> jax.Array:
    """Runs one tile, and writes its visits into those of the other tiles (see `no_visits`).

    Args:
      x: tokens `[M, D]`.
      tiles: tiles of these tokens.
      number: int32 scalar, index of the tile.
      out: visits so far.
      expert: weights `[F, D]` of the tile's expert.
    """
    rows, start = x[tiles.token[number]], tiles.start[number]
    size = tiles.size[number]
    made = feed_forward(rows, norm, expert, add_input=False, batch_invariant=True, valid_rows=size)
    # The rows after its own belong to other tiles, which may have run already.
    there = jax.lax.dynamic_slice_in_dim(out, start, len(rows), axis=0)
    own = jnp.arange(len(rows), dtype=jnp.int32)[:, None] < size
    return jax.lax.dynamic_update_slice_in_dim(out, jnp.where(own, made, there), start, axis=0)


def _one_by_one(x: jax.Array, norm: Norm, tiles: Tiles, experts: FeedForward) -> jax.Array:
    """The visits, `[P, D]` or more rows, zero for rows without a tile, given tokens `x` `[M, D]`."""

    def by_loop(x: jax.Array, norm: Norm, tiles: Tiles, experts: FeedForward) -> jax.Array:
        choose = _chooser(experts)

        def tile(i: jax.Array, out: jax.Array) -> jax.Array:
            expert = tiles.expert[i]
            biases = {name: getattr(experts, name) for name in ("up_bias", "down_bias", "gate_bias")}
            own = {name: None if each is None else jnp.asarray(each)[expert] for name, each in biases.items()}

            def run(block: FeedForward) -> jax.Array:
                return run_tile(x, norm, tiles, i, out, dataclasses.replace(block, **own))

            return choose(expert, run)

        out = jax.lax.fori_loop(0, tiles.count, tile, no_visits(x, tiles))
        return out[: tiles.place.size]

    def by_kernel(x: jax.Array, norm: Norm, tiles: Tiles, experts: FeedForward) -> jax.Array:
        return native_products.visits(
            x,
            (tiles.token, tiles.expert, tiles.size, tiles.count),
            _blocks_apart(experts),
            [(each.left, each.right) if isinstance(each, Adapted) else None for each in experts.weights],
            tiles.place.size,
            activation=experts.activation,
            norm_scale=norm.scale,
            norm_eps=norm.eps,
        )

    if norm.bias is None and _blocks_apart(experts):
        return natively(by_kernel, by_loop, x, norm, tiles, experts)
    return by_loop(x, norm, tiles, experts)


def _blocks_apart(experts: FeedForward) -> list[native_products.ExpertBlocks]:
    """Gate, up and down of each expert, if experts are stored separately and each is in blocks of one
    bitwidth; else empty."""
    stacks = [_base(each) for each in experts.weights]
    apart = [each.matrices for each in stacks if isinstance(each, PerExpert)]
    blocks = [tuple(each for each in of if isinstance(each, BlockedArray)) for of in zip(*apart, strict=True)]
    alike = all(len({(each.bits, each.group) for each in of}) == 1 for of in blocks)
    plain = experts.gate is not None and not experts.biased
    return blocks if plain and alike and all(len(of) == 3 for of in blocks) else []  # pyright: ignore


def _chooser(experts: FeedForward) -> Callable[[jax.Array, Callable[[FeedForward], jax.Array]], jax.Array]:
    """A function that calls another with one expert `[F, D]`, by the expert's index. If experts differ in
    bit width, the function is traced once per bit width, not per expert."""
    stacks = [_base(each) for each in experts.weights]
    if not any(isinstance(each, PerExpert | ByForm) for each in stacks):
        weights = experts.weights
        return lambda expert, run: run(_with_weights(experts, [unit_at(each, expert) for each in weights]))
    forms = [by_form(each.matrices) if isinstance(each, PerExpert) else each for each in stacks]
    forms = [each for each in forms if isinstance(each, ByForm)]
    kinds = list(zip(*(each.form for each in forms), strict=True))
    branches = sorted(set(kinds))
    at = [jnp.asarray(each.at, jnp.int32) for each in forms]
    branch_of = jnp.asarray([branches.index(kind) for kind in kinds], jnp.int32)

    def choose(expert: jax.Array, run: Callable[[FeedForward], jax.Array]) -> jax.Array:
        def with_forms(kind: tuple[int, ...]) -> Callable[[], jax.Array]:
            def branch() -> jax.Array:
                parts = []
                for stack, of, number, form in zip(experts.weights, forms, at, kind, strict=True):
                    part = entry_of_form(of, form, number[expert])
                    if isinstance(stack, Adapted):
                        part = Adapted(part, part_entry(stack.left, expert), part_entry(stack.right, expert))
                    parts.append(part)
                return run(_with_weights(experts, parts))

            return branch

        return jax.lax.switch(branch_of[expert], [with_forms(kind) for kind in branches])

    return choose


def _base(stack: Weight) -> Weight:
    """A stack without its adapters."""
    return stack.base if isinstance(stack, Adapted) else stack


def _with_weights(experts: FeedForward, parts: Sequence[Weight]) -> FeedForward:
    """One expert of these weights, in the order of `FeedForward.weights`."""
    *gate, up, down = parts
    return dataclasses.replace(experts, gate=gate[0] if gate else None, up=up, down=down)


def _tile_rows(pairs: int, experts: int) -> int:
    """Rows of a tile: twice an expert's mean share, so that most experts have one tile, which reads its
    weights."""
    return _rows(2 * pairs // experts)


def _rows(pairs: int) -> int:
    """Rows of a tile: the greatest power of two up to `pairs`, within bounds."""
    return min(_MOST_ROWS, 1 << (max(1, pairs).bit_length() - 1))
