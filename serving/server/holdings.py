"""Adapts what an engine keeps in memory to the governor: chunks of contexts, drafts, layers, the expert
buffer."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

from serving.contexts.memory import ChunkMemory
from serving.speculation.drafter import DrafterMemory
from serving.speculation.speculation import Speculation
from serving.weights.experts.weights import ExpertWeights
from serving.weights.streamed import StreamedWeights


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContextChunks:
    """Chunks of contexts that are in memory.

    Attributes:
      memory: that keeps them.
      floor_bytes: that stays free of contexts that run or are pinned, as far as the whole budget has it; at
        least what the longest one takes, for a call to begin or grow.
      asked_bytes: their budget as it was asked for last.
      name: of this kind of holding.
    """

    memory: ChunkMemory
    floor_bytes: int
    asked_bytes: Callable[[], int]
    name: str = dataclasses.field(default="contexts", init=False)

    @property
    def size_bytes(self) -> int:
        """Of resident chunks."""
        return self.memory.resident_bytes

    @property
    def limit_bytes(self) -> int:
        """Their budget now."""
        return self.memory.budget_bytes

    @property
    def most_bytes(self) -> int:
        """Their budget as it was asked for; more is of no use to them."""
        return self.asked_bytes()

    @property
    def least_bytes(self) -> int:
        """Of contexts that run or are pinned, and the floor."""
        kept = self.memory.kept_bytes
        return max(kept, min(kept + self.floor_bytes, self.most_bytes))

    def resize(self, limit_bytes: int) -> None:
        """Sets the budget; evicts chunks beyond it, in the order of the policy."""
        self.memory.resize(limit_bytes)


class Drafts:
    """What a drafter keeps: it drafts as long as all of that may be there.

    Args:
      speculation: whose drafter it is.
      memory: of the drafter.
      lock: of the model.

    Attributes:
      name: of this kind of holding.
      least_bytes: none: answers do without drafts.
      most_bytes: that the drafter may come to take.
      limit_bytes: most that it may take now.
    """

    name = "drafts"
    least_bytes = 0

    def __init__(
        self,
        speculation: Speculation,
        memory: DrafterMemory,
        lock: contextlib.AbstractContextManager[Any],
    ) -> None:
        self._speculation, self._memory, self._lock = speculation, memory, lock
        self.most_bytes = self.limit_bytes = memory.most_bytes

    @property
    def size_bytes(self) -> int:
        """Of the drafter, its caches among it."""
        return self._memory.size_bytes

    def resize(self, limit_bytes: int) -> None:
        """Sets the budget; drafts stop where it is not all of it, and begin again where it is."""
        with self._lock:
            self._speculation.draft(limit_bytes >= self.most_bytes)
        self.limit_bytes = limit_bytes


class ResidentLayers:
    """Layers of a streamed model that are in memory; others are read in each pass.

    Args:
      weights: that keep them, and are `resizable`.
      lock: of the model.

    Attributes:
      name: of this kind of holding.
      least_bytes: none: all layers can be read in each pass.
      most_bytes: of those that the engine's budget left room for.
      limit_bytes: most that they may take now; whole layers fill it up to a part of one.
    """

    name = "layers"
    least_bytes = 0

    def __init__(self, weights: StreamedWeights, lock: contextlib.AbstractContextManager[Any]) -> None:
        self._weights, self._lock = weights, lock
        self.most_bytes = self.limit_bytes = weights.plan.resident_bytes

    @property
    def size_bytes(self) -> int:
        """Of resident layers."""
        return self._weights.resident_bytes

    def resize(self, limit_bytes: int) -> None:
        """Sets the budget: lets layers beyond it go, or reads those that it has room for again."""
        with self._lock:
            self._weights.resize(limit_bytes)
        self.limit_bytes = limit_bytes


class ExpertBuffer:
    """Experts that are in memory.

    Args:
      weights: that keep them.

    Attributes:
      name: of this kind of holding.
      least_bytes: that one layer needs.
      most_bytes: of all experts, or what the engine's budget left for them.
    """

    name = "experts"

    def __init__(self, weights: ExpertWeights) -> None:
        self._cache = weights.cache
        self.least_bytes, self.most_bytes = weights.store.least_bytes(), weights.budget_bytes

    @property
    def size_bytes(self) -> int:
        """Of resident experts, and those that are being read."""
        return self._cache.taken_bytes

    @property
    def limit_bytes(self) -> int:
        """Their budget now."""
        return self._cache.budget_bytes

    def resize(self, limit_bytes: int) -> None:
        """Sets the budget; evicts idle experts beyond it."""
        self._cache.resize(limit_bytes)
