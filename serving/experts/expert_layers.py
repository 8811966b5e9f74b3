"""Runs tokens through the layers of a mixture whose experts are loaded individually.

A sparse layer is three buckets: attention and router; tiles of tokens through their experts, as experts
become resident (`Visit`); and the sum of the outputs. All chunks of a prompt run the first bucket
before any expert, so that each expert is read once for all of them.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxllm.kernels.native import WeightTable
from jaxllm.kernels.native_products import BEGIN, FINISH, LEAVE, RUN, StoredExperts, begun_shape
from jaxllm.kv.cache import KVCache, Past, TokenPositions
from jaxllm.kv.chunks import LayerChunks
from jaxllm.models.encoder_decoder import encoder_params
from jaxllm.models.parameters import Params
from jaxllm.quant import Weight
from jaxllm.serving.buckets.bucket import HIGH, Bucket, expert_norm, layer_params, router_params
from jaxllm.serving.buckets.bucket_table import BucketTable
from jaxllm.serving.buckets.layer import EmbedBucket, LayerBucket
from jaxllm.serving.buckets.source import AttendEncoderBucket
from jaxllm.serving.experts.bucket import AttendBucket, CombineBucket, ExpertBucket, StoredExpertsBucket
from jaxllm.serving.experts.cache import Arrived
from jaxllm.serving.experts.weights import ExpertWeights
from jaxllm.serving.runners.layerwise import Chunk, LayerwiseRunner, SourceLayers
from jaxllm.serving.weights.model_level import ModelLevel
from jaxllm.serving.weights.prefetch import Meanwhile
from jaxllm.steps.sparse_layers import AtExperts


@dataclasses.dataclass(frozen=True)
class Visit:
    """The tokens of all chunks before the experts of one layer.

    Attributes:
      layer: index among the sparse layers.
      norm: the norm before the experts, and their biases.
      before: the tokens, per chunk.
      tiles: the experts of its tiles, per chunk; E is added for those of high planes only.
      begun: the experts that were begun and not finished.
    """

    layer: int
    norm: dict[str, Any]
    before: list[AtExperts]
    tiles: list[np.ndarray]
    begun: set[int] = dataclasses.field(default_factory=set)

    @classmethod
    def of(cls, layer: int, norm: dict[str, Any], before: list[AtExperts]) -> "Visit":
        """Waits for the routers."""
        tiles = [np.asarray(each.tiles.expert)[: int(each.tiles.count)] for each in before]
        return cls(layer, norm, before, tiles)

    def needs(self, experts: int) -> dict[int, int]:
        """The number of required planes by expert, of E: 1 for only the high one."""
        found: dict[int, int] = {}
        for number in np.concatenate(self.tiles).tolist():
            expert, alone = number % experts, number >= experts
            found[expert] = max(found.get(expert, 1), 1 if alone else 2)
        return found


def make_visits(model: ModelLevel, buckets: BucketTable, experts: ExpertWeights) -> "Visits":
    """Makes what runs the tiles of a layer's tokens through its experts as these become resident: in one call
    of a native kernel over all of them if it reads all experts in place, else tile by tile."""
    weight_table = experts.cache.regions.weight_table
    if weight_table is None or any(name.endswith("ffn_norm.bias") for name in model.weights):
        return VisitsByTile(model, buckets, experts)
    return VisitsByAddress(model, buckets, experts, weight_table)


class VisitsByAddress:
    """One call per chunk over all arrived experts.

    Attributes:
      calls: number of calls of native kernels.
    """

    def __init__(
        self, model: ModelLevel, buckets: BucketTable, experts: ExpertWeights, weight_table: WeightTable
    ) -> None:
        """See `make_visits`."""
        self._model, self._buckets, self._weight_table = model, buckets, weight_table
        self._experts = model.cfg.experts
        self._how, self._nested = experts.bucket_options, experts.store.planes > 1
        # Partial results of begun experts, by the number of tiles; for one layer at a time.
        self._begun: dict[int, jax.Array | np.ndarray] = {}
        self.calls = 0

    def buckets(self, tokens: int) -> list[Bucket]:
        """The buckets for chunks of so many tokens."""
        return [self._bucket(tokens)]

    def together(self, visit: Visit) -> bool:
        """Whether late experts are computed together (see `ExpertCache.visit`): those of one token. Of many
        tokens' experts the buffer may not hold all."""
        return len(visit.before) == 1 and visit.before[0].x.shape[1] == 1

    def run(self, visit: Visit, arrived: Arrived, outs: list[jax.Array]) -> None:
        """Runs the tiles of arrived experts, and waits for them; changes `outs`, the outputs of each
        chunk."""
        cfg = self._model.cfg
        row = np.int32(visit.layer)
        weights = StoredExperts(self._weight_table.operand, row, cfg.experts, cfg.expert_ffn_size)  # pyright: ignore
        ready, first = np.array(arrived.ready, np.int32), np.array(arrived.begun, np.int32)
        late = np.array(sorted(visit.begun), np.int32)
        for number, (each, tiles) in enumerate(zip(visit.before, visit.tiles, strict=True)):
            actions = np.full(len(each.tiles.expert), LEAVE, np.int32)
            own, chosen = actions[: len(tiles)], tiles % self._experts
            own[np.isin(chosen, ready)] = RUN
            own[np.isin(chosen, ready) & np.isin(chosen, late)] = FINISH
            own[np.isin(chosen, first)] = BEGIN
            if not own.any():
                continue
            tokens, count = each.x.shape[1], len(actions)
            compiled, begun = self._buckets.get(self._bucket(tokens)), np.zeros((0,), np.int32)
            if self._nested and tokens == 1:
                shape = begun_shape(count, cfg.expert_ffn_size, cfg.hidden_size)
                begun = self._begun.setdefault(count, np.zeros(shape, np.int32))
            outs[number], begun = compiled(weights, visit.norm, each, actions, outs[number], begun)
            if begun.size:
                self._begun[count] = begun
            self.calls += 1
        visit.begun.update(arrived.begun)
        visit.begun.difference_update(arrived.ready)
        # From here on their memory may be reused for other planes.
        jax.block_until_ready(outs)

    def _bucket(self, tokens: int) -> StoredExpertsBucket:
        early = self._nested and tokens == 1
        return self._model.bucket(StoredExpertsBucket, tokens=tokens, early=early, **self._how)


