"""Dequantizes weights of every storage type, whole or by rows."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxllm.axes import Axes
from jaxllm.quant.blocks import (
    BlockedArray,
    blocked_levels,
    blocked_minima,
    blocked_scales,
    take_blocked_inputs,
    take_blocked_rows,
)
from jaxllm.quant.formats import QArray, scaled, unpack
from jaxllm.quant.parts import entry_of_form, sliced, taken
from jaxllm.quant.weights import (
    Adapted,
    Apart,
    Bfloat16Bits,
    ByForm,
    Changed,
    OwnProduct,
    Prefix,
    Weight,
)


def dequantize(weight: Weight, dtype: DTypeLike) -> jax.Array:
    """The weight as floats `[..., R, C]` in `dtype`, any adapter included."""
    weight = taken(weight)
    if isinstance(weight, Adapted):
        return dequantize(weight.base, dtype) + weight.change.astype(dtype)
    if isinstance(weight, OwnProduct):
        return dequantize(weight.base, dtype)
    if isinstance(weight, Apart):
        return jnp.stack([dequantize(each, dtype) for each in weight.matrices])
    if isinstance(weight, ByForm):
        each = [entry_of_form(weight, *place) for place in zip(weight.form, weight.at, strict=True)]
        return jnp.stack([dequantize(matrix, dtype) for matrix in each])
    if isinstance(weight, Prefix) and weight.axis:
        return dequantize(weight.base, dtype)[:, : weight.count]
    if isinstance(weight, Prefix):
        return dequantize(sliced(weight), dtype)
    if isinstance(weight, Bfloat16Bits):
        # A bfloat16 is the upper half of a float32.
        wide = weight.bits.astype(jnp.uint32) << np.uint32(16)
        return jax.lax.bitcast_convert_type(wide, jnp.float32).astype(dtype)
    if isinstance(weight, BlockedArray):
        levels, scale = blocked_levels(weight).astype(dtype), blocked_scales(weight)
        minimum = blocked_minima(weight)
    elif isinstance(weight, QArray):
        scale, minimum = weight.scale, weight.minimum
        levels = unpack(weight.data, weight.columns, weight.bits, dtype)
    else:
        return weight.astype(dtype)
    return scaled(levels, scale, minimum, weight.group, weight.axis)


def embedding_rows(weight: Weight, rows: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Rows of a matrix `[R, C]` contracted along its last axis: `[*rows.shape, C]` in `dtype`; `rows`
    (any shape) in range."""
    if isinstance(weight, Adapted):
        low = jnp.moveaxis(jnp.take(weight.left, rows, axis=1, mode="clip"), 0, -1).astype(dtype)
        return embedding_rows(weight.base, rows, dtype) + low @ weight.right.astype(dtype)
    if isinstance(weight, OwnProduct):
        return embedding_rows(weight.base if weight.rows is None else weight.rows, rows, dtype)
    if isinstance(weight, BlockedArray):
        levels, scale, minimum = take_blocked_rows(weight, rows)
        return scaled(levels.astype(dtype), scale, minimum, weight.group, -1)

    def take(part: jax.Array) -> jax.Array:
        return jnp.take(part, rows, axis=0, mode="clip")

    return dequantize(jax.tree.map(take, weight), dtype)


def contracted_rows(weight: Weight, index: jax.Array, *, last: bool) -> jax.Array:
    """The weights of some inputs of a product as floats, without adapters.

    Of a weight in blocks only the blocks of these inputs are read.

    Args:
      weight: `[*U, D]`.
      index: `[N]` int32, inputs in range: along the last axis if `last`, else along all other axes together.
      last: whether the last axis is contracted.

    Returns:
      `[N, outputs]` float32.
    """
    Axes("contracted_rows").check(jnp.int32, "N", index=index)
    while isinstance(weight, Changed):
        weight = weight.base
    weight = taken(weight)
    if isinstance(weight, BlockedArray):
        return take_blocked_inputs(weight, index)
    if isinstance(weight, QArray) and weight.bits == 8 and not weight.group:
        rows, columns = weight.data.shape[-2:]
        if last:
            columns_of = weight.data.reshape(-1, columns)[:, index].T
            return columns_of.astype(jnp.float32) * weight.scale.reshape(-1)
        scale = weight.scale.reshape(-1, columns)[index // rows]
        return weight.data.reshape(-1, columns)[index].astype(jnp.float32) * scale
    dense = dequantize(weight, jnp.dtype(jnp.float32)).reshape(-1, weight.shape[-1])
    return dense[:, index].T if last else dense[index]
