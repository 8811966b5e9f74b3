"""Arrays of equal layers stacked along a leading axis, of which a step takes one layer's.

A loop over layers gives a layer's weights as entries of stacks. Slices of an entry are slices of the stack,
so that a loop over rows of a weight, or over experts, copies no other part of the layer's weight.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StackedArray:
    """The array of one layer within a compiled step, in the place of an array of a weight.

    Attributes:
      stack: `[n, U, ...]`, of n layers.
      index: int32 scalar, the layer's.
      units: how many of the U entries of the leading axis it has; None for all.
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
    def ndim(self) -> int:
        """Rank of the array."""
        return self.stack.ndim - 1

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the array."""
        return self.stack.dtype

    @property
    def array(self) -> jax.Array:
        """The array itself: XLA copies it unless it fuses the slice with its use."""
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


class StackEntry:
    """The array of one layer outside of compiled steps: a leaf of a weight. Nothing is copied until it is
    read.

    Attributes:
      stack: `[n, ...]`, of n layers.
      index: the layer's.
    """

    def __init__(self, stack: jax.Array, index: int) -> None:
        self.stack, self.index = stack, index

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return self.stack.shape[1:]

    @property
    def ndim(self) -> int:
        """Rank of the array."""
        return self.stack.ndim - 1

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
        found = (
            np.asarray(self.stack)[self.index] if _on_cpu(self.stack) else np.asarray(self.stack[self.index])
        )
        return np.array(found, dtype, copy=copy)


Taken = TypeVar("Taken")
# What stands in a compiled step for an array of a weight.
Part = jax.Array | StackedArray


def map_parts(function: Callable[..., Any], *weights: Any) -> Any:
    """`jax.tree.map` over the arrays of weights, entries of stacks among them."""
    return jax.tree.map(function, *weights, is_leaf=_stacked)


def taken(weight: Taken) -> Taken:
    """A weight whose entries of stacks are arrays."""
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
      layers: by the prefix of their parameters' names, a function that gives a layer's weights by their names
        within it, as host arrays.

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
    """A stack of zeros for `count` arrays of the shape and dtype of `like`: on a CPU host memory, of which
    the system provides what is written."""
    shape = (count, *np.shape(like))
    return np.zeros(shape, like.dtype) if jax.default_backend() == "cpu" else jnp.zeros(shape, like.dtype)


def with_row(stack: np.ndarray | jax.Array, row: int, array: Any) -> np.ndarray | jax.Array:
    """The same stack with an array in a row; the given one is used up."""
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


def _on_cpu(stack: jax.Array) -> bool:
    return all(device.platform == "cpu" for device in stack.devices())


def _update(stack: jax.Array, row: jax.Array, array: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(stack, array, row, axis=0)


_with_row = jax.jit(_update, donate_argnums=0)