class VisitsByTile:
    """One call per tile."""

    def __init__(self, model: ModelLevel, buckets: BucketTable, experts: ExpertWeights) -> None:
        """See `make_visits`."""
        self._model, self._buckets, self._weights = model, buckets, experts

    def buckets(self, tokens: int) -> list[Bucket]:
        """See `VisitsByAddress`."""
        return [self._bucket(tokens, form) for form in self._weights.forms]

    def together(self, visit: Visit) -> bool:
        """See `VisitsByAddress`."""
        return False

    def run(self, visit: Visit, arrived: Arrived, outs: list[jax.Array]) -> None:
        """See `VisitsByAddress`."""
        ready = set(arrived.ready)
        experts, store = self._model.cfg.experts, self._weights.store
        for number, (each, tiles) in enumerate(zip(visit.before, visit.tiles, strict=True)):
            for tile, stands_for in enumerate(tiles.tolist()):
                key = visit.layer, stands_for % experts
                if key[1] not in ready:
                    continue
                alone = stands_for >= experts and store[key].nested
                weights = self._weights.cache.regions.weights(key, 1 if alone else 2)
                bucket = self._bucket(each.x.shape[1], HIGH if alone else store[key].form)
                compiled = self._buckets.get(bucket)
                outs[number] = compiled(weights, visit.norm, each, np.int32(tile), outs[number])
        jax.block_until_ready(outs)

    def _bucket(self, tokens: int, form: str) -> ExpertBucket:
        how, level = self._weights.bucket_options, self._model.bucket_level
        return ExpertBucket(tokens=tokens, form=form, level=level, **how)


Visits = VisitsByAddress | VisitsByTile


class ResidentSources:
    """The layers for sources, all resident except experts (see `SourceWeights`)."""

    def begin_source(self) -> None:
        """See `SourceWeights`."""

    def rows(self, tokens: Sequence[int]) -> tuple[Weight, np.ndarray]:
        """See `SourceWeights`; the whole embedding is in memory."""
        raise NotImplementedError

    @contextlib.contextmanager
    def layer(self, model: ModelLevel, layer: int) -> Iterator[dict[str, Any]]:
        """See `SourceWeights`."""
        yield layer_params(model.params, layer, model.alike[layer])

    encoder_layer = layer


