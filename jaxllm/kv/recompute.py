"""Which missing chunks to read and which to compute again, so that both end together (LLMS, section 3.3).

Layer by layer a context comes back: while one layer's recomputed tokens are worked on, the next layer's
chunks are read. Computing takes the same for a chunk of any width, reading takes longer the wider it is: so
the widest are computed. How many follows from linear models of both delays (equation 4); the numbers that
there are graphs for are few, and all are tried.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from jaxllm.errors import ConfigError

# Of a chunk that is stored nowhere: it must be computed.
LOST = -1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Delay:
    """Time as a linear function of an amount.

    Attributes:
      fixed_ms: of anything at all.
      per_unit_ms: of each unit more.
    """

    fixed_ms: float
    per_unit_ms: float

    def __post_init__(self) -> None:
        if not all(0 <= each < float("inf") for each in (self.fixed_ms, self.per_unit_ms)):
            raise ConfigError(f"a delay must be finite and not negative, got {self}")

    @classmethod
    def fit(cls, amounts: Sequence[float], times_ms: Sequence[float]) -> "Delay":
        """The least squares line through measured times, neither part of it below zero.

        Raises:
          ConfigError: fewer than two different amounts were measured.
        """
        x, y = np.asarray(amounts, np.float64), np.asarray(times_ms, np.float64)
        if len(set(amounts)) < 2:
            raise ConfigError("a delay needs times of two different amounts at least")
        slope = max(0.0, float(np.cov(x, y, bias=True)[0, 1] / np.var(x)))
        fixed = float(y.mean() - slope * x.mean())
        if fixed < 0:
            # Through the origin, then.
            fixed, slope = 0.0, max(0.0, float(x @ y / (x @ x)))
        return cls(fixed_ms=fixed, per_unit_ms=slope)

    def ms(self, amount: float) -> float:
        """Of an amount; nothing takes no time."""
        return self.fixed_ms + self.per_unit_ms * amount if amount else 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restore:
    """How a context's missing chunks come back.

    Attributes:
      read: numbers of chunks, ascending.
      computed: the others.
      bucket: the number of chunks that computing has a graph for, at least as many as are computed.
      expected_ms: of all layers.
    """

    read: tuple[int, ...]
    computed: tuple[int, ...]
    bucket: int
    expected_ms: float


def plan_restore(
    missing: Mapping[int, int],
    blob_bytes: Mapping[int, int],
    *,
    reading: Delay,
    computing: Delay,
    buckets: Sequence[int],
    layers: int,
) -> Restore:
    """Divides missing chunks so that the context is back the soonest.

    Args:
      missing: the width of each chunk by its number, or `LOST`.
      blob_bytes: of one layer of a chunk, by width.
      reading: of one layer, by bytes.
      computing: of one layer, by chunks; the time of the bucket counts.
      buckets: numbers of chunks that can be computed together, ascending; empty if none can.
      layers: of the model.

    Raises:
      ConfigError: more chunks are lost than can be computed.
    """
    must = sum(bits == LOST for bits in missing.values())
    most = max(buckets, default=0)
    if must > most:
        raise ConfigError(f"{must} chunks are lost, and at most {most} can be computed together")
    sizes = {chunk: blob_bytes.get(bits, 0) for chunk, bits in missing.items()}
    # Those that are worth computing first; of one width the earliest, whose tokens see least.
    order = sorted(missing, key=lambda chunk: (missing[chunk] != LOST, -sizes[chunk], chunk))
    # Bytes to read if the first n are computed.
    left = [sum(sizes.values()) - done for done in itertools.accumulate((sizes[c] for c in order), initial=0)]
    # The bucket of each number that may be computed: the smallest that holds it.
    bucket_of = {
        min(bucket, len(order)): bucket for bucket in sorted({0, *buckets}, reverse=True) if bucket >= must
    }

    def took(count: int) -> float:
        read_ms, compute_ms = reading.ms(left[count]), computing.ms(bucket_of[count])
        # The first layer's reading and the last one's computing have nothing beside them.
        return read_ms + (layers - 1) * max(read_ms, compute_ms) + compute_ms

    best = min(sorted(bucket_of), key=took)
    return Restore(
        read=tuple(sorted(order[best:])),
        computed=tuple(sorted(order[:best])),
        bucket=bucket_of[best],
        expected_ms=took(best),
    )
