"""Learns the time of work by its size: of a verification by its tree, of a drafter's run by its branches.

The time has a fixed part, mostly that of loading weights, a part per unit of size, and, if there are few
sizes, a part specific to each. All are tracked jointly (a Kalman filter), not size by size: a busy machine
or slow storage changes the times of all sizes, including those not measured lately.
"""

from collections.abc import Sequence

import numpy as np

# Variances in squares of the first measurement: of the first state, of a size's own time, of a measurement,
# and of the changes of the states per measurement. The time per unit is a property of the device, so it
# changes slowly.
_FIRST_DOUBT, _OWN_DOUBT = 0.25, 0.02
_NOISE = 0.01
_DRIFT, _SLOW_DRIFT = 0.01, 0.0004
# A measurement further off than so many deviations is an outlier: it is clipped to this.
_MOST_DEVIATIONS = 3.0


class SizeCost:
    """Seconds of work of a size, `base + share * size / most + own(size)`.

    Args:
      most: the largest size.
      own: sizes with a specific time.
    """

    def __init__(self, most: int, own: Sequence[int] = ()) -> None:
        self._most, self._own = most, {size: 2 + place for place, size in enumerate(own)}
        self._state = np.zeros(2 + len(own))
        self._doubt = np.zeros((len(self._state), len(self._state)))
        self._unit = 0.0

    def seconds(self, size: float) -> float:
        """The expected time; 0 before the first measurement."""
        state = self._state.copy()
        state[1] = max(0.0, state[1])
        return max(0.0, float(self._seen(size) @ state))

    def measured(self, size: float, took_s: float) -> None:
        """Learns from the time that work of a size took."""
        seen = self._seen(size)
        if not self._unit:
            # The first guess: half of the time of the largest size is due to its size.
            self._unit = max(took_s, 1e-9)
            self._state[:2] = took_s - 0.5 * took_s * seen[1], 0.5 * took_s
            doubt = [_FIRST_DOUBT] * 2 + [_OWN_DOUBT] * len(self._own)
            self._doubt = np.diag(doubt) * self._unit**2
        drift = [_DRIFT] + [_SLOW_DRIFT] * (1 + len(self._own))
        self._doubt = self._doubt + np.diag(drift) * self._unit**2
        spread = float(seen @ self._doubt @ seen) + _NOISE * self._unit**2
        most = _MOST_DEVIATIONS * spread**0.5
        error = float(np.clip(took_s - seen @ self._state, -most, most))
        gain = self._doubt @ seen / spread
        self._state = self._state + gain * error
        self._doubt = self._doubt - np.outer(gain, seen @ self._doubt)

    def _seen(self, size: float) -> np.ndarray:
        seen = np.zeros(len(self._state))
        seen[:2] = 1.0, size / self._most
        if size in self._own:
            seen[self._own[size]] = 1.0  # pyright: ignore[reportArgumentType]
        return seen
