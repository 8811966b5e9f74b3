"""Counts of used units of a layer as an argument of a compiled step.

On a CPU the native kernels take the number of units as an argument, so that one bucket over the whole model's
parameters serves every level of an elastic model: a level is then these few numbers. Without native kernels
XLA computes all units and masks the unused ones, which gives the same result but is no faster.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

# Name of the parameter with the counts; a model whose units are all used does not have it.
PARAMETER = "used_units"
_GROUPS, _NEURONS, _RANK, _COLUMNS = 0, 1, 2, 3


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class UsedUnits:
    """The number of used units of one block of one layer.

    Attributes:
      counts: `[L, 3]` int32, per layer the numbers of used kv groups, neurons and ranks of adapters (further
        ranks are zero).
      layer: index of the layer.
      column: 0 for kv groups, 1 for neurons.
    """

    counts: jax.Array
    layer: int = dataclasses.field(metadata={"static": True})
    column: int = dataclasses.field(metadata={"static": True})

    @property
    def count(self) -> jax.Array:
        """The number of units, int32 scalar."""
        return self.counts[self.layer, self.column]

    @property
    def indices(self) -> tuple[int, int]:
        """Indices of the numbers of units and of ranks in the flattened counts."""
        return _COLUMNS * self.layer + self.column, _COLUMNS * self.layer + _RANK

    def only(self, h: jax.Array, axis: int) -> jax.Array:
        """`h` with zeros, also in place of NaN, for all units along `axis` that are not used."""
        shape = [1] * h.ndim
        shape[axis] = h.shape[axis]
        inside = jnp.arange(h.shape[axis], dtype=jnp.int32).reshape(shape) < self.count
        return jnp.where(inside, h, jnp.zeros((), h.dtype))


def used_in_layer(counts: jax.Array | None, layer: int) -> tuple[UsedUnits | None, UsedUnits | None]:
    """The used kv groups and the used neurons of a layer; None if all are used."""
    if counts is None:
        return None, None
    return UsedUnits(counts, layer, _GROUPS), UsedUnits(counts, layer, _NEURONS)


def counts_of(groups: list[int], neurons: list[int], rank: int) -> np.ndarray:
    """The counts `[L, 3]` int32 of a level, from its kv groups and neurons by layer and the adapter's
    rank."""
    return np.stack([groups, neurons, [rank] * len(groups)], axis=1).astype(np.int32)
