"""Buckets of single layers: embedding, layers, final norm, logits; and chunks of stored contexts, which are
loaded, restored and encoded layer by layer.

Layers of the same form share their buckets. A model whose weights are all resident loads none of this until
it has contexts.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.kv.cache import Past, TokenPositions
from jaxllm.kv.chunks import LayerChunks, chunk_shapes, encode_chunks, reads_addresses
from jaxllm.models.decoder import embed_tokens
from jaxllm.models.layer_stack import STACK, LayersAt
from jaxllm.models.parameters import head_name
from jaxllm.serving.buckets.bucket import (
    MOST_LAYERS,
    SCALAR,
    Bucket,
    CacheBucket,
    ChunkBucket,
    ModelShapes,
    TokensBucket,
    embedding_params,
    head_params,
    ids,
    layer_shapes,
    mass_shape,
    norm_params,
    position_shapes,
    row_step,
    shapes_of,
    shared_by_layers,
    some_rows,
)
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.steps.layers import (
    consecutive_layers,
    final_rows,
    head_piece,
    last_logits,
    load_cache,
    one_layer,
    prefill_restored,
    restore_layer,
)

# Number of chunks encoded in one dispatch.
ENCODED_CHUNKS = 8


class EmbedBucket(TokensBucket):
    """Embeds tokens by the whole embedding."""

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(embedding, ids, positions) -> x."""
        step = model.jitted(embed_tokens)
        return step.lower(embedding_params(model.params), ids(1, self.tokens), ids(self.tokens))