class SparseEncoderLayers:
    """The layers of an encoder with individually loaded experts."""

    def __init__(
        self, model: ModelLevel, buckets: BucketTable, experts: ExpertWeights, visits: Visits
    ) -> None:
        """See the class; `model` is the whole model; `visits` runs tokens through resident experts."""
        assert model.cfg.encoder is not None
        self._buckets, self._experts, self._visits = buckets, experts, visits
        self._how = experts.bucket_options
        own: Params = encoder_params(model.weights)
        # By the index of a sparse layer: the norm before its experts.
        self._sparse = [
            layer for layer in range(model.cfg.encoder.layers) if model.cfg.encoder.is_sparse(layer)
        ]
        self._norms = [expert_norm(own, layer) for layer in self._sparse]
        self._total = model.cfg.experts

    def buckets(self, tokens: int, layer: int) -> list[Bucket]:
        """The buckets of layers like one, for sources of up to `tokens` tokens."""
        return [
            AttendEncoderBucket(tokens=tokens, layer=layer, **self._how),
            *self._visits.buckets(tokens),
            CombineBucket(tokens=tokens, **self._how),
        ]

    def run(
        self,
        layer: int,
        like: int,
        weights: dict[str, Any],
        inputs: tuple[jax.Array, jax.Array | None, np.int32],
    ) -> jax.Array:
        """Runs a layer, with `weights` besides its experts, over its input, the bias and the number of valid
        tokens: returns the next layer's input."""
        tokens, index = inputs[0].shape[1], self._sparse.index(layer)
        attend = self._buckets.get(AttendEncoderBucket(tokens=tokens, layer=like, **self._how))
        before, out = attend(weights, *inputs)
        visit, outs = Visit.of(index, self._norms[index], [before]), [out]
        for arrived in self._experts.cache.visit(index, visit.needs(self._total)):
            self._visits.run(visit, arrived, outs)
        return self._buckets.get(CombineBucket(tokens=tokens, **self._how))(before, outs[0])


# The predictor learns from the last tokens of a pass.
_LEARNT_TOKENS = 64


