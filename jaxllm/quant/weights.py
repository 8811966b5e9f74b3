"""Types of weights besides plain arrays: quantized, adapted, parts of other weights, and matrices in parts of
rows."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.quant.blocks import BlockedArray
from jaxllm.quant.formats import QArray, Shaped


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Bfloat16Bits(Shaped):
    """A bfloat16 weight as its bit patterns, `bits` uint16 of the weight's shape.

    XLA:CPU has no arithmetic and no fused slices in bfloat16: it would convert a whole weight to float32
    before slicing a block of it. Bit patterns can be sliced, then converted exactly.
    """

    bits: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the represented weight."""
        return self.bits.shape


class Changed(Shaped):
    """A weight that wraps another of the same shape, its `base`."""

    base: "Weight"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the represented weight."""
        return self.base.shape


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapted(Changed):
    """A weight and a low-rank change to it: `base + leftᵀ · right` (LoRA, arXiv 2106.09685, eq. 3).

    The rank axis leads in both factors, so that products read them contiguously in either orientation.
    Adapters of lower rank are zero-padded.

    Attributes:
      base: `[*U, D]`, in any form.
      left: `[r, *U]` floats, the scaling included, or `[E, r, R]` in a stack of E matrices `[E, R, D]`.
      right: `[r, D]` floats, or `[E, r, D]` in a stack.
    """

    base: "Weight"
    left: jax.Array
    right: jax.Array

    @property
    def stacked(self) -> bool:
        """Whether each matrix of a stack has factors of its own."""
        return self.right.ndim == 3

    @property
    def change(self) -> jax.Array:
        """The change `leftᵀ · right`, `[*U, D]`."""
        if self.stacked:
            return jnp.matrix_transpose(self.left) @ self.right
        return jnp.moveaxis(self.left, 0, -1) @ self.right


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prefix(Shaped):
    """The first entries of an axis of a weight that stays whole in memory, cut in the step that uses them.

    Attributes:
      axis: 0 for units: compilers for GPU and TPU fuse the slice, whereas one outside of a compiled step is a
        copy. 1 for the rows of each matrix of a stack `[E, R, C]`, the experts of a sub-model: these are not
        a prefix of the stack's memory.
    """

    base: "Weight"
    count: int = dataclasses.field(metadata={"static": True})
    axis: int = dataclasses.field(default=0, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the represented weight."""
        lead, rest = self.base.shape[: self.axis], self.base.shape[self.axis + 1 :]
        return (*lead, self.count, *rest)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OwnProduct(Changed):
    """A weight with a custom product function, to annotate products for a compiler or to observe their
    inputs.

    Attributes:
      base: `[*U, D]`.
      product: called with activations `[M, N]`, the weight as a matrix `[R, C]`, and the axis of the matrix
        that is contracted with N, -1 or -2.
    """

    base: "Weight"
    product: Callable[[jax.Array, jax.Array, int], jax.Array] = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PerExpert(Shaped):
    """A stack of matrices `[E, R, C]` in separate buffers, each with a bitwidth of its own."""

    matrices: tuple["Weight", ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the represented weight."""
        return (len(self.matrices), *self.matrices[0].shape)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ByForm(Shaped):
    """A stack of matrices `[E, R, C]` of several bitwidths, stacked by form: a compiled step has code per
    form, not per matrix.

    Attributes:
      stacks: per form, its matrices `[R, C]` stacked along a new leading axis.
      form: per matrix, the index of its form in `stacks`.
      at: per matrix, its index within the stack of its form.
      shape: `(E, R, C)`.
    """

    stacks: tuple["Weight", ...]
    form: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    at: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})


Weight = (
    jax.Array | QArray | BlockedArray | Bfloat16Bits | Adapted | Prefix | OwnProduct | PerExpert | ByForm
)  # fmt: skip


# Number of elements of a part; larger matrices are read in parts.
PART_NUMBERS = 1 << 22
# Parts begin at multiples of this number of rows, a panel of the native kernels.
_STEP = 16


@dataclasses.dataclass(frozen=True, eq=False)
class RowParts:
    """A matrix as consecutive parts of its rows, each made on demand, so that it is never in memory as a
    whole.

    Embeddings and heads are by far the largest matrices of small models: a vocabulary of 128,000 tokens has
    ten times the numbers of a layer's largest.

    Attributes:
      shape: `[rows, columns]` of the matrix.
      parts: arrays or weights; all but the last have a multiple of 16 rows. Can be iterated once.
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


@dataclasses.dataclass(frozen=True)
class Measured:
    """A float matrix and how it is to be quantized.

    Attributes:
      value: the matrix.
      input_squares: `[inputs]` float32, mean squares of its inputs over a text; None for unknown ones.
      bits: its bits, if they are not those of the format of all weights; 0 if they are.
    """

    value: np.ndarray
    input_squares: np.ndarray | None = None
    bits: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix."""
        return self.value.shape


# Exponent bits by dtype: all of them are set in infinities and NaN, and in no other value.
_EXPONENTS = {"bfloat16": 0x7F80, "float16": 0x7C00}


def all_finite(values: np.ndarray) -> bool:
    """Whether an array has neither NaN nor infinity, without a copy of it. True for every non-float array."""
    if not values.size:
        return True
    exponent = _EXPONENTS.get(values.dtype.name)
    if exponent is not None:
        # As integers: numpy's 16-bit floats are many times slower.
        magnitudes = np.ascontiguousarray(values).view(np.uint16) & 0x7FFF
        return bool(magnitudes.max() < exponent)
    if values.dtype.kind != "f":
        return True
    # Minimum and maximum are NaN if any value is, and need no temporary array.
    return bool(np.isfinite(values.min()) and np.isfinite(values.max()))
