"""Adapts the memory of a live engine to the governor (`jaxllm.serving.server.memory`): chunks of contexts,
drafts, layers, the expert buffer.

    memory = service_memory(service, MemoryOptions(limit_bytes=2 << 30))
    memory.step()       between dispatches, in the engine's thread

Resident weights cannot be released while the model runs; streamed ones can, layer by layer, down to what a
pass over the model needs.
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
from jaxllm.serving.host.machine import resident_bytes
from jaxllm.serving.opening.loading import LoadedModel
from jaxllm.serving.server.memory import Governor, GovernorOptions, Holding, MemoryOptions, ServiceMemory
from jaxllm.serving.server.service import LLMService
from jaxllm.serving.speculation.drafter import DrafterMemory
from jaxllm.serving.weights.streamed import StreamedWeights


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContextChunks:
    """Chunks of contexts in memory.

    Attributes:
      memory: store of the chunks.
      floor_bytes: bytes to leave free besides running and pinned contexts, within the whole budget, for a
        call to begin or grow: at least the size of the longest one.
      asked_bytes: returns the last requested budget.
      name: kind of the holding.
    """

    memory: ChunkMemory
    floor_bytes: int
    asked_bytes: Callable[[], int]
    name: str = dataclasses.field(default="contexts", init=False)

    @property
    def size_bytes(self) -> int:
        """Size of resident chunks."""
        return self.memory.resident_bytes

    @property
    def limit_bytes(self) -> int:
        """The current budget."""
        return self.memory.budget_bytes

    @property
    def most_bytes(self) -> int:
        """The requested budget; more is useless."""
        return self.asked_bytes()

    @property
    def least_bytes(self) -> int:
        """Size of running and pinned contexts, plus the floor."""
        kept = self.memory.kept_bytes
        return max(kept, min(kept + self.floor_bytes, self.most_bytes))

    def resize(self, limit_bytes: int) -> None:
        """Sets the budget, and evicts chunks beyond it in the order of the policy."""
        self.memory.resize(limit_bytes)


class Drafts:
    """Memory of a drafter, which drafts only while all of it is granted.

    Args:
      speculation: speculation of the drafter.
      memory: memory of the drafter.
      lock: lock of the model.

    Attributes:
      name: kind of the holding.
      least_bytes: 0: answers do not require drafts.
      most_bytes: maximum memory of the drafter.
      limit_bytes: the current budget.
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
        """Size of the drafter, including its caches."""
        return self._memory.size_bytes

    def resize(self, limit_bytes: int) -> None:
        """Sets the budget; drafting stops while it is less than the maximum."""
        with self._lock:
            self._speculation.draft(limit_bytes >= self.most_bytes)
        self.limit_bytes = limit_bytes


class ResidentLayers:
    """Resident layers of a streamed model; others are read in each pass.

    Args:
      weights: weights of the layers, `resizable`.
      lock: lock of the model.

    Attributes:
      name: kind of the holding.
      least_bytes: 0: all layers can be read in each pass.
      most_bytes: size of the layers that fit the engine's budget.
      limit_bytes: the current budget, in which whole layers fit.
    """

    name = "layers"
    least_bytes = 0

    def __init__(self, weights: StreamedWeights, lock: contextlib.AbstractContextManager[Any]) -> None:
        self._weights, self._lock = weights, lock
        self.most_bytes = self.limit_bytes = weights.plan.resident_bytes

    @property
    def size_bytes(self) -> int:
        """Size of resident layers."""
        return self._weights.resident_bytes

    def resize(self, limit_bytes: int) -> None:
        """Sets the budget: drops layers beyond it, or reads layers that fit again."""
        with self._lock:
            self._weights.resize(limit_bytes)
        self.limit_bytes = limit_bytes


class ExpertBuffer:
    """Experts in memory.

    Args:
      weights: weights of the experts.

    Attributes:
      name: kind of the holding.
      least_bytes: size required by one layer.
      most_bytes: size of all experts, or their share of the engine's budget.
    """

    name = "experts"

    def __init__(self, weights: ExpertWeights) -> None:
        self._cache = weights.cache
        self.least_bytes, self.most_bytes = weights.store.least_bytes(), weights.budget_bytes

    @property
    def size_bytes(self) -> int:
        """Size of resident experts, including those that are being read."""
        return self._cache.taken_bytes

    @property
    def limit_bytes(self) -> int:
        """The current budget."""
        return self._cache.budget_bytes

    def resize(self, limit_bytes: int) -> None:
        """Sets the budget, and evicts idle experts beyond it."""
        self._cache.resize(limit_bytes)


def storage_figures(model: LoadedModel) -> dict[str, Any]:
    """Counts of visited experts, and of bytes read from storage, since the start; empty for resident
    weights."""
    streamed = model.streamed
    if streamed is None:
        return {}
    # Already imported by such a model.
    from jaxllm.serving.experts.weights import ExpertWeights

    if not isinstance(streamed, ExpertWeights):
        return {"read_bytes": {"weights": streamed.counts.read_bytes}}
    counts = streamed.counts
    return {
        "experts": {"visits": counts.visits, "hits": counts.hits, "foreseen": counts.foreseen},
        "read_bytes": {"experts": counts.read_bytes},
    }


def weight_figures(model: LoadedModel) -> int:
    """Size of weights that always stay in memory."""
    streamed = model.streamed
    return model.bundle.weight_bytes if streamed is None else streamed.staying_bytes


def engine_bytes(limit_bytes: int) -> int:
    """The part of the process's budget that is left for a model to be opened: 0 for no limit.

    Raises:
      BudgetExceeded: nothing is left.
      ConfigError: the system does not report the process's memory.
    """
    if not limit_bytes:
        return 0
    # Initialize the backend first: it needs memory for any model.
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
    """The memory of an open service (see `ServiceMemory`)."""
    engine = service.engine
    memory = ServiceMemory(
        options,
        holdings=_holdings(service),
        weights_bytes=lambda: weight_figures(engine.model),
        app_bytes=app_bytes,
        governed=governed,
    )
    if memory.sessions.limit_bytes:
        # Services opened by `jaxllm.serving.server.opening` have them already.
        engine.runner.fill(
            [bucket for level in engine.levels for bucket in engine.runner_at(level).fork_buckets()]
        )
    return memory


def _holdings(service: LLMService) -> list[Holding]:
    """Reclaimable memory of a service besides its prefixes."""
    found: list[Holding] = []
    if service.contexts is not None:
        found.append(_chunks(service.contexts))
    engine = service.engine
    memory = None if engine.speculation is None else engine.speculation.drafter.memory
    if engine.speculation is not None and memory is not None:
        found.append(Drafts(engine.speculation, memory, engine.runner.lock))
    streamed = engine.model.streamed
    if streamed is not None:
        # Already imported by such a model.
        from jaxllm.serving.experts.weights import ExpertWeights

        if isinstance(streamed, ExpertWeights):
            found.append(ExpertBuffer(streamed))
        elif streamed.resizable:
            found.append(ResidentLayers(streamed, engine.runner.lock))
    return found


def _chunks(contexts: Contexts) -> ContextChunks:
    """The chunks of contexts, with a floor for those of the longest context."""
    engine = contexts.engine
    count = engine.options.context_tokens // engine.options.kv_chunk_tokens
    forms = [chunk_io_of(engine.runner_at(level)) for level in engine.levels]
    return ContextChunks(
        memory=contexts.memory,
        floor_bytes=max(most_bytes(each, contexts.options, count) for each in forms),
        asked_bytes=lambda: contexts.options.budget_bytes,
    )