class ExpertRunner(LayerwiseRunner):
    """Runs a mixture of which only experts are loaded from storage, mostly before they are needed.

    Attributes:
      experts: provider of the experts.
      visits: runs tokens through resident experts.
    """

    def __init__(self, model: ModelLevel, buckets: BucketTable, weights: ExpertWeights) -> None:
        """`model` is the whole model or a level; its parameters are all but the experts."""
        self.experts, self._how = weights, weights.bucket_options
        self.visits: Visits = make_visits(model, buckets, weights)
        sources = None
        if model.encoder is not None:
            sparse = SparseEncoderLayers(model, buckets, weights, self.visits)
            sources = SourceLayers(model, buckets, ResidentSources(), by_rows=False, sparse=sparse)
        super().__init__(model, buckets, weights, sources)
        self._ready_for: tuple[int, int] | None = None
        # The experts that a context visited in the sparse layers restored so far.
        self._restoring: list[np.ndarray] = []

    # -- which buckets it needs -------------------------------------------------------------------

    def _layer_buckets(self, tokens: int, cache: int, *, tree: bool = False) -> list[Bucket]:
        found = [self._bucket(tokens, cache, layer, tree=tree) for layer in self.model.layer_kinds]
        return [*found, *self.visits.buckets(tokens), self._combine_bucket(tokens)]

    def _embed_bucket(self, tokens: int) -> Bucket:
        return EmbedBucket(tokens=tokens)

    def _restore_bucket(self, tokens: int, cache: int, layer: int) -> Bucket:
        if not self.model.cfg.is_sparse(layer):
            return super()._restore_bucket(tokens, cache, layer)
        where = {"tokens": tokens, "cache_tokens": cache, "layer": layer, "restored": True}
        return self.model.bucket(AttendBucket, **where, **self._how)

    def _bucket(self, tokens: int, cache: int, layer: int, *, tree: bool) -> Bucket:
        """The bucket of a layer; of a sparse layer up to its experts."""
        where = {"tokens": tokens, "cache_tokens": cache, "layer": layer, "tree": tree}
        if self.model.cfg.is_sparse(layer):
            return self.model.bucket(AttendBucket, **where, **self._how)
        return self.model.bucket(LayerBucket, **where)

    def _combine_bucket(self, tokens: int) -> Bucket:
        return self.model.bucket(CombineBucket, tokens=tokens, **self._how)

    # -- running ----------------------------------------------------------------------------------

    def expect(self, tokens: np.ndarray) -> None:
        """See `Runner`."""
        self.experts.expect(tokens)

    def begin_layers(self, tokens: np.ndarray, at: TokenPositions) -> jax.Array:
        """See `LevelRunner`."""
        compiled = self.buckets.get(self._embed_bucket(len(tokens)))
        return compiled(self._embedding, tokens[None], np.asarray(at.positions))

    def _run(
        self, chunks: Sequence[Chunk], cache: KVCache, meanwhile: Meanwhile | None = None
    ) -> tuple[list[jax.Array], KVCache]:
        # Waits for experts are too short for other work.
        del meanwhile
        self._make_ready()
        self.expect(np.concatenate([tokens[: int(at.valid)] for tokens, at in chunks]))
        outputs = [self.begin_layers(tokens, at) for tokens, at in chunks]
        mass = cache.mass
        visited: list[np.ndarray] = []
        for layer in range(self.model.cfg.layers):
            past = cache.past(layer)
            if self.model.cfg.is_sparse(layer):
                before, outs = list[AtExperts](), list[jax.Array]()
                weights, routers = self._layers[layer], self._next_routers(len(visited))
                for (tokens, at), x in zip(chunks, outputs, strict=True):
                    bucket = self._bucket(len(tokens), past.capacity_tokens, layer, tree=at.tree is not None)
                    each, out, past, mass = self.buckets.get(bucket)(weights, routers, x, at, past, mass)
                    before.append(each)
                    outs.append(out)
                self._visit_experts(layer, before, [int(at.valid) for _, at in chunks], outs, visited)
                outputs = [self._combined(each, out) for each, out in zip(before, outs, strict=True)]
            else:
                weights = self._layers[layer]
                for number, (tokens, at) in enumerate(chunks):
                    tree = at.tree is not None
                    bucket = self._bucket(len(tokens), past.capacity_tokens, layer, tree=tree)
                    compiled = self.buckets.get(bucket)
                    outputs[number], past, mass = compiled(weights, outputs[number], at, past, mass)
            cache = cache.with_past(layer, past)
        self.experts.predictor.learn([each[-_LEARNT_TOKENS:] for each in visited])
        return outputs, dataclasses.replace(cache, mass=mass)

    def restore_layer(
        self, layer: int, x: jax.Array, at: TokenPositions, past: Past, chunks: LayerChunks
    ) -> tuple[jax.Array, Past]:
        """See `LevelRunner`."""
        self._make_ready()
        compiled = self.buckets.get(self._restore_bucket(len(at.positions), past.capacity_tokens, layer))
        weights = self._layers[layer]
        if not self.model.cfg.is_sparse(layer):
            return compiled(weights, x, at, past, chunks)
        index = self.experts.store.sparse.index(layer)
        before, out, past = compiled(weights, self._next_routers(index), x, at, past, chunks)
        if index == 0:
            self._restoring = []
        outs = [out]
        self._visit_experts(layer, [before], [int(at.valid)], outs, self._restoring)
        return self._combined(before, outs[0]), past

    def _next_routers(self, index: int) -> list[dict[str, Any]]:
        """The routers of the sparse layers after one, to predict their experts; wraps around after the last
        layer."""
        routers = self._routers
        return [routers[(index + 1 + step) % len(routers)] for step in range(self._how["ahead"])]

    def _visit_experts(
        self,
        layer: int,
        before: list[AtExperts],
        valid: Sequence[int],
        outs: list[jax.Array],
        visited: list[np.ndarray],
    ) -> None:
        """Runs a layer's experts over all chunks; changes `outs`, and appends to `visited`."""
        index = self.experts.store.of_encoder + len(visited)
        visit = Visit.of(index, self._norms[layer], before)
        ids = [np.asarray(each.ids)[:count] for each, count in zip(before, valid, strict=True)]
        visited.append(np.concatenate(ids))
        needs = visit.needs(self.model.cfg.experts)
        # After the last layer come the first layers of the next token.
        seen = visited
        if len(visited) == len(self.experts.store.sparse):
            seen = []
            self.experts.predictor.begin()
        guesses = self.experts.likely(seen, np.asarray(before[-1].ahead), len(needs))
        together = self.visits.together(visit)
        for arrived in self.experts.cache.visit(visit.layer, needs, guesses, together=together):
            self.visits.run(visit, arrived, outs)

    def _combined(self, before: AtExperts, out: jax.Array) -> jax.Array:
        return self.buckets.get(self._combine_bucket(before.x.shape[1]))(before, out)

    def _make_ready(self) -> None:
        """Sorts the parameters by layer, once per version of the weights."""
        model = self.model
        if self._ready_for != model.weights_version:
            # All but experts, under the names of the layer whose buckets it shares; the router and the norm
            # before it, per sparse layer; the norm before the experts, and their biases.
            self._layers = [layer_params(model.params, layer, like) for layer, like in enumerate(model.alike)]
            self._routers = [router_params(model.weights, layer) for layer in self.experts.store.sparse]
            self._norms = [expert_norm(model.weights, layer) for layer in range(model.cfg.layers)]
            self._ready_for = model.weights_version
