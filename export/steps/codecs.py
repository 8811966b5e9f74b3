"""Defines the steps of exported programs that encode chunks of a cache, and load them back (see
`jaxllm.contexts.codecs`).

An encode step accepts caches, and `chunks` `[n]` int32, numbers of chunks within them. It returns, for keys
and values of each layer, packed levels `[n, K, C, H·bits/8]` uint8, and `[n, 2, ...]` float32, their lows and
scales, each of them a float16 number: `jaxllm.export.folder_format.codecs` makes the bytes of blobs from
both. A load step accepts these in addition, and returns the caches with the chunks in their places.
A repeated number is the same chunk. There are no bit operations, which few runtimes have: a byte is a sum of
levels times powers of two.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.axes import Axes
from jaxllm.config import ModelConfig
from jaxllm.contexts.codecs import AXES, ChunkFormat, Sharing
from jaxllm.contexts.coding import quantized_part
from jaxllm.export.folder_format.codecs import CHUNKS, FACTORS, KEYS, LEVELS, VALUES
from jaxllm.export.steps.exported import Arrays


def run_encode_chunks(
    weights: Arrays, caches: Arrays, inputs: Arrays, *, cfg: ModelConfig, form: ChunkFormat, bits: int
) -> dict[str, jax.Array]:
    """Encodes chunks of all layers at a width (see the module); `weights` is empty."""
    chunks = inputs[CHUNKS]
    Axes("run_encode_chunks").check(jnp.int32, "n", chunks=chunks)
    found = {}
    sides: tuple[tuple[str, Sharing], ...] = ((KEYS, form.codec.keys), (VALUES, form.codec.values))
    for layer in range(cfg.layers):
        for name, sharing in sides:
            side = name.format(layer)
            taken = jnp.stack([_slice(caches[side], at, form.tokens) for at in chunks])
            # No constant for converters, which would multiply by its reciprocal and so round otherwise.
            most = jax.lax.optimization_barrier(jnp.float32(2**bits - 1))
            levels, low, scale = quantized_part(form.codec.transformed(taken), AXES[sharing], most)
            found[LEVELS.format(side)] = _packed(levels, bits)
            found[FACTORS.format(side)] = jnp.stack([low, scale], axis=1).astype(jnp.float32)
    return found


def run_load_chunks(
    weights: Arrays, caches: Arrays, inputs: Arrays, *, cfg: ModelConfig, form: ChunkFormat, bits: int
) -> dict[str, jax.Array]:
    """Writes chunks of all layers into caches (see the module); `weights` is empty."""
    chunks = inputs[CHUNKS]
    Axes("run_load_chunks").check(jnp.int32, "n", chunks=chunks)
    found = {}
    for layer in range(cfg.layers):
        for name in (KEYS, VALUES):
            side = name.format(layer)
            factors = inputs[FACTORS.format(side)]
            levels = _unpacked(inputs[LEVELS.format(side)], bits)
            rows = form.codec.transformed(factors[:, 0] + factors[:, 1] * levels).astype(caches[side].dtype)
            whole = caches[side]
            for place in range(chunks.shape[0]):
                whole = _updated(whole, rows[place], chunks[place], form.tokens)
            found[side] = whole
    return found


def _slice(rows: jax.Array, at: jax.Array, tokens: int) -> jax.Array:
    """Chunk number `at` `[K, C, H]` of a cache `[1, K, S, H]`."""
    zero = jnp.int32(0)
    _, heads, _, width = rows.shape
    return jax.lax.dynamic_slice(rows, (zero, zero, at * tokens, zero), (1, heads, tokens, width))[0]


def _updated(rows: jax.Array, chunk: jax.Array, at: jax.Array, tokens: int) -> jax.Array:
    zero = jnp.int32(0)
    return jax.lax.dynamic_update_slice(rows, chunk[None], (zero, zero, at * tokens, zero))


def _packed(levels: jax.Array, bits: int) -> jax.Array:
    """Levels `[n, K, C, H]` float32 as bytes `[n, K, C, H·bits/8]`, the first channels in the lowest bits."""
    planes = jnp.split(levels, 8 // bits, axis=-1)
    together = planes[0]
    for index, plane in enumerate(planes[1:], start=1):
        together = together + plane * np.float32(2 ** (index * bits))
    return together.astype(jnp.uint8)


def _unpacked(data: jax.Array, bits: int) -> jax.Array:
    """Levels `[n, K, C, H]` float32 of bytes."""
    rest, most, planes = data.astype(jnp.float32), np.float32(2**bits), []
    for _ in range(8 // bits):
        above = jnp.floor(rest / most)
        planes.append(rest - above * most)
        rest = above
    return jnp.concatenate(planes, axis=-1)
