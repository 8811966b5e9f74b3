"""Chunks of a cache: so many tokens of all layers, taken out of it and put back in.

A chunk's number is its place: chunk n of C tokens stands at positions `[n·C, (n+1)·C)`.
"""

import jax
import jax.numpy as jnp

from jaxllm.config import ModelConfig
from jaxllm.kv.codecs import ChunkShape

# Of a chunk, unless somebody wants another number (LLMS, section 3.2).
CHUNK_TOKENS = 16


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


def place_chunks(rows: jax.Array, chunks: jax.Array, at: jax.Array) -> jax.Array:
    """One layer's keys or values `[1, K, S, H]` with chunks `[N, K, C, H]` at their numbers `at` `[N]` int32.

    What would lie outside of the cache is dropped: a number of S or more stands for no chunk.
    """
    count, heads, tokens, width = chunks.shape
    places = (at[:, None] * tokens + jnp.arange(tokens, dtype=jnp.int32)).reshape(-1)
    flat = chunks.swapaxes(0, 1).reshape(heads, count * tokens, width)
    return rows.at[0, :, places].set(flat.swapaxes(0, 1).astype(rows.dtype), mode="drop")
