"""Runs the tiles of a layer's tokens through its experts as these become resident: in one call of a native
kernel over all of them, or tile by tile without such a kernel."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxllm.kernels.native import WeightTable
from jaxllm.kernels.native_products import BEGIN, FINISH, LEAVE, RUN, StoredExperts, begun_shape
from jaxllm.serving.buckets.bucket import Bucket
from jaxllm.serving.buckets.bucket_table import BucketTable
from jaxllm.serving.buckets.parts import HIGH
from jaxllm.serving.experts.bucket import ExpertBucket, StoredExpertsBucket
from jaxllm.serving.experts.cache import Arrived
from jaxllm.serving.experts.weights import ExpertWeights
from jaxllm.serving.weights.model_level import ModelLevel
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
    """Makes what runs tiles: by address if native kernels read all experts in place, else by tile."""
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
            compiled = self._buckets.get(self._bucket(each.x.shape[1]))
            begun = self._begun_of(each)
            outs[number], begun = compiled(weights, visit.norm, each, actions, outs[number], begun)
            if begun.size:
                self._begun[len(actions)] = begun
            self.calls += 1
        visit.begun.update(arrived.begun)
        visit.begun.difference_update(arrived.ready)
        # From here on their memory may be reused for other planes.
        jax.block_until_ready(outs)

    def _bucket(self, tokens: int) -> StoredExpertsBucket:
        early = self._nested and tokens == 1
        return self._model.bucket(StoredExpertsBucket, tokens=tokens, early=early, **self._how)

    def _begun_of(self, before: AtExperts) -> jax.Array | np.ndarray:
        count, cfg = len(before.tiles.expert), self._model.cfg
        if not self._nested or before.x.shape[1] > 1:
            return np.zeros((0,), np.int32)
        if count not in self._begun:
            shape = begun_shape(count, cfg.expert_ffn_size, cfg.hidden_size)
            self._begun[count] = np.zeros(shape, np.int32)
        return self._begun[count]


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


def valid_ids(before: Sequence[AtExperts], valid: Sequence[int]) -> np.ndarray:
    """The experts `[M, k]` of the valid tokens of all chunks."""
    return np.concatenate([np.asarray(each.ids)[:count] for each, count in zip(before, valid, strict=True)])
