"""Locates some rows of an embedding or head matrix in a bundle, to read them without the rest.

Such a matrix may be read by pieces or row by row if it is too large for memory. Quantized rows are stored
and read by panels.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxllm.bundle.layout import DTYPES, Extent, Tensor
from jaxllm.errors import ConfigError
from jaxllm.quant import PANEL


def row_step(matrix: Tensor) -> int:
    """The number of rows of a panel: pieces begin at multiples of it. 1 if the matrix is not quantized."""
    return 1 if matrix.scale is None else PANEL


def rows_at(matrix: Tensor, first: int, count: int) -> tuple[Extent, ...]:
    """The extents of rows `[first, first + count)`: their data, and their scales if they are quantized.

    Args:
      matrix: entry of a matrix contracted along its last axis.
      first: a multiple of `row_step`.
      count: number of rows; the extents are rounded up to whole panels.

    Raises:
      ConfigError: `first` is no multiple of `row_step`.
    """
    step = row_step(matrix)
    if first % step:
        raise ConfigError(f"rows of this matrix are stored by {step}, and {first} is no multiple of it")
    extents = (matrix.data,) if matrix.scale is None else (matrix.data, matrix.scale)
    found = []
    for each in extents:
        # Scales without groups are one per row; other arrays lead with rows, or with panels if quantized.
        by_row = len(each.shape) == 1 or matrix.scale is None
        start, stop = (first, first + count) if by_row else (first // step, -(-(first + count) // step))
        if by_row and step > 1:
            stop = -(-stop // step) * step
        row_bytes = int(np.prod(each.shape[1:], dtype=np.int64)) * DTYPES[each.dtype].itemsize
        found.append(Extent(each.offset + start * row_bytes, each.dtype, (stop - start, *each.shape[1:])))
    return tuple(found)


def rows_alone(matrix: Tensor, extents: Sequence[Extent]) -> Tensor:
    """The entry of a matrix of only the rows at `extents` (see `rows_at`)."""
    return dataclasses.replace(matrix, data=extents[0], scale=extents[1] if len(extents) > 1 else None)
