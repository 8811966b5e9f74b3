"""Running a mixture whose experts come one by one: the same calls as with all of it in memory.

A sparse layer is three graphs: attention and the router; each tile of tokens through its expert, as experts
come; and their sum. All chunks of a prompt pass the first together, so that each expert is read once for all.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxllm.config import Bucket, ModelConfig
from jaxllm.elastic.submodel import CountedSubModel
from jaxllm.kv.cache import KVCache, Places
from jaxllm.layer_steps import AtExperts
from jaxllm.models.parameters import Params
from serving.experts.weights import ExpertWeights
from serving.graph_store import GraphStore
from serving.lowering import layer_params, router_params
from serving.options import EngineOptions
from serving.streaming.layered_table import LayeredTable
from serving.streaming.weight_stream import Meanwhile

Chunk = tuple[np.ndarray, Places]
# Of a pass so many tokens, the last, teach the predictor.
_LEARNT_TOKENS = 64


class ExpertTable(LayeredTable):
    """The graphs of a mixture's layers and experts (see `GraphTable`), as calls.

    Attributes:
      experts: brings them.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        params: Params | CountedSubModel,
        options: EngineOptions,
        weights: ExpertWeights,
        store: GraphStore | None = None,
    ) -> None:
        """Makes an empty table of the whole model, whose experts are not among the parameters."""
        super().__init__(cfg, params, options, weights, store)
        self.experts = weights
        self._parts: list[Any] = []
        self._version: tuple[int, int] | None = None
        # Whom a context that comes back has visited so far.
        self._restoring: list[np.ndarray] = []

    # -- which graphs ----------------------------------------------------------------------------

    def _layer_buckets(self, kind: str, tokens: int, cache: int) -> list[Bucket]:
        found: dict[Bucket, None] = {}
        for layer in sorted(set(self.alike)):
            if not self.cfg.is_sparse(layer):
                found[self._layer_bucket(kind, tokens, cache, layer)] = None
                continue
            found[self._layer_bucket(_ATTENDING[kind], tokens, cache, layer)] = None
            found |= dict.fromkeys(self._expert_bucket(tokens, bits) for bits in self.experts.store.widths)
            found[self._expert_bucket(tokens, 0)] = None
        return list(found)

    def _expert_bucket(self, tokens: int, bits: int) -> Bucket:
        """Of one expert of a width; of their sum where it is 0."""
        layer, cache = self.experts.store.sparse[0], self.options.cache_tokens[0]
        bucket = self._layer_bucket("expert" if bits else "combine", tokens, cache, layer)
        return dataclasses.replace(bucket, bits=bits)

    def _rows_bucket(self, tokens: int) -> Bucket:
        # The table of tokens is in memory.
        return Bucket(kind="embed", tokens=tokens)

    # -- running them ----------------------------------------------------------------------------

    def expect(self, tokens: np.ndarray) -> None:
        """See `GraphTable`."""
        self.experts.expect(tokens)

    def _embedded(self, tokens: np.ndarray, at: Places) -> jax.Array:
        graph = self.graph(self._rows_bucket(len(tokens)))
        return graph(self._embedding, tokens[None], np.asarray(at.positions))

    def _pass(
        self, chunks: Sequence[Chunk], cache: KVCache, meanwhile: Meanwhile | None = None
    ) -> tuple[list[jax.Array], KVCache]:
        del meanwhile
        self.expect(np.concatenate([tokens[: int(at.valid)] for tokens, at in chunks]))
        outputs = [self._embedded(tokens, at) for tokens, at in chunks]
        keys, values, mass = list(cache.keys), list(cache.values), cache.mass
        visited: list[np.ndarray] = []
        for layer in range(self.cfg.layers):
            past = keys[layer], values[layer]
            if self.cfg.is_sparse(layer):
                outputs, past, mass = self._sparse_layer(layer, chunks, outputs, past, mass, visited)
            else:
                for number, (tokens, at) in enumerate(chunks):
                    kind = "layer" if at.tree is None else "tree"
                    graph = self.graph(self._layer_bucket(kind, len(tokens), past[0].shape[2], layer))
                    outputs[number], past, mass = graph(self._layers[layer], outputs[number], at, past, mass)
            keys[layer], values[layer] = past
        self.experts.predictor.learn([each[-_LEARNT_TOKENS:] for each in visited])
        return outputs, dataclasses.replace(cache, keys=tuple(keys), values=tuple(values), mass=mass)

    def restore_layer(
        self,
        layer: int,
        x: jax.Array,
        at: Places,
        past: tuple[jax.Array, jax.Array],
        source: np.ndarray,
        bits: np.ndarray,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """See `GraphTable`."""
        graph, weights = self.graph(self._restoring_bucket(layer, at, past)), self._layers[layer]
        if not self.cfg.is_sparse(layer):
            return graph(weights, x, at, past, source, bits)
        place = self.experts.store.sparse.index(layer)
        router = self._routers[(place + 1) % len(self._routers)]
        before, out, past = graph(weights, router, x, at, past, source, bits)
        if place == 0:
            self._restoring = []
        outs = [out]
        self._experts_of(layer, [before], [int(at.valid)], outs, self._restoring)
        return self._combined(before, outs[0]), past

    def _sparse_layer(
        self,
        layer: int,
        chunks: Sequence[Chunk],
        inputs: Sequence[jax.Array],
        past: tuple[jax.Array, jax.Array],
        mass: jax.Array | None,
        visited: list[np.ndarray],
    ) -> tuple[list[jax.Array], tuple[jax.Array, jax.Array], jax.Array | None]:
        """A sparse layer of all chunks; whom their tokens visit is appended to `visited`."""
        before: list[AtExperts] = []
        outs: list[jax.Array] = []
        for (tokens, at), x in zip(chunks, inputs, strict=True):
            kind = _ATTENDING["layer" if at.tree is None else "tree"]
            graph = self.graph(self._layer_bucket(kind, len(tokens), past[0].shape[2], layer))
            router = self._routers[(len(visited) + 1) % len(self._routers)]
            each, out, past, mass = graph(self._layers[layer], router, x, at, past, mass)
            before.append(each)
            outs.append(out)
        self._experts_of(layer, before, [int(at.valid) for _, at in chunks], outs, visited)
        return [self._combined(each, out) for each, out in zip(before, outs, strict=True)], past, mass

    def _experts_of(
        self,
        layer: int,
        before: list[AtExperts],
        valid: Sequence[int],
        outs: list[jax.Array],
        visited: list[np.ndarray],
    ) -> None:
        """The experts of a layer for all chunks, of which so many tokens are real.

        Whom they visit is appended to `visited`, and `outs` is changed.
        """
        # Of each expert its tiles, by chunk.
        tiles: dict[int, list[tuple[int, int]]] = {}
        for number, each in enumerate(before):
            for tile, expert in enumerate(np.asarray(each.tiles.expert)[: int(each.tiles.count)].tolist()):
                tiles.setdefault(expert, []).append((number, tile))
        ids = [np.asarray(each.ids)[:count] for each, count in zip(before, valid, strict=True)]
        visited.append(np.concatenate(ids))
        self._visit(layer, visited, np.asarray(before[-1].ahead), tiles, before, outs)

    def _visit(
        self,
        layer: int,
        visited: list[np.ndarray],
        ahead: np.ndarray,
        tiles: dict[int, list[tuple[int, int]]],
        before: list[AtExperts],
        outs: list[jax.Array],
    ) -> None:
        """Every tile through its expert, as experts come; `outs` is changed."""
        place, norm = len(visited) - 1, self._norms[layer]
        # What comes first behind the last layer are the first layers, of another token.
        seen = visited
        if len(visited) == len(self.experts.store.sparse):
            seen = []
            self.experts.predictor.begin()
        guesses = self.experts.likely(seen, ahead, len(tiles))
        for expert, weights in self.experts.cache.visit(place, list(tiles), guesses):
            bits = self.experts.store[place, expert].bits
            for number, tile in tiles[expert]:
                graph = self.graph(self._expert_bucket(before[number].x.shape[1], bits))
                outs[number] = graph(weights, norm, before[number], np.int32(tile), outs[number])
            # Another expert may take its memory.
            jax.block_until_ready(outs)

    def _combined(self, before: AtExperts, out: jax.Array) -> jax.Array:
        return self.graph(self._expert_bucket(before.x.shape[1], 0))(before, out)

    # -- parameters ------------------------------------------------------------------------------

    @property
    def _layers(self) -> list[Any]:
        return self._take_parameters()[0]

    @property
    def _routers(self) -> list[dict[str, Any]]:
        """Of each sparse layer."""
        return self._take_parameters()[1]

    @property
    def _norms(self) -> list[dict[str, Any]]:
        return self._take_parameters()[2]

    def _take_parameters(self) -> list[Any]:
        """Sorts the parameters by layers, once for each adapter that comes."""
        if self._version != self.weights_version:
            params = self.params
            layers = [layer_params(params, layer, like) for layer, like in enumerate(self.alike)]
            assert not isinstance(params, CountedSubModel)
            routers = [router_params(params, layer) for layer in range(self.cfg.layers)]
            norms = [{name: each[name] for name in each if name != "router"} for each in routers]
            self._parts = [layers, [routers[layer] for layer in self.experts.store.sparse], norms]
            self._version = self.weights_version
        return self._parts


_ATTENDING = {"layer": "attend", "tree": "attend_tree"}
