"""Computes a mixture of experts: every token goes through exactly its chosen experts, none is dropped.

Each (token, chosen expert) is a pair. Pairs are sorted by expert and cut into tiles of up to `tile` pairs of
one expert, so that a tile is an ordinary feed-forward block over a few tokens. There are at most `pairs/tile
+ E` tiles whatever the router chooses, which makes shapes static without a capacity that could overflow (the
idea of MegaBlocks, arXiv 2211.15841, there with block-sparse kernels). The outputs of a tile, its visits, are
stored in the order of pairs, so that visits take no more memory than pairs. Tiles run in one of two modes:

- all at once, as products with a batch axis over tiles: differentiable, for training on CPUs, and elsewhere
  without tiles (`differentiable.py`);
- one after the other: only chosen experts are read, whatever the storage type of their weights, so that a
  decode step reads k of E. Native kernels run all tiles in one call if experts are stored apart. A token's
  output does not depend on other tokens, nor on how many share its tile: products are always `rowwise` (see
  `linear.py`), so that prefill, tree and decode give it bit for bit the same.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import Activation
from jaxllm.experts.differentiable import differentiable_visits
from jaxllm.experts.routing import Routing, high_alone
from jaxllm.experts.tiles import Tiles, tiles_of
from jaxllm.kernels import native_experts
from jaxllm.kernels.platforms import natively
from jaxllm.nn.linear import FeedForward, feed_forward
from jaxllm.nn.norms import Norm, normalize
from jaxllm.quant import (
    Adapted,
    Apart,
    BlockedArray,
    ByForm,
    Weight,
    by_form,
    entry_of_form,
    unit_at,
)
from jaxllm.quant.stacked import part_entry

# The most rows of a tile. Larger tiles make faster products and read weights less often; on average half a
# tile per expert is padding.
_MOST_ROWS = 256


def mixture(
    x: jax.Array,
    norm: Norm,
    routing: Routing,
    experts: FeedForward,
    *,
    add_input: bool = False,
    live: jax.Array | None = None,
    differentiable: bool = False,
) -> jax.Array:
    """The weighted sum of the outputs of each token's experts for `norm(x)`, plus x if `add_input`.

    Args:
      x: `[B, T, D]`.
      norm: of the block.
      routing: of these tokens, computed from `norm(x)`.
      experts: weights `[E, F, D]`, all together, or all apart; biases `[E, F]` and `[E, D]`.
      add_input: whether x is added.
      live: `[T]` bool, False for padding, which visits no expert.
      differentiable: whether gradients may be taken; then all experts are converted to floats first.

      Returns:
      `[B, T, D]` in the dtype of x.
    """
    total, rows = experts.up.shape[0], x.reshape(-1, x.shape[-1])
    tiles, weights = tiles_and_weights(routing, total, live=live, differentiable=differentiable)
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
    live: jax.Array | None = None,
    differentiable: bool = False,
    loss: float = 0.0,
) -> tuple[Tiles, jax.Array]:
    """The tiles of B·T tokens, and the weights of their pairs, `[B·T, k]` float32.

    Args:
      routing: of tokens `[B, T]`.
      experts: number of experts (E).
      live, differentiable: see `mixture`.
      loss: of nested experts, the share of a token's mixture that may be computed by high planes alone (see
        `high_alone`). An expert's number plus E stands for its high plane alone, in tiles of its own.
    """
    count, choices = routing.ids.size, routing.ids.shape[-1]
    ids, weights = routing.ids.reshape(-1, choices), routing.weights.reshape(-1, choices)
    numbers = experts
    if loss:
        numbers = 2 * experts
        ids = jnp.where(high_alone(weights, loss), ids + np.int32(experts), ids)
    if live is not None:
        alive = jnp.broadcast_to(live, routing.ids.shape[:-1]).reshape(-1, 1)
        ids = jnp.where(alive, ids, np.int32(numbers))
        weights = jnp.where(alive, weights, np.float32(0))
    # Smaller tiles if differentiable: each has a copy of its expert, and padding is computed too.
    rows = _rows(count // (4 * experts)) if differentiable else _tile_rows(count, experts)
    return tiles_of(ids, numbers, rows=rows, padded=live is not None), weights


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

    def by_xla(visits: jax.Array, place: jax.Array, weights: jax.Array, residual: jax.Array | None):
        out = jnp.einsum("mkd,mk->md", visits[place], weights.astype(visits.dtype))
        return out if residual is None else residual + out

    def by_kernel(visits: jax.Array, place: jax.Array, weights: jax.Array, residual: jax.Array | None):
        wide = None if residual is None else residual.astype(jnp.float32)
        return native_experts.sum_visits(visits, place, weights.astype(jnp.float32), wide)

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
      norm: of the block.
      tiles: of these tokens.
      number: int32 scalar, index of the tile.
      out: visits so far.
      expert: weights `[F, D]` of the tile's expert.
    """
    rows, start = x[tiles.token[number]], tiles.start[number]
    size = tiles.size[number]
    made = feed_forward(rows, norm, expert, add_input=False, rowwise=True, live=size)
    # The rows after its own belong to other tiles, which may have run already.
    there = jax.lax.dynamic_slice_in_dim(out, start, len(rows), axis=0)
    own = jnp.arange(len(rows), dtype=jnp.int32)[:, None] < size
    return jax.lax.dynamic_update_slice_in_dim(out, jnp.where(own, made, there), start, axis=0)


