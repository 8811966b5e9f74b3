"""Calls native kernels from compiled steps: operands, attributes, counts of used units.

On a CPU the native kernels have the number of used units as an argument, so that one bucket over the whole
model's parameters serves every level of an elastic model: a level is then these few numbers. Without native
kernels XLA computes all units and masks the unused ones, with the same result but no speedup.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import Activation
from jaxllm.kernels.native import Operand, TableArray, target
from jaxllm.quant import Adapted, BlockedArray


def call(
    name: str,
    results: Any,
    buffers: Sequence[Any],
    operands: Sequence[Operand],
    *,
    aliases: Any = None,
    **attributes: Any,
) -> Any:
    """Calls a kernel.

    Args:
      results: shapes and dtypes of its results.
      buffers: its first operands.
      operands: the others, each an array or an entry of a weight table; all entries are of one row.
      aliases: map from the index of a buffer to that of the result that reuses its memory.
      attributes: static arguments.
    """
    columns = [each.column if isinstance(each, TableArray) else -1 for each in operands]
    entries = [each for each in operands if isinstance(each, TableArray)]
    arrays = [each for each in operands if not isinstance(each, TableArray)]
    table, row = jnp.zeros((0,), jnp.uint32), jnp.zeros((0,), jnp.int32)
    if entries:
        table, row = entries[0].table, entries[0].row
    kernel = jax.ffi.ffi_call(target(name), results, input_output_aliases=aliases)
    return kernel(*buffers, table, row, *arrays, **attributes, columns=np.array(columns, np.int64))


def value(array: Operand) -> jax.Array:
    """Returns the array itself, for XLA's own code: an array of a table is copied."""
    if not isinstance(array, TableArray):
        return array
    # Kernels know the bits of bfloat16.
    halves = array.dtype == jnp.bfloat16
    result = jax.ShapeDtypeStruct(array.shape, jnp.uint16 if halves else array.dtype)
    copied = call("copy", result, (), (array,))
    return jax.lax.bitcast_convert_type(copied, jnp.bfloat16) if halves else copied


# Name of a layer's parameter with the counts; models that use all units do not have it.
PARAMETER = "used_units"
_GROUPS, _NEURONS = 0, 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class UsedUnits:
    """Number of used units of one block of a layer.

    Attributes:
      counts: `[3]` int32, the numbers of used kv groups, neurons and ranks of adapters of the layer
        (further ranks are zero). If the sequences of a batch differ `[1 + B, 3]`: the maximum over
        sequences, then the numbers of each (see `of_rows`).
      column: 0 for kv groups, 1 for neurons.
    """

    counts: Operand
    column: int = dataclasses.field(metadata={"static": True})

    @property
    def by_row(self) -> bool:
        """Whether each sequence of a batch has counts of its own."""
        return len(self.counts.shape) == 2

    def of(self, row: int) -> "UsedUnits":
        """Counts of one sequence of a batch."""
        return UsedUnits(value(self.counts)[1 + row], self.column) if self.by_row else self

    def only(self, h: jax.Array, axis: int) -> jax.Array:
        """Returns `h` with zeros, also in place of NaN, for all unused units along `axis`; if sequences
        differ `h` is `[B, ...]`."""
        shape, counts = [1] * h.ndim, value(self.counts)
        shape[axis] = h.shape[axis]
        rows = (h.shape[0],) + (1,) * (h.ndim - 1)
        count = counts[1:, self.column].reshape(rows) if self.by_row else counts[self.column]
        inside = jnp.arange(h.shape[axis], dtype=jnp.int32).reshape(shape) < count
        return jnp.where(inside, h, jnp.zeros((), h.dtype))


def only_of_rows(h: jax.Array, used: UsedUnits | None, axis: int) -> jax.Array:
    """Returns `h` `[B, ...]` with zeros for the units along `axis` that a sequence does not use, if
    sequences differ: products only use the maximum over sequences."""
    return h if used is None or not used.by_row else used.only(h, axis)


def of_rows(units: jax.Array) -> tuple[UsedUnits, UsedUnits]:
    """Returns the used kv groups and the used neurons of one layer, for sequences that differ: `[B, 2]`
    int32. There are no adapters."""
    each = jnp.pad(units, ((0, 0), (0, 1)))
    counts = jnp.concatenate([jnp.max(each, axis=0, keepdims=True), each])
    return UsedUnits(counts, _GROUPS), UsedUnits(counts, _NEURONS)


