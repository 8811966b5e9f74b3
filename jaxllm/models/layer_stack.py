"""The parameters of layers: one by one, by address or stacked.

Layers are equal if their configs, and the names, types and shapes of their parameters are. A step has code
for each run of equal layers, or of a repeated pattern of layers (`LayerRun`), instead of code for each layer.

By address (`LayerStack`), native kernels find the arrays of all layers. Stacked (`StackedLayers`), layers
whose parameters have the same names, types and shapes are one array with a leading axis, from which a loop
slices one layer after the other, for XLA's own products. On accelerators XLA fuses the slice with its use. On
a CPU it copies a slice before a product, so that there only weights that are converted block by block anyway
are stacked (`jaxllm.kernels.converted`).
"""

import dataclasses
import functools
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.kernels import native
from jaxllm.kernels.native import Operand, TableArray, WeightTable
from jaxllm.kernels.native_call import PARAMETER, UsedUnits, used_units, value
from jaxllm.models.parameters import Params, param_specs
from jaxllm.nn.layers import Norm
from jaxllm.quant import Adapted, BlockedArray, PerExpert, Weight, sliced
from jaxllm.quant.parts import StackedArray, StackEntry, new_stack, placed, taken, with_row

# Name of the parameter with the layers: a `LayerStack` or `StackedLayers`; in a step of one layer a
# `LayerAt` or `StackedLayer`, in a step of some layers `LayersAt`.
STACK = "layers"


class LayerParams:
    """The parameters under one prefix."""

    def __init__(
        self,
        params: Mapping[str, Weight | Operand],
        prefix: str,
        used: tuple[UsedUnits, UsedUnits] | None = None,
    ) -> None:
        self._params, self._prefix, self._used = params, prefix, used

    def __getitem__(self, name: str) -> Weight:
        return self._params[self._prefix + name]  # pyright: ignore[reportReturnType]: of a router, an operand

    @property
    def used(self) -> tuple[UsedUnits | None, UsedUnits | None]:
        """The used kv groups and the used neurons, None if all are used (see `jaxllm.kernels.native`)."""
        return used_units(self.operand(PARAMETER)) if self._used is None else self._used

    def using(self, used: tuple[UsedUnits, UsedUnits]) -> "LayerParams":
        """The same parameters with other used units."""
        return LayerParams(self._params, self._prefix, used)

    def operand(self, name: str) -> Operand | None:
        """A vector or small matrix parameter as input of native kernels; None if the model does not have
        it."""
        found = self._params.get(self._prefix + name)
        assert found is None or isinstance(found, jax.Array | np.ndarray | TableArray)
        return found

    def vector(self, name: str) -> jax.Array | None:
        """A vector parameter, such as a bias; None if the model does not have it."""
        found = self.operand(name)
        return None if found is None else value(found)

    def pre_norm(self, name: str, cfg: ModelConfig) -> Norm | None:
        """`norm` of a block's input; None if the model's blocks read their input unnormalized."""
        return self.norm(name, cfg) if cfg.pre_norms and not cfg.norm_after else None

    def norm(self, name: str, cfg: ModelConfig) -> Norm:
        """A norm's scale, and its bias if it has one."""
        scale = self.operand(f"{name}.scale")
        assert scale is not None
        return Norm(scale=scale, bias=self.operand(f"{name}.bias"), eps=cfg.norm_eps)


@dataclasses.dataclass(frozen=True)
class LayerRun:
    """Layers `first + i · period + j` for i < repeats, j < period, where layers of the same j are equal."""

    first: int
    period: int
    repeats: int


