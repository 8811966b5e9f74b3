"""What an app may ask of an answer's time, and whether a cost meets it.

Ratios are of what the whole model takes with the whole prompt on this device (ELMS, arXiv 2409.09071, section
2), and a ratio of 100 % asks for nothing; milliseconds, end-to-end times and joules are absolute.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxllm.config import WHOLE
from jaxllm.elastic.slo import Slo
from jaxllm.errors import ConfigError
from serving.planning.profile import DeviceProfile

# What times may be off by and still meet an objective: that of floats.
_SLACK = 1 + 1e-9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Latency:
    """Times in milliseconds.

    Attributes:
      ttft_ms: most until the first token.
      tpot_ms: most per further token.
    """

    ttft_ms: float
    tpot_ms: float

    def __post_init__(self) -> None:
        _require_positive(self, "ttft_ms", "tpot_ms")

    def __str__(self) -> str:
        return f"{self.ttft_ms:.6g} ms to the first token, {self.tpot_ms:.6g} ms per token"


@dataclasses.dataclass(frozen=True, kw_only=True)
class EndToEnd:
    """The time until an answer is there.

    Attributes:
      total_ms: most milliseconds from the request to the last token.
    """

    total_ms: float

    def __post_init__(self) -> None:
        _require_positive(self, "total_ms")

    def __str__(self) -> str:
        return f"{self.total_ms:.6g} ms in all"


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnergyBudget:
    """What an answer may cost, for devices whose profile knows.

    Attributes:
      joules: most for prompt and answer.
    """

    joules: float

    def __post_init__(self) -> None:
        _require_positive(self, "joules")

    def __str__(self) -> str:
        return f"{self.joules:.6g} J"


Objective = Slo | Latency | EndToEnd | EnergyBudget


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """What an answer takes, expected or measured; or what many would, in arrays of one shape.

    Attributes:
      ttft_ms: until its first token, planning included.
      tpot_ms: per further token.
      tokens: of the answer.
      joules: None where they are not known.
    """

    ttft_ms: Any
    tpot_ms: Any
    tokens: int
    joules: Any = None

    @property
    def total_ms(self) -> Any:
        """From the request to the last token."""
        return self.ttft_ms + self.tpot_ms * max(0, self.tokens - 1)


def expected_cost(
    profile: DeviceProfile, level: int, prompt_tokens: int, answer_tokens: int, *, planning_ms: float = 0.0
) -> Cost:
    """What an answer of `answer_tokens` should take at a level, behind a prompt of so many tokens."""
    costs = expected_costs(profile, (level,), (prompt_tokens,), answer_tokens, planning_ms=planning_ms)
    return Cost(
        ttft_ms=float(costs.ttft_ms[0, 0]),
        tpot_ms=float(costs.tpot_ms[0, 0]),
        tokens=answer_tokens,
        joules=None if costs.joules is None else float(costs.joules[0, 0]),
    )


def expected_costs(
    profile: DeviceProfile,
    levels: Sequence[int],
    prompt_tokens: Sequence[int],
    answer_tokens: int,
    *,
    planning_ms: float = 0.0,
) -> Cost:
    """`expected_cost` of levels and prompt lengths: arrays `[levels, lengths]`."""
    joules = None
    if profile.energy is not None:
        joules = profile.all_joules(levels, prompt_tokens, answer_tokens)
    return Cost(
        ttft_ms=planning_ms + profile.ttfts(levels, prompt_tokens),
        tpot_ms=profile.tpots(levels, prompt_tokens),
        tokens=answer_tokens,
        joules=joules,
    )


def whole_cost(
    profile: DeviceProfile, prompt_tokens: int, answer_tokens: int, *, reading_ms: float = 0.0
) -> Cost:
    """What ratios are of: the whole model, the whole prompt, no planning; `reading_ms` is what making tokens
    of the request took, which it takes at any level."""
    return expected_cost(profile, WHOLE, prompt_tokens, answer_tokens, planning_ms=reading_ms)


def meets(objective: Objective, cost: Cost, whole: Cost) -> bool:
    """Whether a cost is within an objective.

    Raises:
      ConfigError: the objective is about energy, which the cost does not know.
    """
    return bool(overrun(objective, cost, whole) <= _SLACK)


def overrun(objective: Objective, cost: Cost, whole: Cost) -> Any:
    """What share of its objective a cost takes, of all that it asks the worst: above 1 it is missed. Of a
    cost of arrays it is one.

    Raises:
      ConfigError: see `meets`.
    """
    if isinstance(objective, EndToEnd):
        return cost.total_ms / objective.total_ms
    if isinstance(objective, EnergyBudget):
        if cost.joules is None:
            raise ConfigError(
                "this device's profile has no energy, so no energy budget can be met; add it with "
                "`jaxllm profile --energy`"
            )
        return cost.joules / objective.joules
    if isinstance(objective, Slo):
        most_ttft, most_tpot = objective.limits(whole.ttft_ms, whole.tpot_ms)
    else:
        most_ttft, most_tpot = objective.ttft_ms, objective.tpot_ms
    first = cost.ttft_ms / most_ttft
    # An answer of one token has no further ones.
    return np.maximum(first, cost.tpot_ms / most_tpot) if cost.tokens > 1 else first


def as_ratios(objective: Objective, whole: Cost) -> Slo:
    """An objective as shares of the whole model's times, which is what the tiny LM knows."""

    def ratio(value: float) -> float:
        return min(1.0, max(1e-3, value))

    if isinstance(objective, Slo):
        return objective
    if isinstance(objective, Latency):
        return Slo(
            ttft=ratio(objective.ttft_ms / whole.ttft_ms), tpot=ratio(objective.tpot_ms / whole.tpot_ms)
        )
    share = ratio(1 / overrun(objective, whole, whole))
    return Slo(ttft=share, tpot=share)


def _require_positive(objective: Any, *names: str) -> None:
    for name in names:
        value = getattr(objective, name)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or value <= 0:
            raise ConfigError(f"{name} of an objective must be a number above 0, got {value!r:.80}")
