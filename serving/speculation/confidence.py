"""Computes confidences from a drafter's logits: at a temperature, calibrated by acceptance."""

from collections.abc import Sequence

from jaxllm.speculation.tree import Calibration, TokenTree, outcomes

# Temperatures that round to the same multiple of this share counts.
_APART = 0.25


def confidence_temperature(temperature: float, greedy: float) -> float:
    """The temperature of a drafter's probabilities, before calibration.

    Args:
      temperature: temperature of the target's sampler.
      greedy: temperature of probabilities for a greedy target: 1 leaves them unchanged, for any sampler;
        less for a drafter that is underconfident because it is nearly the target.
    """
    return 1.0 if greedy == 1.0 else max(temperature, greedy)


class Confidence:
    """Calibrates the probabilities of one drafter, separately for each temperature of the sampler.

    Args:
      greedy_temperature: see `confidence_temperature`.
      calibrated: whether it learns; else probabilities are the confidences.
    """

    def __init__(self, greedy_temperature: float = 1.0, *, calibrated: bool = True) -> None:
        self._greedy, self._calibrated = greedy_temperature, calibrated
        self.forget()

    def forget(self) -> None:
        """Resets the calibration."""
        self._counts: dict[int, Calibration] = {}
        self._sampler, self.temperature = 0, confidence_temperature(0.0, self._greedy)
        self.shifts = Calibration.fresh().shifts()

    def use(self, temperature: float) -> None:
        """Goes on with a sampler's temperature: sets `temperature` and `shifts` for the next draft."""
        self.temperature = confidence_temperature(temperature, self._greedy)
        sampler = round(temperature / _APART) + bool(temperature > 0)
        if sampler != self._sampler:
            self._sampler = sampler
            self.shifts = self._counts.get(sampler, Calibration.fresh()).shifts()

    def learn(self, tree: TokenTree, path: Sequence[int], token: int) -> None:
        """Learns from a verification of a tree that was drafted since the last `use` (see `outcomes`)."""
        if self._calibrated:
            counts = self._counts.get(self._sampler, Calibration.fresh())
            self._counts[self._sampler] = counts = counts.after(*outcomes(tree, path, token))
            self.shifts = counts.shifts()
