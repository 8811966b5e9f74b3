"""Computes confidence intervals of shares by the cluster bootstrap.

A trace asks the same question for several apps, whose answers depend on each other: so questions are
resampled, each with all of its requests (Davison and Hinkley, Bootstrap Methods and their Application,
section 3.8). Two systems are compared request by request, which cancels how hard the questions are.
"""

import numpy as np


def interval(
    values: np.ndarray, questions: np.ndarray, *, seed: int = 0, draws: int = 2000
) -> tuple[float, float]:
    """The middle 95 % of means over questions drawn with replacement: a confidence interval of the mean.

    With few questions it is too narrow, and with one it is a point.

    Args:
      values: `[M]` bool or float, of each request; for two systems the difference of theirs.
      questions: `[M]` int, which question each request asks.
      seed: of the draws.
      draws: how many.
    """
    _, clusters = np.unique(questions, return_inverse=True)
    sums = np.bincount(clusters, weights=np.asarray(values, np.float64))
    counts = np.bincount(clusters)
    drawn = np.random.default_rng(seed).integers(0, len(counts), (draws, len(counts)))
    low, high = np.percentile(sums[drawn].sum(1) / counts[drawn].sum(1), (2.5, 97.5))
    return float(low), float(high)


def said(values: np.ndarray, questions: np.ndarray) -> str:
    """An interval, for notes."""
    low, high = interval(values, questions)
    return f"95 % in [{low:.1%}, {high:.1%}]"


def lead(ours: np.ndarray, theirs: np.ndarray, questions: np.ndarray) -> str:
    """How far ours is ahead on the same requests, for notes."""
    ahead = np.asarray(ours, np.float64) - np.asarray(theirs, np.float64)
    low, high = (f"{100 * each:+.1f}" for each in interval(ahead, questions))
    return f"ours ahead by {100 * ahead.mean():+.1f} points, paired 95 % in [{low}, {high}]"
