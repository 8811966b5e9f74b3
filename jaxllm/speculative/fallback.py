"""Decides when to stop drafting and verify, by a self-adaptive threshold (LLMCad, section 3.3)."""

import dataclasses
import math

from jaxllm.errors import ConfigError

START = 0.01
# Bounds of alpha: below `LEAST` no tree would be verified early, above `MOST` nothing would be drafted.
LEAST, MOST = 1e-6, 0.9


@dataclasses.dataclass(frozen=True)
class Fallback:
    """The fallback threshold: verify once no branch has a confidence above alpha.

    Attributes:
      alpha: in [LEAST, MOST].
    """

    alpha: float = START

    def __post_init__(self) -> None:
        if not LEAST <= self.alpha <= MOST:
            raise ConfigError(f"alpha must be in [{LEAST}, {MOST}], got {self.alpha}")

    def after(self, *, drafted: int, correct: int, confidence: float) -> "Fallback":
        """The threshold for the next tree (equation 3).

        Args:
          drafted: tokens on the branch that matches the target best, without the root (N_all).
          correct: how many of them were accepted (N_correct).
          confidence: Tc when the tree was verified.

        Raises:
          ConfigError: a number is out of its domain.
        """
        if not 0 <= correct <= drafted or not 0 <= confidence <= 1:
            raise ConfigError(f"{correct} of {drafted} tokens right at a confidence of {confidence}")
        if correct == drafted:
            return Fallback(max(LEAST, 0.5 * self.alpha))
        # In logarithms, because a confidence may be as small as the smallest float.
        share = (drafted - correct) / drafted
        power = math.log(self.alpha) - share * math.log(max(confidence, LEAST))
        return Fallback(min(MOST, math.exp(min(power, 0.0))))
