"""Counts what an expert buffer does."""

import dataclasses


@dataclasses.dataclass
class ExpertCounts:
    """Counts of an expert buffer.

    Attributes:
      visits: experts that layers asked for.
      hits: visits of experts that were resident, with all planes that were needed.
      foreseen: hits of experts of which a plane was prefetched and not visited before.
      late: visits of experts whose read had begun.
      guesses: planes whose prefetch began.
      read_bytes: from storage.
      low_bytes: of these, of low planes of nested experts.
      high_alone: visits that needed the high plane of a nested expert alone.
      waited_s: time for which layers waited.
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
