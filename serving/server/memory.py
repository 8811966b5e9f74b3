"""Keeps the whole process within a memory limit, by resizing holdings between dispatches.

    governor = Governor([ContextChunks(memory, ...), ExpertBuffer(weights)], GovernorOptions(limit_bytes=...))
    governor.step()    between dispatches, in the thread that owns the holdings

A process has fixed memory (Python, resident weights, running caches) and holdings that can be resized. The
limits of all holdings must fit next to the fixed part. `divide` is the policy, a pure function:

    room = allowance - (taken - sizes of holdings)
    limits exceed the room: shrink in the order of holdings, none below its minimum
    limits leave room, and have for a while: grow by one step, in reverse order

Memory pressure on the machine lowers the allowance below the limit step by step, until the pressure is
gone. Growing leaves a margin, so that limits do not shrink again at once. A step before its interval costs
nothing.
"""

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from jaxllm.errors import ConfigError, JaxllmError
from jaxllm.options import check_options, option
from jaxllm.serving.host.machine import give_back_memory, memory_bytes, memory_pressure, resident_bytes
from jaxllm.serving.server.prefix_sessions import PrefixSessions

_log = logging.getLogger(__name__)
PREFIX_BYTES = 256 << 20
# Maximum share of the limit for prefixes.
_PREFIX_SHARE = 4
# Kinds of holdings in the order in which they shrink: cheap to restore first.
SHRINK_ORDER = ("prefixes", "contexts", "drafts", "layers", "experts")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GovernorOptions:
    """Options of enforcing a memory limit.

    Attributes:
      limit_bytes: memory limit of the process, as `--memory`.
      interval_s: minimum time between two measurements of memory.
      step: share of the limit by which limits grow in a step, and shrink in one under pressure.
      margin: share of the limit to leave free when limits grow.
      calm_s: time without shrinking and pressure after which limits grow.
      pressure_high: share of time in which tasks of the machine wait for memory, at which memory is released.
      pressure_low: the same share, up to which there is no pressure.
    """

    limit_bytes: int
    interval_s: float = 1.0
    step: float = 0.05
    margin: float = 0.05
    calm_s: float = 10.0
    pressure_high: float = 0.1
    pressure_low: float = 0.01

    def __post_init__(self) -> None:
        if self.limit_bytes < 1:
            raise ConfigError(f"limit_bytes must be at least 1, got {self.limit_bytes!r:.80}")
        if self.interval_s < 0 or self.calm_s < 0:
            raise ConfigError("interval_s and calm_s must not be negative")
        for name in ("step", "margin"):
            if not 0 < getattr(self, name) < 1:
                raise ConfigError(f"{name} must be between 0 and 1, got {getattr(self, name)!r:.80}")
        if not 0 <= self.pressure_low < self.pressure_high <= 1:
            raise ConfigError(
                f"pressure_low must be below pressure_high, both shares, got {self.pressure_low!r:.80} and "
                f"{self.pressure_high!r:.80}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Portion:
    """A holding as input of the policy.

    Attributes:
      name: kind, of `SHRINK_ORDER`.
      size_bytes: current size.
      limit_bytes: current limit.
      least_bytes: minimum limit.
      most_bytes: maximum useful limit.
    """

    name: str
    size_bytes: int
    limit_bytes: int
    least_bytes: int
    most_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Observed:
    """Memory at one time.

    Attributes:
      now_s: time of a monotonic clock.
      taken_bytes: memory of the process.
      pressure: share of time in which tasks of the machine wait for memory; 0 if the system does not report
        it.
    """

    now_s: float
    taken_bytes: int
    pressure: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Division:
    """Limits, and state for the next decision.

    Attributes:
      limits: bytes by holding.
      allowance_bytes: current memory limit of the process, reduced under pressure.
      restless_s: time of the last shrinking or pressure.
      short_bytes: excess of the minimum sizes over the allowance.
    """

    limits: dict[str, int]
    allowance_bytes: int
    restless_s: float
    short_bytes: int = 0


def divide(
    portions: Sequence[Portion], before: Division, seen: Observed, options: GovernorOptions
) -> Division:
    """Decides new limits.

    Args:
      portions: holdings in the order in which they shrink.
      before: the last decision.
      seen: current memory.
      options: see `GovernorOptions`.
    """
    step = round(options.step * options.limit_bytes)
    margin = round(options.margin * options.limit_bytes)
    fixed = max(0, seen.taken_bytes - sum(each.size_bytes for each in portions))
    limits = {each.name: max(each.least_bytes, each.limit_bytes) for each in portions}
    needed = fixed + sum(each.least_bytes for each in portions)
    calm = seen.now_s - before.restless_s >= options.calm_s
    allowance, restless = before.allowance_bytes, before.restless_s
    if seen.pressure >= options.pressure_high:
        # Not below fixed memory: later growth would only take longer.
        allowance = max(min(needed, allowance), min(allowance, seen.taken_bytes) - step)
        restless = seen.now_s
    elif seen.pressure > options.pressure_low:
        restless = seen.now_s
    elif calm and allowance < options.limit_bytes:
        allowance = min(options.limit_bytes, allowance + step)
    spare = allowance - fixed - sum(limits.values())
    if spare < 0:
        shrunk = _shrink(limits, portions, -spare)
        restless = seen.now_s if shrunk != limits else restless
        limits = shrunk
    elif calm and seen.pressure <= options.pressure_low:
        limits = _grow(limits, portions, min(step, spare - margin))
    return Division(
        limits=limits,
        allowance_bytes=allowance,
        restless_s=restless,
        short_bytes=max(0, needed - allowance),
    )


def _shrink(limits: dict[str, int], portions: Sequence[Portion], excess: int) -> dict[str, int]:
    """Limits that are `excess` bytes smaller in sum, as far as minimum sizes allow."""
    smaller = dict(limits)
    for each in portions:
        cut = min(excess, smaller[each.name] - each.least_bytes)
        smaller[each.name] -= cut
        excess -= cut
    return smaller


def _grow(limits: dict[str, int], portions: Sequence[Portion], room: int) -> dict[str, int]:
    """Limits that are up to `room` bytes larger in sum."""
    larger = dict(limits)
    for each in reversed(portions):
        add = max(0, min(room, each.most_bytes - larger[each.name]))
        larger[each.name] += add
        room -= add
    return larger


class Holding(Protocol):
    """Memory that can be resized at runtime. Methods are for the thread that owns it, except `size_bytes` and
    `limit_bytes`, which others may read."""

    @property
    def name(self) -> str:
        """One of `SHRINK_ORDER`, unique."""
        ...

    @property
    def size_bytes(self) -> int:
        """Current size."""
        ...

    @property
    def limit_bytes(self) -> int:
        """Current limit."""
        ...

    @property
    def least_bytes(self) -> int:
        """Minimum limit."""
        ...

    @property
    def most_bytes(self) -> int:
        """Maximum useful limit."""
        ...

    def resize(self, limit_bytes: int) -> None:
        """Sets the limit, at least `least_bytes`; releases memory beyond it at once."""
        ...


class Governor:
    """Divides the process's memory limit among holdings.

    Args:
      holdings: holdings of different kinds.
      options: see `GovernorOptions`.
      taken_bytes: measures the process's memory.
      pressure: measures the machine's pressure; returns None if the system does not report it.
      clock: monotonic clock in seconds.

    Attributes:
      short_bytes: excess of memory even with all holdings at their minimum; nothing that needs more memory
        should start while it is not 0.

    Raises:
      ConfigError: a holding has an unknown kind, or two have one kind; or the system does not report the
        process's memory.
    """

    def __init__(
        self,
        holdings: Iterable[Holding],
        options: GovernorOptions,
        *,
        taken_bytes: Callable[[], int] = resident_bytes,
        pressure: Callable[[], float | None] = memory_pressure,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        own = list(holdings)
        names = [each.name for each in own]
        if not set(names) <= set(SHRINK_ORDER) or len(set(names)) < len(names):
            raise ConfigError(
                f"holdings must be different ones of {', '.join(SHRINK_ORDER)}, got {names!r:.200}"
            )
        self._holdings = sorted(own, key=lambda each: SHRINK_ORDER.index(each.name))
        self._options, self._measure, self._pressure, self._clock = options, taken_bytes, pressure, clock
        self._division = Division(limits={}, allowance_bytes=options.limit_bytes, restless_s=clock())
        self._next_s = float("-inf")
        # Measured here, to fail at the start if the system does not report it.
        self._seen = Observed(now_s=clock(), taken_bytes=taken_bytes())
        self._tells = True
        # As of the last step: holdings that are called in another thread may fail.
        self._least = {each.name: each.least_bytes for each in own}

    @property
    def short_bytes(self) -> int:
        """See the class."""
        return self._division.short_bytes

    def step(self) -> bool:
        """Resizes holdings if necessary; returns whether it did."""
        now = self._clock()
        if now < self._next_s:
            return False
        self._next_s = now + self._options.interval_s
        pressure = self._pressure()
        self._tells = pressure is not None
        self._seen = Observed(now_s=now, taken_bytes=self._measure(), pressure=pressure or 0.0)
        portions = [
            Portion(
                name=each.name, size_bytes=each.size_bytes, limit_bytes=each.limit_bytes,
                least_bytes=each.least_bytes, most_bytes=each.most_bytes,
            )
            for each in self._holdings
        ]  # fmt: skip
        self._least = {each.name: each.least_bytes for each in portions}
        before, self._division = self._division, divide(portions, self._division, self._seen, self._options)
        if self._division.short_bytes and not before.short_bytes:
            _log.warning(
                "the memory budget of %s bytes is %s bytes too small although all that can shrink has: until "
                "it is enough, answers begin one at a time; give more, or ask for shorter contexts",
                f"{self._options.limit_bytes:,}",
                f"{self._division.short_bytes:,}",
            )
        return self._apply(portions)

    def _apply(self, portions: Iterable[Portion]) -> bool:
        changed = gave = False
        for each, portion in zip(self._holdings, portions, strict=True):
            limit = self._division.limits[each.name]
            if limit != portion.limit_bytes:
                each.resize(limit)
                changed, gave = True, gave or limit < portion.size_bytes
                _log.info("%s may take %s bytes, was %s", each.name, f"{limit:,}", f"{portion.limit_bytes:,}")
        if gave:
            # Else the next measurement would count it as memory of something else.
            give_back_memory()
        return changed

    def figures(self, fixed: Mapping[str, int] | None = None) -> dict[str, Any]:
        """Memory as of the last step (see `Backend.snapshot`). From any thread.

        Args:
          fixed: bytes of fixed memory by kind, such as "weights".
        """
        holdings: dict[str, dict[str, int]] = {
            name: {"size_bytes": size} for name, size in (fixed or {}).items()
        }
        for each in self._holdings:
            holdings[each.name] = {
                "size_bytes": each.size_bytes,
                "limit_bytes": each.limit_bytes,
                "least_bytes": self._least[each.name],
            }
        figures: dict[str, Any] = {
            "process_bytes": self._seen.taken_bytes,
            "limit_bytes": self._options.limit_bytes,
            "holdings": holdings,
        }
        if self._tells:
            figures["pressure"] = self._seen.pressure
        return figures


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    """Options of a service's memory.

    Attributes:
      limit_bytes: memory limit of the process; 0 for no limit.
      prefix_bytes: memory limit of the caches of ended answers; 0 for no such caches.
      follow_pressure: whether to release memory under memory pressure on the machine, even without a limit.
    """

    limit_bytes: int = option(0, low=0)
    prefix_bytes: int = option(PREFIX_BYTES, low=0)
    follow_pressure: bool = False

    def __post_init__(self) -> None:
        check_options(self)


class ServiceMemory:
    """The memory of one service. Methods except `figures` are for the thread that runs the engine.

    Attributes:
      sessions: caches of ended answers.
      governor: None without a limit, unless pressure is followed.
    """

    def __init__(
        self,
        options: MemoryOptions | None = None,
        *,
        holdings: Sequence[Holding] = (),
        weights_bytes: Callable[[], int] = lambda: 0,
        app_bytes: Callable[[str], int] = lambda app: 0,
        governed: Callable[[list[Holding], GovernorOptions], Governor] = Governor,
    ) -> None:
        """Makes the governor, if there is a limit.

        Args:
          options: see `MemoryOptions`.
          holdings: memory besides prefixes that can be resized.
          weights_bytes: returns the bytes of weights that stay in memory.
          app_bytes: returns the maximum bytes of an app's caches of ended answers; 0 for no limit.
          governed: makes the governor.

        Raises:
          ConfigError: the system does not report the process's memory, or memory pressure.
        """
        options = options or MemoryOptions()
        limit, prefixes = options.limit_bytes, options.prefix_bytes
        if options.follow_pressure:
            limit = limit or _machine_bytes()
        self.sessions = PrefixSessions(
            min(prefixes, limit // _PREFIX_SHARE) if limit else prefixes, app_bytes
        )
        self._weights_bytes, self._holdings = weights_bytes, [self.sessions, *holdings]
        self.governor = governed(self._holdings, GovernorOptions(limit_bytes=limit)) if limit else None

    @property
    def short(self) -> bool:
        """Whether memory is exceeded although all holdings are at their minimum: no calls should start."""
        return self.governor is not None and self.governor.short_bytes > 0

    def step(self) -> None:
        """Resizes holdings if necessary; costs nothing before its interval."""
        if self.governor is None:
            return
        try:
            self.governor.step()
        except JaxllmError as error:
            # Such as a layer that cannot be read again: answers continue with unchanged memory.
            _log.error("memory stays as it is: %s", error)

    def figures(self, cache_bytes: int, adapter_bytes: int = 0) -> dict[str, Any]:
        """Memory by kind, for metrics (see `Backend.snapshot`). From any thread.

        Args:
          cache_bytes: bytes of caches of running answers.
          adapter_bytes: bytes of low-rank adapters.
        """
        fixed = {"weights": self._weights_bytes(), "kv": cache_bytes}
        fixed |= {"adapters": adapter_bytes} if adapter_bytes else {}
        if self.governor is not None:
            return self.governor.figures(fixed)
        holdings = {name: {"size_bytes": size} for name, size in fixed.items()}
        for each in self._holdings:
            holdings[each.name] = {"size_bytes": each.size_bytes, "limit_bytes": each.limit_bytes}
        figures: dict[str, Any] = {"limit_bytes": 0, "holdings": holdings}
        # Not available on systems other than Linux.
        with contextlib.suppress(ConfigError):
            figures["process_bytes"] = resident_bytes()
        return figures


def _machine_bytes() -> int:
    """Memory of a machine that reports memory pressure.

    Raises:
      ConfigError: the system does not report it.
    """
    found = memory_bytes()
    if memory_pressure() is None or found is None:
        raise ConfigError(
            "this system does not tell how its tasks wait for memory (/proc/pressure/memory, Linux with "
            "psi=1): leave out follow_pressure, or give a memory budget"
        )
    return found
