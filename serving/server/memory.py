"""Keeps the whole process within a memory limit, by resizing holdings between dispatches.

    memory = ServiceMemory(MemoryOptions(limit_bytes=2 << 30), holdings=[Holding("experts", ...), ...])
    memory.step()    between dispatches, in the thread that owns the holdings

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
from collections.abc import Callable, Collection, Sequence
from typing import Any

from jaxllm.errors import ConfigError, JaxllmError
from jaxllm.options import check_options, option
from jaxllm.serving.engine.request import Session
from jaxllm.serving.host.machine import give_back_memory, memory_bytes, memory_pressure, resident_bytes

_log = logging.getLogger(__name__)
PREFIX_BYTES = 256 << 20
# Maximum share of the limit for prefixes.
_PREFIX_SHARE = 4
# Fewer common tokens are faster to compute than to reuse.
_LEAST_COMMON = 16
# A prompt that lacks at most this many last tokens of a session continues it: the last tokens of an answer
# may be encoded differently when they come back.
_MOST_LEFT = 16
# Kinds of holdings in the order in which they shrink: cheap to restore first.
SHRINK_ORDER = ("prefixes", "contexts", "drafts", "layers", "experts")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    """Options of a service's memory.

    Attributes:
      limit_bytes: memory limit of the process, as `--memory`; 0 for no limit.
      prefix_bytes: memory limit of the caches of ended answers; 0 for no such caches.
      follow_pressure: whether to release memory under memory pressure on the machine, even without a limit.
      interval_s: minimum time between two measurements of memory.
      step: share of the limit by which limits grow in a step, and shrink in one under pressure.
      margin: share of the limit to leave free when limits grow.
      calm_s: time without shrinking and pressure after which limits grow.
      pressure_high: share of time in which tasks of the machine wait for memory, at which memory is released.
      pressure_low: the same share, up to which there is no pressure.
    """

    limit_bytes: int = option(0, low=0)
    prefix_bytes: int = option(PREFIX_BYTES, low=0)
    follow_pressure: bool = False
    interval_s: float = option(1.0, low=0)
    step: float = option(0.05, above=0, below=1)
    margin: float = option(0.05, above=0, below=1)
    calm_s: float = option(10.0, low=0)
    pressure_high: float = option(0.1, above=0, high=1)
    pressure_low: float = option(0.01, low=0)

    def __post_init__(self) -> None:
        check_options(self)
        if self.pressure_low >= self.pressure_high:
            raise ConfigError(
                f"pressure_low must be below pressure_high, got {self.pressure_low} and {self.pressure_high}"
            )


class Holding:
    """Memory that can be resized at runtime. Methods are for the thread that owns it, except `size_bytes` and
    `limit_bytes`, which others may read.

    Attributes:
      name: kind, one of `SHRINK_ORDER`.
    """

    def __init__(
        self,
        name: str,
        size: Callable[[], int],
        resize: Callable[[int], object],
        *,
        most: int | Callable[[], int],
        least: int | Callable[[], int] = 0,
        limit: Callable[[], int] | None = None,
    ) -> None:
        """Describes memory.

        Args:
          name: see the class.
          size: returns the current size.
          resize: sets the limit, at least `least`; releases memory beyond it at once.
          most: maximum useful limit.
          least: minimum limit.
          limit: returns the current limit; None for that of the last `resize`, at first `most`.
        """
        self.name, self._size, self._resize, self._limit = name, size, resize, limit
        self._least, self._most = least, most
        self._resized = self.most_bytes

    @property
    def size_bytes(self) -> int:
        """Current size."""
        return self._size()

    @property
    def limit_bytes(self) -> int:
        """Current limit."""
        return self._resized if self._limit is None else self._limit()

    @property
    def least_bytes(self) -> int:
        """Minimum limit."""
        return self._least() if callable(self._least) else self._least

    @property
    def most_bytes(self) -> int:
        """Maximum useful limit."""
        return self._most() if callable(self._most) else self._most

    def resize(self, limit_bytes: int) -> None:
        """Sets the limit, at least `least_bytes`; releases memory beyond it at once."""
        self._resize(limit_bytes)
        self._resized = limit_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Observed:
    """Memory at one time.

    Attributes:
      now_s: time of a monotonic clock.
      taken_bytes: memory of the process.
      pressure: share of time in which tasks of the machine wait for memory; None if unknown.
    """

    now_s: float
    taken_bytes: int
    pressure: float | None = None


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


def divide(holdings: Sequence[Any], before: Division, seen: Observed, options: MemoryOptions) -> Division:
    """Decides new limits of holdings, which shrink in their order."""
    step = round(options.step * options.limit_bytes)
    margin = round(options.margin * options.limit_bytes)
    fixed = max(0, seen.taken_bytes - sum(each.size_bytes for each in holdings))
    limits = {each.name: max(each.least_bytes, each.limit_bytes) for each in holdings}
    needed = fixed + sum(each.least_bytes for each in holdings)
    calm = seen.now_s - before.restless_s >= options.calm_s
    allowance, restless = before.allowance_bytes, before.restless_s
    pressure = seen.pressure or 0.0
    if pressure >= options.pressure_high:
        # Not below fixed memory: later growth would only take longer.
        allowance = max(min(needed, allowance), min(allowance, seen.taken_bytes) - step)
        restless = seen.now_s
    elif pressure > options.pressure_low:
        restless = seen.now_s
    elif calm and allowance < options.limit_bytes:
        allowance = min(options.limit_bytes, allowance + step)
    spare = allowance - fixed - sum(limits.values())
    if spare < 0:
        shrunk = _shrink(limits, holdings, -spare)
        restless = seen.now_s if shrunk != limits else restless
        limits = shrunk
    elif calm and pressure <= options.pressure_low:
        limits = _grow(limits, holdings, min(step, spare - margin))
    return Division(
        limits=limits,
        allowance_bytes=allowance,
        restless_s=restless,
        short_bytes=max(0, needed - allowance),
    )


def _shrink(limits: dict[str, int], holdings: Sequence[Any], excess: int) -> dict[str, int]:
    """Limits that are `excess` bytes smaller in sum, as far as minimum sizes allow."""
    smaller = dict(limits)
    for each in holdings:
        cut = min(excess, smaller[each.name] - each.least_bytes)
        smaller[each.name] -= cut
        excess -= cut
    return smaller


def _grow(limits: dict[str, int], holdings: Sequence[Any], room: int) -> dict[str, int]:
    """Limits that are up to `room` bytes larger in sum."""
    larger = dict(limits)
    for each in reversed(holdings):
        add = max(0, min(room, each.most_bytes - larger[each.name]))
        larger[each.name] += add
        room -= add
    return larger


@dataclasses.dataclass(eq=False)
class _Kept:
    app: str
    key: str
    session: Session
    size_bytes: int


class PrefixSessions:
    """Ended sessions of apps, the least recently used first; for one thread. It is a
    `Holding`.

    A session is used only for its own app. Its conversation takes the session itself; another prompt with a
    common prefix, such as the same instruction, gets a copy of it, which takes no more memory than the
    cache that it needs anyway.

    Attributes:
      name: kind of the holding.
      least_bytes: 0.
      most_bytes: the requested memory limit.
      limit_bytes: current memory limit of all sessions' caches.
      size_bytes: current size of all sessions' caches.
    """

    name = "prefixes"
    least_bytes = 0

    def __init__(self, most_bytes: int, app_bytes: Callable[[str], int] = lambda app: 0) -> None:
        """See the class; `app_bytes` returns the memory limit of one app's sessions, 0 for none."""
        self.most_bytes = self.limit_bytes = most_bytes
        self.size_bytes = 0
        self._app_bytes = app_bytes
        self._kept: list[_Kept] = []

    def __len__(self) -> int:
        return len(self._kept)

    def reusable(self, app: str, prompt: tuple[int, ...]) -> dict[tuple[int, int], int]:
        """Weights version -> length of the prompt's prefix that `take` would find cached for an app; without
        too short ones."""
        found: dict[tuple[int, int], int] = {}
        for each in self._kept:
            if each.app == app:
                common, version = each.session.reusable(prompt), each.session.weights_version
                if common >= _LEAST_COMMON and version is not None:
                    found[version] = max(common, found.get(version, 0))
        return found

    def take(self, app: str, key: str, prompt: tuple[int, ...], runner: Any) -> Session:
        """The session of the app with the longest common prefix with a prompt, with the key if several are
        equal; an empty one if the prefix is too short.

        Returns:
          The session itself, which is removed from the cache, or a copy of its prefix.
        """
        best, most = None, (_LEAST_COMMON - 1, True)
        for each in self._kept:
            if each.app == app and each.session.weights_version == runner.weights_version:
                rank = (each.session.reusable(prompt), each.key == key)
                if rank > most:
                    best, most = each, rank
        if best is None:
            return Session()
        if len(best.session.tokens) - most[0] <= _MOST_LEFT:
            self._drop(best)
            return best.session
        # Mark it as recently used.
        self._kept.remove(best)
        self._kept.append(best)
        return self._forked(best.session, most[0], runner)

    def keep(self, app: str, key: str, session: Session) -> None:
        """Caches the session of an ended answer; at a limit the least recently used are evicted, the app's
        own first."""
        size, own = session.size_bytes, self._app_bytes(app) or self.limit_bytes
        if not size or len(session.tokens) < _LEAST_COMMON or size > min(own, self.limit_bytes):
            return
        # The session that it continues is no longer useful.
        for each in [each for each in self._kept if each.app == app and _begins(session, each.session)]:
            self._drop(each)
        self._kept.append(_Kept(app, key, session, size))
        self.size_bytes += size
        self._shrink([each for each in self._kept if each.app == app], own)
        self._shrink(self._kept, self.limit_bytes)

    def forget(self, weights_versions: Collection[tuple[int, int]]) -> None:
        """Drops the sessions of weights that were unloaded."""
        for each in [each for each in self._kept if each.session.weights_version in weights_versions]:
            self._drop(each)

    def resize(self, limit_bytes: int) -> None:
        """Sets the memory limit; evicts the least recently used sessions beyond it."""
        self.limit_bytes = limit_bytes
        self._shrink(self._kept, limit_bytes)

    @staticmethod
    def _forked(session: Session, tokens: int, runner: Any) -> Session:
        assert session.cache is not None
        with runner.lock:
            cache = runner.fork(session.cache, tokens)
        return Session(session.tokens[:tokens], cache, session.weights_version)

    def _shrink(self, among: list[_Kept], limit_bytes: int) -> None:
        excess = sum(each.size_bytes for each in among) - limit_bytes
        for each in list(among):
            if excess <= 0:
                return
            self._drop(each)
            excess -= each.size_bytes

    def _drop(self, kept: _Kept) -> None:
        self._kept.remove(kept)
        self.size_bytes -= kept.size_bytes


