"""Chooses the plane to evict: frequency and time of uses, and evictable planes."""

from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from jaxllm.experts.prediction import Policy, Residents
from jaxllm.serving.experts.store import PlaneKey, Slot

# Below every score of a policy.
_LEAVES_FIRST = -1e18


class Usage:
    """Counts and times of the visits that needed each plane. A tick passes with each visit of a layer.

    A source visits an encoder's experts once, so that their visits predict no later ones: they are evicted
    before all others, the most recently computed layer's last (EdgeMoE, section 3.3).
    """

    def __init__(self, frequency: np.ndarray, planes: int, of_encoder: int = 0) -> None:
        """See the class; starts with visits `[L_sparse, E]` of all `planes` planes; the first `of_encoder`
        layers are an encoder's."""
        self._of_encoder = of_encoder
        self._frequency = np.repeat(frequency.astype(np.float64)[..., None], planes, axis=-1)
        self._used, self._loaded = (np.zeros(self._frequency.shape, np.int64) for _ in range(2))
        self._tick = self._layer = 0

    def visited(self, layer: int, planes: Iterable[Sequence[PlaneKey]]) -> None:
        """A layer needs planes."""
        self._tick, self._layer = self._tick + 1, layer
        at = tuple(np.array([key for own in planes for key in own], np.int64).reshape(-1, 3).T)
        self._frequency[at] += 1
        self._used[at] = self._tick

    def loaded(self, key: PlaneKey) -> None:
        """A plane was read."""
        self._loaded[key] = self._tick

    def scores(self, keys: Sequence[PlaneKey], policy: Policy) -> np.ndarray:
        """The scores `[N]` of planes; the lowest is evicted."""
        at = tuple(np.array(keys).T)
        first = self._of_encoder
        residents = Residents(at[0] - first, self._frequency[at], self._loaded[at], self._used[at])
        # While a source is read, the decoder's first layer comes next.
        layer, layers = max(self._layer - first, -1), len(self._frequency) - first
        scores = policy(residents, layer, layers, self._tick)
        return np.where(at[0] < first, _LEAVES_FIRST + self._used[at], scores)


def victim(
    slots: Mapping[PlaneKey, Slot],
    usage: Usage,
    policy: Policy,
    *,
    spared: tuple[Collection[PlaneKey], Collection[PlaneKey]],
    predicted: Collection[PlaneKey],
    demanded: bool,
) -> PlaneKey | None:
    """The plane to evict next; None if none may be evicted. A high plane is evicted after its low plane.

    Args:
      slots: slots of all planes that are resident or being read.
      usage: their usage.
      policy: eviction policy.
      spared: planes to keep, and planes to keep even if a layer could not continue otherwise.
      predicted: planes that are predicted.
      demanded: whether a layer waits for the room.
    """
    needed, first = spared
    idle = [key for key, slot in slots.items() if not slot.in_flight and not slot.pinned]
    # First incomplete planes that are no longer predicted, then those of the lowest score.
    for key in idle:
        if not slots[key].ready and key not in needed and key not in predicted:
            return key
    evictable = [
        key
        for key in idle
        if slots[key].ready and key not in needed and (key[2] or (*key[:2], 1) not in slots)
    ]
    if evictable:
        return evictable[int(np.argmin(usage.scores(evictable, policy)))]
    if not demanded:
        return None
    begun = [key for key in idle if not slots[key].ready and key not in needed]
    # In a prompt a layer may request more than fits: the last requests need not stay.
    later = [key for key in idle if key not in first]
    return next(reversed(begun or later), None)
