"""Buckets of stored contexts: loading chunks, restoring a layer, perhaps with new tokens, encoding chunks."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.kv.chunks import LayerChunks, chunk_shapes, encode_chunks, reads_addresses
from jaxllm.serving.buckets.bucket import Bucket, ModelShapes, ids, position_shapes
from jaxllm.serving.buckets.parts import head_params, lowered_layer
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.steps.layers import last_logits, load_cache, prefill_restored, restore_layer

# Number of chunks encoded in one dispatch.
ENCODED_CHUNKS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadBucket(Bucket):
    """Loads stored chunks into all layers of a cache (see `steps.layers.load_cache`).

    Attributes:
      cache_tokens: length of the cache.
    """

    cache_tokens: int

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(used kv heads, cache, sources, bits) -> cache."""
        cfg, options = model.cfg, model.options
        shapes = [source_shape(cfg, options, each, self.cache_tokens) for each in range(cfg.layers)]
        if reads_addresses(jnp.dtype(options.cache_dtype)):
            sources: Any = jax.ShapeDtypeStruct((cfg.layers, *shapes[0][0]), jnp.uint32)
            heads = ids(cfg.layers)
        else:
            sources, heads = tuple(jax.ShapeDtypeStruct(*each) for each in shapes), None
        load = functools.partial(load_cache, form=options.chunk_format)
        cache, bits = model.cache(self.cache_tokens), bits_shape(model, self.cache_tokens)
        return jax.jit(load, donate_argnums=(1,)).lower(heads, cache, sources, bits)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RestoreBucket(Bucket):
    """Loads the stored chunks of one layer and recomputes others (see `steps.layers.restore_layer`).

    Attributes:
      tokens: number of tokens of recomputed chunks.
      cache_tokens: length of the cache.
      layer: the first of the layers that share the bucket.
    """

    tokens: int
    cache_tokens: int
    layer: int

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(layer's params, x, positions, keys and values, chunks) -> x, keys and values."""
        return lowered_layer(
            model,
            restore_layer,
            self.layer,
            self.tokens,
            position_shapes(self.tokens, consecutive=False),
            model.past(self.layer, self.cache_tokens),
            layer_chunk_shapes(model, self.layer, self.cache_tokens),
            donated=(1, 3),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillRestoredBucket(Bucket):
    """Loads the stored chunks of one layer and runs new tokens through it (see
    `steps.layers.prefill_restored`).

    Attributes:
      tokens: number of new tokens, including padding.
      cache_tokens: length of the cache.
      layer: the first of the layers that share the bucket.
    """

    tokens: int
    cache_tokens: int
    layer: int

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(layer's params, x, positions, keys and values, mass, chunks) -> x, keys and values, mass."""
        return lowered_layer(
            model,
            prefill_restored,
            self.layer,
            self.tokens,
            position_shapes(self.tokens),
            model.past(self.layer, self.cache_tokens),
            model.cache(self.cache_tokens).mass,
            layer_chunk_shapes(model, self.layer, self.cache_tokens),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LastLogitsBucket(Bucket):
    """Logits after one of the tokens that passed all layers (see `steps.layers.last_logits`). All levels
    share it.

    Attributes:
      tokens: number of tokens that passed the layers, including padding.
    """

    tokens: int

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(norm and head, x, row) -> logits."""
        step = jax.jit(functools.partial(last_logits, cfg=model.cfg))
        return step.lower(head_params(model.params, model.cfg), model.hidden(self.tokens), ids(1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncodeBucket(Bucket):
    """Encodes `ENCODED_CHUNKS` chunks of one layer (see `kv.chunks.encode_chunks`).

    Attributes:
      bits: width of the chunks.
      cache_tokens: length of the cache.
      layer: the first of the layers that share the bucket.
    """

    bits: int
    cache_tokens: int
    layer: int

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(keys and values, numbers of chunks) -> chunks as bytes."""
        encode = functools.partial(encode_chunks, form=model.options.chunk_format, bits=self.bits)
        return jax.jit(encode).lower(model.past(self.layer, self.cache_tokens), ids(ENCODED_CHUNKS))


def source_shape(cfg: ModelConfig, options: EngineOptions, layer: int, cache_tokens: int) -> tuple[Any, ...]:
    """Shape and dtype of the `sources` of `load_chunks` for all chunks of a layer's cache."""
    chunks = -(-cache_tokens // options.kv_chunk_tokens)
    if reads_addresses(jnp.dtype(options.cache_dtype)):
        return (chunks, 3), np.uint32
    shape = chunk_shapes(cfg, tokens=options.kv_chunk_tokens, dtype=options.cache_dtype)[layer]
    return (chunks, max(options.chunk_format.sizes(shape).values())), np.uint8


def layer_chunk_shapes(model: ModelShapes, layer: int, cache_tokens: int) -> LayerChunks:
    """Shapes of the stored chunks of a layer."""
    source: Any = jax.ShapeDtypeStruct(*source_shape(model.cfg, model.options, layer, cache_tokens))
    bits: Any = bits_shape(model, cache_tokens)
    return LayerChunks(source, bits, model.options.chunk_format)


def bits_shape(model: ModelShapes, cache_tokens: int) -> jax.ShapeDtypeStruct:
    """Shape of the bit widths of a cache's chunks."""
    return ids(-(-cache_tokens // model.options.kv_chunk_tokens))
