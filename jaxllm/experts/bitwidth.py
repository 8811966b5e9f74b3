"""Chooses the bit width of each expert (EdgeMoE, arXiv 2308.14352, section 3.2).

Experts differ in the model's loss when they are quantized coarsely. The minimum uniform bit width within
the allowed loss is the upper bound, the next lower one the lower bound. Experts are then lowered from the
upper to the lower bound, the most robust first, until the allowed loss is reached.

The caller measures losses; this module decides which bit widths to try, and in which order.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.quant import BITS, Bits

# Bitwidths of all experts `[L_sparse, E]` int -> measured loss.
LossOf = Callable[[np.ndarray], float]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class WidthPlan:
    """The bit widths of a model's experts.

    Attributes:
      bits: `[L_sparse, E]` int8.
      lower, upper: the bounds; equal if all experts may have the minimum bit width.
      lowered: number of experts with the lower one.
      loss: loss measured with these bit widths.
    """

    bits: np.ndarray
    lower: Bits
    upper: Bits
    lowered: int
    loss: float


def lowering_order(importance: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """The order in which experts are lowered: `[L_sparse·E]` int, flat indices.

    Experts with the smallest loss per saved load come first. All experts of a model have one size, so the
    saved loads are proportional to the share of visits.

    Args:
      importance: `[L_sparse, E]`, the loss if only this expert has the minimum bit width.
      shares: `[L_sparse, E]`, share of its layer's visits.
    """
    # Losses below zero are measurement noise. Experts without visits save nothing, and lose nothing.
    cost = np.maximum(importance, 0.0) / np.maximum(shares, 1e-9)
    return np.lexsort((-shares.reshape(-1), cost.reshape(-1)))


def search_widths(
    importance: np.ndarray, shares: np.ndarray, loss_of: LossOf, *, most_loss: float
) -> WidthPlan:
    """Bitwidths with as many experts at the lower bound as the allowed loss permits.

    The loss is assumed to grow with their number, which is found by bisection in some ten measurements.

    Args:
      importance, shares: see `lowering_order`.
      loss_of: measures a loss.
      most_loss: the allowed loss, in the unit of `loss_of`.

    Raises:
      ConfigError: `most_loss` is not positive, or every uniform bit width loses more; the message has the
        minimum loss.
    """
    if not 0 < most_loss < float("inf"):
        raise ConfigError(f"the loss that may be lost must be positive, got {most_loss}")

    def all_at(bits: Bits) -> np.ndarray:
        return np.full(importance.shape, bits, np.int8)

    losses: dict[Bits, float] = {bits: loss_of(all_at(bits)) for bits in BITS}
    fitting: list[Bits] = [bits for bits in BITS if losses[bits] <= most_loss]
    if not fitting:
        best = min(losses, key=lambda bits: losses[bits])
        raise ConfigError(
            f"no widths lose at most {most_loss:.2%}: the least, by {best} bits for all experts, is "
            f"{losses[best]:.2%}; allow that much"
        )
    # The upper bound and the next lower width, if there is one.
    upper = fitting[0]
    lower: Bits = BITS[max(0, BITS.index(upper) - 1)]
    if lower == upper:
        return WidthPlan(
            bits=all_at(lower), lower=lower, upper=upper, lowered=importance.size, loss=losses[lower]
        )
    order = lowering_order(importance, shares)

    def with_lowered(count: int) -> np.ndarray:
        bits = all_at(upper).reshape(-1)
        bits[order[:count]] = lower
        return bits.reshape(importance.shape)

    # Bisection: lowering `fits` experts is within the loss, lowering `exceeds` is not known to be.
    fits, exceeds, loss = 0, importance.size, losses[upper]
    while exceeds - fits > 1:
        middle = (fits + exceeds) // 2
        lost = loss_of(with_lowered(middle))
        if lost <= most_loss:
            fits, loss = middle, lost
        else:
            exceeds = middle
    return WidthPlan(bits=with_lowered(fits), lower=lower, upper=upper, lowered=fits, loss=loss)
