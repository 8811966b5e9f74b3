"""Chooses the codec of a model's chunks by measured errors, and says what each width keeps of its attention.

Quantized keys and values change the output of attention. Its relative error `e = |out' - out|² / |out|²` is
measured for each layer, keys and values apart, by codec, length of chunks and width. How much such an error
matters differs between layers: their sensitivity is the divergence of the model's predictions that an error
of 1 would cause, as measured with 2 bits in one layer. Errors weighted by sensitivities are what a width
costs; of the codecs the one is chosen that costs least in equal bytes, scales included.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.kv.codecs import WIDTHS, ChunkFormat, ChunkShape

# What is quantized, in the order of arrays.
PARTS = ("keys", "values")


@dataclasses.dataclass(frozen=True, order=True)
class Candidate:
    """How chunks may be stored.

    Attributes:
      codec: its name.
      chunk_tokens: tokens of a chunk (C), which share the scale of a channel.
    """

    codec: str
    chunk_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ContextCalibration:
    """What was measured of a model, and the choice.

    Attributes:
      chosen: how its chunks are best stored.
      errors: by candidate, relative errors of attention outputs `[L, 3, 2]` float32, per layer, width of
        `WIDTHS` and part of `PARTS`.
      sensitivity: `[L, 2]` float32, divergence (nats per token) of predictions per error, per layer and part.
    """

    chosen: Candidate
    errors: Mapping[Candidate, np.ndarray]
    sensitivity: np.ndarray

    def kept(self, codec: str, chunk_tokens: int) -> Mapping[int, float] | None:
        """Bits -> share of what attention gives that chunks keep, for `tolerance.allocate`; None if this
        codec and length of chunks were not measured."""
        errors = self.errors.get(Candidate(codec, chunk_tokens))
        return None if errors is None else kept_shares(errors, self.sensitivity)


def kept_shares(errors: np.ndarray, sensitivity: np.ndarray) -> Mapping[int, float]:
    """Bits -> 1 less the cost of a width, relative to that of losing all: errors of 1.

    Args:
      errors: `[L, 3, 2]` (see `ContextCalibration`).
      sensitivity: `[L, 2]`.
    """
    weights = _weights(sensitivity)
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
    """The candidate that costs least in given bytes.

    Args:
      errors, sensitivity: see `ContextCalibration`.
      shapes: of a chunk of any length, of each layer.
      ratio: bytes, scales included (see `ChunkShape.reference_bytes`).

    Returns:
      The candidate, and by candidate the share that is lost at these bytes, with the best mix of widths;
      infinite where even 2 bits take more.

    Raises:
      ConfigError: all candidates take more.
    """
    lost = {each: _lost_at(own, each, sensitivity, shapes, ratio) for each, own in errors.items()}
    best = min(lost, key=lambda each: lost[each])
    if not np.isfinite(lost[best]):
        raise ConfigError(
            f"a ratio of {ratio} is less than all measured codecs take at {min(WIDTHS)} bits with their "
            "scales; raise it, or measure longer chunks, whose scales are shared by more tokens"
        )
    return best, lost


def _lost_at(
    errors: np.ndarray,
    candidate: Candidate,
    sensitivity: np.ndarray,
    shapes: Sequence[ChunkShape],
    ratio: float,
) -> float:
    """The least share lost by two widths, each of a share of the chunks, at most at the ratio."""
    own = [dataclasses.replace(shape, tokens=candidate.chunk_tokens) for shape in shapes]
    form = ChunkFormat.named(candidate.codec, candidate.chunk_tokens)
    reference = sum(shape.reference_bytes for shape in own)
    bytes_of = {bits: sum(form.sizes(shape)[bits] for shape in own) / reference for bits in WIDTHS}
    lost = {bits: 1 - share for bits, share in kept_shares(errors, sensitivity).items()}
    found = [lost[bits] for bits in WIDTHS if bytes_of[bits] <= ratio]
    for wide in WIDTHS:
        for narrow in WIDTHS:
            if bytes_of[narrow] < ratio < bytes_of[wide]:
                share = (ratio - bytes_of[narrow]) / (bytes_of[wide] - bytes_of[narrow])
                found.append(share * lost[wide] + (1 - share) * lost[narrow])
    return min(found, default=float("inf"))


def _weights(sensitivity: np.ndarray) -> np.ndarray:
    """Shares of sensitivities, even if nothing matters."""
    total = float(sensitivity.sum(dtype=np.float64))
    if total <= 0:
        return np.full(sensitivity.shape, 1 / sensitivity.size)
    return sensitivity.astype(np.float64) / total
