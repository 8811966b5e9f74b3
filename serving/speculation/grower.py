"""Grows token trees with a resident model, and measures the time of its runs."""

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
from jaxllm.serving.speculation.costs import SizeCost, running_mean
from jaxllm.serving.speculation.drafter import Growing
from jaxllm.speculation.tree import Calibration, TokenTree, outcomes
from jaxllm.steps.trees import DraftEnd

# Temperatures that round to the same multiple of this share counts.
_APART = 0.25


def confidence_temperature(temperature: float, greedy: float) -> float:
    """The temperature of a drafter's probabilities, before calibration.

    Args:
      temperature: temperature of the target's sampler.
      greedy: temperature of probabilities for a greedy target: 1 leaves them unchanged, for any sampler;
        less for a drafter that is underconfident because it is nearly the target.
    """
    return 1.0 if greedy == 1.0 else max(temperature, greedy)


class Confidence:
    """Calibrates the probabilities of one drafter, separately for each temperature of the sampler.

    Args:
      greedy_temperature: see `confidence_temperature`.
      calibrated: whether it learns; else probabilities are the confidences.
    """

    def __init__(self, greedy_temperature: float = 1.0, *, calibrated: bool = True) -> None:
        self._greedy, self._calibrated = greedy_temperature, calibrated
        self.forget()

    def forget(self) -> None:
        """Resets the calibration."""
        self._counts: dict[int, Calibration] = {}
        self._sampler, self.temperature = 0, confidence_temperature(0.0, self._greedy)
        self.shifts = Calibration.fresh().shifts()

    def use(self, temperature: float) -> None:
        """Goes on with a sampler's temperature: sets `temperature` and `shifts` for the next draft."""
        self.temperature = confidence_temperature(temperature, self._greedy)
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


Nodes = jax.Array | np.ndarray


class TreeGrowth:
    """Runs the steps of one drafter's trees.

    Attributes:
      runner: runner of the drafter's model.
      shape: shape of its trees.
    """

    def __init__(self, runner: ResidentRunner, shape: TreeShape) -> None:
        self.runner, self.shape = runner, shape

    def buckets(self, caches: Sequence[int] | None = None) -> list[Bucket]:
        """The buckets that draft in caches of the lengths `caches`, or of all lengths."""
        runner = self.runner
        buckets = runner.all_buckets() if caches is None else runner.answer_buckets(caches)
        for cache in caches or runner.options.cache_tokens:
            buckets += [self._draft_bucket(cache), self._follow_bucket(cache), self._prune_bucket(cache)]
        return buckets

    def growing_buckets(self, caches: Sequence[int]) -> list[Bucket]:
        """The buckets that grow token trees in caches of these lengths, which are filled by others."""
        return [self._draft_bucket(cache) for cache in caches]

    def draft(
        self, tree: TokenTree, fed: Nodes, cache: KVCache, end: DraftEnd
    ) -> tuple[TokenTree, jax.Array, KVCache, jax.Array]:
        """Grows a token tree after the sequence in the cache (see `steps.drafting.draft`).

        Args:
          tree: token tree; donated.
          fed: `[M]` bool, nodes whose keys and values the cache has; donated.
          cache: cache; donated.
          end: end of drafting.

        Returns:
          The tree, `fed`, the cache, and the number of runs, int32 scalar.
        """
        compiled = self.runner.buckets.get(self._draft_bucket(cache.capacity_tokens))
        return compiled(self.runner.model.params, tree, fed, cache, end)

    def follow(
        self, tree: TokenTree, fed: Nodes, cache: KVCache, *, path: Sequence[int], token: int
    ) -> tuple[TokenTree, jax.Array, KVCache, int]:
        """Moves cache and tree to the end of the accepted path (see `steps.trees.follow`).

        Args:
          tree, fed: see `draft`; not donated.
          cache: cache; donated.
          path: accepted nodes.
          token: the target's token after them.

        Returns:
          The tree, `fed`, the cache, and the number of the path's last nodes that it lacks.
        """
        nodes = np.full(self.shape.room, path[-1], np.int32)
        nodes[: len(path)] = path
        compiled = self.runner.buckets.get(self._follow_bucket(cache.capacity_tokens))
        cache, tree, fed, missing = compiled(cache, tree, fed, nodes, np.int32(len(path)), np.int32(token))
        return tree, fed, cache, int(missing)  # pyright: ignore[reportReturnType]: of the device

    def prune(
        self, tree: TokenTree, fed: Nodes, cache: KVCache, most: int
    ) -> tuple[TokenTree, jax.Array, KVCache, np.ndarray]:
        """Keeps the `most` most confident nodes of a tree of `draft` (see `steps.trees.prune`); the cache is
        donated. Returns the tree, `fed`, the cache, and each node's new index, -1 if it was dropped."""
        compiled = self.runner.buckets.get(self._prune_bucket(cache.capacity_tokens))
        cache, left, fed_then, places = compiled(cache, tree, fed, np.int32(most))
        return left, fed_then, cache, np.asarray(places)

    def _prune_bucket(self, cache: int) -> PruneBucket:
        return PruneBucket(nodes=self.shape.room, cache_tokens=cache, level=self.runner.model.bucket_level)

    def _draft_bucket(self, cache: int) -> DraftBucket:
        return DraftBucket(
            nodes=self.shape.room,
            cache_tokens=cache,
            growth=self.shape.growth,
            level=self.runner.model.bucket_level,
        )

    def _follow_bucket(self, cache: int) -> FollowBucket:
        return FollowBucket(nodes=self.shape.room, cache_tokens=cache, level=self.runner.model.bucket_level)


