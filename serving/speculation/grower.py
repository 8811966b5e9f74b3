"""Grows token trees with a resident model, follows accepted paths, and measures the time of its runs."""

import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxllm.kv.cache import KVCache
from jaxllm.serving.buckets.bucket import Bucket
from jaxllm.serving.buckets.tree import DraftBucket, FollowBucket, PruneBucket
from jaxllm.serving.ground.speculation_options import TreeShape
from jaxllm.serving.ground.text_stream import MAX_STOP_IDS
from jaxllm.serving.runners.resident import ResidentRunner
from jaxllm.serving.speculation.costs import DraftTimes, SizeCost, running_mean
from jaxllm.serving.weights.model_level import AnyBucket
from jaxllm.speculation.token_tree import Growing, TokenTree
from jaxllm.speculation.tree import Calibration, outcomes
from jaxllm.steps.trees import DraftEnd

Nodes = jax.Array | np.ndarray
_FOLLOWING = (FollowBucket, PruneBucket)
# Temperatures that round to the same multiple of this share counts.
_APART = 0.25
# Maximum ratio of the time of a run during weight reads to that of a run before.
_MOST_TIMES = 3.0


class Confidence:
    """Calibrates the probabilities of one drafter, separately for each temperature of the sampler.

    Args:
      greedy_temperature: temperature of probabilities for a greedy target: 1 leaves them unchanged, for any
        sampler; less for a drafter that is underconfident because it is nearly the target.
      calibrated: whether it learns; else probabilities are the confidences.

    Attributes:
      temperature: temperature of the drafter's probabilities, before calibration.
      shifts: shifts of the calibration.
    """

    def __init__(self, greedy_temperature: float = 1.0, *, calibrated: bool = True) -> None:
        self._greedy, self._calibrated = greedy_temperature, calibrated
        self.forget()

    def forget(self) -> None:
        """Resets the calibration."""
        self._counts: dict[int, Calibration] = {}
        self._sampler, self.temperature = 0, self._greedy
        self.shifts = Calibration.fresh().shifts()

    def use(self, temperature: float) -> None:
        """Goes on with a sampler's temperature: sets `temperature` and `shifts` for the next draft."""
        self.temperature = 1.0 if self._greedy == 1.0 else max(temperature, self._greedy)
        sampler = round(temperature / _APART) + bool(temperature > 0)
        if sampler != self._sampler:
            self._sampler = sampler
            self.shifts = self._counts.get(sampler, Calibration.fresh()).shifts()

    def learn(self, tree: TokenTree, path: Sequence[int], token: int) -> None:
        """Learns from a verification of a tree that was drafted since the last `use` (see `outcomes`)."""
        if self._calibrated:
            counts = self._counts.get(self._sampler, Calibration.fresh())
            self._counts[self._sampler] = counts = counts.after(*outcomes(tree, path, token))
            self.shifts = counts.shifts()


