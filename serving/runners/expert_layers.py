"""Runs tokens through the layers of a mixture whose experts are loaded one by one.

A sparse layer is three buckets: attention and router; one tile of tokens through its expert, as experts
become resident; and the sum of the outputs. All chunks of a prompt run the first bucket before any expert, so
that each expert is read once for all of them.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxllm.kv.cache import KVCache, Past
from jaxllm.kv.chunks import LayerChunks
from jaxllm.kv.positions import TokenPositions
from jaxllm.steps.layers import AtExperts
from serving.buckets.bucket import Bucket
from serving.buckets.bucket_table import BucketTable
from serving.buckets.context import RestoreBucket
from serving.buckets.expert import (
    AttendBucket,
    AttendRestoredBucket,
    AttendTreeBucket,
    CombineBucket,
    ExpertBucket,
)
from serving.buckets.layer import EmbedBucket, LayerBucket, LayerTreeBucket
from serving.buckets.parts import embedding_params, expert_norm, layer_params, router_params
from serving.runners.layerwise import Chunk
from serving.weights.experts.weights import ExpertWeights
from serving.weights.model_level import ModelLevel
from serving.weights.prefetch import Meanwhile

# The predictor learns from the last tokens of a pass.
_LEARNT_TOKENS = 64


@dataclasses.dataclass(frozen=True)
class _Parts:
    """The parameters by layer.

    Attributes:
      layers: per layer, all parameters but experts, under the names of the layer whose buckets it shares.
      routers: per sparse layer, the router and the norm before it.
      norms: per layer, the norm before its experts.
    """

    layers: list[Any]
    routers: list[dict[str, Any]]
    norms: list[dict[str, Any]]


class ExpertLayers:
    """The layers of a mixture whose experts alone are loaded from storage (see `LayerSource`).

    Attributes:
      head: provides the head.
      experts: provides the experts.
      streams_weights: False: only experts are read, and most before they are needed.
    """

    streams_weights = False

    def __init__(self, model: ModelLevel, buckets: BucketTable, weights: ExpertWeights) -> None:
        """`model` is the whole model or a level; its parameters are all but the experts."""
        self.head = self.experts = weights
        self._model, self._buckets = model, buckets
        self._embedding = embedding_params(model.params)
        self._known: tuple[tuple[int, int], _Parts] | None = None
        # The experts that a context visited in the sparse layers that are restored so far.
        self._restoring: list[np.ndarray] = []

    # -- which buckets it needs -------------------------------------------------------------------

    def buckets(self, tokens: int, cache: int, *, tree: bool = False) -> list[Bucket]:
        """See `LayerSource`."""
        found = [self._bucket(tokens, cache, layer, tree=tree) for layer in self._model.layer_kinds]
        found += [self._expert_bucket(tokens, bits) for bits in self.experts.store.widths]
        return [*found, self._combine_bucket(tokens)]

    def embed_bucket(self, tokens: int) -> Bucket:
        """See `LayerSource`: the embedding is resident. All levels share the bucket."""
        return EmbedBucket(tokens=tokens)

    def restore_bucket(self, tokens: int, cache: int, layer: int) -> Bucket:
        """See `LayerSource`."""
        family = AttendRestoredBucket if self._model.cfg.is_sparse(layer) else RestoreBucket
        like, level = self._model.alike[layer], self._model.bucket_level
        return family(tokens=tokens, cache_tokens=cache, layer=like, level=level)

    def _bucket(self, tokens: int, cache: int, layer: int, *, tree: bool) -> Bucket:
        """The bucket of a layer; of a sparse layer up to its experts."""
        sparse = self._model.cfg.is_sparse(layer)
        like, level = self._model.alike[layer], self._model.bucket_level
        if tree:
            family = AttendTreeBucket if sparse else LayerTreeBucket
            return family(nodes=tokens, cache_tokens=cache, layer=like, level=level)
        family = AttendBucket if sparse else LayerBucket
        return family(tokens=tokens, cache_tokens=cache, layer=like, level=level)

    def _expert_bucket(self, tokens: int, bits: int) -> Bucket:
        return ExpertBucket(tokens=tokens, bits=bits, level=self._model.bucket_level)

    def _combine_bucket(self, tokens: int) -> Bucket:
        return CombineBucket(tokens=tokens, level=self._model.bucket_level)

    # -- running ----------------------------------------------------------------------------------

    def expect(self, tokens: np.ndarray) -> None:
        """See `LayerSource`."""
        self.experts.expect(tokens)

    def embed(self, tokens: np.ndarray, at: TokenPositions) -> jax.Array:
        """See `LayerSource`."""
        compiled = self._buckets.get(self.embed_bucket(len(tokens)))
        return compiled(self._embedding, tokens[None], np.asarray(at.positions))

    def run(
        self, chunks: Sequence[Chunk], cache: KVCache, meanwhile: Meanwhile | None = None
    ) -> tuple[list[jax.Array], KVCache]:
        """See `LayerSource`; `meanwhile` is never called: waits for experts are too short."""
        del meanwhile
        self.expect(np.concatenate([tokens[: int(at.valid)] for tokens, at in chunks]))
        outputs = [self.embed(tokens, at) for tokens, at in chunks]
        mass = cache.mass
        visited: list[np.ndarray] = []
        for layer in range(self._model.cfg.layers):
            past = cache.past(layer)
            if self._model.cfg.is_sparse(layer):
                outputs, past, mass = self._sparse_layer(layer, chunks, outputs, past, mass, visited)
            else:
                weights = self._parts.layers[layer]
                for number, (tokens, at) in enumerate(chunks):
                    tree = at.tree is not None
                    bucket = self._bucket(len(tokens), past.capacity_tokens, layer, tree=tree)
                    compiled = self._buckets.get(bucket)
                    outputs[number], past, mass = compiled(weights, outputs[number], at, past, mass)
            cache = cache.with_past(layer, past)
        self.experts.predictor.learn([each[-_LEARNT_TOKENS:] for each in visited])
        return outputs, dataclasses.replace(cache, mass=mass)

    def restore(
        self, layer: int, x: jax.Array, at: TokenPositions, past: Past, chunks: LayerChunks
    ) -> tuple[jax.Array, Past]:
        """See `LayerSource`."""
        compiled = self._buckets.get(self.restore_bucket(len(at.positions), past.capacity_tokens, layer))
        weights = self._parts.layers[layer]
        if not self._model.cfg.is_sparse(layer):
            return compiled(weights, x, at, past, chunks)
        index = self.experts.store.sparse.index(layer)
        before, out, past = compiled(weights, self._next_router(index), x, at, past, chunks)
        if index == 0:
            self._restoring = []
        outs = [out]
        self._visit_experts(layer, [before], [int(at.valid)], outs, self._restoring)
        return self._combined(before, outs[0]), past

    def _sparse_layer(
        self,
        layer: int,
        chunks: Sequence[Chunk],
        inputs: Sequence[jax.Array],
        past: Past,
        mass: jax.Array | None,
        visited: list[np.ndarray],
    ) -> tuple[list[jax.Array], Past, jax.Array | None]:
        """Runs a sparse layer over all chunks, and appends the experts that they visit to `visited`."""
        before: list[AtExperts] = []
        outs: list[jax.Array] = []
        weights, router = self._parts.layers[layer], self._next_router(len(visited))
        for (tokens, at), x in zip(chunks, inputs, strict=True):
            bucket = self._bucket(len(tokens), past.capacity_tokens, layer, tree=at.tree is not None)
            each, out, past, mass = self._buckets.get(bucket)(weights, router, x, at, past, mass)
            before.append(each)
            outs.append(out)
        self._visit_experts(layer, before, [int(at.valid) for _, at in chunks], outs, visited)
        return [self._combined(each, out) for each, out in zip(before, outs, strict=True)], past, mass

    def _next_router(self, index: int) -> dict[str, Any]:
        """The router of the sparse layer after one, from which its experts are predicted."""
        routers = self._parts.routers
        return routers[(index + 1) % len(routers)]

    def _visit_experts(
        self,
        layer: int,
        before: list[AtExperts],
        valid: Sequence[int],
        outs: list[jax.Array],
        visited: list[np.ndarray],
    ) -> None:
        """Runs the experts of a layer over all chunks, of which `valid` tokens are real.

        Appends the experts that they visit to `visited`, and changes `outs`.
        """
        # Expert -> its tiles as (chunk, tile).
        tiles: dict[int, list[tuple[int, int]]] = {}
        for number, each in enumerate(before):
            for tile, expert in enumerate(np.asarray(each.tiles.expert)[: int(each.tiles.count)].tolist()):
                tiles.setdefault(expert, []).append((number, tile))
        ids = [np.asarray(each.ids)[:count] for each, count in zip(before, valid, strict=True)]
        visited.append(np.concatenate(ids))
        self._run_tiles(layer, visited, np.asarray(before[-1].ahead), tiles, before, outs)

    def _run_tiles(
        self,
        layer: int,
        visited: list[np.ndarray],
        ahead: np.ndarray,
        tiles: dict[int, list[tuple[int, int]]],
        before: list[AtExperts],
        outs: list[jax.Array],
    ) -> None:
        """Runs each tile through its expert, as experts become resident; changes `outs`."""
        index, norm = len(visited) - 1, self._parts.norms[layer]
        # After the last layer come the first layers of the next token.
        seen = visited
        if len(visited) == len(self.experts.store.sparse):
            seen = []
            self.experts.predictor.begin()
        guesses = self.experts.likely(seen, ahead, len(tiles))
        for expert, weights in self.experts.cache.visit(index, list(tiles), guesses):
            bits = self.experts.store[index, expert].bits
            for number, tile in tiles[expert]:
                compiled = self._buckets.get(self._expert_bucket(before[number].x.shape[1], bits))
                outs[number] = compiled(weights, norm, before[number], np.int32(tile), outs[number])
            # Another expert may take its memory now.
            jax.block_until_ready(outs)

    def _combined(self, before: AtExperts, out: jax.Array) -> jax.Array:
        return self._buckets.get(self._combine_bucket(before.x.shape[1]))(before, out)

    @property
    def _parts(self) -> _Parts:
        """The parameters by layer, sorted once per version of the weights."""
        model = self._model
        if self._known is None or self._known[0] != model.weights_version:
            params = model.weights
            layers = [layer_params(model.params, layer, like) for layer, like in enumerate(model.alike)]
            routers = [router_params(params, layer) for layer in range(model.cfg.layers)]
            norms = [expert_norm(each) for each in routers]
            sparse = [routers[layer] for layer in self.experts.store.sparse]
            self._known = model.weights_version, _Parts(layers, sparse, norms)
        return self._known[1]
