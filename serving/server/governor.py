"""Keeps the whole process within one memory budget, by resizing what can be resized between dispatches.

    governor = Governor([ContextChunks(memory, ...), ExpertBuffer(weights)], GovernorOptions(limit_bytes=...))
    governor.step()    between dispatches, in the thread that owns the holdings

The policy is `serving.server.division`. A step that comes too early costs nothing.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from jaxllm.errors import ConfigError
from serving.host.machine import give_back_memory
from serving.host.pressure import memory_pressure
from serving.host.process_memory import resident_bytes
from serving.server.division import SHRINK_ORDER, Division, GovernorOptions, Observed, Portion, divide
from serving.server.figures import HoldingFigures, MemoryFigures

_log = logging.getLogger(__name__)


class Holding(Protocol):
    """Memory that can be resized while the service runs. All is called in the thread that owns it, but for
    `size_bytes` and `limit_bytes`, which others may read."""

    @property
    def name(self) -> str:
        """One of `SHRINK_ORDER`; each once."""
        ...

    @property
    def size_bytes(self) -> int:
        """That it takes now."""
        ...

    @property
    def limit_bytes(self) -> int:
        """Most that it may take now."""
        ...

    @property
    def least_bytes(self) -> int:
        """That it cannot do without now."""
        ...

    @property
    def most_bytes(self) -> int:
        """More is of no use to it."""
        ...

    def resize(self, limit_bytes: int) -> None:
        """Sets the most that it may take, at least `least_bytes`; gives back at once what is beyond it."""
        ...


class Governor:
    """Divides the process's budget among holdings.

    Args:
      holdings: of different kinds.
      options: see `GovernorOptions`.
      taken_bytes: measures the process's memory.
      pressure: measures the machine's; None where the system does not tell.
      clock: seconds that do not go back.

    Attributes:
      short_bytes: by which the budget is too small even with all holdings at their least; what needs more
        memory should wait while it is not 0.

    Raises:
      ConfigError: a holding is of an unknown kind, or two are of one kind; or the system does not tell what
        the process takes.
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
        # Here, so that a system that does not tell is known at the start.
        self._seen = Observed(now_s=clock(), taken_bytes=taken_bytes())
        self._tells = True
        # As of the last step: holdings that are called in another thread may fail.
        self._least = {each.name: each.least_bytes for each in own}

    @property
    def short_bytes(self) -> int:
        """See the class."""
        return self._division.short_bytes

    def step(self) -> bool:
        """Resizes holdings where memory asks for it; returns whether it did."""
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
            # Else the next look would take it for memory that something else took.
            give_back_memory()
        return changed

    def figures(self, fixed: Mapping[str, int] | None = None) -> MemoryFigures:
        """What the last step saw, for metrics and the dashboard; see `MemoryFigures`. From any thread.

        Args:
          fixed: bytes by kind of what cannot be resized, such as "weights".
        """
        holdings: dict[str, HoldingFigures] = {
            name: {"size_bytes": size} for name, size in (fixed or {}).items()
        }
        for each in self._holdings:
            holdings[each.name] = {
                "size_bytes": each.size_bytes,
                "limit_bytes": each.limit_bytes,
                "least_bytes": self._least[each.name],
            }
        figures: MemoryFigures = {
            "process_bytes": self._seen.taken_bytes,
            "limit_bytes": self._options.limit_bytes,
            "holdings": holdings,
        }
        if self._tells:
            figures["pressure"] = self._seen.pressure
        return figures
