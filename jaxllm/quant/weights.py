"""A weight, however it is stored: read as floats, row by row, or in part."""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.quant.blocks import (
    PANEL,
    BlockedArray,
    blocked_levels,
    blocked_scales,
    take_blocked_inputs,
    take_blocked_rows,
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


class _Changed:
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
class Adapted(_Changed):
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
class AdaptedFromBuffer(_Changed):
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
class OwnProduct(_Changed):
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
)


def dequantize(weight: Weight, dtype: jnp.dtype) -> jax.Array:
    """The weight as floats `[..., R, C]` in `dtype`."""
    if isinstance(weight, AdaptedFromBuffer):
        return dequantize(weight.apart, dtype)
    if isinstance(weight, Adapted):
        return dequantize(weight.base, dtype) + weight.change.astype(dtype)
    if isinstance(weight, OwnProduct):
        return dequantize(weight.base, dtype)
    if isinstance(weight, Narrowed):
        return dequantize(weight.stack, dtype)[:, : weight.rows]
    if isinstance(weight, Apart):
        return jnp.stack([dequantize(each, dtype) for each in weight.matrices])
    if isinstance(weight, FirstUnits):
        return dequantize(sliced(weight), dtype)
    if isinstance(weight, Bfloat16Bits):
        # The upper half of a float32's bits.
        wide = weight.bits.astype(jnp.uint32) << np.uint32(16)
        return jax.lax.bitcast_convert_type(wide, jnp.float32).astype(dtype)
    if isinstance(weight, BlockedArray):
        levels, scale = blocked_levels(weight).astype(dtype), blocked_scales(weight)
    elif isinstance(weight, QArray):
        data, scale = weight.data, weight.scale
        levels = data.astype(dtype)
        if weight.bits != 8:
            unpack = unpack_int4 if weight.bits == 4 else unpack_int2
            levels = unpack(data, weight.columns, dtype)
    else:
        return weight.astype(dtype)
    return levels * _spread(scale.astype(dtype), weight.group, levels.shape[weight.axis], weight.axis)


def unpack_int4(packed: jax.Array, columns: int, dtype: jnp.dtype) -> jax.Array:
    """Inverse of `pack_int4`: whole numbers `[..., columns]` in `dtype`."""
    halves = (packed & np.uint8(15), packed >> np.uint8(4))
    wide = jnp.concatenate([half.astype(dtype) for half in halves], axis=-1)
    return wide[..., :columns] - np.asarray(8, dtype)


def unpack_int2(packed: jax.Array, columns: int, dtype: jnp.dtype) -> jax.Array:
    """Inverse of `pack_int2`: whole numbers `[..., columns]` in `dtype`."""
    quarters = [(packed >> np.uint8(shift)) & np.uint8(3) for shift in (0, 2, 4, 6)]
    codes = jnp.concatenate([quarter.astype(dtype) for quarter in quarters], axis=-1)
    return codes[..., :columns] * np.asarray(2, dtype) - np.asarray(3, dtype)


