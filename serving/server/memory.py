"""Keeps the whole process within a memory limit, by resizing holdings between dispatches.

    memory = ServiceMemory(2 << 30, holdings=[Holding("experts", ...), ...])
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
import gc
import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from jaxllm.errors import ConfigError, JaxllmError
from jaxllm.serving.contexts.manager import Contexts
from jaxllm.serving.contexts.memory import ChunkAccess
from jaxllm.serving.contexts.saving import most_bytes
from jaxllm.serving.engine.request import Session
from jaxllm.serving.host.allocator import STAGES, give_back_memory, resident_bytes
from jaxllm.serving.host.machine import memory_bytes, memory_pressure
from jaxllm.serving.host.process_memory import ProcessMemory, children_bytes, process_memory
from jaxllm.serving.server.device_state import Trim

_log = logging.getLogger(__name__)
PREFIX_BYTES = 256 << 20
# Minimum time between two measurements of memory, and time without shrinking and pressure before growing.
_INTERVAL_S, _CALM_S = 1.0, 10.0
# Shares of the limit: by which limits grow in a step and shrink in one under pressure, and to leave free when
# limits grow.
_STEP, _MARGIN = 0.05, 0.05
# Shares of time in which tasks of the machine wait for memory: from which on memory is released, and up to
# which there is no pressure.
_PRESSURE_HIGH, _PRESSURE_LOW = 0.1, 0.01
# The same of what a device wants back.
_TRIM_PRESSURE: Mapping[Trim, float] = {"none": 0.0, "moderate": 1.0, "critical": math.inf}
# Maximum share of the limit for prefixes.
_PREFIX_SHARE = 4
# Fewer common tokens are faster to compute than to reuse.
_LEAST_COMMON = 16
# A prompt that lacks at most this many last tokens of a session continues it: the last tokens of an answer
# may be encoded differently when they come back.
_MOST_LEFT = 16
# Kinds of holdings in the order in which they shrink: cheap to restore first.
SHRINK_ORDER = ("prefixes", "contexts", "drafts", "layers", "experts")


class Holding:
    """Memory that can be resized at runtime. Methods are for the thread that owns it, except `size_bytes` and
    `limit_bytes`, which others may read.

    Args:
      name: kind, one of `SHRINK_ORDER`.
      size: returns the current size.
      resize: sets the limit, at least `least`; releases memory beyond it at once.
      most: maximum useful limit.
      least: minimum limit.
      limit: returns the current limit; None for that of the last `resize`, at first `most`.
    """

    def __init__(
        self,
        name: str,
        size: Callable[[], int],
        resize: Callable[[int], object],
        *,
        most: Callable[[], int],
        least: Callable[[], int] = lambda: 0,
        limit: Callable[[], int] | None = None,
    ) -> None:
        self.name, self._size, self._resize = name, size, resize
        self._most, self._least, self._resized = most, least, most()
        self._limit = limit or (lambda: self._resized)

    size_bytes = property(lambda self: self._size(), doc="Current size.")
    limit_bytes = property(lambda self: self._limit(), doc="Current limit.")
    least_bytes = property(lambda self: self._least(), doc="Minimum limit.")
    most_bytes = property(lambda self: self._most(), doc="Maximum useful limit.")

    def resize(self, limit_bytes: int) -> None:
        """Sets the limit, at least `least_bytes`; releases memory beyond it at once."""
        self._resize(limit_bytes)
        self._resized = limit_bytes


def contexts_holding(contexts: Contexts, chunk_ios: Iterable[ChunkAccess]) -> Holding:
    """The chunks of contexts at some levels, with room for the longest context besides running and pinned
    ones."""
    chunks, tokens = contexts.memory, contexts.engine.options.context_tokens
    longest = max(most_bytes(each, contexts.options, tokens // each.chunk_tokens) for each in chunk_ios)

    def least() -> int:
        kept = chunks.kept_bytes
        return max(kept, min(kept + longest, contexts.options.budget_bytes))

    return Holding(
        "contexts", lambda: chunks.resident_bytes, chunks.resize, least=least,
        most=lambda: contexts.options.budget_bytes, limit=lambda: chunks.budget_bytes,
    )  # fmt: skip


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
    holdings: Sequence[Any],
    before: Division,
    limit_bytes: int,
    *,
    now_s: float,
    taken_bytes: int,
    pressure: float = 0.0,
) -> Division:
    """Decides new limits of holdings, which shrink in their order. The process has `taken_bytes` now;
    `pressure` is the share of time in which tasks of the machine wait for memory, infinite to release all
    that can be."""
    step, margin = round(_STEP * limit_bytes), round(_MARGIN * limit_bytes)
    fixed = max(0, taken_bytes - sum(each.size_bytes for each in holdings))
    limits = {each.name: max(each.least_bytes, each.limit_bytes) for each in holdings}
    needed = fixed + sum(each.least_bytes for each in holdings)
    calm = now_s - before.restless_s >= _CALM_S
    allowance, restless = before.allowance_bytes, before.restless_s
    if pressure >= _PRESSURE_HIGH:
        # Not below fixed memory: later growth would only take longer.
        lowest = min(needed, allowance)
        allowance = lowest if math.isinf(pressure) else max(lowest, min(allowance, taken_bytes) - step)
    if pressure > _PRESSURE_LOW:
        restless = now_s
    elif calm and allowance < limit_bytes:
        allowance = min(limit_bytes, allowance + step)
    spare = allowance - fixed - sum(limits.values())
    if spare < 0:
        for each in holdings:
            cut = min(-spare, limits[each.name] - each.least_bytes)
            limits[each.name] -= cut
            spare += cut
            restless = now_s if cut else restless
    elif calm and pressure <= _PRESSURE_LOW:
        room = min(step, spare - margin)
        for each in reversed(holdings):
            add = max(0, min(room, each.most_bytes - limits[each.name]))
            limits[each.name] += add
            room -= add
    short = max(0, needed - allowance)
    return Division(limits=limits, allowance_bytes=allowance, restless_s=restless, short_bytes=short)


@dataclasses.dataclass(eq=False)
class _Kept:
    app: str
    key: str
    session: Session
    size_bytes: int


class PrefixSessions:
    """Ended sessions of apps, the least recently used first; for one thread. It is a `Holding`.

    A session is used only for its own app. Its conversation takes the session itself; another prompt with a
    common prefix, such as the same instruction, gets a copy of it, which takes no more memory than the
    cache that it needs anyway.

    Attributes:
      name, most_bytes, least_bytes, limit_bytes, size_bytes: see `Holding`.
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
        equal; an empty one if the prefix is too short, or the bucket that copies it is not ready yet.

        Returns:
          The session itself, which is removed from the cache, or a copy of its prefix.
        """
        ranked = [
            ((each.session.reusable(prompt), each.key == key), each)
            for each in self._kept
            if each.app == app and each.session.weights_version == runner.weights_version
        ]
        (common, _), best = max(ranked, key=lambda each: each[0], default=((0, False), None))
        if best is None or common < _LEAST_COMMON:
            return Session()
        session = best.session
        if len(session.tokens) - common <= _MOST_LEFT:
            self._remove(best)
            return session
        if not runner.can_fork(session.cache):
            return Session()
        # Mark it as recently used.
        self._kept.remove(best)
        self._kept.append(best)
        with runner.lock:
            forked = runner.fork(session.cache, common)
        return Session(session.tokens[:common], forked, session.weights_version)

    def keep(self, app: str, key: str, session: Session) -> bool:
        """Caches the session of an ended answer; at a limit the least recently used are evicted, the app's
        own first. Returns whether it is cached."""
        size, own = session.size_bytes, self._app_bytes(app) or self.limit_bytes
        if not size or len(session.tokens) < _LEAST_COMMON or size > min(own, self.limit_bytes):
            return False
        # Sessions that it continues are no longer useful.
        for each in list(self._kept):
            tokens, version = each.session.tokens, each.session.weights_version
            same = each.app == app and version == session.weights_version
            if same and session.tokens[: len(tokens)] == tokens:
                self._drop(each)
        self._kept.append(_Kept(app, key, session, size))
        self.size_bytes += size
        self._shrink([each for each in self._kept if each.app == app], own)
        self._shrink(self._kept, self.limit_bytes)
        return True

    @property
    def resident_bytes(self) -> int:
        """The part of `size_bytes` that is resident, where the system reports it."""
        found = [(each.session.resident_bytes, each.size_bytes) for each in list(self._kept)]
        return sum(size if resident is None else resident for resident, size in found)

    def forget(self, weights_versions: Collection[tuple[int, int]]) -> None:
        """Drops the sessions of weights that were unloaded."""
        for each in list(self._kept):
            if each.session.weights_version in weights_versions:
                self._drop(each)

    def resize(self, limit_bytes: int) -> None:
        """Sets the memory limit; evicts the least recently used sessions beyond it."""
        self.limit_bytes = limit_bytes
        self._shrink(self._kept, limit_bytes)

    def _shrink(self, among: list[_Kept], limit_bytes: int) -> None:
        excess = sum(each.size_bytes for each in among) - limit_bytes
        for each in list(among):
            if excess > 0:
                self._drop(each)
                excess -= each.size_bytes

    def _drop(self, kept: _Kept) -> None:
        self._remove(kept)
        # Its run, which has the session, may be garbage that is collected much later.
        kept.session.take()

    def _remove(self, kept: _Kept) -> None:
        self._kept.remove(kept)
        self.size_bytes -= kept.size_bytes


class ServiceMemory:
    """Divides a service's memory limit among its holdings. Methods except `figures` are for the thread that
    runs the engine.

    Attributes:
      sessions: caches of ended answers.
      short_bytes: excess of memory even with all holdings at their minimum; nothing that needs more memory
        should start while it is not 0.
      trim: how much memory the device wants back (see `DeviceState`); may be set from any thread.
    """

    trim: Trim = "none"

    def __init__(
        self,
        limit_bytes: int = 0,
        prefix_bytes: int = PREFIX_BYTES,
        *,
        follow_pressure: bool = False,
        holdings: Sequence[Any] = (),
        weights_bytes: Callable[[], int] = lambda: 0,
        weights_files: Collection[str] = (),
        app_bytes: Callable[[str], int] = lambda app: 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Measures the process's memory, if there is a limit. Raises ConfigError if a holding has an unknown
        kind, or two have one kind; or the system does not report the process's memory, or memory pressure.

        Args:
          limit_bytes: memory limit of the process; 0 for no limit.
          prefix_bytes: memory limit of the caches of ended answers; 0 for no such caches.
          follow_pressure: whether to release memory under memory pressure on the machine, even without a
            limit.
          holdings: memory besides prefixes that can be resized, of different kinds.
          weights_bytes: returns the bytes of weights that stay in memory.
          weights_files: absolute paths of files from which weights are mapped.
          app_bytes: returns the maximum bytes of an app's caches of ended answers; 0 for no limit.
          clock: monotonic clock in seconds.
        """
        limit = limit_bytes
        if follow_pressure and not limit:
            limit = memory_bytes() or 0
            if memory_pressure() is None or not limit:
                raise ConfigError(
                    "this system does not report memory pressure (/proc/pressure/memory, Linux with "
                    "psi=1): leave out follow_pressure, or give a memory budget"
                )
        self._limit_bytes, self._clock, self._trims = limit, clock, False
        self._weights_bytes, self._weights_files = weights_bytes, frozenset(weights_files)
        self._measured: tuple[ProcessMemory, int] | None = None
        self._used_s: float | None = None
        prefix_bytes = min(prefix_bytes, limit // _PREFIX_SHARE) if limit else prefix_bytes
        self.sessions = PrefixSessions(prefix_bytes, app_bytes)
        own = [self.sessions, *holdings]
        names = [each.name for each in own]
        if not set(names) <= set(SHRINK_ORDER) or len(set(names)) < len(names):
            raise ConfigError(f"holdings must be different ones of {', '.join(SHRINK_ORDER)}, got {names}")
        self._holdings = sorted(own, key=lambda each: SHRINK_ORDER.index(each.name))
        self._division = Division(limits={}, allowance_bytes=limit, restless_s=clock())
        self._next_s = float("-inf")
        # As of the last step: holdings that are called in another thread may fail.
        self._least = {each.name: each.least_bytes for each in own} if limit else {}
        # Measured here, to fail at the start if the system does not report it.
        self._taken_bytes, self._pressure = resident_bytes() if limit else 0, None

    short_bytes = property(lambda self: self._division.short_bytes, doc="See the class.")

    def step(self) -> bool:
        """Resizes holdings if necessary; returns whether it did. Costs nothing before its interval."""
        now, before = self._clock(), self._division
        if self.trim != "none" and not self._limit_bytes:
            # What there is now is the limit, until nothing is wanted back.
            self._limit_bytes, self._trims = resident_bytes(), True
            before = dataclasses.replace(before, allowance_bytes=self._limit_bytes)
        limit = self._limit_bytes
        if not limit or now < self._next_s:
            return False
        self._next_s = now + _INTERVAL_S
        try:
            if self._trims and self.trim == "none":
                self._limit_bytes, self._trims = 0, False
                self._division = Division(limits={}, allowance_bytes=0, restless_s=now)
                for each in self._holdings:
                    each.resize(each.most_bytes)
                return True
            self._taken_bytes, self._pressure = resident_bytes(), memory_pressure()
            self._least = {each.name: each.least_bytes for each in self._holdings}
            self._division = divide(
                self._holdings, before, limit,
                now_s=now, taken_bytes=self._taken_bytes,
                pressure=max(self._pressure or 0.0, _TRIM_PRESSURE[self.trim]),
            )  # fmt: skip
            if self.short_bytes and not before.short_bytes:
                _log.warning(
                    "the memory budget of %s bytes is %s bytes too small although all that can shrink has: "
                    "until it is enough, answers begin one at a time; give more, or ask for shorter contexts",
                    f"{limit:,}",
                    f"{self.short_bytes:,}",
                )
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
        except JaxllmError as error:
            # Such as a layer that cannot be read again: answers continue with unchanged memory.
            _log.error("memory stays as it is: %s", error)
            return False

    def settle(self, *, idle: bool) -> None:
        """Returns to the system what answers have freed, once, when there has been nothing to answer for a
        while."""
        now = self._clock()
        if not idle:
            self._used_s = now
        elif self._used_s is not None and now - self._used_s >= _INTERVAL_S:
            self._used_s = None
            # Of connections that clients have left, for example.
            gc.collect()
            give_back_memory()

    def measure(self) -> None:
        """Measures the process for `figures`, in some tens of milliseconds, if the system reports it. From
        any thread."""
        with contextlib.suppress(ConfigError):
            self._measured = process_memory(), children_bytes()

    def figures(
        self, cache_bytes: int, adapter_bytes: int = 0, resident_cache_bytes: int | None = None
    ) -> dict[str, Any]:
        """Memory by kind as of the last step, for metrics (see `Backend.snapshot`). From any thread. Caches
        are those of running answers."""
        fixed = {"weights": self._weights_bytes(), "kv": cache_bytes}
        fixed |= {"adapters": adapter_bytes} if adapter_bytes else {}
        holdings = {name: {"size_bytes": size} for name, size in fixed.items()}
        for each in self._holdings:
            holdings[each.name] = {"size_bytes": each.size_bytes, "limit_bytes": each.limit_bytes}
            holdings[each.name] |= {"least_bytes": self._least[each.name]} if self._least else {}
        figures: dict[str, Any] = {"limit_bytes": self._limit_bytes, "holdings": holdings}
        # Not available on systems other than Linux.
        with contextlib.suppress(ConfigError):
            figures["process_bytes"] = self._taken_bytes or resident_bytes()
        if self._measured is not None:
            memory, children = self._measured
            files = sum(memory.files.values())
            figures |= {"process_bytes": memory.resident, "children_bytes": children}
            figures["pages"] = {**memory.kinds, "files": files}
            figures["parts"] = self._parts(memory, cache_bytes, resident_cache_bytes)
        return figures | ({} if self._pressure is None else {"pressure": self._pressure})

    def _parts(self, memory: ProcessMemory, cache_bytes: int, resident: int | None) -> dict[str, int]:
        """Resident memory by what takes it; together all of the process. `rest` is what no other part counts,
        or below 0 if they count more: a start's stages have also grown by what was freed later."""
        parts = dict(STAGES.grown)
        mapped = sum(size for path, size in memory.files.items() if path in self._weights_files)
        parts["weights"] = parts.get("weights", 0) + mapped
        parts["libraries"] = sum(memory.files.values()) - mapped
        parts["kv"] = cache_bytes if resident is None else resident
        parts["prefixes"] = self.sessions.resident_bytes
        parts |= {each.name: each.size_bytes for each in self._holdings if each.name == "contexts"}
        return parts | {"rest": memory.resident - sum(parts.values())}
