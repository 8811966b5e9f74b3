"""Which chunks bear to be stored at few bits: those that later tokens hardly look at (LLMS, section 3.2).

A chunk's density is the attention that its tokens got, on average over the queries of all heads and layers
that could see them (equation 1): mass by sightings, both of which add up over calls. Under a ratio of bytes
for all chunks of a context, two thresholds of density divide them into those at 8, at 4 and at 2 bits so that
most of the attended information is kept (equations 2 and 3).
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.kv.codecs import WIDTHS

# Of 8 bits.
RATIOS: Mapping[int, float] = MappingProxyType({8: 1.0, 4: 0.5, 2: 0.25})
# The share of a value's variance that is left by levels over its range: the error of b bits is uniform, its
# variance falls with the square of their number.
KEPT: Mapping[int, float] = MappingProxyType({bits: 1 - 1 / (2**bits - 1) ** 2 for bits in WIDTHS})


def chunk_mass(mass: np.ndarray, count: int, chunk_tokens: int) -> np.ndarray:
    """The attention that each of the first `count` chunks got, `[N]` float64, from that of each position
    (`KVCache.mass`, `[>= N·C]`)."""
    whole = np.asarray(mass[: count * chunk_tokens], np.float64)
    return whole.reshape(count, chunk_tokens).sum(1)


def sightings(
    first: int,
    length: int,
    count: int,
    chunk_tokens: int,
    *,
    heads: Sequence[int],
    windows: Sequence[int],
) -> np.ndarray:
    """How often tokens of each chunk could be seen, `[N]` float64: the mass that they would get if nobody
    attended to anything else.

    Args:
      first: the position of the first token that was a query.
      length: one more than that of the last.
      count: of the chunks, from position 0 on (N).
      chunk_tokens: of a chunk.
      heads: query heads of each layer.
      windows: of each layer, how many positions a query sees at most, itself included; 0 for all.
    """
    token = np.arange(count * chunk_tokens)
    begin = np.maximum(first, token)
    seen = np.zeros(len(token))
    for number, window in zip(heads, windows, strict=True):
        end = np.minimum(length, token + window) if window else length
        seen += number * np.maximum(0, end - begin)
    return seen.reshape(count, chunk_tokens).sum(1)


def allocate(
    density: np.ndarray,
    ratio: float,
    *,
    newest: int = 1,
    kept: Mapping[int, float] = KEPT,
    most: np.ndarray | None = None,
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
      most: `[N]`, bits that each chunk may have at most: what they leave of its share goes to others, the
        densest first.

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
    return bits if most is None else _under(bits, np.asarray(most), order, quarters)


def _under(bits: np.ndarray, most: np.ndarray, order: np.ndarray, quarters: int) -> np.ndarray:
    """Bits under those that chunks may have at most, and others raised by what that leaves, in an order."""
    bits = np.minimum(bits, most)
    left = quarters - int(sum(4 * RATIOS[int(each)] for each in bits))
    for chunk in order:
        for wider in sorted(RATIOS, reverse=True):
            costs = int(4 * (RATIOS[wider] - RATIOS[int(bits[chunk])]))
            if 0 < costs <= left and wider <= most[chunk]:
                bits[chunk], left = wider, left - costs
                break
    return bits