def run_stored(
    x: jax.Array,
    norm: Norm,
    tiles: Tiles,
    actions: jax.Array,
    weights: native_experts.StoredExperts,
    before: tuple[jax.Array, jax.Array],
    *,
    activation: Activation,
) -> tuple[jax.Array, jax.Array]:
    """Runs some tiles in one call of a native kernel, by experts found by address.

    Args:
      x: tokens `[M, D]`.
      norm: of the block, without a bias.
      tiles: of these tokens.
      actions: `[n]` int32, what is done with each tile (see `native_experts.stored_visits`).
      weights: of the layer.
      before: visits so far (see `no_visits`), and what was begun.
      activation: of the experts.
    """
    out, begun = before
    found, begun = native_experts.stored_visits(
        x.astype(jnp.float32),
        (tiles.token, tiles.expert, tiles.size, tiles.count),
        actions,
        weights,
        out.astype(jnp.float32),
        begun,
        activation=activation,
        norm_scale=norm.scale,
        norm_eps=norm.eps,
    )
    return found.astype(out.dtype), begun


def _one_by_one(x: jax.Array, norm: Norm, tiles: Tiles, experts: FeedForward) -> jax.Array:
    """The visits, `[P, D]` or more rows, zero where no tile writes, given tokens `x` `[M, D]`."""

    def by_loop(x: jax.Array, norm: Norm, tiles: Tiles, experts: FeedForward) -> jax.Array:
        choose = _chooser(experts)

        def tile(i: jax.Array, out: jax.Array) -> jax.Array:
            def run(block: FeedForward) -> jax.Array:
                return run_tile(x, norm, tiles, i, out, _with_biases(block, experts, tiles.expert[i]))

            return choose(tiles.expert[i], run)

        out = jax.lax.fori_loop(0, tiles.count, tile, no_visits(x, tiles))
        return out[: tiles.place.size]

    def by_kernel(x: jax.Array, norm: Norm, tiles: Tiles, experts: FeedForward) -> jax.Array:
        return native_experts.visits(
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


def _blocks_apart(experts: FeedForward) -> list[native_experts.ExpertBlocks]:
    """Gate, up and down of each expert, if experts are stored apart and each is in blocks of one bitwidth;
    else empty."""
    stacks = [_base(each) for each in experts.weights]
    apart = [each.matrices for each in stacks if isinstance(each, Apart)]
    blocks = [tuple(each for each in of if isinstance(each, BlockedArray)) for of in zip(*apart, strict=True)]
    alike = all(len({(each.bits, each.group) for each in of}) == 1 for of in blocks)
    plain = experts.gate is not None and not experts.biased
    return blocks if plain and alike and all(len(of) == 3 for of in blocks) else []  # pyright: ignore


def _chooser(experts: FeedForward) -> Callable[[jax.Array, Callable[[FeedForward], jax.Array]], jax.Array]:
    """A function that calls another with one expert `[F, D]`, by the expert's index. If experts differ in
    bitwidth, the function is traced once per bitwidth, not per expert."""
    stacks = [_base(each) for each in experts.weights]
    if not any(isinstance(each, Apart | ByForm) for each in stacks):
        return lambda expert, run: run(_each_weight(experts, lambda stack: unit_at(stack, expert)))
    forms = [by_form(each.matrices) if isinstance(each, Apart) else each for each in stacks]
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


def _each_weight(experts: FeedForward, take: Callable[[Weight], Weight]) -> FeedForward:
    """One expert `[F, D]`: `take` applied to each weight of a stack."""
    gate = None if experts.gate is None else take(experts.gate)
    return dataclasses.replace(experts, up=take(experts.up), down=take(experts.down), gate=gate)


def _with_biases(block: FeedForward, experts: FeedForward, expert: jax.Array) -> FeedForward:
    """A block with one expert's biases, of those of all."""
    biases = {name: getattr(experts, name) for name in ("up_bias", "down_bias", "gate_bias")}
    own = {name: None if each is None else jnp.asarray(each)[expert] for name, each in biases.items()}
    return dataclasses.replace(block, **own)


def _with_weights(experts: FeedForward, parts: Sequence[Weight]) -> FeedForward:
    """One expert of these weights, in the order of `FeedForward.weights`."""
    *gate, up, down = parts
    return dataclasses.replace(experts, gate=gate[0] if gate else None, up=up, down=down)


def _tile_rows(pairs: int, experts: int) -> int:
    """Rows of a tile: twice an expert's mean share: most experts have one tile, which reads its weights."""
    return _rows(2 * pairs // experts)


def _rows(pairs: int) -> int:
    """Rows of a tile: the greatest power of two up to `pairs`, within bounds."""
    return min(_MOST_ROWS, 1 << (max(1, pairs).bit_length() - 1))
