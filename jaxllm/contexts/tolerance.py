"""Allocates bits to chunks by density: chunks that later tokens hardly attend to get fewer (LLMS, section
3.2).

The density of a chunk is the attention mass of its tokens, averaged over the queries of all heads and
layers that could attend to them (equation 1): mass divided by sightings, both summed over calls. For given
bytes of all chunks of a context, scales included, two density thresholds divide chunks into 8, 4 and 2 bits
such that the most attended information is retained (equations 2 and 3).

Also chooses the codec of a model's chunks by measured errors, and computes what each width retains of its
attention.

Quantized keys and values change the output of attention. Its relative error `e = |out' - out|² / |out|²` is
measured for each layer, keys and values separately, by codec, chunk length and width. The effect of such an
error differs between layers: their sensitivity is the divergence of the model's predictions that an error
of 1 would cause, as measured with 2 bits in one layer. Errors weighted by sensitivities are the cost of a
width; the codec with the minimum cost in equal bytes, scales included, is chosen.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from jaxllm.contexts.codecs import WIDTHS, ChunkFormat, ChunkShape
from jaxllm.errors import ConfigError

# Bits -> share of a value's variance that quantization retains: the error of b bits is uniform over a step,
# so its variance falls with the square of the number of levels. For models without a calibration, which
# measures it (see `jaxllm.contexts.tolerance`).
KEPT: Mapping[int, float] = MappingProxyType({bits: 1 - 1 / (2**bits - 1) ** 2 for bits in WIDTHS})
# The quantized parts, in the order of arrays.
PARTS = ("keys", "values")


@dataclasses.dataclass(frozen=True, order=True)
class Candidate:
    """Candidate for the storage of chunks.

    Attributes:
      chunk_tokens: tokens of a chunk (C), which share the scale of a channel.
    """

    codec: str
    chunk_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ContextCalibration:
    """Measurements of a model, and the choice.

    Attributes:
      chosen: the best storage of its chunks.
      errors: by candidate, relative errors of attention outputs `[L, 3, 2]` float32, per layer, width of
        `WIDTHS` and part of `PARTS`.
      sensitivity: `[L, 2]` float32, divergence (nats per token) of predictions per error, per layer and part.
    """

    chosen: Candidate
    errors: Mapping[Candidate, np.ndarray]
    sensitivity: np.ndarray

    def kept(self, codec: str, chunk_tokens: int) -> Mapping[int, float] | None:
        """Bits -> share of attention's information that chunks retain, for `tolerance.allocate`; None if this
        codec and chunk length were not measured."""
        errors = self.errors.get(Candidate(codec, chunk_tokens))
        return None if errors is None else kept_shares(errors, self.sensitivity)


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
    """Number of (query, token) pairs of each chunk, over heads and layers: its maximum attention mass.

    Args:
      first: position of the first query.
      length: position of the last query, plus one.
      count: number of chunks, from position 0 on (N).
      chunk_tokens: tokens of a chunk (C).
      heads: per layer, query heads.
      windows: per layer, maximum number of positions that a query attends to, including its own; 0 for all.

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
    """Allocates bits to chunks to retain the most information within a budget.

    Maximises `sum(density·kept[bits])` subject to `sum(sizes[bits]) <= budget_bytes`, over all pairs of
    thresholds. The result is exact, at the cost of a sort.

    Args:
      density: `[N]`, density of the chunks, oldest first.
      budget_bytes: size limit of all chunks.
      sizes: bits -> bytes of a chunk, scales included.
      newest: number of last chunks that count as the densest: too few queries have attended to them to
        estimate their density. No other chunk is wider, unless they are limited.
      kept: bits -> share of information retained, more for more bits.
      most: `[N]`, maximum bits of each chunk; bytes that this saves go to the other chunks, the densest
        first.

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
    if most is not None:
        bits = np.minimum(bits, most)
        unused = budget_bytes - sum(sizes[int(each)] for each in bits)
        for chunk in order:
            for wider in sorted(sizes, reverse=True):
                costs = sizes[wider] - sizes[int(bits[chunk])]
                if 0 < costs <= unused and wider <= most[chunk]:
                    bits[chunk], unused = wider, unused - costs
                    break
    return bits


def kept_shares(errors: np.ndarray, sensitivity: np.ndarray) -> Mapping[int, float]:
    """Bits -> 1 minus the cost of a width, relative to losing everything: errors of 1.

    Args:
      errors: `[L, 3, 2]` (see `ContextCalibration`).
      sensitivity: `[L, 2]`.
    """
    total = float(sensitivity.sum(dtype=np.float64))
    even = np.full(sensitivity.shape, 1 / sensitivity.size)
    # Shares of sensitivities, even if nothing matters.
    weights = even if total <= 0 else sensitivity.astype(np.float64) / total
    lost = np.minimum(1.0, np.einsum("lbp,lp->b", errors.astype(np.float64), weights))
    # Noise of the measurement must not make fewer bits look better.
    lost = np.maximum.accumulate(lost)
    return MappingProxyType({bits: float(1 - each) for bits, each in zip(WIDTHS, lost, strict=True)})


def choose(
    errors: Mapping[Candidate, np.ndarray],
    sensitivity: np.ndarray,
    shapes: Sequence[ChunkShape],
    ratio: float,
) -> tuple[Candidate, dict[Candidate, float]]:
    """The candidate with the minimum cost in given bytes.

    Args:
      errors, sensitivity: see `ContextCalibration`.
      shapes: shape of a chunk of any length, for each layer.
      ratio: bytes, scales included (see `ChunkShape.reference_bytes`).

    Returns:
      The candidate, and by candidate the lost share at these bytes, with the best mix of widths; infinite
      if even 2 bits need more.

    Raises:
      ConfigError: all candidates need more.
    """
    lost = {}
    for candidate, own in errors.items():
        sized = [dataclasses.replace(shape, tokens=candidate.chunk_tokens) for shape in shapes]
        form = ChunkFormat.named(candidate.codec, candidate.chunk_tokens)
        reference = sum(shape.reference_bytes for shape in sized)
        bytes_of = {bits: sum(form.sizes(shape)[bits] for shape in sized) / reference for bits in WIDTHS}
        losses = {bits: 1 - share for bits, share in kept_shares(own, sensitivity).items()}
        found = [losses[bits] for bits in WIDTHS if bytes_of[bits] <= ratio]
        # Two widths, each for a share of the chunks.
        for wide, narrow in itertools.product(WIDTHS, WIDTHS):
            if bytes_of[narrow] < ratio < bytes_of[wide]:
                share = (ratio - bytes_of[narrow]) / (bytes_of[wide] - bytes_of[narrow])
                found.append(share * losses[wide] + (1 - share) * losses[narrow])
        lost[candidate] = min(found, default=float("inf"))
    best = min(lost, key=lambda each: lost[each])
    if not np.isfinite(lost[best]):
        raise ConfigError(
            f"a ratio of {ratio} is less than all measured codecs take at {min(WIDTHS)} bits with their "
            "scales; raise it, or measure longer chunks, whose scales are shared by more tokens"
        )
    return best, lost
