"""Allocates bits to chunks by density: chunks that later tokens hardly attend to get fewer (LLMS, section
3.2).

The density of a chunk is the attention that its tokens got, averaged over the queries of all heads and layers
that could attend to them (equation 1): mass divided by sightings, both summed over calls. For a given ratio
of bytes of all chunks of a context, two density thresholds divide chunks into 8, 4 and 2 bits such that the
most attended information is kept (equations 2 and 3).
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.kv.codecs import WIDTHS

# Bits -> bytes relative to 8 bits.
RATIOS: Mapping[int, float] = MappingProxyType({8: 1.0, 4: 0.5, 2: 0.25})
# Bits -> share of a value's variance that quantization keeps: the error of b bits is uniform over a step, so
# its variance falls with the square of the number of levels.
KEPT: Mapping[int, float] = MappingProxyType({bits: 1 - 1 / (2**bits - 1) ** 2 for bits in WIDTHS})


def chunk_mass(mass: np.ndarray, count: int, chunk_tokens: int) -> np.ndarray:
    """The attention mass of the first `count` chunks, `[N]` float64, from that of positions (`KVCache.mass`,
    `[>= N·C]`)."""
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
    """How many (query, token) pairs each chunk has, over heads and layers: the greatest mass that it can get.

    Args:
      first: position of the first query.
      length: position of the last query, plus one.
      count: number of chunks, from position 0 on (N).
      chunk_tokens: tokens of a chunk (C).
      heads: per layer, query heads.
      windows: per layer, how many positions a query attends to at most, its own included; 0 for all.

    Returns:
      `[N]` float64.
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
    """Bits of each chunk that keep the most information under an average ratio.

    Maximises `sum(density·kept[bits])` subject to `mean(RATIOS[bits]) <= ratio`, over all pairs of
    thresholds. The result is exact, and takes the time of a sort.

    Args:
      density: `[N]` of the chunks, oldest first.
      ratio: bytes of all chunks relative to 8 bits, between 0.25 and 1.
      newest: this many of the last chunks stay at 8 bits, as far as the ratio allows: too few queries have
        attended to them to estimate their density.
      kept: bits -> share of information kept.
      most: `[N]`, the most bits that each chunk may have; bytes that this saves go to the other chunks, the
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
        raise ConfigError("densities must be a one-dimensional array of finite numbers")
    count = len(density)
    # A chunk of 8, 4 or 2 bits costs 4, 2 or 1 quarters. The epsilon guards against sums just below an
    # integer.
    quarters = int(np.floor(4 * ratio * count + 1e-9))
    newest = min(newest, count)
    age = np.arange(count)[::-1]
    # The newest chunks first, then by density, of equals the newer one.
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
    """Limits bits to `most`, and spends the saved quarters on the other chunks in `order`."""
    bits = np.minimum(bits, most)
    left = quarters - int(sum(4 * RATIOS[int(each)] for each in bits))
    for chunk in order:
        for wider in sorted(RATIOS, reverse=True):
            costs = int(4 * (RATIOS[wider] - RATIOS[int(bits[chunk])]))
            if 0 < costs <= left and wider <= most[chunk]:
                bits[chunk], left = wider, left - costs
                break
    return bits
