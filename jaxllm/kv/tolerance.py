"""Allocates bits to chunks by density: chunks that later tokens hardly attend to get fewer (LLMS, section
3.2).

The density of a chunk is the attention that its tokens got, averaged over the queries of all heads and layers
that could attend to them (equation 1): mass divided by sightings, both summed over calls. For given bytes of
all chunks of a context, scales included, two density thresholds divide chunks into 8, 4 and 2 bits such that
the most attended information is kept (equations 2 and 3).
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.kv.codecs import WIDTHS

# Bits -> share of a value's variance that quantization keeps: the error of b bits is uniform over a step, so
# its variance falls with the square of the number of levels. For models without a calibration, which measures
# it (see `jaxllm.kv.calibration`).
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
    budget_bytes: int,
    *,
    sizes: Mapping[int, int],
    newest: int = 1,
    kept: Mapping[int, float] = KEPT,
    most: np.ndarray | None = None,
) -> np.ndarray:
    """Bits of each chunk that keep the most information in a budget.

    Maximises `sum(density·kept[bits])` subject to `sum(sizes[bits]) <= budget_bytes`, over all pairs of
    thresholds. The result is exact, and takes the time of a sort.

    Args:
      density: `[N]` of the chunks, oldest first.
      budget_bytes: of all chunks together.
      sizes: bits -> bytes of a chunk, scales included.
      newest: this many of the last chunks count as the densest: too few queries have attended to them to
        estimate their density. None is wider than they are, unless they may not be.
      kept: bits -> share of information kept, more for more bits.
      most: `[N]`, the most bits that each chunk may have; bytes that this saves go to the other chunks, the
        densest first.

    Returns:
      `[N]` int, each 8, 4 or 2.

    Raises:
      ConfigError: the budget is too small for 2 bits, or a density is not a finite number.
    """
    density = np.asarray(density, np.float64)
    if density.ndim != 1 or not np.all(np.isfinite(density)):
        raise ConfigError("densities must be a one-dimensional array of finite numbers")
    count = len(density)
    if budget_bytes < count * sizes[2]:
        raise ConfigError(
            f"{count} chunks take {count * sizes[2]:,} bytes at 2 bits, scales included, and may take "
            f"{budget_bytes:,}; raise the ratio"
        )
    newest = min(newest, count)
    age = np.arange(count)[::-1]
    # The newest chunks first, then by density, of equals the newer one.
    order = np.lexsort((age, -density, age >= newest))
    worth = np.concatenate([[0.0], np.cumsum(density[order])])
    wide = np.arange(count + 1)
    left = budget_bytes - sizes[8] * wide - sizes[2] * (count - wide)
    wide, left = wide[left >= 0], left[left >= 0]
    middle = np.minimum(count - wide, left // (sizes[4] - sizes[2]))
    information = (
        kept[8] * worth[wide]
        + kept[4] * (worth[wide + middle] - worth[wide])
        + kept[2] * (worth[count] - worth[wide + middle])
    )
    chosen = int(np.argmax(information))
    bits = np.full(count, 2)
    bits[order[: wide[chosen] + middle[chosen]]] = 4
    bits[order[: wide[chosen]]] = 8
    return bits if most is None else _under(bits, np.asarray(most), order, sizes, budget_bytes)


def _under(
    bits: np.ndarray, most: np.ndarray, order: np.ndarray, sizes: Mapping[int, int], budget_bytes: int
) -> np.ndarray:
    """Limits bits to `most`, and spends the saved bytes on the other chunks in `order`."""
    bits = np.minimum(bits, most)
    left = budget_bytes - sum(sizes[int(each)] for each in bits)
    for chunk in order:
        for wider in sorted(sizes, reverse=True):
            costs = sizes[wider] - sizes[int(bits[chunk])]
            if 0 < costs <= left and wider <= most[chunk]:
                bits[chunk], left = wider, left - costs
                break
    return bits
