"""Adapts what an engine keeps in memory to the governor: chunks of contexts, the expert buffer."""

import dataclasses

from serving.contexts.memory import ChunkMemory
from serving.weights.experts.weights import ExpertWeights


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContextChunks:
    """Chunks of contexts that are in memory.

    Attributes:
      memory: that keeps them.
      floor_bytes: that stays for contexts to run in; at least what the longest one takes, so that no call is
        refused that the whole budget would have had room for.
      most_bytes: their budget as it was asked for.
      name: of this kind of holding.
    """

    memory: ChunkMemory
    floor_bytes: int
    most_bytes: int
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
    def least_bytes(self) -> int:
        """Of contexts that run or are pinned, and at least the floor."""
        return max(self.memory.kept_bytes, min(self.floor_bytes, self.most_bytes))

    def resize(self, limit_bytes: int) -> None:
        """Sets the budget; evicts chunks beyond it, in the order of the policy."""
        self.memory.resize(limit_bytes)


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
