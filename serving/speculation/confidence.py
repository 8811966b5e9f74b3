"""Makes confidences of a drafter's logits: at a temperature, and calibrated by what was accepted."""

from collections.abc import Sequence

from jaxllm.speculation.tree import Calibration, TokenTree, outcomes

# Temperatures that share counts are rounded to the same multiple of this.
_APART = 0.25


def confidence_temperature(temperature: float, greedy: float) -> float:
    """The temperature at which a drafter's probabilities are taken, before they are calibrated.

    Args:
      temperature: of the target's sampler.
      greedy: that of probabilities under a greedy target: 1 takes them as they are, whatever the sampler;
        less for a drafter that is surer than its probabilities say, since it is nearly the target.
    """
    return 1.0 if greedy == 1.0 else max(temperature, greedy)


class Confidence:
    """Calibrates the probabilities of one drafter, under each temperature of the sampler by itself.

    Args:
      greedy_temperature: see `confidence_temperature`.
      calibrated: whether it learns; else probabilities are confidences as they are.
    """

    def __init__(self, greedy_temperature: float = 1.0, *, calibrated: bool = True) -> None:
        self._greedy, self._calibrated = greedy_temperature, calibrated
        self.forget()

    def forget(self) -> None:
        """Forgets what was learned."""
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
