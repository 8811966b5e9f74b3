"""Parts of weights of every storage type: units, rows, planes, one matrix of a stack, one layer; and
dequantization of weights, whole or by rows.

A loop over layers yields a layer's weights as entries of stacks of equal layers. Slices of an entry are
slices of the stack, so that a loop over rows of a weight, or over experts, copies no other part of the
layer's weight.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxllm.axes import Axes
from jaxllm.errors import ConfigError
from jaxllm.quant.blocks import (
    PANEL,
    BlockedArray,
    blocked_levels,
    blocked_minima,
    blocked_scales,
    from_blocks,
    levels_in_blocks,
    take_blocked_inputs,
    take_blocked_rows,
)
from jaxllm.quant.formats import QArray, Shaped, scaled, unpack
from jaxllm.quant.nested import FACTORS, NestedLevels, scale_parts
from jaxllm.quant.weights import (
    Adapted,
    Bfloat16Bits,
    ByForm,
    Changed,
    Measured,
    OwnProduct,
    PerExpert,
    Prefix,
    Weight,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StackedArray(Shaped):
    """The array of one layer within a compiled step, in the place of an array of a weight.

    Attributes:
      stack: `[n, U, ...]`, of n layers.
      index: int32 scalar, the layer's.
      units: number of its entries among the U of the leading axis; None for all.
    """

    stack: jax.Array
    index: jax.Array
    units: int | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        whole = self.stack.shape[1:]
        return whole if self.units is None else (self.units, *whole[1:])

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the array."""
        return self.stack.dtype

    @property
    def array(self) -> jax.Array:
        """The entry as an array: XLA copies it unless it fuses the slice with its use."""
        return self._sliced((0,) * self.ndim, self.shape)

    def rows(self, start: jax.Array, count: int) -> jax.Array:
        """Entries `[start, start + count)` of the leading axis."""
        return self._sliced((start, *(0,) * (self.ndim - 1)), (count, *self.shape[1:]))

    def entry(self, index: jax.Array | int) -> "StackedArray":
        """One entry of the leading axis."""
        entries = self.stack.shape[1]
        stack = self.stack.reshape(-1, *self.stack.shape[2:])
        return StackedArray(stack, self.index * np.int32(entries) + index)

    def first(self, count: int) -> "StackedArray":
        """The first entries of the leading axis."""
        return dataclasses.replace(self, units=count)

    @property
    def matrix(self) -> "StackedArray":
        """With all axes but the last as one."""
        rows = 1 if self.ndim == 1 else int(np.prod(self.stack.shape[2:-1], dtype=np.int64))
        stack = self.stack.reshape(len(self.stack), -1, self.stack.shape[-1])
        return StackedArray(stack, self.index, None if self.units is None else self.units * rows)

    def _sliced(self, start: Sequence[Any], shape: Sequence[int]) -> jax.Array:
        starts = [self.index, *(np.int32(each) if isinstance(each, int) else each for each in start)]
        part = jax.lax.dynamic_slice(self.stack, starts, (1, *shape), allow_negative_indices=False)
        return part.reshape(shape)


class StackEntry(Shaped):
    """The array of one layer outside of compiled steps: a leaf of a weight. Nothing is copied until it is
    read.

    Attributes:
      stack: `[n, ...]`, of n layers.
    """

    def __init__(self, stack: jax.Array, index: int) -> None:
        self.stack, self.index = stack, index

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return self.stack.shape[1:]

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the array."""
        return self.stack.dtype

    @property
    def nbytes(self) -> int:
        """Size of the array."""
        return self.stack.nbytes // len(self.stack)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The array on the host; on a CPU a view of the stack."""
        on_cpu = all(device.platform == "cpu" for device in self.stack.devices())
        found = np.asarray(self.stack)[self.index] if on_cpu else np.asarray(self.stack[self.index])
        return np.array(found, dtype, copy=copy)


Taken = TypeVar("Taken")
# An array of a weight in a compiled step.
Part = jax.Array | StackedArray


def map_parts(function: Callable[..., Any], *weights: Any) -> Any:
    """`jax.tree.map` over the arrays of weights, entries of stacks among them."""
    return jax.tree.map(function, *weights, is_leaf=_stacked)


def taken(weight: Taken) -> Taken:
    """A weight whose entries of stacks are converted to arrays."""
    return map_parts(lambda part: part.array if _stacked(part) else part, weight)


def is_stacked(weight: Any) -> bool:
    """Whether the weight has an entry of a stack."""
    return any(map(_stacked, jax.tree.leaves(weight, is_leaf=_stacked)))