@dataclasses.dataclass(frozen=True)
class LayerForm:
    """Structure that the parameters of equal layers share.

    Attributes:
      names: names of the parameters, within the layer.
      structure: structure of the tree of all their arrays, each in the column of its index.
      shapes, dtypes: per array. Factors of adapters have shape (): their rank is the table's.
    """

    names: tuple[str, ...]
    structure: Any
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> "LayerForm":
        """The form of a layer's parameters, or of their shapes, by their names within it."""
        without = [_without_ranks(each) for each in params.values()]
        arrays, structure = jax.tree.flatten(without, is_leaf=lambda each: each is _FACTOR)
        shapes = tuple(() if each is _FACTOR else tuple(each.shape) for each in arrays)
        dtypes = tuple("float32" if each is _FACTOR else np.dtype(each.dtype).name for each in arrays)
        return cls(tuple(params), structure, shapes, dtypes)

    def at(self, table: jax.Array, row: jax.Array) -> dict[str, Any]:
        """The parameters, in a row of a weight table."""
        specs = enumerate(zip(self.shapes, self.dtypes, strict=True))
        arrays = [TableArray(table, row, column, shape, jnp.dtype(dtype)) for column, (shape, dtype) in specs]
        return dict(zip(self.names, jax.tree.unflatten(self.structure, arrays), strict=True))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerAt:
    """The parameters of one layer by address.

    Attributes:
      table: `[2]` uint32, the handle of a weight table.
      row: int32 scalar, the layer's row in the table.
    """

    table: jax.Array
    row: jax.Array | np.integer
    form: LayerForm = dataclasses.field(metadata={"static": True})

    @property
    def params(self) -> LayerParams:
        """The parameters, for a step."""
        return LayerParams(self.form.at(self.table, jnp.asarray(self.row)), "")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayersAt:
    """The parameters of some layers of one form by address, each in a separate weight table.

    Attributes:
      handles: `[n, 2]` uint32, each of a weight table with one row. They are copies, which keep none open:
        the caller of a step must reference the layers until it has ended.
    """

    handles: jax.Array | np.ndarray
    form: LayerForm = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, layers: Sequence[LayerAt], room: int) -> "LayersAt":
        """Makes it of layers in separate weight tables, with room for `room` layers."""
        handles = np.zeros((room, 2), np.uint32)
        for index, each in enumerate(layers):
            handles[index] = each.table
        return cls(handles, layers[0].form)

    def at(self, index: jax.Array) -> LayerAt:
        """The parameters of one of them, int32 scalar."""
        table = jax.lax.dynamic_index_in_dim(self.handles, index, axis=0, keepdims=False)
        return LayerAt(table, np.int32(0), self.form)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerStack:
    """The parameters of all layers by address.

    Attributes:
      table: `[2]` uint32, the handle of a weight table with a row for each layer.
      alike: per layer, the first layer that equals it.
      forms: forms of the distinct layers of `alike`, ascending.
    """

    table: jax.Array
    alike: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    forms: tuple[LayerForm, ...] = dataclasses.field(metadata={"static": True})

    def at(self, layer: int, row: jax.Array | np.integer | None = None) -> LayerAt:
        """The parameters of a layer; or of layer `row`, int32 scalar, which equals it."""
        form = self.forms[sorted(set(self.alike)).index(self.alike[layer])]
        return LayerAt(self.table, np.int32(layer) if row is None else row, form)


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

        def entry(name: str, weight: Weight) -> Any:
            found = sliced(jax.tree.map(lambda stack: StackedArray(stack, row), weight))
            # Floats are multiplied unchanged; a mixture uses one expert at a time.
            by_expert = name.startswith("experts.")
            return taken(found) if isinstance(found, StackedArray) and not by_expert else found

        return LayerParams({name: entry(name, each) for name, each in self.weights.items()}, "")


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
        if number is None or isinstance(number, np.integer):
            at = np.int32(row if number is None else self.places[number][1])
            return StackedLayer(self.stacks[stack], at)
        shifts = {row - layer for layer, (own, row) in enumerate(self.places) if own == stack}
        if len(shifts) == 1:
            return StackedLayer(self.stacks[stack], number + np.int32(shifts.pop()))
        rows = jnp.asarray([row for _, row in self.places], jnp.int32)
        at = jax.lax.dynamic_index_in_dim(rows, number, axis=0, keepdims=False)
        return StackedLayer(self.stacks[stack], at)


def by_address(
    params: Params, cfg: ModelConfig, beside: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Weight]:
    """A model's parameters with its layers as a `LayerStack` (see `can_be_addressed`).

    The weight table is open, and references the arrays, until the handle (`LayerStack.table`, the array
    itself) is collected and the steps that were called with it have ended. Parameters that are only given
    as shapes remain shapes.

    Args:
      params: parameters of the model. Nothing is copied.
    """
    layers = layers_of(params, cfg)
    for layer, further in zip(layers, beside, strict=False):
        layer.update(further)
    return {**_outside(params), STACK: stack_by_address(layers, kinds_of(cfg))}  # pyright: ignore