def used_units(counts: Operand | None) -> tuple[UsedUnits | None, UsedUnits | None]:
    """The used kv groups and the used neurons of a layer with such counts; None if all are used."""
    if counts is None:
        return None, None
    return UsedUnits(counts, _GROUPS), UsedUnits(counts, _NEURONS)


def counts_of(groups: list[int], neurons: list[int], rank: int) -> np.ndarray:
    """The counts `[L, 3]` int32 of a level, from its kv groups and neurons by layer and the rank of its
    adapters."""
    return np.stack([groups, neurons, [rank] * len(groups)], axis=1).astype(np.int32)


Adaptable = BlockedArray | Adapted
ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu", "gelu_tanh", "relu")


def format_of(weight: Adaptable) -> dict[str, np.int64]:
    """Attributes of an FFI call that describe a weight's format."""
    stored = _stored(weight)
    return {"bits": np.int64(stored.bits), "group": np.int64(stored.group)}


def units_of(used: UsedUnits | None, weight: Adaptable) -> dict[str, np.int64]:
    """Attributes: the units of weights whose units are outputs, and the index of their used number."""
    # Partly used weights have the same number of units; their rows per unit differ.
    return {
        "units": np.int64(1 if used is None else weight.shape[0]),
        "units_at": np.int64(-1 if used is None else used.column),
    }


def segments_of(used: UsedUnits | None, weight: Adaptable) -> dict[str, Any]:
    """Returns `units_of` of a weight whose units are inputs."""
    stacked = weight.ndim == 3
    return {
        "stacked": stacked,
        "segments": np.int64(weight.shape[0] if stacked else 1),
        "units_at": np.int64(-1 if used is None else used.column),
    }


def block_of(used: UsedUnits | None, up: Adaptable, activation: Activation) -> dict[str, np.int64]:
    """`units_of` of a feed-forward block, and its activation."""
    return {
        "units": np.int64(up.shape[0]),
        "units_at": np.int64(-1 if used is None else used.column),
        "activation": np.int64(ACTIVATIONS.index(activation)),
    }


def parts_of(weight: Adaptable) -> tuple[Operand, ...]:
    """Operands of a weight: its arrays, and its adapter's factors, empty without one."""
    sides = (nothing(), nothing())
    if isinstance(weight, Adapted):
        sides = (_wide(weight.left), _wide(weight.right))
    return *arrays_of(_stored(weight)), *sides


def arrays_of(weight: BlockedArray) -> tuple[Operand, ...]:
    """Operands of a weight without its adapter: data, scales, and the low plane, empty for none."""
    return weight.data, weight.scale, nothing() if weight.low is None else weight.low


def no_parts() -> tuple[Operand, ...]:
    """Returns the operands of a missing weight."""
    return (nothing(),) * 5


def _stored(weight: Adaptable) -> BlockedArray:
    stored = weight if isinstance(weight, BlockedArray) else weight.base
    assert isinstance(stored, BlockedArray)
    return stored


def _wide(side: Operand) -> Operand:
    return side.astype(jnp.float32) if isinstance(side, jax.Array) else side


def counts_operand(used: UsedUnits | None) -> Operand:
    """The operand with the counts of used units, empty for all."""
    return jnp.zeros((0,), jnp.int32) if used is None else used.counts


def count_operand(count: jax.Array | np.integer | None) -> jax.Array:
    """A number, or numbers, as an operand, empty for none."""
    return jnp.zeros((0,), jnp.int32) if count is None else jnp.asarray(count, jnp.int32)


def steps_operand(*steps: jax.Array | None) -> jax.Array:
    """Static steps as an operand, empty for none."""
    given = [each for each in steps if each is not None]
    return jnp.stack([jnp.asarray(each, jnp.float32) for each in given]) if given else nothing()


def nothing() -> jax.Array:
    """Returns the operand of missing floats."""
    return jnp.zeros((0,), jnp.float32)


def optional(value: Operand | None) -> Operand:
    """An optional operand, empty for none."""
    return nothing() if value is None else value
