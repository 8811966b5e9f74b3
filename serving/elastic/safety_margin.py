"""Learns the ratio of measured to expected times of answers.

A profile has medians of an idle device. Devices have other load, and an objective that the median just
meets is missed half of the time: so plans use a quantile of the ratio, the confidence.
"""

import math
from collections import deque
from collections.abc import Sequence

from jaxllm.errors import ConfigError
from jaxllm.serving.ground.plan import Cost

CONFIDENCE = 0.99
# The margin before any answer was measured.
START = 1 / 0.9
# Number of answers to remember; initially `_STARTING` answers of the ratio `START` are assumed.
WINDOW = 256
_STARTING = 16
# Maximum margin: the delays of a device that stalls are unbounded.
MOST = 2.0
# Confidences to try in turn if no choice meets the objective with a higher one.
_LESS = (0.9, 0.75, 0.5)


class SafetyMargin:
    """Stores the ratios of measured to expected times of recent answers.

    Args:
      confidence: share of answers that should take at most the expected time times the margin, in (0, 1).
      window: number of answers to remember.

    Raises:
      ConfigError: an argument is out of range.
    """

    def __init__(self, confidence: float = CONFIDENCE, *, window: int = WINDOW) -> None:
        number = isinstance(confidence, int | float) and not isinstance(confidence, bool)
        if not number or not 0 < confidence < 1:
            raise ConfigError(f"a confidence must be in (0, 1), got {confidence!r:.80}")
        if not isinstance(window, int) or window < 1:
            raise ConfigError(f"a window must be a number of answers above 0, got {window!r:.80}")
        self._confidence, self._window = confidence, window
        self.forget()

    def forget(self) -> None:
        """Resets the ratios, for example after a change of profile."""
        starting = [START] * min(_STARTING, self._window)
        self._first, self._further = deque(starting, self._window), deque(starting, self._window)

    def saw_first(self, expected: Cost, measured: Cost) -> None:
        """Learns from the time to the first token of an answer."""
        self._first.append(_share(measured.ttft_ms, expected.ttft_ms))

    def saw_further(self, expected: Cost, measured: Cost) -> None:
        """Learns from the time per further token of an answer, if it has some."""
        if measured.tokens > 1:
            self._further.append(_share(measured.tpot_ms, expected.tpot_ms))

    @property
    def ttft(self) -> float:
        """The factor of the expected time to the first token to plan for, in [1, `MOST`]."""
        return _quantile(sorted(self._first), self._confidence)

    @property
    def tpot(self) -> float:
        """The factor of the expected time per further token to plan for, in [1, `MOST`]."""
        return _quantile(sorted(self._further), self._confidence)

    def factors(self) -> list[tuple[float, float]]:
        """`ttft` and `tpot` factors to plan with in turn: at the confidence, then, for objectives that are
        not met so surely, at smaller ones, down to half of the answers; distinct pairs."""
        first, further = sorted(self._first), sorted(self._further)
        confidences = [self._confidence, *(each for each in _LESS if each < self._confidence)]
        return list(dict.fromkeys((_quantile(first, each), _quantile(further, each)) for each in confidences))


def _quantile(ascending: Sequence[float], confidence: float) -> float:
    place = math.ceil(confidence * len(ascending)) - 1
    return min(MOST, max(1.0, ascending[place]))


def _share(measured_ms: float, expected_ms: float) -> float:
    return min(MOST, measured_ms / expected_ms)
