"""What reading a tree takes by its size, learned while answering.

A pass takes some time whatever is read, mostly that of getting the weights, and some for each node. Both are
tracked together (a Kalman filter of two states), not size by size: where the machine becomes busy, or storage
slow, that holds for all sizes, also for those that were not tried lately.
"""

import numpy as np

# In squares of the first measurement: how little is known then, what a measurement says of one pass, and how
# fast the pass and the nodes' share change. The nodes' share is a matter of the device: slowly.
_FIRST_DOUBT = 0.25
_NOISE = 0.01
_DRIFT = (0.01, 0.0004)
# A measurement that is further off than so many deviations was something else: it counts as this far.
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
        """What a tree of so many nodes should take; 0 before anything was measured."""
        base, share = self._state
        return float(base + max(0.0, share) * nodes / self._most)

    def measured(self, nodes: int, took_s: float) -> None:
        """A tree of so many nodes took so long."""
        seen = np.array([1.0, nodes / self._most])
        if not self._unit:
            # Until other sizes were tried, the largest trees may take half of it more than the least.
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
