"""Takes chunks out of a cache, encodes them, and loads them back.

A chunk is C consecutive tokens of all layers: chunk number n has positions `[n·C, (n+1)·C)`.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.axes import Axes
from jaxllm.config import ModelConfig
from jaxllm.kernels import native, native_attention
from jaxllm.kernels.used_units import UsedUnits
from jaxllm.kv.codecs import ChunkFormat, ChunkShape

# Default tokens of a chunk (LLMS, section 4).
CHUNK_TOKENS = 16

# One layer's keys and values.
Past = tuple[jax.Array, jax.Array]


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


def chunk_shapes(cfg: ModelConfig, *, tokens: int = CHUNK_TOKENS, dtype: str) -> tuple[ChunkShape, ...]:
    """The shape of a chunk in each layer."""
    return tuple(
        ChunkShape(heads=cfg.units(layer).kv_heads, tokens=tokens, width=cfg.head_dim, dtype=dtype)
        for layer in range(cfg.layers)
    )


def take_chunks(rows: jax.Array, first: jax.Array, *, count: int, tokens: int) -> jax.Array:
    """`count` chunks `[n, K, C, H]` from number `first` on, of one layer's keys or values `[1, K, S, H]`.

    All of them must be within the cache.
    """
    axes = Axes("take_chunks")
    axes.check(jnp.floating, "1 K S H", rows=rows)
    axes.check(jnp.int32, "", first=first)
    _, heads, _, width = rows.shape
    run = jax.lax.dynamic_slice_in_dim(rows[0], first * tokens, count * tokens, axis=1)
    return run.reshape(heads, count, tokens, width).swapaxes(0, 1)


def encode_chunks(
    past: tuple[jax.Array, jax.Array], at: jax.Array, *, form: ChunkFormat, bits: int
) -> jax.Array:
    """Encodes chunks of one layer.

    Args:
      past: keys and values `[1, K, S, H]`.
      at: `[n]` int32, numbers of chunks in any order, all within the cache.
      form: codec and size of the chunks.
      bits: a width, or `RAW`.

    Returns:
      Blobs `[n, bytes]` uint8.
    """
    keys, values = past
    axes = Axes("encode_chunks")
    axes.check(jnp.floating, "1 K S H", keys=keys, values=values)
    axes.check(jnp.int32, "n", at=at)
    _, heads, _, width = keys.shape
    shape = ChunkShape(heads=heads, tokens=form.tokens, width=width, dtype=keys.dtype.name)
    places = at[:, None] * form.tokens + jnp.arange(form.tokens, dtype=jnp.int32)

    def taken(rows: jax.Array) -> jax.Array:
        return jnp.take(rows[0], places, axis=1).swapaxes(0, 1)

    return form.codec.encode(taken(keys), taken(values), shape, bits)


def load_chunks(
    pasts: Sequence[Past],
    sources: jax.Array | Sequence[jax.Array],
    bits: jax.Array,
    *,
    form: ChunkFormat,
    used: Sequence[UsedUnits | None] = (),
) -> tuple[Past, ...]:
    """Decodes stored chunks into the keys and values `[1, K, S, H]` of some layers.

    Args:
      pasts: per layer, keys and values; donate them where `reads_addresses`.
      sources: blobs of chunks 0, 1, ...: their addresses and sizes, uint32 `[L, n, 3]` (see
        `native_attention.load_chunks`); or per layer the blobs themselves, uint8 `[n, bytes]`, padded to the
        longest.
      bits: `[n]` int32, width of each chunk; negative: the chunk is not loaded.
      form: codec and size of the chunks.
      used: per layer, how many of the K kv heads the blobs have; empty: all. Needs addresses as `sources`.

    Returns:
      Per layer, the updated keys and values.
    """
    codec = form.codec
    axes = Axes("load_chunks", L=len(pasts))
    for layer, (keys, values) in enumerate(pasts):
        axes.check(jnp.floating, f"1 K{layer} S H", keys=keys, values=values)
    axes.check(jnp.int32, "n", bits=bits)
    if isinstance(sources, jax.Array):
        axes.check(jnp.uint32, "L n 3", sources=sources)
        return native_attention.load_chunks(
            pasts,
            sources,
            bits,
            tokens=form.tokens,
            keys_by_token=codec.keys == "token",
            values_by_token=codec.values == "token",
            rotated=codec.rotated,
            used=used,
        )
    for source in sources:
        axes.check(jnp.uint8, "n *", source=source)
    return tuple(
        _load_layer(past, source, bits, form=form) for past, source in zip(pasts, sources, strict=True)
    )


def reads_addresses(dtype: jnp.dtype) -> bool:
    """Whether `load_chunks` into a cache of `dtype` is native, and takes addresses of blobs in memory."""
    on_cpu = jax.default_backend() == "cpu" and native.kernels().native
    return on_cpu and dtype in (jnp.float32, jnp.float16)


def place_chunks(rows: jax.Array, chunks: jax.Array, at: jax.Array) -> jax.Array:
    """Writes chunks `[n, K, C, H]` into one layer's keys or values `[1, K, S, H]`, at their numbers `at`
    `[n]` int32.

    Chunks outside of the cache are dropped: a number of S or more stands for no chunk.
    """
    axes = Axes("place_chunks")
    axes.check(jnp.floating, "1 K S H", rows=rows)
    axes.check(jnp.floating, "n K C H", chunks=chunks)
    axes.check(jnp.int32, "n", at=at)
    count, heads, tokens, width = chunks.shape
    places = (at[:, None] * tokens + jnp.arange(tokens, dtype=jnp.int32)).reshape(-1)
    flat = chunks.swapaxes(0, 1).reshape(heads, count * tokens, width)
    return rows.at[0, :, places].set(flat.swapaxes(0, 1).astype(rows.dtype), mode="drop")


def _load_layer(past: Past, source: jax.Array, bits: jax.Array, *, form: ChunkFormat) -> Past:
    keys, values = past
    capacity = keys.shape[2]
    shape = ChunkShape(heads=keys.shape[1], tokens=form.tokens, width=keys.shape[3], dtype=keys.dtype.name)
    for width, size in form.sizes(shape).items():
        # Chunks of other widths get a number outside of the cache, and are dropped.
        at = jnp.where(bits == width, jnp.arange(len(bits), dtype=jnp.int32), capacity)
        of_keys, of_values = form.codec.decode(source[:, :size], shape, width)
        keys, values = place_chunks(keys, of_keys, at), place_chunks(values, of_values, at)
    return keys, values
