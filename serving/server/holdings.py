"""Adapts the memory of a live engine to the governor (`jaxllm.serving.server.memory`): chunks of contexts,
drafts, layers, the expert buffer.

    memory = service_memory(service, MemoryOptions(limit_bytes=2 << 30))
    memory.step()       between dispatches, in the engine's thread

Weights that are all in memory cannot be given up while the model runs; those that are streamed can, layer by
layer, down to what a pass over the model needs.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jaxllm.errors import BudgetExceeded
from jaxllm.serving.contexts.chunk_io import chunk_io_of
from jaxllm.serving.contexts.growth import most_bytes
from jaxllm.serving.contexts.manager import Contexts
from jaxllm.serving.contexts.memory import ChunkMemory
from jaxllm.serving.engine.decoding import Drafts as Drafting
from jaxllm.serving.experts.weights import ExpertWeights
from jaxllm.serving.host.process_memory import resident_bytes
from jaxllm.serving.opening.loading import LoadedModel
from jaxllm.serving.server.memory import Governor, GovernorOptions, Holding, MemoryOptions, ServiceMemory
from jaxllm.serving.server.service import LLMService
from jaxllm.serving.speculation.drafter import DrafterMemory
from jaxllm.serving.weights.streamed import StreamedWeights


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
        speculation: Drafting,
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


def storage_figures(model: LoadedModel) -> dict[str, Any]:
    """The experts that were visited, and the bytes that were read from storage since the start; empty where
    all weights are in memory."""
    streamed = model.streamed
    if streamed is None:
        return {}
    # Imported by now: the model is such a one.
    from jaxllm.serving.experts.weights import ExpertWeights

    if not isinstance(streamed, ExpertWeights):
        return {"read_bytes": {"weights": streamed.counts.read_bytes}}
    counts = streamed.counts
    return {
        "experts": {"visits": counts.visits, "hits": counts.hits, "foreseen": counts.foreseen},
        "read_bytes": {"experts": counts.read_bytes},
    }


def weight_figures(model: LoadedModel) -> int:
    """Bytes of weights that are always in memory."""
    streamed = model.streamed
    return model.bundle.weight_bytes if streamed is None else streamed.staying_bytes


def engine_bytes(limit_bytes: int) -> int:
    """The part of the process's budget that is left for a model, which is about to be opened: 0 for no limit.

    Raises:
      BudgetExceeded: nothing is left.
      ConfigError: the system does not tell what the process takes.
    """
    if not limit_bytes:
        return 0
    # Starts the backend, which takes memory whatever the model.
    jax.default_backend()
    taken = resident_bytes()
    if taken >= limit_bytes:
        raise BudgetExceeded(
            f"a memory budget of {limit_bytes:,} bytes is too small: the process takes {taken:,} before a "
            "model is opened; give more"
        )
    return limit_bytes - taken


def service_memory(
    service: LLMService,
    options: MemoryOptions | None = None,
    *,
    app_bytes: Callable[[str], int] = lambda app: 0,
    governed: Callable[[list[Holding], GovernorOptions], Governor] = Governor,
) -> ServiceMemory:
    """The memory of a service that is open (see `ServiceMemory`)."""
    engine = service.engine
    memory = ServiceMemory(
        options,
        holdings=_holdings(service),
        weights_bytes=lambda: weight_figures(engine.model),
        app_bytes=app_bytes,
        governed=governed,
    )
    if memory.sessions.limit_bytes:
        # A service that was opened as `jaxllm.serving.server.opening` does has them.
        engine.runner.fill(
            [bucket for level in engine.levels for bucket in engine.runner_at(level).fork_buckets()]
        )
    return memory


def _holdings(service: LLMService) -> list[Holding]:
    """What a service can give up besides its prefixes."""
    found: list[Holding] = []
    if service.contexts is not None:
        found.append(_chunks(service.contexts))
    engine = service.engine
    memory = None if engine.speculation is None else engine.speculation.drafter.memory
    if engine.speculation is not None and memory is not None:
        found.append(Drafts(engine.speculation, memory, engine.runner.lock))
    streamed = engine.model.streamed
    if streamed is not None:
        # Imported by now: the model is such a one.
        from jaxllm.serving.experts.weights import ExpertWeights

        if isinstance(streamed, ExpertWeights):
            found.append(ExpertBuffer(streamed))
        elif streamed.resizable:
            found.append(ResidentLayers(streamed, engine.runner.lock))
    return found


def _chunks(contexts: Contexts) -> ContextChunks:
    """The chunks of contexts, of which those of the longest context have room in any case."""
    engine = contexts.engine
    count = engine.options.context_tokens // engine.options.kv_chunk_tokens
    forms = [chunk_io_of(engine.runner_at(level)) for level in engine.levels]
    return ContextChunks(
        memory=contexts.memory,
        floor_bytes=max(most_bytes(each, contexts.options, count) for each in forms),
        asked_bytes=lambda: contexts.options.budget_bytes,
    )
