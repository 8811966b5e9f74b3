"""The parameters of all layers in forms that a loop over layers reads: by address, or stacked.

Layers are equal if their configs, and the names, types and shapes of their parameters are. A step has code for
each run of equal layers, or of a repeated pattern of layers (`LayerRun`), instead of code for each layer.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.kernels.weight_table import TableArray, WeightTable
from jaxllm.models.layer_params import LayerParams
from jaxllm.models.parameters import Params
from jaxllm.quant import Weight

# Name of the parameter that has the layers.
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
    """What the parameters of equal layers have in common.

    Attributes:
      names: of the parameters, within the layer.
      structure: of the tree of all their arrays.
      columns: per array its column in the weight table.
      shapes, dtypes: per array.
    """

    names: tuple[str, ...]
    structure: Any
    columns: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype, ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerStack:
    """The parameters of all layers by address.

    Attributes:
      table: `[2]` uint32, the handle of a weight table with a row for each layer.
      alike: per layer, the first layer that equals it.
      forms: per layer of `alike`'s distinct values, ascending, its form.
    """

    table: jax.Array | np.ndarray
    alike: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    forms: tuple[LayerForm, ...] = dataclasses.field(metadata={"static": True})

    def layer(self, like: int, number: jax.Array | int) -> LayerParams:
        """The parameters of layer `number`, int32 scalar, which equals layer `like`."""
        form = self.forms[sorted(set(self.alike)).index(self.alike[like])]
        row, table = jnp.asarray(number, jnp.int32), jnp.asarray(self.table)
        arrays = [
            TableArray(table, row, *each)
            for each in zip(form.columns, form.shapes, form.dtypes, strict=True)
        ]
        weights = jax.tree.unflatten(form.structure, arrays)
        return LayerParams(dict(zip(form.names, weights, strict=True)), "")


def stack_by_address(
    layers: Sequence[Mapping[str, Weight]], kinds: Sequence[Any]
) -> tuple[LayerStack, WeightTable]:
    """Puts the arrays of all layers' parameters into a weight table.

    Args:
      layers: per layer its parameters by their names within it. Nothing is copied.
      kinds: per layer, what else makes layers equal.

    Returns:
      The stack, valid while the table is open.
    """
    rows: list[list[Any]] = []
    firsts: dict[Any, int] = {}
    forms: list[LayerForm] = []
    alike = []
    for number, (params, kind) in enumerate(zip(layers, kinds, strict=True)):
        names = tuple(params)
        arrays, structure = jax.tree.flatten([params[name] for name in names])
        columns = tuple(range(len(arrays)))
        shapes = tuple(tuple(each.shape) for each in arrays)
        form = LayerForm(names, structure, columns, shapes, tuple(np.dtype(each.dtype) for each in arrays))
        first = firsts.setdefault((kind, form), number)
        if first == number:
            forms.append(form)
        alike.append(first)
        rows.append(arrays)
    most = max(map(len, rows))
    table = WeightTable([[*row, *[None] * (most - len(row))] for row in rows])
    return LayerStack(table.operand, tuple(alike), tuple(forms)), table


def over_layers(
    params: Params,
    cfg: ModelConfig,
    body: Callable[[Carry, LayerParams, int, jax.Array | int], Carry],
    carry: Carry,
) -> Carry:
    """Runs `body` for each layer, in order.

    Args:
      params: of the model; with its layers as a `LayerStack` under `STACK`, or each by itself.
      cfg: the model.
      body: of (what it returned for the layer before, the layer's parameters, a layer that equals it, its
        number), where only the number may be known at run time alone.
      carry: for the first layer.
    """
    stack = params.get(STACK)
    if not isinstance(stack, LayerStack):
        for layer in range(cfg.layers):
            carry = body(carry, LayerParams(params, f"layers.{layer}."), layer, layer)
        return carry
    for run in layer_runs(stack.alike):

        def pattern(index: jax.Array | int, carry: Carry, run: LayerRun = run) -> Carry:
            for like in range(run.first, run.first + run.period):
                number = like + index * run.period
                carry = body(carry, stack.layer(like, number), like, number)
            return carry

        carry = pattern(0, carry) if run.repeats == 1 else jax.lax.fori_loop(0, run.repeats, pattern, carry)
    return carry


def layer_runs(alike: Sequence[int]) -> list[LayerRun]:
    """The runs of layers, of which `alike` says the first that equals each: at each layer the pattern that
    covers most layers, the shortest of equals."""
    return list(_runs(tuple(alike)))


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