# Maximum ratio of the time of a run during weight reads to that of a run before.
_MOST_TIMES = 3.0


class Grower:
    """Runs a drafter's model.

    Attributes:
      trees: runs the model's steps.
      confidence: confidence of the model's tokens.
      steps: number of runs so far.
    """

    def __init__(self, runner: ResidentRunner, shape: TreeShape, confidence: Confidence) -> None:
        self.trees, self.confidence, self._tips = TreeGrowth(runner, shape), confidence, shape.tips
        self.forget()

    def forget(self) -> None:
        """Resets the measurements."""
        self.steps, self._cost = 0, SizeCost(self._tips)
        self._step_s: float | None = None
        self._first = True

    @property
    def run_s(self) -> float:
        """Time of a run, without its branches."""
        return self._cost.seconds(0)

    @property
    def branch_s(self) -> float:
        """Time per branch of a run."""
        return max(0.0, self._cost.seconds(self._tips) - self.run_s) / self._tips

    @property
    def step_s(self) -> float:
        """Time of a run while weights are read, which also uses processors."""
        return self._step_s or self._cost.seconds(self._tips)

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
        """Grows a tree by up to `limit` runs.

        Args:
          tree, fed, cache: see `TreeGrowth.draft`; donated.
          growing: stop rule.
          limit: maximum number of runs.
          hidden: whether weights are read meanwhile.

        Returns:
          The tree, `fed`, the cache, and the number of runs.
        """
        before, began = int(np.asarray(fed).sum()), time.perf_counter()
        confidence = self.confidence
        end = DraftEnd(
            alpha=np.float32(growing.alpha),
            run=np.float32(growing.run),
            branch=np.float32(growing.branch),
            free=np.int32(growing.free_runs),
            most=np.int32(growing.most),
            limit=np.int32(limit),
            depth=np.int32(growing.depth),
            stop_ids=np.array([*growing.stop_ids, *[-1] * MAX_STOP_IDS][:MAX_STOP_IDS], np.int32),
            temperature=np.float32(confidence.temperature),
            shifts=confidence.shifts,
        )
        tree, fed, cache, runs = self.trees.draft(tree, fed, cache, end)
        count = int(runs)
        self.steps += count
        took_s, first = time.perf_counter() - began, self._first
        self._first = self._first and not count
        # A bucket's first run sets its kernels up, so it is not representative.
        if count and hidden:
            # A run that had to wait is not representative, and must not prevent the next one.
            most_s = _MOST_TIMES * self._cost.seconds(self._tips)
            self._step_s = running_mean(self._step_s, min(took_s / count, most_s or took_s))
        elif count and not first:
            self._cost.measured((int(np.asarray(fed).sum()) - before) / count, took_s / count)
        return tree, fed, cache, count


class GrowingDrafter:
    """The measurements of a drafter with a grower (see `Drafter`)."""

    _grower: Grower

    @property
    def run_s(self) -> float:
        """See `Drafter`."""
        return self._grower.run_s

    @property
    def step_s(self) -> float:
        """See `Drafter`."""
        return self._grower.step_s

    @property
    def branch_s(self) -> float:
        """See `Drafter`."""
        return self._grower.branch_s

    @property
    def steps(self) -> int:
        """Number of the model's runs."""
        return self._grower.steps
