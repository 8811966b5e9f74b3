"""Grows token trees with a resident model, and measures the time of its runs."""

import time
from typing import Any

import numpy as np

from jaxllm.kv.cache import KVCache
from jaxllm.serving.ground.speculation_options import TreeShape
from jaxllm.serving.ground.text_stream import MAX_STOP_IDS
from jaxllm.serving.runners.resident import ResidentRunner
from jaxllm.serving.speculation.confidence import Confidence
from jaxllm.serving.speculation.drafter import Growing
from jaxllm.serving.speculation.payoff import running_mean
from jaxllm.serving.speculation.size_cost import SizeCost
from jaxllm.serving.speculation.tree_growth import Nodes, TreeGrowth
from jaxllm.speculation.tree import TokenTree
from jaxllm.steps.trees import DraftEnd

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
