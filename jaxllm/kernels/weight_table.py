"""Weights by address: a table of the arrays of all layers, which native kernels look up by handle and row.

A compiled step takes the handle, 8 bytes, instead of hundreds of arrays, and its body can be a loop over
layers. A kernel finds an array's address, type and shape in the table and checks them as those of an operand;
a handle of no open table is an error before the kernel runs. Handles are worthless in other processes, so
that buckets kept on disk hold none.
"""

import dataclasses
import weakref
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.kernels import native


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TableArray:
    """An array in a row of a weight table, in the place of an array as an operand of native kernels.

    Attributes:
      table: `[2]` uint32, the handle, lower half first.
      row: int32 scalar.
      column: of the table.
      shape, dtype: of the array. Kernels go by those of the table.
    """

    table: jax.Array
    row: jax.Array
    column: int = dataclasses.field(metadata={"static": True})
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    dtype: np.dtype = dataclasses.field(metadata={"static": True})

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)


# XLA on a CPU uses memory of this alignment without a copy.
_ALIGN_BYTES = 64
# An array as a native kernel takes it.
Operand = jax.Array | TableArray


class WeightTable:
    """An open weight table. It holds its arrays, and closes when the memory of `operand` is free.

    Attributes:
      operand: `[2]` uint32, the handle as compiled steps take it, aligned so that a CPU device may use its
        memory: then the table is open until the last step with it has ended.
    """

    def __init__(self, rows: Sequence[Sequence[np.ndarray | jax.Array | None]]) -> None:
        """Opens a table.

        Args:
          rows: of as many arrays each, which are not copied: C-contiguous, of at most 5 dimensions, of
            8-bit integers, bool, int32, uint16, float16, bfloat16 or float32. None is no array.

        Raises:
          ValueError: an array has another form, or 4,096 tables are open.
          BufferError: an array is not contiguous.
        """
        handle = native.open_table([[_buffer(each) for each in row] for row in rows])
        memory = np.zeros(2 * _ALIGN_BYTES, np.uint8)
        start = -memory.ctypes.data % _ALIGN_BYTES
        self.operand = memory[start : start + 8].view(np.uint32)
        self.operand[:] = handle & 0xFFFFFFFF, handle >> 32
        self._finalizer = weakref.finalize(memory, native.close_table, handle)

    def close(self) -> None:
        """Closes the table when no kernel reads it any more: later kernels fail, and the arrays are
        released."""
        self._finalizer()


def _buffer(array: np.ndarray | jax.Array | None) -> np.ndarray | None:
    if array is None:
        return None
    found = np.asarray(array)
    return found.view(np.uint16) if found.dtype == jnp.bfloat16 else found
