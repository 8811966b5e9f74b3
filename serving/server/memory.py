"""Keeps a service within its memory: what of it can be resized, its governor, and what takes it.

    memory = ServiceMemory(service, MemoryOptions(limit_bytes=2 << 30))
    memory.step()       between dispatches, in the engine's thread

Weights that are all in memory cannot be given up while the model runs; those that are streamed can, layer by
layer, down to what a pass over the model needs.
"""

import contextlib
import dataclasses
import logging
from collections.abc import Callable

import jax

from jaxllm.errors import BudgetExceeded, ConfigError, JaxllmError
from serving.contexts.growth import most_bytes
from serving.contexts.manager import Contexts
from serving.contexts.state_chunks import chunk_io_of
from serving.host.machine import memory_bytes
from serving.host.pressure import memory_pressure
from serving.host.process_memory import resident_bytes
from serving.server.division import GovernorOptions
from serving.server.engine_figures import weight_figures
from serving.server.figures import HoldingFigures, MemoryFigures
from serving.server.governor import Governor, Holding
from serving.server.holdings import ContextChunks, Drafts, ExpertBuffer, ResidentLayers
from serving.server.prefix_sessions import PrefixSessions
from serving.service import LLMService

PREFIX_BYTES = 256 << 20
_log = logging.getLogger(__name__)
# Prefixes take at most this share of the budget.
_PREFIX_SHARE = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    """How much memory a service takes.

    Attributes:
      limit_bytes: most of the process; 0 for no limit.
      prefix_bytes: most of the caches of ended answers; 0 keeps none.
      follow_pressure: give memory back while tasks of the machine wait for it, where there is no limit, too.
    """

    limit_bytes: int = 0
    prefix_bytes: int = PREFIX_BYTES
    follow_pressure: bool = False

    def __post_init__(self) -> None:
        for name in ("limit_bytes", "prefix_bytes"):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise ConfigError(f"{name} must be a whole number and not negative, got {value!r:.80}")


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


class ServiceMemory:
    """The memory of one service. All but `figures` is called in the thread that runs the engine.

    Attributes:
      sessions: caches of ended answers.
      governor: None where there is no limit, and pressure is not followed.
    """

    def __init__(
        self,
        service: LLMService,
        options: MemoryOptions | None = None,
        *,
        app_bytes: Callable[[str], int] = lambda app: 0,
        governed: Callable[[list[Holding], GovernorOptions], Governor] = Governor,
    ) -> None:
        """Makes the governor, where there is a limit.

        Args:
          service: that is open.
          options: see `MemoryOptions`.
          app_bytes: most bytes of an app's caches of ended answers; 0 for no limit.
          governed: makes the governor.

        Raises:
          ConfigError: the system does not tell what the process takes, or how tasks wait for memory.
        """
        options = options or MemoryOptions()
        limit, prefixes = options.limit_bytes, options.prefix_bytes
        if options.follow_pressure:
            limit = limit or _machine_bytes()
        most = min(prefixes, limit // _PREFIX_SHARE) if limit else prefixes
        self.sessions = PrefixSessions(most, app_bytes)
        self._service = service
        if most:
            engine = service.engine
            # A service that was opened as `serving.server.opening` does has them.
            engine.runner.fill(
                [each for level in engine.levels for each in engine.runner_at(level).fork_buckets()]
            )
        self._holdings = [self.sessions, *_holdings(service)]
        self.governor = governed(self._holdings, GovernorOptions(limit_bytes=limit)) if limit else None

    @property
    def short(self) -> bool:
        """Whether there is too little memory although all that can shrink has: nothing more should begin."""
        return self.governor is not None and self.governor.short_bytes > 0

    def step(self) -> None:
        """Resizes what can be resized, where memory asks for it; costs nothing where it comes too early."""
        if self.governor is None:
            return
        try:
            self.governor.step()
        except JaxllmError as error:
            # Such as a layer that cannot be read again: answers go on with what is there.
            _log.error("memory stays as it is: %s", error)

    def figures(self, cache_bytes: int, adapter_bytes: int = 0) -> MemoryFigures:
        """What takes the memory, for metrics and the dashboard. From any thread.

        Args:
          cache_bytes: of answers that run.
          adapter_bytes: of low-rank adapters.
        """
        fixed = {"weights": weight_figures(self._service.engine.model), "kv": cache_bytes}
        fixed |= {"adapters": adapter_bytes} if adapter_bytes else {}
        if self.governor is not None:
            return self.governor.figures(fixed)
        holdings: dict[str, HoldingFigures] = {name: {"size_bytes": size} for name, size in fixed.items()}
        for each in self._holdings:
            holdings[each.name] = {"size_bytes": each.size_bytes, "limit_bytes": each.limit_bytes}
        figures: MemoryFigures = {"limit_bytes": 0, "holdings": holdings}
        # Another system than Linux.
        with contextlib.suppress(ConfigError):
            figures["process_bytes"] = resident_bytes()
        return figures


def _machine_bytes() -> int:
    """Memory of a machine that tells how its tasks wait for it.

    Raises:
      ConfigError: it does not.
    """
    found = memory_bytes()
    if memory_pressure() is None or found is None:
        raise ConfigError(
            "this system does not tell how its tasks wait for memory (/proc/pressure/memory, Linux with "
            "psi=1): leave out follow_pressure, or give a memory budget"
        )
    return found


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
        from serving.weights.experts.weights import ExpertWeights

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
