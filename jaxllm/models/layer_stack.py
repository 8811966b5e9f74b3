"""The parameters of all layers by address or stacked, and a loop over layers.

Layers are equal if their configs, and the names, types and shapes of their parameters are. A step has code
for each run of equal layers, or of a repeated pattern of layers (`LayerRun`), instead of code for each layer.
"""

import dataclasses
import weakref
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.kernels import native
from jaxllm.kernels.native import TableArray, WeightTable
from jaxllm.kernels.native_call import PARAMETER
from jaxllm.models.layer_params import LayerParams
from jaxllm.models.parameters import Params, param_specs
from jaxllm.models.stacked_layers import StackedLayer, StackedLayers, stack_layers
from jaxllm.quant import Adapted, Apart, BlockedArray, Weight

# Name of the parameter with the layers: a `LayerStack` or `StackedLayers`; in a step of one layer a
# `LayerAt` or `StackedLayer`, in a step of some layers `LayersAt`.
STACK = "layers"
Carry = TypeVar("Carry")


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
      form: form of the parameters.
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
      form: form of the parameters.
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


def addressable(params: Mapping[str, Weight], vectors: Container[str]) -> bool:
    """Whether native kernels read all of a layer's parameters by address: matrices in blocks, separate
    experts.

    Args:
      params: parameters by their names within the layer.
      vectors: names of parameters that are not matrices of products.
    """

    def readable(name: str, weight: Any) -> bool:
        if name in vectors:
            plain = isinstance(weight, jax.Array | np.ndarray | jax.ShapeDtypeStruct)
            return plain and np.dtype(weight.dtype) in (np.float32, np.int32)
        if name.startswith("experts."):
            return isinstance(weight, Apart) and all(
                isinstance(each, BlockedArray) for each in weight.matrices
            )
        return isinstance(weight.base if isinstance(weight, Adapted) else weight, BlockedArray)

    return all(readable(*each) for each in params.items()) and _experts_agree(params)


def by_address(
    params: Params, cfg: ModelConfig, beside: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Weight]:
    """A model's parameters with its layers as a `LayerStack` (see `can_be_addressed`).

    The weight table is open, and references the arrays, until the handle (`LayerStack.table`, the array
    itself) is collected and the steps that were called with it have ended. Parameters that are only given
    as shapes remain shapes.

    Args:
      params: parameters of the model. Nothing is copied.
      cfg: config of the model.
      beside: further arrays by name, per layer.
    """
    layers = layers_of(params, cfg)
    for layer, further in zip(layers, beside, strict=False):
        layer.update(further)
    return {**_outside(params), STACK: stack_by_address(layers, kinds_of(cfg))}  # pyright: ignore


def by_stacking(params: Params, cfg: ModelConfig) -> dict[str, Weight]:
    """A model's parameters with its layers as `StackedLayers`; see `stack_layers` for what is copied."""
    stack = stack_layers(layers_of(params, cfg), kinds_of(cfg))
    return {**_outside(params), STACK: stack}  # pyright: ignore[reportReturnType]


