"""Divides a memory budget among holdings: a pure policy that shrinks them in an order, and grows them back.

What a process takes is fixed memory (Python, weights that stay, running caches) and holdings that can be
resized. The limits of all holdings together must fit beside the fixed part:

    room = allowance - (taken - sizes of holdings)
    the limits exceed the room: shrink, the first holding in the order first, none below its least
    they leave room, and have for a while: grow, the last holding first, by one step

Pressure on the machine's memory lowers the allowance below the limit, step by step, until it is gone. Growing
leaves a margin free, so that what made limits shrink does not do so at once again.
"""

import dataclasses
from collections.abc import Sequence

from jaxllm.errors import ConfigError

# Kinds of holdings in the order in which they shrink: what is cheap to bring back comes first.
SHRINK_ORDER = ("prefixes", "contexts", "drafts", "layers", "experts")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GovernorOptions:
    """How a budget is kept.

    Attributes:
      limit_bytes: most memory of the process; what `--memory` says.
      interval_s: least time between two looks at the memory.
      step: share of the limit by which limits grow in a step, and which pressure takes in one.
      margin: share of the limit that stays free when limits grow.
      calm_s: time without shrinking and pressure after which limits grow.
      pressure_high: share of time that tasks of the machine wait for memory, from which on memory is given
        back.
      pressure_low: the same, up to which there is none.
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
    """A holding as the policy sees it.

    Attributes:
      name: of `SHRINK_ORDER`.
      size_bytes: that it takes now.
      limit_bytes: most that it may take now.
      least_bytes: that it cannot do without.
      most_bytes: more is of no use to it.
    """

    name: str
    size_bytes: int
    limit_bytes: int
    least_bytes: int
    most_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Observed:
    """Memory at a time.

    Attributes:
      now_s: of a clock that does not go back.
      taken_bytes: by the process.
      pressure: share of time that tasks of the machine wait for memory; 0 where the system does not tell.
    """

    now_s: float
    taken_bytes: int
    pressure: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Division:
    """Limits, and what the next decision must know.

    Attributes:
      limits: bytes by holding.
      allowance_bytes: that the process may take now: its limit, or less under pressure.
      restless_s: when limits last shrank, or there was pressure.
      short_bytes: by which even the least sizes exceed the allowance.
    """

    limits: dict[str, int]
    allowance_bytes: int
    restless_s: float
    short_bytes: int = 0


def divide(
    portions: Sequence[Portion], before: Division, seen: Observed, options: GovernorOptions
) -> Division:
    """The limits from now on.

    Args:
      portions: holdings in the order in which they shrink.
      before: the last decision.
      seen: the memory now.
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
        # Not below what cannot be given back: later growth would only take longer.
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
    """Limits that are `excess` bytes smaller, as far as least sizes allow."""
    smaller = dict(limits)
    for each in portions:
        cut = min(excess, smaller[each.name] - each.least_bytes)
        smaller[each.name] -= cut
        excess -= cut
    return smaller


def _grow(limits: dict[str, int], portions: Sequence[Portion], room: int) -> dict[str, int]:
    """Limits that are up to `room` bytes larger."""
    larger = dict(limits)
    for each in reversed(portions):
        add = max(0, min(room, each.most_bytes - larger[each.name]))
        larger[each.name] += add
        room -= add
    return larger
