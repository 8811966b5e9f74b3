"""Runs tokens through layers that are read from storage in each pass."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxllm.kv.cache import KVCache, Past, TokenPositions
from jaxllm.kv.chunks import LayerChunks
from jaxllm.models.layer_stack import STACK, LayersAt, LayerStack
from jaxllm.serving.buckets.bucket import Bucket
from jaxllm.serving.buckets.bucket_table import BucketTable
from jaxllm.serving.buckets.layer import EmbedRowsBucket, LayerBucket, LayersBucket, RestoreBucket
from jaxllm.serving.buckets.parts import MOST_LAYERS, shared_by_layers
from jaxllm.serving.runners.layerwise import Chunk, LayerSource
from jaxllm.serving.runners.source_layers import SourceLayers
from jaxllm.serving.weights.model_level import ModelLevel
from jaxllm.serving.weights.prefetch import Meanwhile
from jaxllm.serving.weights.streamed import StreamedWeights


class StreamedLayers(LayerSource):
    """The layers of one level, prefetched."""

    def __init__(self, model: ModelLevel, buckets: BucketTable, weights: StreamedWeights) -> None:
        """See the class; `model` only has shapes of its layers and embedding (see
        `StreamedWeights.frozen`)."""
        sources = None if model.encoder is None else SourceLayers(model, buckets, weights)
        super().__init__(model, buckets, weights, sources)
        self._weights = weights
        # Equal consecutive layers run together, in one loop over their addresses. Layers that are separate
        # arguments, for XLA's products, run one by one: each number of them would be another bucket, whose
        # size grows with it.
        self._together = isinstance(model.params.get(STACK), LayerStack)
        self._most = layers_together(model.alike, MOST_LAYERS if self._together else 1)

    @property
    def idle_read_s(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        """See `Runner`."""
        return self._weights.idle_read_s

    def buckets(self, tokens: int, cache: int, *, tree: bool = False) -> list[Bucket]:
        """See `LayerSource`."""
        return [self._bucket(tokens, cache, layer, tree=tree) for layer in self._model.layer_kinds]

    def embed_bucket(self, tokens: int) -> Bucket:
        """See `LayerSource`: by streamed rows of the embedding."""
        return EmbedRowsBucket(tokens=tokens)

    def restore_bucket(self, tokens: int, cache: int, layer: int) -> Bucket:
        """See `LayerSource`."""
        return self._model.bucket(RestoreBucket, tokens=tokens, cache_tokens=cache, layer=layer)

    def embed(self, tokens: np.ndarray, at: TokenPositions) -> jax.Array:
        """See `LayerSource`."""
        self._weights.begin(self._model.cfg)
        return self._embed(tokens, at)

    def run(
        self, chunks: Sequence[Chunk], cache: KVCache, meanwhile: Meanwhile | None = None
    ) -> tuple[list[jax.Array], KVCache]:
        """See `LayerSource`."""
        self._weights.begin(self._model.cfg)
        outputs = [self._embed(tokens, at) for tokens, at in chunks]
        # Transferred once for all layers.
        placed = [(len(tokens), jax.device_put(at)) for tokens, at in chunks]
        mass, layer = cache.mass, 0
        # Sum attention mass layer by layer, independent of what is in memory.
        alone = mass is not None and len(chunks) > 1
        while layer < self._model.cfg.layers:
            past, most = cache.past(layer), 1 if alone else self._most[layer]
            with self._weights.layers(self._model, layer, most, meanwhile) as layers:
                weights, *count = self._arguments(layers)
                for number, (tokens, at) in enumerate(placed):
                    tree = at.tree is not None
                    bucket = self._bucket(tokens, cache.capacity_tokens, layer, tree=tree)
                    compiled = self._buckets.get(bucket)
                    outputs[number], past, mass = compiled(weights, outputs[number], at, past, mass, *count)
                # The next pieces overwrite the memory of these.
                jax.block_until_ready(outputs)
            cache, layer = cache.with_past(layer, past), layer + len(layers)
        return outputs, dataclasses.replace(cache, mass=mass)

    def restore(
        self, layer: int, x: jax.Array, at: TokenPositions, past: Past, chunks: LayerChunks
    ) -> tuple[jax.Array, Past]:
        """See `LayerSource`."""
        compiled = self._buckets.get(self.restore_bucket(len(at.positions), past.capacity_tokens, layer))
        with self._weights.layer(self._model, layer) as weights:
            # The next piece overwrites the memory of this one.
            return jax.block_until_ready(compiled(weights, x, at, past, chunks))

    def _embed(self, tokens: np.ndarray, at: TokenPositions) -> jax.Array:
        some, rows = self._weights.rows(tokens.tolist())
        compiled = self._buckets.get(self.embed_bucket(len(tokens)))
        return compiled({**self._embedding, "embed.tokens": some}, rows, np.asarray(at.positions))

    def _arguments(self, layers: Sequence[dict[str, Any]]) -> tuple[Any, ...]:
        """The parameters of some layers as inputs of their bucket, and their number if it is an input."""
        if not self._together:
            (one,) = layers
            return (one,)
        by_address = LayersAt.of([each[STACK] for each in layers], MOST_LAYERS)
        return {STACK: by_address, **shared_by_layers(self._model.params)}, np.int32(len(layers))

    def _bucket(self, tokens: int, cache: int, layer: int, *, tree: bool) -> Bucket:
        family = LayersBucket if self._together else LayerBucket
        return self._model.bucket(family, tokens=tokens, cache_tokens=cache, layer=layer, tree=tree)


def layers_together(alike: Sequence[int], most: int) -> list[int]:
    """Per layer, the number of layers that run together from it on: equal consecutive ones, at most
    `most`."""
    found = [1] * len(alike)
    for layer in reversed(range(len(alike) - 1)):
        if alike[layer] == alike[layer + 1]:
            found[layer] = min(most, found[layer + 1] + 1)
    return found
