"""How many units of a layer are used, where only a graph's argument says so.

On a CPU the native kernels take the number of units to compute as an argument, so that one graph, over the
whole model's parameters, serves every level of an elastic model: a level is then these few numbers. Without
native kernels XLA computes all units and leaves out what the unused ones would add: right, but no faster.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

# The parameter that has the counts; a model whose units are all used has none.
PARAMETER = "used_units"
_GROUPS, _NEURONS, _RANK, _COLUMNS = 0, 1, 2, 3


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class UsedUnits:
    """How many units of one block of one layer are used.

    Attributes:
      counts: `[L, 3]` int32, of each layer the kv-groups, the neurons and the ranks of adapters that are used
        (ranks beyond hold zeros).
      layer: which layer.
      column: which count.
    """

    counts: jax.Array
    layer: int = dataclasses.field(metadata={"static": True})
    column: int = dataclasses.field(metadata={"static": True})

    @property
    def count(self) -> jax.Array:
        """The number of units, int32 scalar."""
        return self.counts[self.layer, self.column]

    @property
    def places(self) -> tuple[int, int]:
        """Where in the flattened counts the numbers of units and of ranks are."""
        return _COLUMNS * self.layer + self.column, _COLUMNS * self.layer + _RANK

    def only(self, h: jax.Array, axis: int) -> jax.Array:
        """`h` with zeros for all units along `axis` that are not used, whatever they held."""
        shape = [1] * h.ndim
        shape[axis] = h.shape[axis]
        inside = jnp.arange(h.shape[axis], dtype=jnp.int32).reshape(shape) < self.count
        return jnp.where(inside, h, jnp.zeros((), h.dtype))


def used_in_layer(counts: jax.Array | None, layer: int) -> tuple[UsedUnits | None, UsedUnits | None]:
    """What is used of a layer's kv-groups and of its neurons; None where all are."""
    if counts is None:
        return None, None
    return UsedUnits(counts, layer, _GROUPS), UsedUnits(counts, layer, _NEURONS)


def counts_of(groups: list[int], neurons: list[int], rank: int) -> np.ndarray:
    """The counts `[L, 3]` int32 of a level: of each layer kv-groups and neurons, and the adapter's rank."""
    return np.stack([groups, neurons, [rank] * len(groups)], axis=1).astype(np.int32)