def can_be_addressed(params: Params, cfg: ModelConfig) -> bool:
    """Whether native kernels read the layers of a model by address: on a CPU, see `addressable`."""
    if jax.default_backend() != "cpu" or not native.kernels().native:
        return False
    specs = param_specs(cfg).items()
    vectors = {PARAMETER, *(within_layer(name) for name, spec in specs if spec.role == "vector")}
    return all(addressable(layer, vectors) for layer in layers_of(params, cfg))


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
      kinds: further criteria of equality, per layer.
    """
    # `jax.tree.map`, which makes shapes of parameters, sorts them by name.
    layers = [dict(sorted(params.items())) for params in layers]
    firsts: dict[Any, int] = {}
    forms = [LayerForm.of(params) for params in layers]
    alike = [
        firsts.setdefault((kind, form), number)
        for number, (kind, form) in enumerate(zip(kinds, forms, strict=True))
    ]
    rows = [jax.tree.leaves(list(params.values())) for params in layers]
    handle: Any = jax.ShapeDtypeStruct((2,), jnp.uint32)
    if not any(isinstance(each, jax.ShapeDtypeStruct) for row in rows for each in row):
        most = max(map(len, rows))
        table = WeightTable([[*row, *[None] * (most - len(row))] for row in rows])
        handle = jax.device_put(table.operand, jax.devices()[0], may_alias=True)
        if handle.unsafe_buffer_pointer() != table.operand.ctypes.data:
            # A device that copies the handle does not reference the weight table.
            weakref.finalize(handle, table.close)
    return LayerStack(handle, tuple(alike), tuple(forms[first] for first in sorted(set(alike))))


def layer_of(params: Params, layer: int) -> LayerParams:
    """The parameters of a layer: under its own names, or those of a step of one layer (see `STACK`)."""
    found: Any = params.get(STACK)
    one = isinstance(found, LayerAt | StackedLayer)
    return found.params if one else LayerParams(params, f"layers.{layer}.")


def one_by_one(params: Params, cfg: ModelConfig) -> Iterator[Params]:
    """The parameters of each layer, for `layer_of`."""
    stack: Any = params.get(STACK)
    for layer in range(cfg.layers):
        if isinstance(stack, LayerStack | StackedLayers):
            yield {STACK: stack.at(layer)}  # pyright: ignore[reportReturnType]
        else:
            prefix = f"layers.{layer}."
            yield {name: each for name, each in params.items() if name.startswith(prefix)}


def over_layers(
    params: Params,
    cfg: ModelConfig,
    body: Callable[[Carry, Params, int, jax.Array | int], Carry],
    carry: Carry,
) -> Carry:
    """Runs `body` for each layer, in order.

    Args:
      params: parameters of the model, with all its layers under `STACK`, or separate.
      cfg: config of the model.
      body: function of (its result for the layer before, parameters for `layer_of`, a layer that equals
        this one, its number), where only the number may be unknown at trace time.
      carry: initial value for the first layer.
    """
    stack: Any = params.get(STACK)
    if not isinstance(stack, LayerStack | StackedLayers):
        for layer in range(cfg.layers):
            carry = body(carry, params, layer, layer)
        return carry
    for run in layer_runs(stack.alike):

        def pattern(index: jax.Array | int, carry: Carry, run: LayerRun = run) -> Carry:
            for like in range(run.first, run.first + run.period):
                number = like + index * run.period
                own: Any = {STACK: stack.at(like, jnp.asarray(number, jnp.int32))}
                carry = body(carry, own, like, number)
            return carry

        carry = pattern(0, carry) if run.repeats == 1 else jax.lax.fori_loop(0, run.repeats, pattern, carry)
    return carry


def layer_runs(alike: Sequence[int]) -> list[LayerRun]:
    """The runs of layers, with the first equal layer of each in `alike`: at each layer the pattern that
    covers most layers, the shortest of equals."""
    return list(_runs(tuple(alike)))


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
    """The parameters outside of layers."""
    return {name: each for name, each in params.items() if not name.startswith("layers.")}


def _runs(alike: tuple[int, ...]) -> Iterator[LayerRun]:
    first = 0
    while first < len(alike):
        best = LayerRun(first, 1, 1)
        for period in range(1, (len(alike) - first) // 2 + 1):
            repeats = 1
            pattern = alike[first : first + period]
            while alike[first + repeats * period :][:period] == pattern:
                repeats += 1
            if repeats > 1 and repeats * period > best.repeats * best.period:
                best = LayerRun(first, period, repeats)
        yield best
        first += best.repeats * best.period


def _experts_agree(params: Mapping[str, Weight]) -> bool:
    """Whether each expert's matrices have one format."""
    stacks = [each.matrices for each in params.values() if isinstance(each, Apart)]
    formats = [{(each.bits, each.group) for each in of} for of in zip(*stacks, strict=True)]  # pyright: ignore
    return all(len(each) == 1 for each in formats)


class _Factor:
    """Stands for a factor of an adapter."""


_FACTOR = _Factor()


def _without_ranks(weight: Any) -> Any:
    if not isinstance(weight, Adapted):
        return weight
    return dataclasses.replace(weight, base=_without_ranks(weight.base), left=_FACTOR, right=_FACTOR)  # pyright: ignore
