"""Attention within packed documents for training, forward and backward: native kernels, and fused ones on
GPUs and TPUs.

Documents are packed one after another into a sequence, and a token attends to its own document up to itself.
Each document is then a dense causal attention of its own: the work depends on the lengths of documents, not
of the packed sequence, and there is no mask. Tiles and the recomputed softmax of the backward pass are those
of FlashAttention-2 (arXiv 2307.08691). On CPUs soft caps, sliding windows and dtypes other than float32 use
XLA (`layers.py`).

The fused kernels are JAX's own, written in Pallas: FlashAttention on GPUs, splash attention on TPUs. They
accept the borders of documents as segment ids, and store no scores `[T, T]`. Shapes that no kernel supports
are computed by XLA, with a line in the log. Neither cuDNN's attention is used nor tokamax's, which JAX names
as the successor of its own for GPUs: for both a document's beginning is a mask of the scores' size, cuDNN
computes no float32, and tokamax needs a newer Python than this package.
"""

import functools
import logging
import math
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from jaxllm.axes import BATCH_AXES, UNIT_AXES
from jaxllm.kernels import native, native_attention
from jaxllm.kernels.native import CHOICE_VARIABLE, switched_off

# The same function of q, k, v and starts, for other platforms and shapes.
Elsewhere = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