def by_stacking(params: Params, cfg: ModelConfig) -> dict[str, Weight]:
    """A model's parameters with its layers as `StackedLayers`.

    Arrays that are already entries of a stack (`StackEntry`) are not copied. Others, such as their adapters,
    get a stack of as many rows.
    """
    layers = layers_of(params, cfg)
    forms = [_form_of(each) for each in layers]
    stacks, places = [], dict[int, tuple[int, int]]()
    for form in dict.fromkeys(forms):
        numbers = [number for number, each in enumerate(forms) if each == form]
        own = [dict(layers[number]) for number in numbers]
        # Their rows in the stacks of their entries, if they have any.
        columns = zip(*(jax.tree.leaves(each) for each in own), strict=True)
        entries = (each for each in columns if all(isinstance(part, StackEntry) for part in each))
        column = next(entries, None)
        rows = range(len(own)) if column is None else [each.index for each in column]
        count = len(own) if column is None else len(column[0].stack)
        stacks.append(jax.tree.map(functools.partial(_stack, rows, count), *own))
        places |= {number: (len(stacks) - 1, row) for number, row in zip(numbers, rows, strict=True)}
    alike = first_alike(zip(kinds_of(cfg), forms, strict=True))
    stack = StackedLayers(tuple(stacks), alike, tuple(places[number] for number in range(len(layers))))
    return {**_outside(params), STACK: stack}  # pyright: ignore[reportReturnType]


def are_entries(params: Iterable[Weight]) -> bool:
    """Whether some arrays of the weights are entries of stacks, and none is only a shape."""
    leaves = jax.tree.leaves(list(params))
    shapes = any(isinstance(each, jax.ShapeDtypeStruct) for each in leaves)
    return not shapes and any(isinstance(each, StackEntry) for each in leaves)


def can_be_addressed(params: Params, cfg: ModelConfig) -> bool:
    """Whether native kernels read all parameters of a model's layers by address: on a CPU, with matrices in
    blocks, and separate experts, each with matrices of one format."""
    if jax.default_backend() != "cpu" or not native.kernels().native:
        return False
    specs = param_specs(cfg).items()
    vectors = {PARAMETER, *(within_layer(name) for name, spec in specs if spec.role == "vector")}

    def readable(name: str, weight: Any) -> bool:
        if name in vectors:
            plain = isinstance(weight, jax.Array | np.ndarray | jax.ShapeDtypeStruct)
            return plain and np.dtype(weight.dtype) in (np.float32, np.int32)
        if name.startswith("experts."):
            return isinstance(weight, PerExpert) and all(
                isinstance(each, BlockedArray) for each in weight.matrices
            )
        return isinstance(weight.base if isinstance(weight, Adapted) else weight, BlockedArray)

    def agree(layer: Mapping[str, Any]) -> bool:
        """Whether each expert's matrices have one format."""
        stacks = [each.matrices for each in layer.values() if isinstance(each, PerExpert)]
        formats = [{(each.bits, each.group) for each in of} for of in zip(*stacks, strict=True)]
        return all(len(each) == 1 for each in formats)

    layers = layers_of(params, cfg)
    return all(all(readable(*each) for each in layer.items()) and agree(layer) for layer in layers)


def layers_of(params: Params, cfg: ModelConfig) -> list[dict[str, Weight]]:
    """Per layer, its parameters by their names within it."""
    layers: list[dict[str, Weight]] = [{} for _ in range(cfg.layers)]
    for name, each in params.items():
        if name.startswith("layers."):
            layers[int(name.split(".", 2)[1])][within_layer(name)] = each
    return layers


def within_layer(name: str) -> str:
    """A parameter's name within its layer."""
    return name.split(".", 2)[-1]


