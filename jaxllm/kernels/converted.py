"""Products for platforms without native kernels, and the choice of an implementation by platform.

XLA:CPU writes a whole converted weight (int8, int4 or bfloat16 to float32) to memory before it multiplies.
For one token this is eight times slower than loading the weight, and with the conversions of all layers
live at once it needs the memory of a float32 model. A loop over blocks of rows converts what fits the
core's own cache and multiplies it there. Accelerators fuse the conversion into the product and do not need
this.

The loops' carries start from a value of the activations instead of zeros. The value is never read, but it
keeps XLA from allocating the carries of all layers at the start of the step.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxllm.kernels import native
from jaxllm.kernels.native import TableArray
from jaxllm.quant import QArray, Weight, dequantize
from jaxllm.quant.parts import Part, StackedArray, map_parts, part_entry, part_rows, taken

Out = TypeVar("Out")
# Converted bytes per block: they stay in a core's second-level cache next to the activations.
BLOCK_BYTES = 1 << 19


def fits_one_block(weight: Weight, dtype: DTypeLike) -> bool:
    """Whether the weight, converted to `dtype`, is one block, so that a loop is not needed."""
    return math.prod(weight.shape[:-1]) <= _block_rows(weight, dtype)


def rows_product(x: jax.Array, weight: Weight) -> jax.Array:
    """`x` `[M, C]` times rows of `weight` `[R, C]`: `[M, R]` in x's dtype."""
    count, block_rows = weight.shape[0], _block_rows(weight, x.dtype)
    if count <= block_rows:
        return _contract(x, dequantize(weight, x.dtype), 1)

    def block(i: jax.Array, out: jax.Array) -> jax.Array:
        # The last block overlaps the one before instead of being shorter; overlapping rows get the same
        # values.
        start = jnp.minimum(i * block_rows, count - block_rows)
        part = _contract(x, dequantize(_rows(weight, start, block_rows), x.dtype), 1)
        return jax.lax.dynamic_update_slice_in_dim(out, part, start, axis=1)

    out = jnp.broadcast_to(x[0, 0], (x.shape[0], count))
    return jax.lax.fori_loop(0, -(-count // block_rows), block, out)


def reduction_product(h: jax.Array, weight: Weight) -> jax.Array:
    """`h` `[M, R]` times `weight` `[R, C]`, contracted over its rows: `[M, C]` in h's dtype."""
    count, block_rows = weight.shape[0], _block_rows(weight, h.dtype)
    if count <= block_rows:
        return _contract(h, dequantize(weight, h.dtype), 0)

    def block(i: jax.Array, total: jax.Array) -> jax.Array:
        start = jnp.minimum(i * block_rows, count - block_rows)
        # Rows that the previous block has already added are zero here.
        fresh = start + jnp.arange(block_rows, dtype=jnp.int32) >= i * block_rows
        part = jax.lax.dynamic_slice_in_dim(h, start, block_rows, axis=1)
        part = jnp.where(fresh, part, jnp.zeros((), h.dtype))
        part = _contract(part, dequantize(_rows(weight, start, block_rows), h.dtype), 0)
        return jnp.where(i == 0, part, total + part)

    total = jnp.broadcast_to(h[0, 0], (h.shape[0], weight.shape[-1]))
    return jax.lax.fori_loop(0, -(-count // block_rows), block, total)


def stacked_reduction_product(h: jax.Array, weight: QArray) -> jax.Array:
    """`h` `[M, K, R]` times `weight` `[K, R, C]`, contracted over K and R: `[M, C]` in h's dtype.

    For weights whose scales run along R within each of the K units, which rows of the flattened weight
    cannot express.
    """

    def unit(k: jax.Array, total: jax.Array) -> jax.Array:
        rows = map_parts(lambda part: part_entry(part, k), weight)
        part = jax.lax.dynamic_index_in_dim(h, k, axis=1, keepdims=False)
        part = reduction_product(part, rows)
        return jnp.where(k == 0, part, total + part)

    total = jnp.broadcast_to(h[0, 0, 0], (h.shape[0], weight.columns))
    return jax.lax.fori_loop(0, weight.shape[0], unit, total)


def _block_rows(weight: Weight, dtype: DTypeLike) -> int:
    return max(1, BLOCK_BYTES // (weight.shape[-1] * jnp.dtype(dtype).itemsize))


def _contract(x: jax.Array, dense: jax.Array, axis: int) -> jax.Array:
    return jax.lax.dot_general(x, dense, (((1,), (axis,)), ((), ())))


def _rows(weight: Weight, start: jax.Array, count: int) -> Weight:
    """Rows `[start, start + count)` of a `[R, C]` weight; XLA fuses the slice with its use."""
    if not isinstance(weight, QArray):
        return map_parts(lambda part: part_rows(part, start, count), weight)
    data = part_rows(weight.data, start, count)
    if weight.axis == -2 and weight.group == 0:
        return dataclasses.replace(weight, data=data, scale=taken(weight.scale))

    def of_groups(groups: Part) -> Any:
        """Rows of scales or minima; each row's own of its group, since a block may begin within one."""
        if weight.axis == -1:
            return part_rows(groups, start, count)
        rows = (start + jnp.arange(count, dtype=jnp.int32)) // weight.group
        whole = groups.array if isinstance(groups, StackedArray) else groups
        return jnp.take(whole, rows, axis=0, mode="clip")

    minimum = None if weight.minimum is None else of_groups(weight.minimum)
    group = weight.group if weight.axis == -1 else 1
    return dataclasses.replace(weight, data=data, scale=of_groups(weight.scale), minimum=minimum, group=group)


def natively(by_kernel: Callable[..., Out], by_xla: Callable[..., Out], x: jax.Array, *operands: Any) -> Out:
    """Calls `by_kernel` with x in float32 if the step is compiled for a CPU with native kernels, else
    `by_xla`. Floats of the result have the dtype of x. Operands in a weight table require `by_kernel`,
    because only it reads them."""
    in_table = any(map(_in_table, jax.tree.leaves(operands, is_leaf=_in_table)))
    # XLA cannot partition an FFI call over the devices of a mesh.
    elsewhere = not native.kernels().native or jax.sharding.get_abstract_mesh().size > 1
    if elsewhere and not in_table:
        return by_xla(x, *operands)
    dtype = x.dtype

    def typed(out: jax.Array) -> jax.Array:
        return out.astype(dtype) if jnp.issubdtype(out.dtype, jnp.floating) else out

    def widened(x: jax.Array, *operands: Any) -> Out:
        return jax.tree.map(typed, by_kernel(x.astype(jnp.float32), *operands))

    return widened(x, *operands) if in_table else on_platform(widened, by_xla, (x, *operands))


def _in_table(operand: Any) -> bool:
    return isinstance(operand, TableArray)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def on_platform(on_cpu: Callable[..., Out], elsewhere: Callable[..., Out], operands: tuple[Any, ...]) -> Out:
    """Calls `on_cpu` if the step is compiled for a CPU, else `elsewhere`; both must compute the same
    function.

    The gradient is that of `elsewhere`, because a kernel has none. Neither function may close over arrays.
    """
    return jax.lax.platform_dependent(*operands, cpu=on_cpu, default=elsewhere)


def _forward(
    on_cpu: Callable[..., Out], elsewhere: Callable[..., Out], operands: tuple[Any, ...]
) -> tuple[Out, tuple[Any, ...]]:
    return on_platform(on_cpu, elsewhere, operands), operands


def _backward(
    on_cpu: Callable[..., Any], elsewhere: Callable[..., Any], operands: tuple[Any, ...], cotangent: Any
) -> tuple[Any]:
    del on_cpu
    return (jax.vjp(elsewhere, *operands)[1](cotangent),)


on_platform.defvjp(_forward, _backward)
