"""Divides missing chunks into those to read and those to recompute, with minimum delay (LLMS, section 3.3).

A context is restored layer by layer: while tokens of one layer are recomputed, chunks of the next layer are
read. Recomputing takes the same time for chunks of any bits, a read takes longer the more bits they have,
so the chunks with most bits are recomputed. Their number follows from linear models of both delays
(equation 4). Every number that a bucket supports is tried.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from jaxllm.errors import ConfigError

# In place of bits: the chunk is not stored anywhere and must be recomputed.
LOST = -1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Delay:
    """A delay as a linear function of an amount."""

    fixed_ms: float
    per_unit_ms: float

    def __post_init__(self) -> None:
        if not all(0 <= each < float("inf") for each in (self.fixed_ms, self.per_unit_ms)):
            raise ConfigError(f"a delay must be finite and not negative, got {self}")

    @classmethod
    def fit(cls, amounts: Sequence[float], times_ms: Sequence[float]) -> "Delay":
        """Least squares fit of measured times, with neither coefficient below zero.

        Raises:
          ConfigError: fewer than two different amounts were measured.
        """
        x, y = np.asarray(amounts, np.float64), np.asarray(times_ms, np.float64)
        if len(set(amounts)) < 2:
            raise ConfigError("a delay needs times of two different amounts at least")
        slope = max(0.0, float(np.cov(x, y, bias=True)[0, 1] / np.var(x)))
        fixed = float(y.mean() - slope * x.mean())
        if fixed < 0:
            # The fit through the origin.
            fixed, slope = 0.0, max(0.0, float(x @ y / (x @ x)))
        return cls(fixed_ms=fixed, per_unit_ms=slope)

    def ms(self, amount: float) -> float:
        """The delay of an amount; 0 for an amount of 0."""
        return self.fixed_ms + self.per_unit_ms * amount if amount else 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restore:
    """The plan of a restore.

    Attributes:
      read: numbers of the chunks to read, ascending.
      computed: numbers of the chunks to recompute, ascending.
      bucket: number of chunks of the bucket that recomputes them, at least as many as `computed`.
      expected_ms: expected time of all layers.
    """

    read: tuple[int, ...]
    computed: tuple[int, ...]
    bucket: int
    expected_ms: float


def plan_restore(
    missing: Mapping[int, int],
    blob_bytes: Mapping[int, int],
    *,
    read_delay: Delay,
    compute_delay: Delay,
    buckets: Sequence[int],
    layers: int,
    exact: bool = False,
    beside_ms: float = 0.0,
) -> Restore:
    """Divides missing chunks for the earliest end of the restore.

    Args:
      missing: chunk number -> bits, or `LOST`; at most as many are lost as the largest bucket recomputes.
      blob_bytes: bits -> bytes of one layer of a chunk.
      read_delay: delay of a read of one layer, by bytes.
      compute_delay: delay of recomputing one layer, by chunks of the bucket, or if `exact` by chunks.
      buckets: numbers of chunks with buckets, ascending; empty if none can be recomputed.
      layers: number of layers of the model (L).
      exact: whether a bucket only computes the given chunks, else always its full number.
      beside_ms: additional time per layer during the restore, as for a prompt.
    """
    must, most = sum(bits == LOST for bits in missing.values()), max(buckets, default=0)
    sizes = {chunk: blob_bytes.get(bits, 0) for chunk, bits in missing.items()}
    # In the order of recomputing: lost chunks, then those of most bytes; among equals the earliest, whose
    # tokens attend to the fewest positions.
    order = sorted(missing, key=lambda chunk: (missing[chunk] != LOST, -sizes[chunk], chunk))
    # left[n]: bytes to read if the first n chunks of `order` are recomputed.
    left = [sum(sizes.values()) - done for done in itertools.accumulate((sizes[c] for c in order), initial=0)]
    # Number of chunks to recompute -> smallest bucket for it.
    sizes_of = sorted({0, *buckets}, reverse=True)
    bucket_of = {min(bucket, len(order)): bucket for bucket in sizes_of if bucket >= must}
    if exact:
        numbers = range(must, min(most, len(order)) + 1)
        bucket_of = {number: min(each for each in sizes_of if each >= number) for number in numbers}

    def took(count: int) -> float:
        computed = count if exact else bucket_of[count]
        read_ms, compute_ms = read_delay.ms(left[count]), compute_delay.ms(computed) + beside_ms
        # The first read and the last recompute overlap with nothing.
        return read_ms + (layers - 1) * max(read_ms, compute_ms) + compute_ms

    best = min(sorted(bucket_of), key=took)
    return Restore(
        read=tuple(sorted(order[best:])),
        computed=tuple(sorted(order[:best])),
        bucket=bucket_of[best],
        expected_ms=took(best),
    )
