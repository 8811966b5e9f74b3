"""Objectives of an answer's time or energy, expected costs, whether a cost meets an objective, and how far
answers exceed their expected times.

Ratios are relative to the whole model with the whole prompt on this device (ELMS, arXiv 2409.09071, section
3.1); 100 % sets no limit. Milliseconds, end-to-end times and joules are absolute.
"""

import dataclasses
import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxllm.elastic.slo import Slo
from jaxllm.errors import ConfigError
from jaxllm.serving.elastic.profile import DeviceProfile
from jaxllm.serving.ground.plan import Cost

# Maximum overrun that still meets an objective: 1, and the rounding error of floats.
_MOST_OVERRUN = 1 + 1e-9


class _Limits:
    """Limits of an answer: numbers above 0."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not math.isfinite(value) or value <= 0:
                raise ConfigError(f"{name} of an objective must be a number above 0, got {value!r:.80}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Latency(_Limits):
    """Limits of both times in milliseconds.

    Attributes:
      ttft_ms: maximum time to the first token.
      tpot_ms: maximum time per further token.
    """

    ttft_ms: float
    tpot_ms: float

    def __str__(self) -> str:
        return f"{self.ttft_ms:.6g} ms to the first token, {self.tpot_ms:.6g} ms per token"


@dataclasses.dataclass(frozen=True, kw_only=True)
class EndToEnd(_Limits):
    """A limit of the time to the end of an answer.

    Attributes:
      total_ms: maximum time from the request to the last token, in milliseconds.
    """

    total_ms: float

    def __str__(self) -> str:
        return f"{self.total_ms:.6g} ms in all"


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnergyBudget(_Limits):
    """A limit of an answer's energy, for devices whose profile has energy.

    Attributes:
      joules: maximum energy of prompt and answer.
    """

    joules: float

    def __str__(self) -> str:
        return f"{self.joules:.6g} J"


Objective = Slo | Latency | EndToEnd | EnergyBudget


@dataclasses.dataclass(frozen=True)
class Binding:
    """The objective of an app's calls.

    Attributes:
      objective: objective of calls without their own.
      strict: whether to reject calls that no level can answer in time.
      shorten: whether plans may drop words of prompts.
    """

    objective: Objective
    strict: bool = False
    shorten: bool = False


def expected_cost(
    profile: DeviceProfile,
    level: int,
    prompt_tokens: int,
    answer_tokens: int,
    *,
    planning_ms: float = 0.0,
    reused: int = 0,
    thought_tokens: int = 0,
) -> Cost:
    """The expected cost of an answer of `answer_tokens` at a level, after a prompt of so many tokens.

    Ratios refer to that of the whole model with the whole prompt, where `planning_ms` is only the time to
    tokenize the request."""
    costs = expected_costs(
        profile, (level,), (prompt_tokens,), answer_tokens, planning_ms=planning_ms, reused=(reused,),
        thought_tokens=thought_tokens,
    )  # fmt: skip
    return Cost(
        ttft_ms=float(costs.ttft_ms[0, 0]),
        tpot_ms=float(costs.tpot_ms[0, 0]),
        tokens=answer_tokens,
        joules=None if costs.joules is None else float(costs.joules[0, 0]),
        thought_tokens=thought_tokens,
    )


def expected_costs(
    profile: DeviceProfile,
    levels: Sequence[int],
    prompt_tokens: Sequence[int],
    answer_tokens: int,
    *,
    planning_ms: float = 0.0,
    reused: Sequence[int] = (),
    thought_tokens: int = 0,
) -> Cost:
    """`expected_cost` of levels and prompt lengths: arrays `[levels, lengths]`.

    Args:
      profile: profile of the device.
      levels: levels of the profile.
      prompt_tokens: lengths of prompts.
      answer_tokens: length of the answer.
      planning_ms: time before the computation.
      reused: number of cached tokens at the prompt's start, for each level; empty for none.
      thought_tokens: see `Cost`.
    """
    ttft_ms = profile.ttfts(levels, prompt_tokens)
    joules = None
    if profile.energy is not None:
        joules = profile.all_joules(levels, prompt_tokens, answer_tokens)
    for row, tokens in enumerate(reused):
        if tokens:
            level, left = levels[row : row + 1], [max(1, each - tokens) for each in prompt_tokens]
            # At least the time of a prompt of this length; attention also reads the cached tokens, which is
            # part of the difference between a whole prompt and its prefix.
            more_ms = ttft_ms[row] - profile.ttfts(level, (tokens,))[0]
            ttft_ms[row] = np.maximum(profile.ttfts(level, left)[0], more_ms)
            if joules is not None:
                joules[row] = profile.all_joules(level, left, answer_tokens)[0]
    return Cost(
        ttft_ms=planning_ms + ttft_ms,
        tpot_ms=profile.tpots(levels, prompt_tokens),
        tokens=answer_tokens,
        joules=joules,
        thought_tokens=thought_tokens,
    )


def meets(objective: Objective, cost: Cost, whole: Cost) -> bool:
    """Whether a cost is within an objective.

    Raises:
      ConfigError: the objective limits energy, and the cost has none.
    """
    return bool(overrun(objective, cost, whole) <= _MOST_OVERRUN)


def overrun(objective: Objective, cost: Cost, whole: Cost) -> Any:
    """A cost as a share of its objective, the maximum over the objective's limits; above 1 the objective is
    missed. An array for a cost of arrays.

    Raises:
      ConfigError: see `meets`.
    """
    if isinstance(objective, EndToEnd):
        return cost.total_ms / objective.total_ms
    if isinstance(objective, EnergyBudget):
        if cost.joules is None:
            raise ConfigError(
                "this device's profile has no energy, so no energy budget can be met; add it with "
                "`jaxllm profile --energy FILE`"
            )
        return cost.joules / objective.joules
    if isinstance(objective, Slo):
        most_ttft, most_tpot = objective.limits(whole.counted_ttft_ms, whole.tpot_ms)
    else:
        most_ttft, most_tpot = objective.ttft_ms, objective.tpot_ms
    first = cost.counted_ttft_ms / most_ttft
    # An answer of one token has no time per further token.
    return np.maximum(first, cost.tpot_ms / most_tpot) if cost.tokens > 1 else first


def as_ratios(objective: Objective, whole: Cost) -> Slo:
    """An objective as shares of the whole model's times, the input of the tiny LM."""

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


