"""Learns the time of a verification by the size of its tree.

A pass takes a fixed time, mostly that of getting the weights, and a time per node. Both are tracked together
(a Kalman filter of two states), not size by size: a busy machine or slow storage changes the times of all
sizes, also of those that were not tried lately.
"""

import numpy as np

# Variances in squares of the first measurement: of the first state, of a measurement, and of the change of
# both states per pass. The time per node is a property of the device, so it changes slowly.
_FIRST_DOUBT = 0.25
_NOISE = 0.01
_DRIFT = (0.01, 0.0004)
# A measurement further off than so many deviations is an outlier: it is clipped to this.
_MOST_DEVIATIONS = 3.0


class VerifyCost:
    """Seconds of a pass over a tree, `pass + share * nodes / most`.

    Args:
      most: nodes of the largest trees.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._state = np.zeros(2)
        self._doubt = np.zeros((2, 2))
        self._unit = 0.0

    def seconds(self, nodes: int) -> float:
        """The expected time of a tree of so many nodes; 0 before the first measurement."""
        base, share = self._state
        return float(base + max(0.0, share) * nodes / self._most)

    def measured(self, nodes: int, took_s: float) -> None:
        """Learns from the time that a tree of so many nodes took."""
        seen = np.array([1.0, nodes / self._most])
        if not self._unit:
            # The first guess: nodes take half of the time of the largest trees.
            self._unit = max(took_s, 1e-9)
            self._state = np.array([took_s - 0.5 * took_s * seen[1], 0.5 * took_s])
            self._doubt = _FIRST_DOUBT * np.eye(2) * self._unit**2
        self._doubt = self._doubt + np.diag(_DRIFT) * self._unit**2
        spread = float(seen @ self._doubt @ seen) + _NOISE * self._unit**2
        most = _MOST_DEVIATIONS * spread**0.5
        error = float(np.clip(took_s - seen @ self._state, -most, most))
        gain = self._doubt @ seen / spread
        self._state = self._state + gain * error
        self._doubt = self._doubt - np.outer(gain, seen @ self._doubt)
