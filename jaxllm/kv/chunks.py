"""Encodes chunks of a cache, and loads them back.

A chunk is C consecutive tokens of all layers: chunk number n has positions `[n·C, (n+1)·C)`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxllm.axes import Axes
from jaxllm.config import ModelConfig
from jaxllm.contexts.codecs import ChunkFormat, ChunkShape
from jaxllm.kernels import native, native_attention
from jaxllm.kv.cache import KVCache, Past


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerChunks:
    """Stored chunks of one layer, to be loaded into its cache.

    Attributes:
      source: their blobs, uint8 `[n, bytes]`; or addresses and sizes of these, uint32 `[n, 3]`.
      bits: `[n]` int32, width of each chunk; negative: the chunk is not loaded.
      form: codec and size of the chunks.
    """

    source: jax.Array | np.ndarray
    bits: jax.Array | np.ndarray
    form: ChunkFormat = dataclasses.field(metadata={"static": True})


def chunk_shapes(cfg: ModelConfig, *, tokens: int, dtype: str) -> tuple[ChunkShape, ...]:
    """The shape of a chunk in each layer that attends."""
    return tuple(
        ChunkShape(heads=cfg.units(layer).kv_heads, tokens=tokens, width=cfg.head_dim, dtype=dtype)
        for layer in range(cfg.layers)
        if not cfg.is_state(layer)
    )


def encode_chunks(past: Past, at: jax.Array, *, form: ChunkFormat, bits: int) -> jax.Array:
    """Encodes chunks of one layer.

    Args:
      past: the layer's keys and values, of one sequence.
      at: `[n]` int32, numbers of chunks in any order, all within the cache.
      form: codec and size of the chunks.
      bits: a width, or `RAW`.

    Returns:
      Blobs `[n, bytes]` uint8.
    """
    axes = Axes("encode_chunks", B=1)
    past.check(axes)
    axes.check(jnp.int32, "n", at=at)
    heads, width = past.keys.shape[-3], past.keys.shape[-1]
    shape = ChunkShape(heads=heads, tokens=form.tokens, width=width, dtype=past.keys.dtype.name)
    places = at[:, None] * form.tokens + jnp.arange(form.tokens, dtype=jnp.int32)

    def taken(rows: jax.Array) -> jax.Array:
        if past.slot is None:
            return jnp.take(rows[0], places, axis=1).swapaxes(0, 1)
        # Indices on both sides of a slice bring the chunks to the front: the stack is not copied.
        return rows[past.slot, 0, :, places].swapaxes(1, 2)

    return form.codec.encode(taken(past.keys), taken(past.values), shape, bits)


def load_chunks(
    cache: KVCache,
    layers: Sequence[int],
    sources: jax.Array | Sequence[jax.Array],
    bits: jax.Array,
    *,
    form: ChunkFormat,
    heads: jax.Array | None = None,
) -> KVCache:
    """Decodes stored chunks into some layers of a cache.

    Args:
      cache: cache of one sequence; donate it if `reads_addresses`.
      sources: blobs of chunks 0, 1, ...: their addresses and sizes, uint32 `[L, n, 3]` (see
        `native_attention.load_chunks`); or per layer the blobs themselves, uint8 `[n, bytes]`, padded to
        the longest.
      bits: `[n]` int32, width of each chunk; negative: the chunk is not loaded.
      form: codec and size of the chunks.
      heads: `[L]` int32, number of the K kv heads in the blobs; None: all. Requires addresses as `sources`.
    """
    axes = Axes("load_chunks", L=len(layers), B=1)
    cache.check(axes)
    axes.check(jnp.int32, "n", bits=bits)
    if isinstance(sources, jax.Array):
        axes.check(jnp.uint32, "L n 3", sources=sources)
        axes.check(jnp.int32, "L", heads=heads)
        assert cache.places is not None
        places = [cache.places[layer] for layer in layers]
        stacks = native_attention.load_chunks(
            list(zip(cache.keys, cache.values, strict=True)),
            [stack for stack, _ in places],
            np.array([slot for _, slot in places], np.int32),
            sources,
            bits,
            heads,
            **_native_form(form),
        )
        keys, values = zip(*stacks, strict=True)
        return dataclasses.replace(cache, keys=keys, values=values)
    for layer, source in zip(layers, sources, strict=True):
        axes.check(jnp.uint8, "n *", source=source)
        cache = cache.with_past(layer, load_layer(cache.past(layer), source, bits, form=form))
    return cache


def load_layer(
    past: Past, source: jax.Array, bits: jax.Array, *, form: ChunkFormat, heads: jax.Array | None = None
) -> Past:
    """`load_chunks` into one layer, from its addresses `[n, 3]` or its blobs; `heads` is an int32 scalar."""
    if source.dtype == jnp.uint32:
        assert past.slot is not None
        caches, slots = [(past.keys, past.values)], jnp.asarray(past.slot)[None]
        counts = None if heads is None else heads[None]
        ((keys, values),) = native_attention.load_chunks(
            caches, [0], slots, source[None], bits, counts, **_native_form(form)
        )
        return dataclasses.replace(past, keys=keys, values=values, coded=None)
    keys, values, capacity = past.keys, past.values, past.capacity_tokens
    heads_of, width_of = keys.shape[-3], keys.shape[-1]
    shape = ChunkShape(heads=heads_of, tokens=form.tokens, width=width_of, dtype=keys.dtype.name)
    for width, size in form.sizes(shape).items():
        # Chunks of other widths get a number outside of the cache, and are dropped.
        at = jnp.where(bits == width, jnp.arange(len(bits), dtype=jnp.int32), capacity)
        of_keys, of_values = form.codec.decode(source[:, :size], shape, width)
        keys = place_chunks(keys, of_keys, at, past.slot)
        values = place_chunks(values, of_values, at, past.slot)
    return dataclasses.replace(past, keys=keys, values=values, coded=None)


def reads_addresses(dtype: DTypeLike) -> bool:
    """Whether `load_chunks` into a cache of `dtype` is native, with addresses of blobs in memory."""
    on_cpu = jax.default_backend() == "cpu" and native.kernels().native
    return on_cpu and jnp.dtype(dtype) in (jnp.float32, jnp.float16)


def place_chunks(
    rows: jax.Array, chunks: jax.Array, at: jax.Array, slot: jax.Array | np.integer | None = None
) -> jax.Array:
    """Writes chunks `[n, K, C, H]` into one layer's keys or values `[1, K, S, H]`, or those of layer `slot`
    of a stack `[n, 1, K, S, H]`, at their numbers `at` `[n]` int32.

    Chunks outside of the cache are dropped: a number of S or more means no chunk.
    """
    axes = Axes("place_chunks")
    axes.check(jnp.floating, "1 K S H" if slot is None else "* 1 K S H", rows=rows)
    axes.check(jnp.floating, "n K C H", chunks=chunks)
    axes.check(jnp.int32, "n", at=at)
    count, heads, tokens, width = chunks.shape
    places = (at[:, None] * tokens + jnp.arange(tokens, dtype=jnp.int32)).reshape(-1)
    flat = chunks.swapaxes(0, 1).reshape(heads, count * tokens, width)
    new = flat.swapaxes(0, 1).astype(rows.dtype)
    if slot is None:
        return rows.at[0, :, places].set(new, mode="drop")
    return rows.at[slot, 0, :, places].set(new, mode="drop")


def _native_form(form: ChunkFormat) -> dict[str, Any]:
    codec = form.codec
    return {
        "tokens": form.tokens,
        "keys_by_token": codec.keys == "token",
        "values_by_token": codec.values == "token",
        "rotated": codec.rotated,
    }
