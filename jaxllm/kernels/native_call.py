"""Calls native kernels from compiled steps, with operands that are arrays or entries of a weight table.

See `native.py` for the library, and `native_products.py`, `native_attention.py`, `native_experts.py` and
`native_shadow.py` for the kernels.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.kernels.native import target
from jaxllm.kernels.weight_table import Operand, TableArray


def call(
    name: str,
    results: Any,
    buffers: Sequence[Any],
    operands: Sequence[Operand],
    *,
    aliases: Any = None,
    **attributes: Any,
) -> Any:
    """Calls a kernel.

    Args:
      name: of the kernel.
      results: shapes and dtypes of its results.
      buffers: its first operands.
      operands: the others, each an array or an entry of a weight table; all entries are of one row.
      aliases: index of a buffer -> index of the result that takes its memory.
      attributes: static arguments.
    """
    columns = [each.column if isinstance(each, TableArray) else -1 for each in operands]
    entries = [each for each in operands if isinstance(each, TableArray)]
    arrays = [each for each in operands if not isinstance(each, TableArray)]
    table, row = jnp.zeros((0,), jnp.uint32), jnp.zeros((0,), jnp.int32)
    if entries:
        table, row = entries[0].table, entries[0].row
    kernel = jax.ffi.ffi_call(target(name), results, input_output_aliases=aliases)
    return kernel(*buffers, table, row, *arrays, **attributes, columns=np.array(columns, np.int64))


def value(array: Operand) -> jax.Array:
    """The array itself, for XLA's own code: an array of a table is copied."""
    if not isinstance(array, TableArray):
        return array
    # Kernels know the bits of bfloat16.
    halves = array.dtype == jnp.bfloat16
    result = jax.ShapeDtypeStruct(array.shape, jnp.uint16 if halves else array.dtype)
    copied = call("copy", result, (), (array,))
    return jax.lax.bitcast_convert_type(copied, jnp.bfloat16) if halves else copied
