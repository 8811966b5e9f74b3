"""Computes 95 % intervals of what a model scores on a sample of questions or texts.

Shares of right answers have Wilson's interval (Wilson 1927; also holds for few questions and shares near 0
or 1), other means the bootstrap's. Tokens of a text depend on each other: blocks of consecutive tokens are
resampled (Davison and Hinkley, Bootstrap Methods and their Application, section 8.2.3).
"""

from collections.abc import Callable

import numpy as np

Interval = tuple[float, float]
# Computes, from `[draws, N]` indices of a sample drawn with replacement, a value `[draws]` of each draw.
Statistic = Callable[[np.ndarray], np.ndarray]

DRAWS = 2000
# The normal distribution's quantile that leaves 2.5 % on either side.
_Z = 1.959964
# Tokens of a text that are resampled together.
BLOCK_TOKENS = 64


def bootstrap(count: int, statistic: Statistic, *, draws: int = DRAWS) -> Interval:
    """The middle 95 % of a statistic of `count` things drawn with replacement."""
    drawn = np.random.default_rng(0).integers(0, count, (draws, count))
    low, high = np.percentile(statistic(drawn), (2.5, 97.5))
    return float(low), float(high)


def mean_interval(values: np.ndarray) -> Interval:
    """The interval of a mean: Wilson's if every value is 0 or 1.

    Args:
      values: `[N]`, one per question, at least one.
    """
    values = np.asarray(values, np.float64)
    if not np.isin(values, (0, 1)).all():
        return bootstrap(len(values), lambda drawn: values[drawn].mean(axis=1))
    share, weight = values.mean(), _Z**2 / len(values)
    middle = share + weight / 2
    half = _Z * np.sqrt(share * (1 - share) / len(values) + weight / (4 * len(values)))
    # Within [0, 1] but for rounding.
    low, high = np.clip(((middle - half) / (1 + weight), (middle + half) / (1 + weight)), 0, 1)
    return float(low), float(high)


def perplexity_interval(losses: np.ndarray) -> Interval:
    """The interval of exp of the mean loss of tokens.

    Args:
      losses: `[T]`, negative log-likelihood of each token of a text, in order, at least one.
    """
    starts = np.arange(0, len(losses), BLOCK_TOKENS)
    sums, counts = np.add.reduceat(losses, starts), np.diff(np.append(starts, len(losses)))
    return bootstrap(len(sums), lambda drawn: np.exp(sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1)))
