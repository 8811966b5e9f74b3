"""Computes attention within packed documents for training, forward and backward, by native kernels.

Documents are packed one after another into a sequence, and a token attends to its own document up to itself.
Each document is then a dense causal attention of its own: the work depends on the lengths of documents, not
of the packed sequence, and there is no mask. Tiles and the recomputed softmax of the backward pass are those
of FlashAttention-2 (arXiv 2307.08691). Soft caps, sliding windows, dtypes other than float32 and other
processors use XLA (`layers.py`).
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from jaxllm.kernels import native, native_attention

# The same function of q, k, v and starts for processors without native kernels.
Elsewhere = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
# Axes of a mesh that may divide the batch, and the kv heads.
BATCH_AXES, HEAD_AXES = ("data", "fsdp"), ("tensor",)


def fits(q: jax.Array) -> bool:
    """Whether native kernels take queries `[B, T, K, G, H]`: float32 on this process's CPU, with batch and kv
    heads that the mesh, if there is one, divides evenly."""
    if q.dtype != jnp.float32 or q.size == 0 or not native.kernels().native:
        return False
    return jax.default_backend() == "cpu" and divides(q)


def divides(q: jax.Array) -> bool:
    """Whether the mesh, if there is one, divides batch and kv heads of `[B, T, K, G, H]` evenly."""
    batch, heads = _axes()
    sizes = jax.sharding.get_abstract_mesh().shape
    shards = [math.prod(sizes[axis] for axis in axes) for axes in (batch, heads)]
    return q.shape[0] % shards[0] == 0 and q.shape[2] % shards[1] == 0


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def document_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, starts: jax.Array, scale: float, elsewhere: Elsewhere
) -> jax.Array:
    """Causal attention within documents, for queries that `fits` accepts.

    In a mesh (`jax.set_mesh`) each device computes its own part of the batch and heads, because XLA cannot
    partition an FFI call.

    Args:
      q: queries `[B, T, K, G, H]` float32.
      k, v: keys and values `[B, T, K, H]` float32.
      starts: `[B, T]` int32, per token the index in the sequence where its document begins: the token's own
        index or the start of the token before. Other values are an error at run time.
      scale: multiplies the scores.
      elsewhere: computes the same when the step is lowered for another processor.

    Returns:
      `[B, T, K, G, H]` float32.
    """
    return _forward(q, k, v, starts, scale, elsewhere)[0]


def _forward(q, k, v, starts, scale, elsewhere):
    def by_kernel(q, k, v, starts):
        return native_attention.document_attention(q, k, v, starts, scale=scale)

    def by_other(q, k, v, starts):
        return elsewhere(q, k, v, starts), jnp.zeros(q.shape[:-1], jnp.float32)

    def compute(*args):
        return jax.lax.platform_dependent(*args, cpu=by_kernel, default=by_other)

    out, lse = on_shards(compute, (q, k, v, starts), 2)
    return out, (q, k, v, starts, out, lse)


def _backward(scale, elsewhere, kept, dout):
    def by_kernel(q, k, v, starts, out, lse, dout):
        return native_attention.document_attention_gradients(q, k, v, starts, out, lse, dout, scale=scale)

    def by_other(q, k, v, starts, out, lse, dout):
        return jax.vjp(lambda q, k, v: elsewhere(q, k, v, starts), q, k, v)[1](dout)

    def compute(*args):
        return jax.lax.platform_dependent(*args, cpu=by_kernel, default=by_other)

    return (*on_shards(compute, (*kept, dout), 3), None)


document_attention.defvjp(_forward, _backward)


def _axes() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Axes of the mesh that divide the batch, and those that divide the kv heads. Axes of a caller's own
    `shard_map` are left out, because it has divided the arrays already."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    free = {name for name, kind in kinds.items() if kind != AxisType.Manual}
    batch, heads = (tuple(axis for axis in axes if axis in free) for axes in (BATCH_AXES, HEAD_AXES))
    return batch, heads


def on_shards(compute: Callable[..., Any], args: tuple[jax.Array, ...], results: int) -> Any:
    """Runs `compute` on each device's part of batch and heads; all results are `[B, T, K, ...]`."""
    batch, heads = _axes()
    if not batch and not heads:
        return compute(*args)
    shard = PartitionSpec(batch or None, None, heads or None)
    row = PartitionSpec(batch or None)
    return jax.shard_map(
        compute,
        in_specs=tuple(shard if each.ndim > 2 else row for each in args),
        out_specs=(shard,) * results,
        check_vma=False,  # what a foreign call's results vary over is unknown
    )(*args)