# Plans use a quantile of the ratio of measured to expected times, the confidence: a profile has medians of an
# idle device, and devices have other load, so that an objective that the median just meets is missed half of
# the time.
CONFIDENCE = 0.99
# The margin before any answer was measured.
START = 1 / 0.9
# Number of answers to remember; initially `_STARTING` answers of the ratio `START` are assumed.
_WINDOW, _STARTING = 256, 16
# Maximum margin: the delays of a device that stalls are unbounded.
MOST = 2.0
# Confidences to try in turn if no choice meets the objective with a higher one.
_LESS = (0.9, 0.75, 0.5)


class SafetyMargin:
    """Stores the ratios of measured to expected times of recent answers.

    Args:
      confidence: share of answers that should take at most the expected time times the margin, in (0, 1).

    Raises:
      ConfigError: it is out of range.
    """

    def __init__(self, confidence: float = CONFIDENCE) -> None:
        number = isinstance(confidence, int | float) and not isinstance(confidence, bool)
        if not number or not 0 < confidence < 1:
            raise ConfigError(f"a confidence must be in (0, 1), got {confidence!r:.80}")
        self._confidence = confidence
        self.forget()

    def forget(self) -> None:
        """Resets the ratios, for example after a change of profile."""
        self._first, self._further = (deque([START] * _STARTING, _WINDOW) for _ in range(2))

    def saw_first(self, expected: Cost, measured: Cost) -> None:
        """Learns from the time to the first token of an answer."""
        self._first.append(_share(measured.ttft_ms, expected.ttft_ms))

    def saw_further(self, expected: Cost, measured: Cost) -> None:
        """Learns from the time per further token of an answer, if it has some."""
        if measured.tokens > 1:
            self._further.append(_share(measured.tpot_ms, expected.tpot_ms))

    def factors(self) -> list[tuple[float, float]]:
        """Factors in [1, `MOST`] of the expected times to the first token and per further token to plan with
        in turn: at the confidence, then, for objectives that are not met so surely, at smaller ones, down to
        half of the answers; distinct pairs."""
        first, further = sorted(self._first), sorted(self._further)
        confidences = [self._confidence, *(each for each in _LESS if each < self._confidence)]
        return list(dict.fromkeys((_quantile(first, each), _quantile(further, each)) for each in confidences))


def _quantile(ascending: Sequence[float], confidence: float) -> float:
    place = math.ceil(confidence * len(ascending)) - 1
    return min(MOST, max(1.0, ascending[place]))


def _share(measured_ms: float, expected_ms: float) -> float:
    return min(MOST, measured_ms / expected_ms)