def _begins(session: Session, other: Session) -> bool:
    """Whether a session extends or equals another."""
    same = session.weights_version == other.weights_version
    return same and session.tokens[: len(other.tokens)] == other.tokens


class ServiceMemory:
    """Divides a service's memory limit among its holdings. Methods except `figures` are for the thread that
    runs the engine.

    Attributes:
      sessions: caches of ended answers.
      short_bytes: excess of memory even with all holdings at their minimum; nothing that needs more memory
        should start while it is not 0.
    """

    def __init__(
        self,
        options: MemoryOptions | None = None,
        *,
        holdings: Sequence[Any] = (),
        weights_bytes: Callable[[], int] = lambda: 0,
        app_bytes: Callable[[str], int] = lambda app: 0,
        taken_bytes: Callable[[], int] | None = None,
        pressure: Callable[[], float | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Measures the process's memory, if there is a limit.

        Args:
          options: see `MemoryOptions`.
          holdings: memory besides prefixes that can be resized, of different kinds.
          weights_bytes: returns the bytes of weights that stay in memory.
          app_bytes: returns the maximum bytes of an app's caches of ended answers; 0 for no limit.
          taken_bytes: measures the process's memory; None for `resident_bytes`.
          pressure: measures the machine's pressure, None if the system does not report it; None for
            `memory_pressure`.
          clock: monotonic clock in seconds.

        Raises:
          ConfigError: a holding has an unknown kind, or two have one kind; or the system does not report the
            process's memory, or memory pressure.
        """
        options = options or MemoryOptions()
        self._measure, self._pressure = taken_bytes or resident_bytes, pressure or memory_pressure
        limit, prefixes = options.limit_bytes, options.prefix_bytes
        if options.follow_pressure and not limit:
            limit = _machine_bytes()
        self._options, self._clock = dataclasses.replace(options, limit_bytes=limit), clock
        self._weights_bytes = weights_bytes
        self.sessions = PrefixSessions(
            min(prefixes, limit // _PREFIX_SHARE) if limit else prefixes, app_bytes
        )
        own = [self.sessions, *holdings]
        names = [each.name for each in own]
        if not set(names) <= set(SHRINK_ORDER) or len(set(names)) < len(names):
            raise ConfigError(
                f"holdings must be different ones of {', '.join(SHRINK_ORDER)}, got {names!r:.200}"
            )
        self._holdings = sorted(own, key=lambda each: SHRINK_ORDER.index(each.name))
        self._division = Division(limits={}, allowance_bytes=limit, restless_s=clock())
        self._next_s = float("-inf")
        # As of the last step: holdings that are called in another thread may fail.
        self._least = {each.name: each.least_bytes for each in own} if limit else {}
        # Measured here, to fail at the start if the system does not report it.
        self._seen = Observed(now_s=clock(), taken_bytes=self._measure()) if limit else None

    @property
    def short_bytes(self) -> int:
        """See the class."""
        return self._division.short_bytes

    def step(self) -> bool:
        """Resizes holdings if necessary; returns whether it did. Costs nothing before its interval."""
        now, options, before = self._clock(), self._options, self._division
        if not options.limit_bytes or now < self._next_s:
            return False
        self._next_s = now + options.interval_s
        try:
            self._seen = Observed(now_s=now, taken_bytes=self._measure(), pressure=self._pressure())
            self._least = {each.name: each.least_bytes for each in self._holdings}
            self._division = divide(self._holdings, before, self._seen, options)
            if self.short_bytes and not before.short_bytes:
                _log.warning(
                    "the memory budget of %s bytes is %s bytes too small although all that can shrink has: "
                    "until it is enough, answers begin one at a time; give more, or ask for shorter contexts",
                    f"{options.limit_bytes:,}",
                    f"{self.short_bytes:,}",
                )
            return self._resize()
        except JaxllmError as error:
            # Such as a layer that cannot be read again: answers continue with unchanged memory.
            _log.error("memory stays as it is: %s", error)
            return False

    def _resize(self) -> bool:
        changed = gave = False
        for each in self._holdings:
            limit, before_bytes = self._division.limits[each.name], each.limit_bytes
            if limit != before_bytes:
                changed, gave = True, gave or limit < each.size_bytes
                each.resize(limit)
                _log.info("%s may take %s bytes, was %s", each.name, f"{limit:,}", f"{before_bytes:,}")
        if gave:
            # Else the next measurement would count it as memory of something else.
            give_back_memory()
        return changed

    def figures(self, cache_bytes: int, adapter_bytes: int = 0) -> dict[str, Any]:
        """Memory by kind as of the last step, for metrics (see `Backend.snapshot`). From any thread.

        Args:
          cache_bytes: bytes of caches of running answers.
          adapter_bytes: bytes of low-rank adapters.
        """
        fixed = {"weights": self._weights_bytes(), "kv": cache_bytes}
        fixed |= {"adapters": adapter_bytes} if adapter_bytes else {}
        holdings = {name: {"size_bytes": size} for name, size in fixed.items()}
        for each in self._holdings:
            holdings[each.name] = {"size_bytes": each.size_bytes, "limit_bytes": each.limit_bytes}
            holdings[each.name] |= {"least_bytes": self._least[each.name]} if self._least else {}
        figures: dict[str, Any] = {"limit_bytes": self._options.limit_bytes, "holdings": holdings}
        if (seen := self._seen) is not None:
            figures["process_bytes"] = seen.taken_bytes
            return figures | ({} if seen.pressure is None else {"pressure": seen.pressure})
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
            "this system does not report memory pressure (/proc/pressure/memory, Linux with "
            "psi=1): leave out follow_pressure, or give a memory budget"
        )
    return found