def part_rows(part: Part, start: jax.Array, count: int) -> jax.Array:
    """Entries `[start, start + count)` of an array's leading axis."""
    if isinstance(part, StackedArray):
        return part.rows(start, count)
    return jax.lax.dynamic_slice_in_dim(part, start, count, axis=0)


def part_entry(part: Part, index: jax.Array | int) -> Any:
    """One entry of an array's leading axis."""
    if isinstance(part, StackedArray):
        return part.entry(index)
    return jax.lax.dynamic_index_in_dim(part, index, axis=0, keepdims=False)


def part_first(part: Any, count: int) -> Any:
    """The first entries of an array's leading axis."""
    return part.first(count) if isinstance(part, StackedArray) else part[:count]


def part_matrix(part: Part) -> Part:
    """An array with all axes but the last as one."""
    return part.matrix if isinstance(part, StackedArray) else part.reshape(-1, part.shape[-1])


def stack_entries(layers: Mapping[str, Callable[[], Mapping[str, Any]]]) -> dict[str, Any]:
    """Stacks the arrays of equal layers, with one layer at a time in memory besides the stacks.

    Args:
      layers: functions that return a layer's weights by their names within it, as host arrays, by the
        prefix of their parameters' names.

    Returns:
      The weights by name, with arrays that are entries of stacks on the default device.
    """
    stacks: Any = None
    for row, read in enumerate(layers.values()):
        weights = dict(read())
        if len(layers) == 1:
            stacks = jax.tree.map(lambda array: array[None], weights)
        elif stacks is None:
            stacks = jax.tree.map(lambda array: new_stack(len(layers), array), weights)
        if len(layers) > 1:
            stacks = jax.tree.map(lambda stack, array, row=row: with_row(stack, row, array), stacks, weights)
    stacks = jax.tree.map(placed, stacks)
    return {
        prefix + name: jax.tree.map(lambda stack, row=row: StackEntry(stack, row), weight)
        for row, prefix in enumerate(layers)
        for name, weight in stacks.items()
    }


def new_stack(count: int, like: Any) -> np.ndarray | jax.Array:
    """A stack of zeros for `count` arrays of the shape and dtype of `like`: on a CPU host memory, committed
    when written."""
    shape = (count, *np.shape(like))
    return np.zeros(shape, like.dtype) if jax.default_backend() == "cpu" else jnp.zeros(shape, like.dtype)


def with_row(stack: np.ndarray | jax.Array, row: int, array: Any) -> np.ndarray | jax.Array:
    """The stack with an array in a row; the argument is consumed."""
    if isinstance(stack, np.ndarray):
        stack[row] = np.asarray(array)
        return stack
    own = np.asarray(array) if isinstance(array, StackEntry) else array
    return _with_row(stack, np.int32(row), own)


def placed(stack: np.ndarray | jax.Array) -> jax.Array:
    """The stack on the default device."""
    if isinstance(stack, jax.Array):
        return stack
    return jax.device_put(stack, jax.devices()[0], may_alias=True)


def _stacked(part: Any) -> bool:
    return isinstance(part, StackedArray)


