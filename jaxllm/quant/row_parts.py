"""A matrix that comes in parts of its rows, so that all of it is never in memory.

Embeddings and heads are by far the largest matrices of small models: a vocabulary of 128,000 tokens has ten
times the numbers of a layer's largest.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

# Numbers of a part, of which a matrix that has more than one is read in parts.
PART_NUMBERS = 1 << 22
# Parts begin at multiples of so many rows, those of a panel of the native kernels.
_STEP = 16


@dataclasses.dataclass(frozen=True, eq=False)
class RowParts:
    """A matrix as consecutive parts of its rows, each made when it is asked for.

    Attributes:
      shape: `[rows, columns]` of the matrix.
      parts: arrays or weights; all but the last have a multiple of 16 rows. They can be taken once.
    """

    shape: tuple[int, ...]
    parts: Iterable[Any]

    def map(self, change: Callable[[Any], Any]) -> "RowParts":
        """The same matrix of changed parts."""
        return RowParts(self.shape, map(change, self.parts))


def part_rows(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """The first and last row (exclusive) of each part of a matrix; one if it has fewer numbers than a
    part."""
    step = max(_STEP, PART_NUMBERS // max(1, columns) // _STEP * _STEP)
    for first in range(0, rows, step):
        yield first, min(rows, first + step)
