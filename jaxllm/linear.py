"""The one door for every matrix product of a model.

Weights lead with their unit axes (`[*U, D]`: a kv-group's rows, an MLP neuron's row, a vocabulary
entry), whichever side of the product they are on, so that a prefix of units is a prefix of memory.
Hence two orientations:

- `to_units`:   x `[..., D]`  with w `[*U, D]` -> `[..., *U]` (q, k, v, gate, up, head)
- `from_units`: h `[..., *U]` with w `[*U, D]` -> `[..., D]`  (o, down)

Models call these and never know whether a weight is dense or quantized, nor which kernel runs.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxllm.kernels import converted
from jaxllm.quant import QArray, Weight, dequantize, take_rows


def to_units(x: jax.Array, weight: Weight, bias: jax.Array | None = None) -> jax.Array:
    """Contracts the last axis of `x` `[..., D]` with that of `weight` `[*U, D]`: `[..., *U]`."""
    units, width = weight.shape[:-1], weight.shape[-1]
    rows = x.reshape(-1, width)

    def whole(rows: jax.Array, weight: Weight) -> jax.Array:
        dense = dequantize(weight, x.dtype).reshape(-1, width)
        return jax.lax.dot_general(rows, dense, (((1,), (1,)), ((), ())))

    def by_blocks(rows: jax.Array, weight: Weight) -> jax.Array:
        return converted.rows_product(rows, _flat(weight))

    out = _product(rows, weight, whole=whole, by_blocks=by_blocks)
    out = out.reshape(*x.shape[:-1], *units)
    return out if bias is None else out + bias.astype(out.dtype)


def from_units(h: jax.Array, weight: Weight, bias: jax.Array | None = None) -> jax.Array:
    """Contracts the unit axes of `h` `[..., *U]` with those of `weight` `[*U, D]`: `[..., D]`."""
    units, width = weight.shape[:-1], weight.shape[-1]
    batch = h.shape[: h.ndim - len(units)]
    rows = h.reshape(-1, math.prod(units))

    def whole(rows: jax.Array, weight: Weight) -> jax.Array:
        dense = dequantize(weight, h.dtype).reshape(-1, width)
        return jax.lax.dot_general(rows, dense, (((1,), (0,)), ((), ())))

    def by_blocks(rows: jax.Array, weight: Weight) -> jax.Array:
        if isinstance(weight, QArray) and weight.ndim == 3:
            return converted.stacked_reduction_product(rows.reshape(-1, *units), weight)
        return converted.reduction_product(rows, _flat(weight))

    out = _product(rows, weight, whole=whole, by_blocks=by_blocks).reshape(*batch, width)
    return out if bias is None else out + bias.astype(out.dtype)


def embed(tokens: jax.Array, table: Weight, dtype: jnp.dtype) -> jax.Array:
    """Rows of `table` `[V, D]` at `tokens` (any shape, in range): `[*tokens.shape, D]` in `dtype`."""
    return dequantize(take_rows(table, tokens), dtype)


def _product(
    rows: jax.Array,
    weight: Weight,
    *,
    whole: Callable[[jax.Array, Weight], jax.Array],
    by_blocks: Callable[[jax.Array, Weight], jax.Array],
) -> jax.Array:
    """The product by the path that suits the weight and the platform the graph is compiled for."""
    stored_as_is = isinstance(weight, jax.Array) and weight.dtype == rows.dtype
    if stored_as_is or converted.fits_one_block(weight, rows.dtype):
        return whole(rows, weight)
    return jax.lax.platform_dependent(rows, weight, cpu=by_blocks, default=whole)


def _flat(weight: Weight) -> Weight:
    """The weight as a matrix `[R, C]`."""
    return jax.tree.map(lambda part: part.reshape(-1, part.shape[-1]), weight)
