"""The parameters of all layers stacked along a leading axis, for XLA's own products.

Layers whose parameters have the same names, types and shapes are a stack, from which a loop over layers
slices one layer after the other. On accelerators XLA fuses the slice with its use. On a CPU it copies a
slice before a product, so that there only weights that are converted block by block anyway are stacked
(`jaxllm.kernels.converted`).
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.models.layer_params import LayerParams
from jaxllm.quant import Weight, sliced
from jaxllm.quant.parts import StackedArray, StackEntry, new_stack, placed, taken, with_row


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StackedLayer:
    """The parameters of one layer in a stack.

    Attributes:
      weights: weights of the stack, by their names within a layer; each array has a leading axis of layers.
      row: int32 scalar, the layer's index in the stack.
    """

    weights: Mapping[str, Weight]
    row: jax.Array | np.integer

    @property
    def params(self) -> LayerParams:
        """The parameters, for a step."""
        row = jnp.asarray(self.row)
        return LayerParams({name: _entry(name, each, row) for name, each in self.weights.items()}, "")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StackedLayers:
    """The parameters of all layers in stacks.

    Attributes:
      stacks: weights of a `StackedLayer`, per form of layers.
      alike: the first equal layer, per layer.
      places: index of its stack and its row in it, per layer.
    """

    stacks: tuple[Mapping[str, Weight], ...]
    alike: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    places: tuple[tuple[int, int], ...] = dataclasses.field(metadata={"static": True})

    def at(self, layer: int, number: jax.Array | np.integer | None = None) -> StackedLayer:
        """The parameters of a layer; or of layer `number`, int32 scalar, which equals it."""
        stack, row = self.places[layer]
        return StackedLayer(self.stacks[stack], np.int32(row) if number is None else self._row(stack, number))

    def _row(self, stack: int, number: jax.Array | np.integer) -> jax.Array | np.integer:
        """The row of a layer that is known to be in `stack`."""
        if isinstance(number, np.integer):
            return np.int32(self.places[number][1])
        shifts = {row - layer for layer, (own, row) in enumerate(self.places) if own == stack}
        if len(shifts) == 1:
            return number + np.int32(shifts.pop())
        rows = jnp.asarray([row for _, row in self.places], jnp.int32)
        return jax.lax.dynamic_index_in_dim(rows, number, axis=0, keepdims=False)


def stack_layers(layers: Sequence[Mapping[str, Weight]], kinds: Sequence[Any]) -> StackedLayers:
    """Stacks the arrays of all layers' parameters.

    Arrays that are already entries of a stack (`StackEntry`) are not copied. Others, such as their
    adapters, get a stack of as many rows.

    Args:
      layers: parameters of each layer by their names within it.
      kinds: further criteria of equality, per layer.
    """
    firsts: dict[Any, int] = {}
    members: dict[Any, list[int]] = {}
    alike = []
    for number, (params, kind) in enumerate(zip(layers, kinds, strict=True)):
        form = _form_of(params)
        alike.append(firsts.setdefault((kind, form), number))
        members.setdefault(form, []).append(number)
    stacks, places = [], dict[int, tuple[int, int]]()
    for numbers in members.values():
        rows, count = _rows([layers[number] for number in numbers])
        each = [dict(layers[number]) for number in numbers]
        stacks.append(
            jax.tree.map(lambda *column, rows=rows, count=count: _stack(column, rows, count), *each)
        )
        places |= {number: (len(stacks) - 1, row) for number, row in zip(numbers, rows, strict=True)}
    return StackedLayers(tuple(stacks), tuple(alike), tuple(places[number] for number in range(len(layers))))


def are_entries(params: Iterable[Weight]) -> bool:
    """Whether some arrays of the weights are entries of stacks, and none is only a shape."""
    leaves = jax.tree.leaves(list(params))
    shapes = any(isinstance(each, jax.ShapeDtypeStruct) for each in leaves)
    return not shapes and any(isinstance(each, StackEntry) for each in leaves)


def _form_of(params: Mapping[str, Weight]) -> Any:
    """Structure that the parameters of layers in one stack share, hashable."""
    leaves, structure = jax.tree.flatten(dict(params))
    stacks = tuple(id(each.stack) for each in leaves if isinstance(each, StackEntry))
    return structure, stacks, tuple((tuple(np.shape(each)), np.dtype(each.dtype).name) for each in leaves)


def _entry(name: str, weight: Weight, row: jax.Array) -> Any:
    found = sliced(jax.tree.map(lambda stack: StackedArray(stack, row), weight))
    # Floats are multiplied unchanged; a mixture uses one expert at a time.
    by_expert = name.startswith("experts.")
    return taken(found) if isinstance(found, StackedArray) and not by_expert else found


def _rows(layers: Sequence[Mapping[str, Weight]]) -> tuple[list[int], int]:
    """The rows of some layers in the stacks of their entries, and the number of rows of these."""
    for column in zip(*(jax.tree.leaves(dict(each)) for each in layers), strict=True):
        if all(isinstance(each, StackEntry) for each in column):
            return [each.index for each in column], len(column[0].stack)
    return list(range(len(layers))), len(layers)


def _stack(column: Sequence[Any], rows: Sequence[int], count: int) -> jax.Array:
    """A stack of `count` rows with the arrays of a column at `rows`."""
    first = column[0]
    entries = [each.index for each in column if isinstance(each, StackEntry) and each.stack is first.stack]
    if entries == list(rows):
        return first.stack
    stack = new_stack(count, first)
    for row, each in zip(rows, column, strict=True):
        stack = with_row(stack, row, each)
    return placed(stack)