def fits(q: jax.Array) -> bool:
    """Whether native kernels accept queries `[B, T, K, G, H]`: float32 on this process's CPU, with batch
    and kv heads that the mesh, if there is one, divides evenly."""
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
      starts: `[B, T]` int32, per token the index in the sequence of its document's beginning: the token's
        own index or the start of the preceding token. Other values are an error at run time.
      elsewhere: function that computes the same when the step is lowered for another processor.

    Returns:
      `[B, T, K, G, H]` float32.
    """
    return _forward(q, k, v, starts, scale, elsewhere)[0]


def _forward(
    q: jax.Array, k: jax.Array, v: jax.Array, starts: jax.Array, scale: float, elsewhere: Elsewhere
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    def by_kernel(*given: jax.Array) -> tuple[jax.Array, jax.Array]:
        return native_attention.document_attention(*given, scale=scale)

    def by_other(q: jax.Array, *rest: jax.Array) -> tuple[jax.Array, jax.Array]:
        return elsewhere(q, *rest), jnp.zeros(q.shape[:-1], jnp.float32)

    def compute(*args: jax.Array) -> Any:
        return jax.lax.platform_dependent(*args, cpu=by_kernel, default=by_other)

    out, lse = on_shards(compute, (q, k, v, starts), 2)
    return out, (q, k, v, starts, out, lse)


def _backward(
    scale: float, elsewhere: Elsewhere, kept: tuple[jax.Array, ...], dout: jax.Array
) -> tuple[jax.Array | None, ...]:
    def by_kernel(*given: jax.Array) -> tuple[jax.Array, ...]:
        return native_attention.document_attention_gradients(*given, scale=scale)

    def by_other(*given: jax.Array) -> tuple[jax.Array, ...]:
        q, k, v, starts, _, _, dout = given
        return jax.vjp(lambda q, k, v: elsewhere(q, k, v, starts), q, k, v)[1](dout)

    def compute(*args: jax.Array) -> Any:
        return jax.lax.platform_dependent(*args, cpu=by_kernel, default=by_other)

    return (*on_shards(compute, (*kept, dout), 3), None)


document_attention.defvjp(_forward, _backward)


def _axes() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns axes of the mesh that divide the batch, and those that divide the kv heads. Axes of a
    caller's own `shard_map` are left out, because it has already divided the arrays."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    free = {name for name, kind in kinds.items() if kind != AxisType.Manual}
    batch, heads = (tuple(axis for axis in axes if axis in free) for axes in (BATCH_AXES, UNIT_AXES))
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


# Tokens of a sequence must be a multiple of it, for both kernels.
_TOKENS = 128
_TPU_BLOCKS = (512, 256, 128)
# Shared memory limit of a block of threads, in bytes: of consumer GPUs from Ampere on, and of the A100;
# Hopper's and Blackwell's is larger. The needs of each setting were measured by compiling it for each.
_CONSUMER, _DATACENTRE = 101_376, 166_912
# By the bytes of a padded key, ascending: the shared memory needed, then queries and keys of a block of the
# forward pass, and the step of the backward pass.
_GPU_BLOCKS = {
    256: ((_CONSUMER, (128, 128, 32)),),
    512: ((_DATACENTRE, (128, 64, 32)), (_CONSUMER, (64, 32, 32))),
    1024: ((_DATACENTRE, (64, 32, 32)), (_CONSUMER, (32, 16, 16))),
}
# Queries, keys, and the backward pass's step.
Blocks = tuple[int, int, int]


def fused_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    starts: jax.Array,
    *,
    scale: float,
    window: int,
    softcap: float,
    elsewhere: Elsewhere,
) -> jax.Array:
    """Computes causal attention within documents, by the platform that the step is lowered for.

    Args:
      q: queries `[B, T, K, G, H]`.
      k, v: keys and values `[B, T, K, H]`, of the same dtype.
      starts: `[B, T]` int32, per token the index in the sequence of its document's beginning.
      window: number of tokens that a query attends to, its own the last; 0 for all of its document.
      softcap: bound of the scores' magnitude; 0 for none.
      elsewhere: function that computes the same without a fused kernel: on other platforms, and if
        `why_none` returns a reason.

    Returns:
      `[B, T, K, G, H]` in q's dtype; differentiable in q, k and v.
    """
    choices: dict[str, tuple[str, Elsewhere]] = {
        "gpu": ("cuda", functools.partial(on_gpu, scale=scale)),
        "tpu": ("tpu", functools.partial(on_tpu, scale=scale, window=window, softcap=softcap)),
    }
    kernels: dict[str, Elsewhere] = {}
    for platform, (name, kernel) in choices.items():
        if reason := why_none(platform, q, window=window, softcap=softcap):
            log_fallback(platform, reason)
        else:
            kernels[name] = kernel
    if not kernels:
        return elsewhere(q, k, v, starts)

    def sharded(kernel: Elsewhere) -> Elsewhere:
        # XLA cannot partition a kernel: each device runs it on its part of batch and heads.
        return lambda *args: on_shards(lambda *own: (kernel(*own),), args, 1)[0]

    platforms = {name: sharded(kernel) for name, kernel in kernels.items()}
    return jax.lax.platform_dependent(q, k, v, starts, default=elsewhere, **platforms)


def why_none(platform: str, q: jax.Array, *, window: int = 0, softcap: float = 0.0) -> str:
    """Why queries `[B, T, K, G, H]` have no fused kernel on a platform, "gpu" or "tpu"; empty if they do."""
    tokens, width = q.shape[1], q.shape[-1]
    if switched_off():
        return f"{CHOICE_VARIABLE}=xla switches kernels off"
    if not divides(q):
        return "the mesh does not divide its batch and heads"
    if tokens % _TOKENS:
        return f"rows of {tokens} tokens are no multiple of {_TOKENS}"
    if platform == "gpu":
        if window or softcap:
            return f"the kernel has no {'window' if window else 'soft cap'}"
        if gpu_blocks(width, q.dtype, shared_memory_bytes()) is None:
            return (
                f"head_dim {width} in {q.dtype} does not fit the {shared_memory_bytes()} bytes of shared "
                "memory that a block of threads may have"
            )
        if _flash_attention() is None:
            return f"JAX {jax.__version__} has no such kernel"
    return ""


@functools.cache
def log_fallback(platform: str, reason: str) -> None:
    """Logs once, on the platform concerned, that XLA computes attention, and why."""
    if jax.default_backend() == platform:
        logging.getLogger("jaxllm").warning(
            "attention is computed by XLA instead of by a fused kernel, more slowly: %s", reason
        )


def shared_memory_bytes() -> int:
    """Returns the shared memory limit of a block of threads on this process's GPUs; without one, that of
    consumer GPUs."""
    return getattr(jax.devices()[0], "shared_memory_per_block_optin", None) or _CONSUMER


def gpu_blocks(width: int, dtype: jnp.dtype, shared_memory: int) -> Blocks | None:
    """Returns the largest blocks of the GPU's kernel that fit a shared memory in bytes; None if none do."""
    # The kernel pads its rows to a power of two.
    row = (1 << (width - 1).bit_length()) * jnp.dtype(dtype).itemsize
    choices = next((choices for most, choices in _GPU_BLOCKS.items() if row <= most), ())
    return next((blocks for needed, blocks in choices if needed <= shared_memory), None)