def stack_by_address(layers: Sequence[Mapping[str, Any]], kinds: Sequence[Any]) -> LayerStack:
    """Puts the arrays of all layers' parameters into a weight table (see `by_address`).

    Args:
      layers: parameters of each layer by their names within it.
    """
    # `jax.tree.map`, which makes shapes of parameters, sorts them by name.
    layers = [dict(sorted(params.items())) for params in layers]
    forms = [LayerForm.of(params) for params in layers]
    alike = first_alike(zip(kinds, forms, strict=True))
    rows = [jax.tree.leaves(list(params.values())) for params in layers]
    handle: Any = jax.ShapeDtypeStruct((2,), jnp.uint32)
    if not any(isinstance(each, jax.ShapeDtypeStruct) for row in rows for each in row):
        most = max(map(len, rows))
        table = WeightTable([[*row, *[None] * (most - len(row))] for row in rows])
        handle = jax.device_put(table.operand, jax.devices()[0], may_alias=True)
        if handle.unsafe_buffer_pointer() != table.operand.ctypes.data:
            # A device that copies the handle does not reference the weight table.
            weakref.finalize(handle, table.close)
    return LayerStack(handle, alike, tuple(forms[first] for first in sorted(set(alike))))


def layer_of(params: Params, layer: int) -> LayerParams:
    """The parameters of a layer: under its own names, or those of a step of one layer (see `STACK`)."""
    found: Any = params.get(STACK)
    one = isinstance(found, LayerAt | StackedLayer)
    return found.params if one else LayerParams(params, f"layers.{layer}.")


def params_of_layer(params: Params, layer: int) -> Params:
    """The parameters of one layer, for `layer_of`."""
    stack: Any = params.get(STACK)
    if isinstance(stack, LayerStack | StackedLayers):
        return {STACK: stack.at(layer)}  # pyright: ignore[reportReturnType]
    return {name: each for name, each in params.items() if name.startswith(f"layers.{layer}.")}


def one_by_one(params: Params, cfg: ModelConfig) -> Iterator[Params]:
    """The parameters of each layer, for `layer_of`."""
    return (params_of_layer(params, layer) for layer in range(cfg.layers))


def first_alike(keys: Iterable[Any]) -> tuple[int, ...]:
    """Per layer, the first one with an equal key."""
    firsts: dict[Any, int] = {}
    return tuple(firsts.setdefault(key, number) for number, key in enumerate(keys))


def layer_runs(alike: Sequence[int]) -> list[LayerRun]:
    """The runs of layers, with the first equal layer of each in `alike`: at each layer the pattern that
    covers most layers, the shortest of equals."""
    runs: list[LayerRun] = []
    alike, first = tuple(alike), 0
    while first < len(alike):
        best = LayerRun(first, 1, 1)
        for period in range(1, (len(alike) - first) // 2 + 1):
            repeats = 1
            pattern = alike[first : first + period]
            while alike[first + repeats * period :][:period] == pattern:
                repeats += 1
            if repeats > 1 and repeats * period > best.repeats * best.period:
                best = LayerRun(first, period, repeats)
        runs.append(best)
        first += best.repeats * best.period
    return runs


def kinds_of(cfg: ModelConfig) -> list[Any]:
    """Criteria of layers' equality besides their parameters, per layer."""
    return [
        (
            cfg.units(layer),
            cfg.attention_windows[layer],
            cfg.layer_rope(layer),
            cfg.is_sparse(layer),
            cfg.is_state(layer),
        )
        for layer in range(cfg.layers)
    ]


def _outside(params: Params) -> dict[str, Weight]:
    return {name: each for name, each in params.items() if not name.startswith("layers.")}


# Stands for a factor of an adapter.
_FACTOR: Any = object()


def _without_ranks(weight: Any) -> Any:
    if not isinstance(weight, Adapted):
        return weight
    return dataclasses.replace(weight, base=_without_ranks(weight.base), left=_FACTOR, right=_FACTOR)


def _form_of(params: Mapping[str, Weight]) -> Any:
    """Structure that the parameters of layers in one stack share, hashable."""
    leaves, structure = jax.tree.flatten(dict(params))
    stacks = tuple(id(each.stack) for each in leaves if isinstance(each, StackEntry))
    return structure, stacks, tuple((tuple(np.shape(each)), np.dtype(each.dtype).name) for each in leaves)


def _stack(rows: Sequence[int], count: int, *column: Any) -> jax.Array:
    """A stack of `count` rows with the arrays of a column at `rows`."""
    first = column[0]
    entries = [each.index for each in column if isinstance(each, StackEntry) and each.stack is first.stack]
    if entries == list(rows):
        return first.stack
    stack = new_stack(count, first)
    for row, each in zip(rows, column, strict=True):
        stack = with_row(stack, row, each)
    return placed(stack)
