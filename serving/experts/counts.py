"""Counts the events of an expert buffer."""

import collections
import dataclasses


@dataclasses.dataclass
class ExpertCounts:
    """Counts of an expert buffer.

    Attributes:
      visits: number of requested experts.
      hits: visits of experts with all required planes resident.
      foreseen: hits of experts of which a plane was prefetched and not visited before.
      late: visits of experts whose read had begun.
      guesses: planes whose prefetch began.
      read_bytes: bytes read from storage.
      low_bytes: the part for low planes of nested experts.
      high_alone: visits that only needed the high plane of a nested expert.
      waited_s: time that layers waited.
      layers: visits and hits by the index of the sparse layer, an encoder's first.
      loads: number of reads of each plane, by its layer, expert and plane.
    """

    visits: int = 0
    hits: int = 0
    foreseen: int = 0
    late: int = 0
    guesses: int = 0
    read_bytes: int = 0
    low_bytes: int = 0
    high_alone: int = 0
    waited_s: float = 0.0
    layers: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)
    loads: collections.Counter[tuple[int, int, int]] = dataclasses.field(default_factory=collections.Counter)

    def visited(self, layer: int, visits: int, hits: int) -> None:
        """Counts visits of a layer's experts, of which `hits` were resident."""
        before, found = self.layers.get(layer, (0, 0))
        self.layers[layer] = before + visits, found + hits
        self.visits += visits
        self.hits += hits

    def hit_rates(self, layers: range) -> list[float]:
        """The hit rate of each of some sparse layers."""
        pairs = (self.layers.get(layer, (0, 0)) for layer in layers)
        return [round(hits / max(1, visits), 4) for visits, hits in pairs]
