"""Chunks of a cache: so many tokens of all layers, taken out of it, stored, and put back in.

A chunk's number is its place: chunk n of C tokens stands at positions `[n·C, (n+1)·C)`.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxllm.config import ModelConfig
from jaxllm.kernels import native, native_attention
from jaxllm.kv.codecs import ChunkFormat, ChunkShape
from jaxllm.used_units import UsedUnits

# Of a chunk, unless somebody wants another number (LLMS, section 3.2).
CHUNK_TOKENS = 16

# One layer's keys and values.
Past = tuple[jax.Array, jax.Array]


def chunk_shapes(cfg: ModelConfig, *, tokens: int = CHUNK_TOKENS, dtype: str) -> tuple[ChunkShape, ...]:
    """The shape of a chunk in each layer."""
    return tuple(
        ChunkShape(heads=cfg.units(layer).kv_heads, tokens=tokens, width=cfg.head_dim, dtype=dtype)
        for layer in range(cfg.layers)
    )


def take_chunks(rows: jax.Array, first: jax.Array, *, count: int, tokens: int) -> jax.Array:
    """`count` chunks `[N, K, C, H]` from number `first` on, of one layer's keys or values `[1, K, S, H]`.

    All of them must lie within the cache.
    """
    _, heads, _, width = rows.shape
    run = jax.lax.dynamic_slice_in_dim(rows[0], first * tokens, count * tokens, axis=1)
    return run.reshape(heads, count, tokens, width).swapaxes(0, 1)


def encode_chunks(
    past: tuple[jax.Array, jax.Array], at: jax.Array, *, form: ChunkFormat, bits: int
) -> jax.Array:
    """Some chunks of one layer's keys and values `[1, K, S, H]` as blobs `[N, bytes]` uint8, whatever their
    order: those at numbers `at` `[N]` int32, which must lie within the cache."""
    keys, values = past
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
    """Keys and values `[1, K, S, H]` of some layers with stored chunks at their places.

    Args:
      pasts: of each layer keys and values; donate them where they are read natively.
      sources: where the blobs of chunks 0, 1, ... are: addresses and sizes uint32 `[L, N, 3]` (see
        `native_attention.load_chunks`), or of each layer the blobs themselves, uint8 `[N, most]`, each
        padded to that of the widest.
      bits: int32 `[N]`, a width of `form`; negative for no chunk.
      form: how they were stored.
      used: of each layer how many of the K heads the blobs have; none for all. Only addresses can be read so.
    """
    codec = form.codec
    if isinstance(sources, jax.Array):
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
    return tuple(
        _load_layer(past, source, bits, form=form) for past, source in zip(pasts, sources, strict=True)
    )


def reads_addresses(dtype: jnp.dtype) -> bool:
    """Whether `load_chunks` reads chunks of a cache of `dtype` natively, from where they are in memory."""
    on_cpu = jax.default_backend() == "cpu" and native.kernels().native
    return on_cpu and dtype in (jnp.float32, jnp.float16)


def place_chunks(rows: jax.Array, chunks: jax.Array, at: jax.Array) -> jax.Array:
    """One layer's keys or values `[1, K, S, H]` with chunks `[N, K, C, H]` at their numbers `at` `[N]` int32.

    What would lie outside of the cache is dropped: a number of S or more stands for no chunk.
    """
    count, heads, tokens, width = chunks.shape
    places = (at[:, None] * tokens + jnp.arange(tokens, dtype=jnp.int32)).reshape(-1)
    flat = chunks.swapaxes(0, 1).reshape(heads, count * tokens, width)
    return rows.at[0, :, places].set(flat.swapaxes(0, 1).astype(rows.dtype), mode="drop")


def _load_layer(past: Past, source: jax.Array, bits: jax.Array, *, form: ChunkFormat) -> Past:
    keys, values = past
    capacity = keys.shape[2]
    shape = ChunkShape(heads=keys.shape[1], tokens=form.tokens, width=keys.shape[3], dtype=keys.dtype.name)
    for width, size in form.sizes(shape).items():
        # Chunks of other widths, and none, aim behind the cache.
        at = jnp.where(bits == width, jnp.arange(len(bits), dtype=jnp.int32), capacity)
        of_keys, of_values = form.codec.decode(source[:, :size], shape, width)
        keys, values = place_chunks(keys, of_keys, at), place_chunks(values, of_values, at)
    return keys, values
