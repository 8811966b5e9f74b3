"""Computes the visits of a mixture's experts so that gradients may be taken, for training.

On CPUs tiles run all at once, as products with a batch axis over tiles. Elsewhere
`jax.lax.ragged_dot_general` multiplies each expert's pairs with its weights: no expert is copied for a tile,
and no row is padding. On CPUs XLA would compute that with every expert for every pair.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import RaggedDotDimensionNumbers

from jaxllm.experts.tiles import Tiles
from jaxllm.nn.layers import activate, gated
from jaxllm.nn.linear import FeedForward
from jaxllm.quant import Weight, dequantize

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
    `[E, F, D]`; zero or anything for pairs without an expert, whose weight is zero."""
    if tiles.token.shape[1] == 1 and tiles.place.size <= experts.up.shape[0]:
        # So few pairs are not sorted.
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
