"""Intervals of ratios that were measured in pairs."""

from collections.abc import Sequence

import numpy as np

_DRAWS = 2000


def median_ratio_interval(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """The middle 95 % of the ratio of medians, `theirs` to `ours`, over runs drawn with replacement, the same
    ones of both (paired bootstrap).

    Args:
      ours: a figure of each run.
      theirs: of the same runs.
    """
    drawn = np.random.default_rng(0).integers(0, len(ours), (_DRAWS, len(ours)))
    medians = [np.median(np.asarray(each)[drawn], axis=1) for each in (ours, theirs)]
    low, high = np.percentile(medians[1] / medians[0], (2.5, 97.5))
    return float(low), float(high)
