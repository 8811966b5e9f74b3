"""What a weight may be, beside an array of floats or integers."""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxllm.quant.blocks import (
    BlockedArray,
)
from jaxllm.quant.formats import QArray


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Bfloat16Bits:
    """A bfloat16 weight as its bit patterns, `bits` uint16 of the weight's shape.

    XLA:CPU has no arithmetic and no fused slices in bfloat16: it would convert a whole weight to
    float32 before it takes a block of it. Bit patterns can be sliced, then widened exactly.
    """

    bits: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight this stands for."""
        return self.bits.shape

    @property
    def ndim(self) -> int:
        """Rank of the weight."""
        return self.bits.ndim


class Changed:
    """A weight that stands for another of its shape, its `base`."""

    base: "Weight"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight this stands for."""
        return self.base.shape

    @property
    def ndim(self) -> int:
        """Rank of the weight."""
        return self.base.ndim


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapted(Changed):
    """A weight and a low-rank change to it: `base + leftᵀ · right` (LoRA, arXiv 2106.09685, eq. 3).

    Ranks lead on both sides, so that a product over units, or to them, runs along memory. Adapters of less
    rank are filled up with zeros.

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
        """Whether each of a stack of matrices is changed for itself."""
        return self.right.ndim == 3

    @property
    def change(self) -> jax.Array:
        """What is added to the weight, `[*U, D]`."""
        if self.stacked:
            return jnp.matrix_transpose(self.left) @ self.right
        return jnp.moveaxis(self.left, 0, -1) @ self.right


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AdaptedFromBuffer(Changed):
    """`Adapted` whose sides lie in a buffer with those of other weights, for products alone to read.

    Attributes:
      base: `[*U, D]`, in any form, no stack.
      buffer: `[N]` float32; from `at` on the left side `[r, *U]`, right behind it the right side `[r, D]`.
      at: where the left side begins.
      rank: r.
    """

    base: "Weight"
    buffer: jax.Array
    at: int = dataclasses.field(metadata={"static": True})
    rank: int = dataclasses.field(metadata={"static": True})

    @property
    def right_at(self) -> int:
        """Where the right side begins."""
        return self.at + self.rank * math.prod(self.shape[:-1])

    @property
    def apart(self) -> Adapted:
        """The weight with sides of its own, which XLA copies."""
        units, width = self.shape[:-1], self.shape[-1]
        left = self.buffer[self.at : self.right_at].reshape(self.rank, *units)
        right = self.buffer[self.right_at : self.right_at + self.rank * width].reshape(self.rank, width)
        return Adapted(self.base, left, right)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Narrowed:
    """A stack of matrices `[E, R, C]` of which each has its first `rows` rows alone: a sub-model's experts.

    Those rows are no prefix of the stack, so it stays whole, and a matrix is cut when it is taken out.
    """

    stack: "Weight"
    rows: int = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight this stands for."""
        return (self.stack.shape[0], self.rows, self.stack.shape[-1])

    @property
    def ndim(self) -> int:
        """Rank of the weight."""
        return 3


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FirstUnits:
    """The first units of a weight that stays whole in memory, to be sliced in the graph that uses them.

    For devices whose compilers slice at no cost, but where a slice outside of a graph would be a copy.
    """

    base: "Weight"
    units: int = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight this stands for."""
        return (self.units, *self.base.shape[1:])

    @property
    def ndim(self) -> int:
        """Rank of the weight."""
        return self.base.ndim


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OwnProduct(Changed):
    """A weight whose products are somebody else's to compute: to annotate them for a compiler, or to observe
    what passes through them.

    Attributes:
      base: `[*U, D]`.
      product: called with rows `[M, N]`, the weight as a matrix `[R, C]`, and the axis of it to contract with
        N, -1 or -2.
      rows: what rows of the weight are read from, where that is stored otherwise.
    """

    base: "Weight"
    product: Callable[[jax.Array, jax.Array, int], jax.Array] = dataclasses.field(metadata={"static": True})
    rows: QArray | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Apart:
    """A stack of matrices `[E, R, C]` that lie apart, each at a width of its own."""

    matrices: tuple["Weight", ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight this stands for."""
        return (len(self.matrices), *self.matrices[0].shape)

    @property
    def ndim(self) -> int:
        """Rank of the weight."""
        return 3


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ByForm:
    """A stack of matrices `[E, R, C]`, each at a width of its own, of which those of a form lie together:
    graphs have code for each form, however many matrices there are.

    Attributes:
      stacks: of each form a matrix `[R, C]` whose arrays have one more axis in front, its matrices.
      form: of each of the E its form.
      at: and which of its matrices it is.
      shape: `(E, R, C)`.
    """

    stacks: tuple["Weight", ...]
    form: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    at: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    @property
    def ndim(self) -> int:
        """Rank of the weight."""
        return 3


Weight = (
    jax.Array
    | QArray
    | BlockedArray
    | Bfloat16Bits
    | Adapted
    | AdaptedFromBuffer
    | Narrowed
    | FirstUnits
    | OwnProduct
    | Apart
    | ByForm
)
