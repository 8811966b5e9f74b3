"""Says how activations are divided over the devices of a mesh.

Without constraints XLA's partitioner may follow the parameters instead, which are divided too, and gather the
whole batch on every device. The rules are data: per kind of activation, the mesh axes of each of its axes.
"""

import math

import jax
from jax.sharding import AxisType, PartitionSpec

from jaxllm.kernels.document_attention import BATCH_AXES
from jaxllm.kernels.document_attention import HEAD_AXES as UNIT_AXES

RULES = {
    "residual": (BATCH_AXES,),  # [B, T, D]
    "logits": (BATCH_AXES, None, UNIT_AXES),  # [B, T, V]
}


def constrained(x: jax.Array, kind: str) -> jax.Array:
    """`x`, divided as `RULES` say, in a mesh (`jax.set_mesh`) that has these axes; an axis that does not
    divide evenly stays whole."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.size <= 1:
        return x
    free = {name for name, of in zip(mesh.axis_names, mesh.axis_types, strict=True) if of == AxisType.Auto}
    parts: list[tuple[str, ...] | None] = []
    for size, axes in zip(x.shape, RULES[kind], strict=False):
        own = tuple(axis for axis in axes or () if axis in free)
        divides = size % math.prod(mesh.shape[axis] for axis in own) == 0
        parts.append(own if own and divides else None)
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*parts)) if any(parts) else x