def on_gpu(
    q: jax.Array, k: jax.Array, v: jax.Array, starts: jax.Array, *, scale: float, interpret: bool = False
) -> jax.Array:
    """Computes `fused_attention` by Pallas' FlashAttention for GPUs, if `why_none` returns no reason."""
    attention, blocks = _flash_attention(), gpu_blocks(q.shape[-1], q.dtype, shared_memory_bytes())
    assert attention is not None
    assert blocks is not None
    queries, keys, step = blocks
    sizes = attention.BlockSizes(
        block_q=queries, block_k=keys,
        block_q_dkv=step, block_kv_dkv=32, block_q_dq=32, block_kv_dq=step,
    )  # fmt: skip
    heads = (*q.shape[:2], -1, q.shape[-1])
    # The kernel pairs each query head with a key head of its own.
    k, v = (jnp.repeat(each, q.shape[3], axis=2) for each in (k, v))
    out: Any = attention.mha(
        q.reshape(heads), k, v, starts,
        sm_scale=scale, causal=True, block_sizes=sizes, interpret=interpret,
    )  # fmt: skip
    return out.reshape(q.shape)


def on_tpu(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    starts: jax.Array,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    interpret: bool = False,
) -> jax.Array:
    """Computes `fused_attention` by splash attention, if `why_none` returns no reason."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    tokens, count = q.shape[1], q.shape[2] * q.shape[3]
    block = next(size for size in _TPU_BLOCKS if tokens % size == 0)
    sizes = splash.BlockSizes(
        block_q=block, block_kv=block, block_kv_compute=block,
        block_q_dkv=block, block_kv_dkv=block, block_kv_dkv_compute=block,
        block_q_dq=block, block_kv_dq=block,
    )  # fmt: skip
    shape = (tokens, tokens)
    mask = masks.LocalMask(shape, (window - 1, 0), 0) if window else masks.CausalMask(shape)
    kernel = splash.make_splash_mha(
        masks.MultiHeadMask([mask] * count),
        head_shards=1,
        q_seq_shards=1,
        block_sizes=sizes,
        attn_logits_soft_cap=softcap or None,
        interpret=interpret,
    )
    # The kernel does not scale.
    queries = (q * np.asarray(scale, q.dtype)).reshape(*q.shape[:2], count, -1)

    def one(q: jax.Array, k: jax.Array, v: jax.Array, starts: jax.Array) -> jax.Array:
        heads_first = (each.transpose(1, 0, 2) for each in (q, k, v))
        out: Any = kernel(*heads_first, segment_ids=splash.SegmentIds(starts, starts))
        return out.transpose(1, 0, 2)

    return jax.vmap(one)(queries, k, v, starts).astype(q.dtype).reshape(q.shape)


@functools.cache
def _flash_attention() -> Any:
    """Returns JAX's module of the GPU's kernel; None if this JAX no longer has it."""
    # JAX 0.12 deprecates it for tokamax: see above.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            from jax.experimental.pallas.ops.gpu import attention
        except ImportError:
            return None
    return attention
