"""Which chunks bear to be stored at few bits: those that later tokens hardly look at (LLMS, section 3.2).

A token's density is the attention that it got, on average over the rows that could see it, over heads and
layers (equation 1); a chunk's is the mean of its tokens'. Under a ratio of bytes for all chunks of a context,
two thresholds of density divide them into those at 8, at 4 and at 2 bits so that most of the attended
information is kept (equations 2 and 3).
"""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.kv.codecs import WIDTHS

# Of 8 bits.
RATIOS: Mapping[int, float] = MappingProxyType({8: 1.0, 4: 0.5, 2: 0.25})
# The share of a value's variance that is left by levels over its range: the error of b bits is uniform, its
# variance falls with the square of their number.
KEPT: Mapping[int, float] = MappingProxyType({bits: 1 - 1 / (2**bits - 1) ** 2 for bits in WIDTHS})


def token_density(mass: np.ndarray, length: int, *, heads: int, window: int = 0) -> np.ndarray:
    """Density of each token of a context.

    Args:
      mass: `[>= length]` float, the attention weights that each position got, summed over rows, query heads
        and layers.
      length: tokens of the context, each of which has been a row.
      heads: query heads of all layers together.
      window: how many positions a row sees at most, itself included; 0 for all.

    Returns:
      `[length]` float64 in [0, 1].
    """
    rows = np.arange(length, 0, -1)
    if window:
        rows = np.minimum(rows, window)
    return np.asarray(mass[:length], np.float64) / (rows * heads)


def chunk_density(density: np.ndarray, chunk_tokens: int) -> np.ndarray:
    """Mean density of each whole chunk `[N]` of tokens' `[length]`; tokens behind the last whole one do not
    count."""
    whole = len(density) // chunk_tokens
    return density[: whole * chunk_tokens].reshape(whole, chunk_tokens).mean(1)


def allocate(
    density: np.ndarray,
    ratio: float,
    *,
    newest: int = 1,
    kept: Mapping[int, float] = KEPT,
) -> np.ndarray:
    """Bits of each chunk, so that most information is kept under an average ratio.

    Maximises `sum(density·kept[bits])` subject to `mean(RATIOS[bits]) <= ratio`, over all pairs of
    thresholds: exactly, in the time of sorting.

    Args:
      density: `[N]` of the chunks, oldest first.
      ratio: bytes of all chunks relative to 8 bits, between 0.25 and 1.
      newest: so many of the last chunks stay at 8 bits, as far as the ratio allows: what was said last has
        not been seen by enough rows to be judged.
      kept: of information, by bits.

    Returns:
      `[N]` int, each 8, 4 or 2.

    Raises:
      ConfigError: the ratio is out of range, or a density is not a finite number.
    """
    if not RATIOS[2] <= ratio <= 1:
        raise ConfigError(f"chunks take between {RATIOS[2]} and 1 of the bytes of 8 bits, got {ratio!r}")
    density = np.asarray(density, np.float64)
    if density.ndim != 1 or not np.all(np.isfinite(density)):
        raise ConfigError("densities must be a row of finite numbers")
    count = len(density)
    # In quarters of 8 bits a chunk costs 4, 2 or 1; rounded against sums that come out a hair too small.
    quarters = int(np.floor(4 * ratio * count + 1e-9))
    newest = min(newest, count)
    age = np.arange(count)[::-1]
    # The newest first, then the densest, of equals the newer.
    order = np.lexsort((age, -density, age >= newest))
    worth = np.concatenate([[0.0], np.cumsum(density[order])])
    wide = np.arange(count + 1)
    wide = wide[4 * wide + (count - wide) <= quarters]
    middle = np.minimum(count - wide, quarters - 4 * wide - (count - wide))
    information = (
        kept[8] * worth[wide]
        + kept[4] * (worth[wide + middle] - worth[wide])
        + kept[2] * (worth[count] - worth[wide + middle])
    )
    allowed = wide >= min(newest, wide[-1])
    chosen = int(np.argmax(np.where(allowed, information, -np.inf)))
    bits = np.full(count, 2)
    bits[order[: wide[chosen] + middle[chosen]]] = 4
    bits[order[: wide[chosen]]] = 8
    return bits
