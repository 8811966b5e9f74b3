"""Computes attention within packed documents on GPUs and TPUs by fused kernels, forward and backward.

Both kernels are JAX's own, written in Pallas: FlashAttention on GPUs, splash attention on TPUs. They take the
borders of documents as segment ids, and hold no scores `[T, T]`. cuDNN's attention is not used: its mask is
an array of the scores' size.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.kernels.document_attention import divides, on_shards

# The same function of q, k, v and starts, for other platforms and shapes.
Elsewhere = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
_GPU_BLOCK, _TPU_BLOCK, _TPU_LANES = 128, 512, 128


def fused_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, starts: jax.Array, scale: float, elsewhere: Elsewhere
) -> jax.Array:
    """Causal attention within documents, by the platform that the step is lowered for.

    Args:
      q: queries `[B, T, K, G, H]`.
      k, v: keys and values `[B, T, K, H]`.
      starts: `[B, T]` int32, per token the index in the sequence where its document begins.
      scale: multiplies the scores.
      elsewhere: computes the same where there is no fused kernel: on other platforms, for sequences that are
        no multiple of a kernel's block, and for batches that the mesh does not divide.

    Returns:
      `[B, T, K, G, H]` in q's dtype; differentiable in q, k and v.
    """
    tokens, width = q.shape[1], q.shape[-1]
    kernels = {}
    if divides(q) and tokens % _GPU_BLOCK == 0:
        kernels["cuda"] = lambda *args: on_gpu(*args, scale=scale)
    if divides(q) and tokens % _TPU_LANES == 0 and width % _TPU_LANES == 0:
        kernels["tpu"] = lambda *args: on_tpu(*args, scale=scale)
    if not kernels:
        return elsewhere(q, k, v, starts)

    def sharded(kernel: Elsewhere) -> Elsewhere:
        # XLA cannot partition a kernel: each device runs it on its part of batch and heads.
        return lambda *args: on_shards(lambda *own: (kernel(*own),), args, 1)[0]

    platforms = {name: sharded(kernel) for name, kernel in kernels.items()}
    return jax.lax.platform_dependent(q, k, v, starts, default=elsewhere, **platforms)


def on_gpu(
    q: jax.Array, k: jax.Array, v: jax.Array, starts: jax.Array, *, scale: float, interpret: bool = False
) -> jax.Array:
    """`fused_attention` by Pallas' FlashAttention for GPUs, which T must be a multiple of 128 for."""
    from jax.experimental.pallas.ops.gpu import attention

    heads = (*q.shape[:2], -1, q.shape[-1])
    # The kernel pairs each query head with a key head of its own.
    k, v = (jnp.repeat(each, q.shape[3], axis=2) for each in (k, v))
    out: Any = attention.mha(q.reshape(heads), k, v, starts, sm_scale=scale, causal=True, interpret=interpret)
    return out.reshape(q.shape)


def on_tpu(
    q: jax.Array, k: jax.Array, v: jax.Array, starts: jax.Array, *, scale: float, interpret: bool = False
) -> jax.Array:
    """`fused_attention` by splash attention, which T and H must be multiples of 128 for."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    tokens, count = q.shape[1], q.shape[2] * q.shape[3]
    block = next(size for size in (_TPU_BLOCK, 256, _TPU_LANES) if tokens % size == 0)
    sizes = splash.BlockSizes(
        block_q=block, block_kv=block, block_kv_compute=block,
        block_q_dkv=block, block_kv_dkv=block, block_kv_dkv_compute=block,
        block_q_dq=block, block_kv_dq=block,
    )  # fmt: skip
    mask = masks.MultiHeadMask([masks.CausalMask((tokens, tokens)) for _ in range(count)])
    with jax.ensure_compile_time_eval():
        kernel = splash.make_splash_mha(
            mask, head_shards=1, q_seq_shards=1, block_sizes=sizes, interpret=interpret
        )
    # The kernel does not scale.
    queries = (q * np.asarray(scale, q.dtype)).reshape(*q.shape[:2], count, -1)

    def one(q: jax.Array, k: jax.Array, v: jax.Array, starts: jax.Array) -> jax.Array:
        heads_first = (each.transpose(1, 0, 2) for each in (q, k, v))
        out: Any = kernel(*heads_first, segment_ids=splash.SegmentIds(starts, starts))
        return out.transpose(1, 0, 2)

    return jax.vmap(one)(queries, k, v, starts).astype(q.dtype).reshape(q.shape)
