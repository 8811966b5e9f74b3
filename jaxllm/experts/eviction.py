"""Which expert leaves memory when room is needed: policies as scores of those that are there.

EdgeMoE (arXiv 2308.14352, section 3.4) keeps what is visited often and will be passed soon: layers are
computed one after the other, so experts of the layers just passed are needed last.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from jaxllm.errors import ConfigError


@dataclasses.dataclass(frozen=True, eq=False)
class Residents:
    """Experts in memory, N of them.

    Attributes:
      layers: `[N]` int, the sparse layer of each, from 0.
      frequency: `[N]` float, how often each was visited, in and out of memory.
      loaded: `[N]` int, when each came, in ticks of some clock.
      used: `[N]` int, when each was visited last.
    """

    layers: np.ndarray
    frequency: np.ndarray
    loaded: np.ndarray
    used: np.ndarray


# Residents, the layer at work, the number of sparse layers and the tick it is -> scores `[N]`, of which the
# lowest goes.
Policy = Callable[[Residents, int, int, int], np.ndarray]


def nearness(layers: np.ndarray, at: int, total: int) -> np.ndarray:
    """How soon layers are passed, seen from layer `at` of `total`: from total - 1 for the next one down to 0
    for this one, a whole pass away (EdgeMoE, equation 2)."""
    return (total - layers + at) % total


def frequency_nearness(those: Residents, at: int, total: int, now: int) -> np.ndarray:
    """EdgeMoE's: frequency times nearness; of those that are equally near the rarest goes."""
    del now
    # The layer at work has nearness 0, and still a rarest expert.
    least = 1e-6 * those.frequency
    return those.frequency * nearness(those.layers, at, total) + least


def first_in_first_out(those: Residents, at: int, total: int, now: int) -> np.ndarray:
    """What came first goes first."""
    del at, total, now
    return those.loaded.astype(np.float64)


def least_recently_used(those: Residents, at: int, total: int, now: int) -> np.ndarray:
    """What was not visited for longest goes."""
    del at, total, now
    return those.used.astype(np.float64)


def least_frequently_used(those: Residents, at: int, total: int, now: int) -> np.ndarray:
    """What was visited least goes; of those visited equally often what was not for longest."""
    del at, total, now
    return those.frequency + 1e-9 * those.used


def least_frequently_recently_used(those: Residents, at: int, total: int, now: int) -> np.ndarray:
    """Frequency over the time since the last visit."""
    del at, total
    return those.frequency / (1 + now - those.used)


POLICIES: dict[str, Policy] = {
    "frequency-nearness": frequency_nearness,
    "fifo": first_in_first_out,
    "lru": least_recently_used,
    "lfu": least_frequently_used,
    "lfru": least_frequently_recently_used,
}


def eviction_policy(name: str) -> Policy:
    """The policy of a name.

    Raises:
      ConfigError: there is none.
    """
    if name not in POLICIES:
        raise ConfigError(f"there is no eviction policy {name!r:.80}; take one of {', '.join(POLICIES)}")
    return POLICIES[name]
