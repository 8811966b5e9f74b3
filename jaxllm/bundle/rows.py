"""Some rows of a vocabulary's table in a bundle: where they stand in the file, and the weight that they are.

A table may be read by pieces, or row by row, where all of it would take too much memory. Quantized rows come
by panels, as they are stored.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxllm.bundle.layout import DTYPES, Extent, Tensor
from jaxllm.errors import ConfigError
from jaxllm.quant import PANEL


def row_step(table: Tensor) -> int:
    """Rows that stand together: pieces begin at multiples of it."""
    return 1 if table.scale is None else PANEL


def rows_at(table: Tensor, first: int, count: int) -> tuple[Extent, ...]:
    """Where rows `[first, first + count)` stand: their data, and their scales if they are quantized.

    Args:
      table: of a matrix contracted along its last axis.
      first: a multiple of `row_step`.
      count: up to the next multiple all are there.

    Raises:
      ConfigError: the rows do not begin where rows do.
    """
    step = row_step(table)
    if first % step:
        raise ConfigError(f"rows of this table come by {step}, and {first} is no multiple")
    extents = (table.data,) if table.scale is None else (table.data, table.scale)
    found = []
    for each in extents:
        # Scales of whole rows are one for each row; all else leads with rows or panels of them.
        by_row = len(each.shape) == 1 or table.scale is None
        start, stop = (first, first + count) if by_row else (first // step, -(-(first + count) // step))
        if by_row and step > 1:
            stop = -(-stop // step) * step
        row_bytes = int(np.prod(each.shape[1:], dtype=np.int64)) * DTYPES[each.dtype].itemsize
        found.append(Extent(each.offset + start * row_bytes, each.dtype, (stop - start, *each.shape[1:])))
    return tuple(found)


def rows_alone(table: Tensor, extents: Sequence[Extent]) -> Tensor:
    """The entry of a table that has only the rows that stand at `extents` (see `rows_at`)."""
    return dataclasses.replace(table, data=extents[0], scale=extents[1] if len(extents) > 1 else None)