@functools.partial(jax.jit, donate_argnums=0)
def _with_row(stack: jax.Array, row: jax.Array, array: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(stack, array, row, axis=0)


def take_units(weight: Weight, count: int) -> Weight:
    """The first `count` units (entries of the leading axis): the weight of a sub-model.

    A weight in blocks keeps its buffer under a smaller shape, and nothing is copied. Other types are sliced.

    Raises:
      ConfigError: the weight has fewer units.
    """
    if not 1 <= count <= weight.shape[0]:
        raise ConfigError(f"a weight of {weight.shape[0]} units has no first {count}")
    if isinstance(weight, Adapted):
        return Adapted(take_units(weight.base, count), taken(weight.left)[:, :count], weight.right)
    if isinstance(weight, Prefix):
        base = take_units(weight.base, count) if weight.axis else weight.base
        return dataclasses.replace(weight, base=base, count=weight.count if weight.axis else count)
    if isinstance(weight, BlockedArray):
        return dataclasses.replace(weight, shape=(count, *weight.shape[1:]))
    if isinstance(weight, QArray):
        units_contracted = weight.axis == -2 and weight.ndim == 2
        scales = count
        if units_contracted:
            scales = -(-count // weight.group) if weight.group else 1
        data, scale = part_first(weight.data, count), part_first(weight.scale, scales)
        minimum = None if weight.minimum is None else part_first(weight.minimum, scales)
        return dataclasses.replace(weight, data=data, scale=scale, minimum=minimum)
    return map_parts(lambda part: part_first(part, count), weight)


def first_units(weight: Weight, count: int) -> Weight:
    """`take_units` with all slicing left to the compiled step (see `Prefix` and `sliced`)."""
    if isinstance(weight, Adapted):
        return Adapted(first_units(weight.base, count), weight.left[:, :count], weight.right)
    if isinstance(weight, BlockedArray) or (isinstance(weight, Prefix) and not weight.axis):
        return take_units(weight, count)
    return Prefix(weight, count)


def sliced(weight: Weight) -> Weight:
    """The weight with every prefix of units replaced by its slice."""
    if isinstance(weight, Prefix) and not weight.axis:
        return take_units(weight.base, weight.count)
    if isinstance(weight, Adapted):
        return Adapted(sliced(weight.base), weight.left, weight.right)
    return weight


def narrow(weight: Weight, rows: int) -> Weight:
    """A stack of matrices `[E, R, C]` cut to the first `rows` rows of each.

    Raises:
      ConfigError: the matrices have fewer rows.
    """
    if rows == weight.shape[1]:
        return weight
    if not 1 <= rows <= weight.shape[1]:
        raise ConfigError(f"matrices of {weight.shape[1]} rows have no first {rows}")
    if isinstance(weight, Adapted):
        return Adapted(narrow(weight.base, rows), weight.left[..., :rows], weight.right)
    return Prefix(weight.base if isinstance(weight, Prefix) and weight.axis == 1 else weight, rows, 1)


def by_form(matrices: Sequence[Weight], stack: Callable[..., Any] = jnp.stack) -> ByForm:
    """Matrices `[R, C]` as one weight, grouped by form (type, shapes and dtypes).

    Args:
      stack: stacks arrays along a new leading axis.
    """
    forms: dict[Any, list[Weight]] = {}
    form, at = [], []
    for each in matrices:
        leaves, kind = jax.tree.flatten(each)
        key = kind, tuple((leaf.shape, np.dtype(leaf.dtype)) for leaf in leaves)
        members = forms.setdefault(key, [])
        form.append(list(forms).index(key))
        at.append(len(members))
        members.append(each)
    stacks = tuple(jax.tree.map(lambda *parts: stack(parts), *members) for members in forms.values())
    return ByForm(stacks, tuple(form), tuple(at), (len(matrices), *matrices[0].shape))


def entry_of_form(weight: ByForm, form: int, index: jax.Array | int) -> Weight:
    """Matrix number `index` `[R, C]` of those of one form."""
    return map_parts(lambda part: part_entry(part, index), weight.stacks[form])


def unit_at(weight: Weight, index: jax.Array) -> Weight:
    """One unit of a stack of matrices: `[R, C]` of a weight `[U, R, C]`, at `index` (int32 scalar, in range).

    No other unit is read. A weight in blocks gives a unit in blocks, with one exception: if R is the output
    axis and not a multiple of a panel, units share panels, and the result is a `QArray` of 8 bits, or with
    minima an array of floats.
    """

    def entry(part: Any) -> Any:
        return part_entry(part, index)

    if isinstance(weight, Adapted):
        return Adapted(unit_at(weight.base, index), entry(weight.left), entry(weight.right))
    if isinstance(weight, Prefix) and weight.axis:
        return take_units(unit_at(weight.base, index), weight.count)
    if not isinstance(weight, BlockedArray):
        return map_parts(entry, weight)
    weight = taken(weight)
    units, rows, columns = weight.shape
    if weight.axis == -2:
        # `BlockedArray` has a matrix as a stack of one.
        matrix = jax.tree.map(lambda part: entry(part)[None], weight)
        return dataclasses.replace(matrix, shape=(rows, columns))
    if rows % PANEL == 0:
        matrix = jax.tree.map(lambda part: entry(part.reshape(units, -1, *part.shape[1:])), weight)
        return dataclasses.replace(matrix, shape=(rows, columns))
    flat = dataclasses.replace(weight, shape=(units * rows, columns))
    found = index * rows + jnp.arange(rows, dtype=jnp.int32)
    levels, scale, minimum = take_blocked_rows(flat, found)
    if minimum is not None:
        return scaled(levels.astype(jnp.float32), scale, minimum, weight.group, -1)
    return QArray(levels, scale, bits=8, group=weight.group, axis=-1, columns=columns)


def high_plane(weight: Weight) -> Weight:
    """A weight that only reads the high plane if it is nested; nothing is copied."""
    if isinstance(weight, BlockedArray):
        return dataclasses.replace(weight, low=None)
    if isinstance(weight, Adapted):
        return Adapted(high_plane(weight.base), weight.left, weight.right)
    if isinstance(weight, Prefix):
        return dataclasses.replace(weight, base=high_plane(weight.base))
    if isinstance(weight, PerExpert):
        return PerExpert(tuple(map(high_plane, weight.matrices)))
    return weight


def high_planes(params: Mapping[str, Weight]) -> dict[str, Weight]:
    """`high_plane` of all layers. Not of the head, by whose 4 bits drafts are a fifth shorter, nor of the
    embedding, of which few rows are read."""
    return {name: high_plane(each) if "layers." in name else each for name, each in params.items()}


def nested_entry(stack: BlockedArray, index: int) -> BlockedArray:
    """One matrix of a nested stack `[n, R, C]` of host arrays: the same levels and scales, bit for bit."""
    count, rows, columns = stack.shape
    levels = np.asarray(blocked_levels(stack))[index]
    if stack.axis == -1:
        outputs = count * rows
        channel, factor = (np.asarray(each)[:, :, 0] for each in scale_parts(stack.scale, 1))
        channels = channel.reshape(-1)[:outputs].reshape(count, rows, 1)[index]
        factors = factor.transpose(0, 2, 1).reshape(len(factor) * PANEL, -1)[:outputs]
        factors = factors.reshape(count, rows, -1)[index]
        found = NestedLevels(levels[None], channels[None], factors[None])
        return levels_in_blocks(found, (rows, columns), -1)
    channel, factor = (np.asarray(each)[index] for each in scale_parts(stack.scale, stack.data.shape[-2]))
    channels = channel.reshape(-1)[:columns, None]
    factors = factor.reshape(len(factor), -1).T[:columns]
    found = NestedLevels(levels.T[None], channels[None], factors[None])
    return levels_in_blocks(found, (rows, columns), -2)


def by_outputs(weight: np.ndarray, axis: int) -> np.ndarray:
    """A weight `[..., R, C]` as `[outputs, inputs]`, where the contracted axes are the inputs."""
    rows = weight.reshape(-1, weight.shape[-1])
    return rows if axis == -1 else rows.T


def levels_by_outputs(weight: BlockedArray) -> tuple[np.ndarray, np.ndarray]:
    """Levels of a nested weight of host arrays and the scale of each, int8 and float32, as `by_outputs`."""
    levels, scale = np.asarray(blocked_levels(weight)), np.asarray(blocked_scales(weight))
    scale = np.repeat(scale, weight.group, axis=weight.axis)
    scale = np.take(scale, np.arange(levels.shape[weight.axis]), axis=weight.axis)
    return by_outputs(levels, weight.axis), by_outputs(scale, weight.axis)


def with_levels(weight: BlockedArray, levels: np.ndarray) -> BlockedArray:
    """A nested weight of host arrays with other levels, in the order of `levels_by_outputs`, and its own
    scales."""
    lead = (1,) if weight.axis == -1 else weight.shape[:-2] or (1,)
    inputs = weight.shape[weight.axis]
    # [K, outputs, inputs].
    stack = levels.reshape(len(levels), *lead, inputs).swapaxes(0, 1)
    groups = -(-inputs // weight.group)
    none = NestedLevels(
        levels=stack,
        channel=np.ones((*stack.shape[:2], 1), np.float32),
        factor=np.full((*stack.shape[:2], groups), FACTORS[-1], np.int8),
    )
    axis = -1 if weight.axis == -1 else -2
    return dataclasses.replace(levels_in_blocks(none, weight.shape, axis), scale=weight.scale)


def as_floats(value: Any) -> np.ndarray:
    """The numbers of a parameter as read or as stored, float32 on the host: of an array, a `Measured` one, or
    a quantized one, in blocks or not."""
    value = value.value if isinstance(value, Measured) else value
    value = from_blocks(value) if isinstance(value, BlockedArray) else value
    if isinstance(value, QArray):
        return np.asarray(dequantize(jax.tree.map(jnp.asarray, value), jnp.float32))
    return np.asarray(value, np.float32)


def dequantize(weight: Weight, dtype: DTypeLike) -> jax.Array:
    """The weight as floats `[..., R, C]` in `dtype`, any adapter included."""
    weight = taken(weight)
    if isinstance(weight, Adapted):
        return dequantize(weight.base, dtype) + weight.change.astype(dtype)
    if isinstance(weight, OwnProduct):
        return dequantize(weight.base, dtype)
    if isinstance(weight, PerExpert):
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
        return embedding_rows(weight.base, rows, dtype)
    if isinstance(weight, BlockedArray):
        levels, scale, minimum = take_blocked_rows(weight, rows)
        return scaled(levels.astype(dtype), scale, minimum, weight.group, -1)

    def take(part: jax.Array) -> jax.Array:
        # Accelerators of phones take one axis of numbers.
        return jnp.take(part, rows.reshape(-1), axis=0, mode="clip").reshape(*rows.shape, *part.shape[1:])

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
