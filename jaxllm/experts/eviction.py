"""Eviction policies of the expert buffer: scores of resident experts, of which the lowest is evicted.

EdgeMoE (arXiv 2308.14352, section 3.3.3) keeps experts that are visited often and whose layer comes soon:
layers are computed in order, so experts of the layers just computed are needed last.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from jaxllm.errors import ConfigError


@dataclasses.dataclass(frozen=True, eq=False)
class Residents:
    """The N resident experts.

    Attributes:
      layers: `[N]` int, the sparse layer of each, from 0.
      frequency: `[N]` float, number of visits to each, resident or not.
      loaded: `[N]` int, tick at which each was loaded.
      used: `[N]` int, tick of each one's last visit.
    """

    layers: np.ndarray
    frequency: np.ndarray
    loaded: np.ndarray
    used: np.ndarray


# (residents, current layer, number of sparse layers, current tick) -> scores `[N]`; the lowest is evicted.
Policy = Callable[[Residents, int, int, int], np.ndarray]


def nearness(layers: np.ndarray, at: int, total: int) -> np.ndarray:
    """How soon layers are computed after layer `at` of `total`: total - 1 for the next layer, down to 0 for
    layer `at` itself, which comes again in the next forward pass (EdgeMoE, equation 2)."""
    return (total - layers + at) % total


def frequency_nearness(those: Residents, at: int, total: int, now: int) -> np.ndarray:
    """EdgeMoE's policy: frequency times nearness; of equally near experts the least visited is evicted."""
    del now
    # Orders the experts of the current layer, whose nearness is 0.
    least = 1e-6 * those.frequency
    return those.frequency * nearness(those.layers, at, total) + least


def first_in_first_out(those: Residents, at: int, total: int, now: int) -> np.ndarray:
    """FIFO: evicts the expert that was loaded first."""
    del at, total, now
    return those.loaded.astype(np.float64)


def least_recently_used(those: Residents, at: int, total: int, now: int) -> np.ndarray:
    """LRU: evicts the expert whose last visit is the longest ago."""
    del at, total, now
    return those.used.astype(np.float64)


def least_frequently_used(those: Residents, at: int, total: int, now: int) -> np.ndarray:
    """LFU: evicts the expert with the fewest visits; of equals the one whose last visit is the longest
    ago."""
    del at, total, now
    return those.frequency + 1e-9 * those.used


def least_frequently_recently_used(those: Residents, at: int, total: int, now: int) -> np.ndarray:
    """LFRU: frequency divided by the time since the last visit."""
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
      ConfigError: there is no policy of this name.
    """
    if name not in POLICIES:
        raise ConfigError(f"there is no eviction policy {name!r:.80}; take one of {', '.join(POLICIES)}")
    return POLICIES[name]