class EmbedRowsBucket(TokensBucket):
    """Embeds tokens by their own rows of the embedding, which is not in memory."""

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(embedding with some rows, ids, positions) -> x."""
        rows = model.params["embed.tokens"]
        embedding = embedding_params(model.params)
        embedding["embed.tokens"] = some_rows(rows, self.tokens * row_step(rows))
        step = jax.jit(functools.partial(embed_tokens, cfg=model.cfg, dtype=model.dtype))
        return step.lower(embedding, ids(1, self.tokens), ids(self.tokens))


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfLayerBucket(ChunkBucket):
    """A family that runs one layer.

    Attributes:
      layer: the first of the layers that share the bucket.
    """

    layer: int

    def _lowered(
        self, model: ModelShapes, step: Callable[..., Any], *rest: Any, donated: tuple[int, ...] = (1, 3, 4)
    ) -> jax.stages.Lowered:
        """Lowers a step of one layer, (layer's params, x, *rest), that also has `cfg` and `layer` as
        arguments."""
        part = model.jitted_part(functools.partial(step, cfg=model.cfg, layer=self.layer), *donated)
        return part.lower(layer_shapes(model.params, self.layer), model.hidden(self.tokens), *rest)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerBucket(OfLayerBucket):
    """Runs one layer over a chunk or a token tree (see `steps.layers.one_layer`).

    Attributes:
      tree: whether the tokens are a tree; then attention mass is counted by node.
    """

    tree: bool = False

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(layer's params, x, positions, keys and values, mass) -> x, keys and values, mass."""
        return self._lowered(model, one_layer, *self._inputs(model))

    def _inputs(self, model: ModelShapes) -> tuple[TokenPositions, Past, Any]:
        at, past = position_shapes(self.tokens, tree=self.tree), model.past(self.layer, self.cache_tokens)
        return at, past, mass_shape(model.cache(self.cache_tokens), self.tokens if self.tree else None)


class LayersBucket(LayerBucket):
    """Runs up to `MOST_LAYERS` consecutive layers that share their buckets (see
    `steps.layers.consecutive_layers`)."""

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(layers' params, x, positions, keys and values of the first, mass, count) -> x, keys and values,
        mass."""
        stack: Any = model.params[STACK]
        handles: Any = jax.ShapeDtypeStruct((MOST_LAYERS, 2), np.uint32)
        params = {
            STACK: LayersAt(handles, stack.at(self.layer).form),
            **shapes_of(shared_by_layers(model.params)),
        }
        step = functools.partial(consecutive_layers, cfg=model.cfg, layer=self.layer)
        part = model.jitted_part(step, 1, 3, 4)
        return part.lower(params, model.hidden(self.tokens), *self._inputs(model), SCALAR)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormBucket(TokensBucket):
    """Applies the final norm to the head's input (see `steps.layers.final_rows`). All levels share it.

    Attributes:
      rows: number of tokens to compute logits of.
    """

    rows: int

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(norm, x, rows) -> hidden rows."""
        step = jax.jit(functools.partial(final_rows, cfg=model.cfg))
        return step.lower(norm_params(model.params), model.hidden(self.tokens), ids(self.rows))


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadBucket(Bucket):
    """Computes logits for a piece of the vocabulary (see `steps.layers.head_piece`). All levels share it.

    Attributes:
      rows: rows of the hidden state.
      vocab_tokens: number of token ids in the piece.
    """

    rows: int
    vocab_tokens: int

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(piece of the head and its biases, hidden rows) -> logits."""
        names = {head_name(model.cfg), "head_bias"} & model.params.keys()
        head = {name: some_rows(model.params[name], self.vocab_tokens) for name in sorted(names)}
        hidden = jax.ShapeDtypeStruct((self.rows, model.cfg.hidden_size), model.dtype)
        return jax.jit(functools.partial(head_piece, cfg=model.cfg)).lower(head, hidden)


class LoadBucket(CacheBucket):
    """Loads stored chunks into all layers of a cache (see `steps.layers.load_cache`)."""

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
        cache, bits = model.cache(self.cache_tokens), _bits_shape(model, self.cache_tokens)
        return jax.jit(load, donate_argnums=(1,)).lower(heads, cache, sources, bits)


class RestoreBucket(OfLayerBucket):
    """Loads the stored chunks of one layer and recomputes others, of `tokens` tokens (see
    `steps.layers.restore_layer`)."""

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(layer's params, x, positions, keys and values, chunks) -> x, keys and values."""
        at = position_shapes(self.tokens, consecutive=False)
        past, chunks = _stored_shapes(model, self)
        return self._lowered(model, restore_layer, at, past, chunks, donated=(1, 3))


class PrefillRestoredBucket(OfLayerBucket):
    """Loads the stored chunks of one layer and runs new tokens through it (see
    `steps.layers.prefill_restored`)."""

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(layer's params, x, positions, keys and values, mass, chunks) -> x, keys and values, mass."""
        past, chunks = _stored_shapes(model, self)
        mass = model.cache(self.cache_tokens).mass
        return self._lowered(model, prefill_restored, position_shapes(self.tokens), past, mass, chunks)


class LastLogitsBucket(TokensBucket):
    """Logits after one of the tokens that passed all layers (see `steps.layers.last_logits`). All levels
    share it."""

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(norm and head, x, row) -> logits."""
        step = jax.jit(functools.partial(last_logits, cfg=model.cfg))
        return step.lower(head_params(model.params, model.cfg), model.hidden(self.tokens), ids(1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncodeBucket(CacheBucket):
    """Encodes `ENCODED_CHUNKS` chunks of one layer (see `kv.chunks.encode_chunks`).

    Attributes:
      bits: width of the chunks.
      layer: the first of the layers that share the bucket.
    """

    bits: int
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
    bits: Any = _bits_shape(model, cache_tokens)
    return LayerChunks(source, bits, model.options.chunk_format)


def _stored_shapes(model: ModelShapes, bucket: OfLayerBucket) -> tuple[Past, LayerChunks]:
    layer, cache = bucket.layer, bucket.cache_tokens
    return model.past(layer, cache), layer_chunk_shapes(model, layer, cache)


def _bits_shape(model: ModelShapes, cache_tokens: int) -> jax.ShapeDtypeStruct:
    return ids(-(-cache_tokens // model.options.kv_chunk_tokens))
