"""Buckets of models that run layer by layer: embedding, one layer, final norm, logits.

Layers of the same form share their buckets.
"""

import dataclasses
import functools
from typing import Any

import jax

from jaxllm.kv.cache import Past, TokenPositions
from jaxllm.models.decoder import embed_tokens
from jaxllm.models.parameters import Params, head_name
from jaxllm.serving.buckets.bucket import Bucket, ModelShapes, ids, mass_by_node, position_shapes
from jaxllm.serving.buckets.parts import (
    embedding_params,
    lowered_layer,
    lowered_layers,
    norm_params,
    row_step,
    some_rows,
)
from jaxllm.steps.layers import final_rows, head_piece, one_layer


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbedBucket(Bucket):
    """Embeds tokens by the whole embedding.

    Attributes:
      tokens: number of tokens (T).
    """

    tokens: int

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(embedding, ids, positions) -> x."""

        def embedded(params: Params, tokens: jax.Array, positions: jax.Array) -> jax.Array:
            return embed_tokens(params, tokens, positions, cfg=model.cfg, dtype=model.dtype)

        step = model.jitted_part(embedded)
        return step.lower(embedding_params(model.params), ids(1, self.tokens), ids(self.tokens))


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbedRowsBucket(Bucket):
    """Embeds tokens by their own rows of the embedding, which is not in memory.

    Attributes:
      tokens: number of tokens (T).
    """

    tokens: int

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(embedding with some rows, ids, positions) -> x."""
        rows = model.params["embed.tokens"]
        embedding = embedding_params(model.params)
        embedding["embed.tokens"] = some_rows(rows, self.tokens * row_step(rows))
        step = jax.jit(functools.partial(embed_tokens, cfg=model.cfg, dtype=model.dtype))
        return step.lower(embedding, ids(1, self.tokens), ids(self.tokens))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerBucket(Bucket):
    """Runs one layer over a chunk (see `steps.layers.one_layer`).

    Attributes:
      tokens: length of the chunk, including padding.
      cache_tokens: length of the cache.
      layer: the first of the layers that share the bucket.
    """

    tokens: int
    cache_tokens: int
    layer: int

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(layer's params, x, positions, keys and values, mass) -> x, keys and values, mass."""
        return lowered_layer(model, one_layer, *self._over(model))

    def _over(self, model: ModelShapes) -> tuple[int, int, TokenPositions, Past, Any]:
        """The layer, its number of tokens, and the shapes of its other inputs."""
        past, mass = model.past(self.layer, self.cache_tokens), model.cache(self.cache_tokens).mass
        return self.layer, self.tokens, position_shapes(self.tokens), past, mass


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerTreeBucket(Bucket):
    """Runs one layer over a token tree (see `steps.layers.one_layer`).

    Attributes:
      nodes: capacity of the tree (M).
      cache_tokens: length of the cache.
      layer: the first of the layers that share the bucket.
    """

    nodes: int
    cache_tokens: int
    layer: int

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(layer's params, x, positions, keys and values, mass by node) -> x, keys and values, mass."""
        return lowered_layer(model, one_layer, *self._over(model))

    def _over(self, model: ModelShapes) -> tuple[int, int, TokenPositions, Past, Any]:
        """The layer, its number of nodes, and the shapes of its other inputs."""
        past, at = model.past(self.layer, self.cache_tokens), position_shapes(self.nodes, tree=True)
        return self.layer, self.nodes, at, past, mass_by_node(model.cache(self.cache_tokens), self.nodes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayersBucket(LayerBucket):
    """Runs consecutive layers that share their buckets over a chunk (see `steps.consecutive_layers`)."""

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(layers' params, x, positions, keys and values of the first, mass, count) -> x, keys and values,
        mass."""
        return lowered_layers(model, *self._over(model))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayersTreeBucket(LayerTreeBucket):
    """Runs consecutive layers that share their buckets over a token tree (see `steps.consecutive_layers`)."""

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(layers' params, x, positions, keys and values of the first, mass by node, count) -> x, keys and
        values, mass."""
        return lowered_layers(model, *self._over(model))


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormBucket(Bucket):
    """Applies the final norm to the head's input (see `steps.layers.final_rows`). All levels share it.

    Attributes:
      tokens: number of tokens that passed the layers (T).
      rows: number of them to compute logits of.
    """

    tokens: int
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
        name, bias = head_name(model.cfg), model.params.get("head_bias")
        head = {name: some_rows(model.params[name], self.vocab_tokens)}
        if bias is not None:
            head["head_bias"] = some_rows(bias, self.vocab_tokens)
        hidden = jax.ShapeDtypeStruct((self.rows, model.cfg.hidden_size), model.dtype)
        return jax.jit(functools.partial(head_piece, cfg=model.cfg)).lower(head, hidden)
