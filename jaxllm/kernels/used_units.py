"""Counts of used units of a layer as an argument of a compiled step.

On a CPU the native kernels take the number of units as an argument, so that one bucket over the whole model's
parameters serves every level of an elastic model: a level is then these few numbers. Without native kernels
XLA computes all units and masks the unused ones, which gives the same result but is no faster.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.kernels.native_call import value
from jaxllm.kernels.weight_table import Operand

# Name of a layer's parameter with the counts; a model whose units are all used does not have it.
PARAMETER = "used_units"
_GROUPS, _NEURONS = 0, 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class UsedUnits:
    """The number of used units of one block of a layer.

    Attributes:
      counts: `[3]` int32, the numbers of used kv groups, neurons and ranks of adapters of the layer (further
        ranks are zero). Where the sequences of a batch differ `[1 + B, 3]`: the most of any sequence, then
        those of each (see `of_rows`).
      column: 0 for kv groups, 1 for neurons.
    """

    counts: Operand
    column: int = dataclasses.field(metadata={"static": True})

    @property
    def by_row(self) -> bool:
        """Whether each sequence of a batch has counts of its own."""
        return len(self.counts.shape) == 2

    def of(self, row: int) -> "UsedUnits":
        """Those of one sequence of a batch."""
        return UsedUnits(value(self.counts)[1 + row], self.column) if self.by_row else self

    def only(self, h: jax.Array, axis: int) -> jax.Array:
        """`h` with zeros, also in place of NaN, for all units along `axis` that are not used; where sequences
        differ `h` is `[B, ...]`."""
        shape, counts = [1] * h.ndim, value(self.counts)
        shape[axis] = h.shape[axis]
        rows = (h.shape[0],) + (1,) * (h.ndim - 1)
        count = counts[1:, self.column].reshape(rows) if self.by_row else counts[self.column]
        inside = jnp.arange(h.shape[axis], dtype=jnp.int32).reshape(shape) < count
        return jnp.where(inside, h, jnp.zeros((), h.dtype))


def only_of_rows(h: jax.Array, used: UsedUnits | None, axis: int) -> jax.Array:
    """`h` `[B, ...]` with zeros for the units along `axis` that a sequence does not use, where sequences
    differ: products know the most of any sequence alone."""
    return h if used is None or not used.by_row else used.only(h, axis)


def of_rows(units: jax.Array) -> tuple[UsedUnits, UsedUnits]:
    """The used kv groups and the used neurons of one layer, of sequences that differ: `[B, 2]` int32. There
    are no adapters."""
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