class Grower:
    """Runs the steps of a drafter's trees. In its methods a tree's `fed` is `[M]` bool: the nodes whose keys
    and values the cache has.

    Attributes:
      confidence: confidence of the model's tokens.
      times: times of the model's runs.
    """

    def __init__(self, runner: ResidentRunner, shape: TreeShape, confidence: Confidence) -> None:
        self._runner, self._shape, self.confidence = runner, shape, confidence
        self.times = DraftTimes()
        self.forget()

    def forget(self) -> None:
        """Resets the measurements."""
        self._cost, self._hidden_s, self._first = SizeCost(self._shape.tips), None, True
        self.times.steps = 0
        self._update_times()

    def buckets(self, caches: Sequence[int] | None = None) -> list[Bucket]:
        """The buckets that draft in caches of the lengths `caches`, or of all lengths."""
        found = self._runner.buckets_for(caches=caches or ())
        for cache in caches or self._runner.options.cache_tokens:
            found += [self.draft_bucket(cache), *(self._bucket(each, cache) for each in _FOLLOWING)]
        return found

    def grow(
        self,
        tree: TokenTree,
        fed: Nodes,
        cache: KVCache,
        growing: Growing,
        limit: int,
        *,
        hidden: bool = False,
    ) -> tuple[TokenTree, Nodes, Any, int]:
        """Grows a tree after the sequence in the cache by up to `limit` runs (see `steps.trees.draft`); tree,
        `fed` and cache are donated. `hidden` states whether weights are read meanwhile.

        Returns:
          The tree, `fed`, the cache, and the number of runs.
        """
        before, began = int(np.asarray(fed).sum()), time.perf_counter()
        end = DraftEnd(
            alpha=np.float32(growing.alpha),
            run=np.float32(growing.run),
            branch=np.float32(growing.branch),
            free=np.int32(growing.free_runs),
            most=np.int32(growing.most),
            limit=np.int32(limit),
            depth=np.int32(growing.depth),
            stop_ids=np.array([*growing.stop_ids, *[-1] * MAX_STOP_IDS][:MAX_STOP_IDS], np.int32),
            temperature=np.float32(self.confidence.temperature),
            shifts=self.confidence.shifts,
        )
        compiled = self._runner.buckets.get(self.draft_bucket(cache.capacity_tokens))
        tree, fed, cache, runs = compiled(self._runner.model.params, tree, fed, cache, end)
        count = int(runs)
        took_s, first = time.perf_counter() - began, self._first
        self._first = self._first and not count
        # A bucket's first run sets its kernels up, so it is not representative.
        if count and hidden:
            # A run that had to wait is not representative, and must not prevent the next one.
            most_s = _MOST_TIMES * self._cost.seconds(self._shape.tips)
            self._hidden_s = running_mean(self._hidden_s, min(took_s / count, most_s or took_s))
        elif count and not first:
            self._cost.measured((int(np.asarray(fed).sum()) - before) / count, took_s / count)
        self.times.steps += count
        self._update_times()
        return tree, fed, cache, count

    def follow(
        self, tree: TokenTree, fed: Nodes, cache: KVCache, *, path: Sequence[int], token: int
    ) -> tuple[TokenTree, jax.Array, KVCache, int]:
        """Moves cache and tree to the end of the accepted nodes `path`, after which the target's token is
        `token` (see `steps.trees.follow`); only the cache is donated.

        Returns:
          The tree, `fed`, the cache, and the number of the path's last nodes that it lacks.
        """
        nodes = np.full(self._shape.room, path[-1], np.int32)
        nodes[: len(path)] = path
        compiled = self._runner.buckets.get(self._bucket(FollowBucket, cache.capacity_tokens))
        cache, tree, fed, missing = compiled(cache, tree, fed, nodes, np.int32(len(path)), np.int32(token))
        return tree, fed, cache, int(missing)  # pyright: ignore[reportReturnType]: of the device

    def prune(
        self, tree: TokenTree, fed: Nodes, cache: KVCache, most: int
    ) -> tuple[TokenTree, jax.Array, KVCache, np.ndarray]:
        """Keeps the `most` most confident nodes of a tree (see `steps.trees.prune`); the cache is donated.
        Returns the tree, `fed`, the cache, and each node's new index, -1 if it was dropped."""
        compiled = self._runner.buckets.get(self._bucket(PruneBucket, cache.capacity_tokens))
        cache, left, fed_then, places = compiled(cache, tree, fed, np.int32(most))
        return left, fed_then, cache, np.asarray(places)

    def draft_bucket(self, cache: int) -> DraftBucket:
        """The bucket that grows token trees in caches of a length."""
        return self._bucket(DraftBucket, cache, growth=self._shape.growth)

    def _bucket(self, family: type[AnyBucket], cache: int, **fields: Any) -> AnyBucket:
        return self._runner.model.bucket(family, tokens=self._shape.room, cache_tokens=cache, **fields)

    def _update_times(self) -> None:
        times, whole_s = self.times, self._cost.seconds(self._shape.tips)
        times.run_s = self._cost.seconds(0)
        times.branch_s = max(0.0, whole_s - times.run_s) / self._shape.tips
        times.step_s = self._hidden_s or whole_s
