"""Computes confidence intervals of answers in time, by the bootstrap over blocks of calls.

Calls that come soon after each other wait for each other, so that blocks of consecutive ones are resampled
(Davison and Hinkley, Bootstrap Methods and their Application, section 8.2.3). Two systems were sent the same
calls: they are compared block by block, which cancels how many calls come at once.
"""

from collections.abc import Sequence

import numpy as np

from benchmarks.service.outcomes import Window

BLOCK_CALLS = 5
# With fewer blocks intervals are too narrow to be said.
LEAST_BLOCKS = 10
_DRAWS = 4000


def said(windows: Sequence[Window]) -> str | None:
    """The middle 95 % of the answers in time per second of one system, for notes; None for too few calls.

    Args:
      windows: of repeated loads.
    """
    sums, seconds = _blocks(windows), sum(each.seconds for each in windows)
    if len(sums) < LEAST_BLOCKS:
        return None
    low, high = np.percentile(_resampled(sums), (2.5, 97.5)) / seconds
    return f"95 % in [{low:.3g}, {high:.3g}] of {_calls(windows)} calls"


def lead(ours: Sequence[Window], theirs: Sequence[Window]) -> str | None:
    """How many times as many answers in time ours gives to the same calls, for notes; None for too few calls.

    Args:
      ours: windows of repeated loads.
      theirs: of the same calls.
    """
    mine, other = _blocks(ours), _blocks(theirs)
    if len(mine) < LEAST_BLOCKS or len(mine) != len(other):
        return None
    # A draw may have no answer in time.
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.nan_to_num(_resampled(mine) / _resampled(other), nan=1.0, posinf=np.inf)
    low, high = np.percentile(ratios, (2.5, 97.5), method="nearest")
    return f"ours paired 95 % in [{low:.2f}x, {high:.2f}x]"


def _calls(windows: Sequence[Window]) -> int:
    return sum(len(each.counted) for each in windows)


def _blocks(windows: Sequence[Window]) -> np.ndarray:
    """`[blocks]` answers in time of each block of consecutive calls; no block is of two windows."""
    sums = []
    for window in windows:
        met = [each.met for each in sorted(window.counted, key=lambda each: each.due_s)]
        sums += [sum(met[place : place + BLOCK_CALLS]) for place in range(0, len(met), BLOCK_CALLS)]
    return np.array(sums, np.float64)


def _resampled(sums: np.ndarray) -> np.ndarray:
    """`[draws]` sums over blocks drawn with replacement, the same ones for as many blocks."""
    drawn = np.random.default_rng(0).integers(0, len(sums), (_DRAWS, len(sums)))
    return sums[drawn].sum(1)