def embedding_rows(weight: Weight, rows: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Rows of a matrix `[R, C]` contracted along its last axis: `[*rows.shape, C]` in `dtype`; `rows`
    (any shape) in range."""
    if isinstance(weight, Adapted):
        low = jnp.moveaxis(jnp.take(weight.left, rows, axis=1, mode="clip"), 0, -1).astype(dtype)
        return embedding_rows(weight.base, rows, dtype) + low @ weight.right.astype(dtype)
    if isinstance(weight, OwnProduct):
        return embedding_rows(weight.base if weight.rows is None else weight.rows, rows, dtype)
    if isinstance(weight, BlockedArray):
        levels, scale = take_blocked_rows(weight, rows)
        scale = _spread(scale.astype(dtype), weight.group, levels.shape[-1], -1)
        return levels.astype(dtype) * scale

    def take(part: jax.Array) -> jax.Array:
        return jnp.take(part, rows, axis=0, mode="clip")

    return dequantize(jax.tree.map(take, weight), dtype)


def contracted_rows(weight: Weight, index: jax.Array, *, last: bool) -> jax.Array:
    """What the inputs at `index` `[N]` (int32, in range) of a product are multiplied with, `[N, outputs]`
    float32.

    Of a weight in blocks no more is read than the blocks that hold them. Adapters are left aside.

    Args:
      weight: `[*U, D]`.
      index: of inputs: those along the last axis, else those along all the others together.
      last: whether the last axis is contracted.
    """
    while isinstance(weight, _Changed):
        weight = weight.base
    if isinstance(weight, BlockedArray):
        return take_blocked_inputs(weight, index)
    if isinstance(weight, QArray) and weight.bits == 8 and not weight.group:
        rows, columns = weight.data.shape[-2:]
        if last:
            taken = weight.data.reshape(-1, columns)[:, index].T
            return taken.astype(jnp.float32) * weight.scale.reshape(-1)
        scale = weight.scale.reshape(-1, columns)[index // rows]
        return weight.data.reshape(-1, columns)[index].astype(jnp.float32) * scale
    dense = dequantize(weight, jnp.dtype(jnp.float32)).reshape(-1, weight.shape[-1])
    return dense[:, index].T if last else dense[index]


def take_units(weight: Weight, count: int) -> Weight:
    """The first `count` units (entries of the leading axis): a smaller model's weight.

    In blocks it is the same buffer under a smaller shape, and nothing is copied. Other forms are sliced.

    Raises:
      ConfigError: the weight has fewer units.
    """
    if not 1 <= count <= weight.shape[0]:
        raise ConfigError(f"a weight of {weight.shape[0]} units has no first {count}")
    if isinstance(weight, Adapted):
        return Adapted(take_units(weight.base, count), weight.left[:, :count], weight.right)
    if isinstance(weight, Narrowed):
        return Narrowed(take_units(weight.stack, count), weight.rows)
    if isinstance(weight, FirstUnits):
        return FirstUnits(weight.base, count)
    if isinstance(weight, BlockedArray):
        return dataclasses.replace(weight, shape=(count, *weight.shape[1:]))
    if isinstance(weight, QArray):
        units_contracted = weight.axis == -2 and weight.ndim == 2
        if not units_contracted:
            return dataclasses.replace(weight, data=weight.data[:count], scale=weight.scale[:count])
        scales = -(-count // weight.group) if weight.group else 1
        return dataclasses.replace(weight, data=weight.data[:count], scale=weight.scale[:scales])
    return jax.tree.map(lambda part: part[:count], weight)


def first_units(weight: Weight, count: int) -> Weight:
    """`take_units` that leaves all slicing to the graph (see `FirstUnits` and `sliced`)."""
    if isinstance(weight, Adapted):
        return Adapted(first_units(weight.base, count), weight.left[:, :count], weight.right)
    if isinstance(weight, BlockedArray | FirstUnits):
        return take_units(weight, count)
    return FirstUnits(weight, count)


def sliced(weight: Weight) -> Weight:
    """The weight without `FirstUnits`: their units as weights of their own."""
    if isinstance(weight, FirstUnits):
        return take_units(weight.base, weight.units)
    if isinstance(weight, Adapted):
        return Adapted(sliced(weight.base), weight.left, weight.right)
    return weight


def narrow(weight: Weight, rows: int) -> Weight:
    """A stack of matrices `[E, R, C]` of which each has its first `rows` rows alone."""
    if rows == weight.shape[1]:
        return weight
    if not 1 <= rows <= weight.shape[1]:
        raise ConfigError(f"matrices of {weight.shape[1]} rows have no first {rows}")
    if isinstance(weight, Adapted):
        return Adapted(narrow(weight.base, rows), weight.left[..., :rows], weight.right)
    return Narrowed(weight.stack if isinstance(weight, Narrowed) else weight, rows)


def stack_entry(weight: Weight, index: int) -> Weight:
    """One matrix `[R, C]` of a stack whose matrices lie apart, with its adapter if it has one."""
    if isinstance(weight, Adapted):
        return Adapted(stack_entry(weight.base, index), weight.left[index], weight.right[index])
    assert isinstance(weight, Apart)
    return weight.matrices[index]


def unit_at(weight: Weight, index: jax.Array) -> Weight:
    """One unit of a stack of matrices: `[R, C]` of a weight `[U, R, C]`, at `index` (int32 scalar, in range).

    Reads that unit alone. In blocks it stays in blocks, but where outputs are R and do not fill whole
    panels: units then share panels, and the unit comes as rows at 8 bits.
    """

    def entry(part: jax.Array) -> jax.Array:
        return jax.lax.dynamic_index_in_dim(part, index, axis=0, keepdims=False)

    if isinstance(weight, Adapted):
        return Adapted(unit_at(weight.base, index), entry(weight.left), entry(weight.right))
    if isinstance(weight, Narrowed):
        return take_units(unit_at(weight.stack, index), weight.rows)
    if not isinstance(weight, BlockedArray):
        return jax.tree.map(entry, weight)
    units, rows, columns = weight.shape
    if weight.axis == -2:
        # A matrix is a stack of one.
        data, scale = (entry(part)[None] for part in (weight.data, weight.scale))
        return dataclasses.replace(weight, data=data, scale=scale, shape=(rows, columns))
    if rows % PANEL == 0:
        data = entry(weight.data.reshape(units, -1, *weight.data.shape[1:]))
        scale = entry(weight.scale.reshape(units, -1, *weight.scale.shape[1:]))
        return dataclasses.replace(weight, data=data, scale=scale, shape=(rows, columns))
    flat = dataclasses.replace(weight, shape=(units * rows, columns))
    levels, scale = take_blocked_rows(flat, index * rows + jnp.arange(rows, dtype=jnp.int32))
    return QArray(levels, scale, bits=8, group=weight.group, axis=-1, columns=columns)


def _spread(scale: jax.Array, group: int, length: int, axis: int) -> jax.Array:
    """Scales of groups along `axis` repeated for each of `length` values; those of a whole axis as they
    are."""
    if not group:
        return scale
    scale = jnp.repeat(scale, group, axis=axis)
    return jax.lax.slice_in_dim(scale, 0, length, axis=scale.ndim + axis)
