"""Which width each expert deserves (EdgeMoE, arXiv 2308.14352, section 3.2).

Experts differ in how much a model loses when one of them is stored coarsely. Of the uniform widths the
narrowest that loses little enough is the upper bound, the next narrower one the lower bound; experts then go
from the upper to the lower bound, the most robust first, until together they lose as much as may be lost.
The loss of some widths is the caller's to measure; what is tried, and in which order, is decided here.
"""

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.quant import BITS, Bits

# What a loss is measured of: widths `[L_sparse, E]` int, of all experts.
LossOf = Callable[[np.ndarray], float]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class WidthPlan:
    """The widths of a model's experts.

    Attributes:
      bits: `[L_sparse, E]` int8.
      lower, upper: the bounds; equal where all experts may have the narrowest width.
      lowered: how many experts have the lower one.
      loss: measured, with these widths.
    """

    bits: np.ndarray
    lower: Bits
    upper: Bits
    lowered: int
    loss: float


def width_bounds(losses: Mapping[Bits, float], most_loss: float) -> tuple[Bits, Bits]:
    """The lower and the upper bound of widths.

    Args:
      losses: of every uniform width.
      most_loss: that may be lost.

    Raises:
      ConfigError: even the widest loses more; the message says how much.
    """
    fitting: list[Bits] = [bits for bits in BITS if losses[bits] <= most_loss]
    if not fitting:
        best = min(losses, key=lambda bits: losses[bits])
        raise ConfigError(
            f"no widths lose at most {most_loss:.2%}: the least, by {best} bits for all experts, is "
            f"{losses[best]:.2%}; allow that much"
        )
    upper = fitting[0]
    narrower: list[Bits] = [bits for bits in BITS if bits < upper]
    return (narrower[-1] if narrower else upper), upper


def lowering_order(importance: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """In which order experts are lowered: `[L_sparse·E]` int, flat indices.

    First those whose lowering costs least for the loading that it saves. All experts of a model are of one
    size, so what is saved is proportional to how often an expert is visited.

    Args:
      importance: `[L_sparse, E]`, the loss when an expert alone has the narrowest width.
      shares: `[L_sparse, E]`, how often it is visited, of all visits to its layer.
    """
    # A loss below zero is chance; an expert that is never visited saves nothing, and costs nothing.
    cost = np.maximum(importance, 0.0) / np.maximum(shares, 1e-9)
    return np.lexsort((-shares.reshape(-1), cost.reshape(-1)))


def search_widths(
    importance: np.ndarray, shares: np.ndarray, loss_of: LossOf, *, most_loss: float
) -> WidthPlan:
    """As many experts at the lower bound as the loss allows.

    The loss is taken to grow with their number, so that their number is found by halving: some ten
    measurements.

    Args:
      importance, shares: see `lowering_order`.
      loss_of: measures a loss.
      most_loss: that may be lost, as `loss_of` counts.

    Raises:
      ConfigError: it is not positive, or no widths lose so little.
    """
    if not 0 < most_loss < float("inf"):
        raise ConfigError(f"the loss that may be lost must be positive, got {most_loss}")

    def all_at(bits: Bits) -> np.ndarray:
        return np.full(importance.shape, bits, np.int8)

    losses: dict[Bits, float] = {bits: loss_of(all_at(bits)) for bits in BITS}
    lower, upper = width_bounds(losses, most_loss)
    if lower == upper:
        return WidthPlan(
            bits=all_at(lower), lower=lower, upper=upper, lowered=importance.size, loss=losses[lower]
        )
    order = lowering_order(importance, shares)

    def with_lowered(count: int) -> np.ndarray:
        bits = all_at(upper).reshape(-1)
        bits[order[:count]] = lower
        return bits.reshape(importance.shape)

    # So many keep within the loss, and so many do not.
    fits, exceeds, loss = 0, importance.size, losses[upper]
    while exceeds - fits > 1:
        middle = (fits + exceeds) // 2
        lost = loss_of(with_lowered(middle))
        if lost <= most_loss:
            fits, loss = middle, lost
        else:
            exceeds = middle
    return WidthPlan(bits=with_lowered(fits), lower=lower, upper=upper, lowered=fits, loss=loss)
