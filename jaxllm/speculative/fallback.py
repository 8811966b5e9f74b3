"""When drafting gives way to verifying: a threshold that learns from what was right (LLMCad, section 3.3)."""

import dataclasses
import math

from jaxllm.errors import ConfigError

START = 0.01
# Below the first nothing would ever be verified early, above the second nothing drafted.
LEAST, MOST = 1e-6, 0.9


@dataclasses.dataclass(frozen=True)
class Fallback:
    """Verify when no branch is more confident than alpha.

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
          drafted: tokens on the branch that matches the target best, the root left aside (N_all).
          correct: how many of them were right (N_correct).
          confidence: Tc when the tree was verified.

        Raises:
          ConfigError: a number is out of its domain.
        """
        if not 0 <= correct <= drafted or not 0 <= confidence <= 1:
            raise ConfigError(f"{correct} of {drafted} tokens right at a confidence of {confidence}")
        if correct == drafted:
            return Fallback(max(LEAST, 0.5 * self.alpha))
        # The surer the draft was of what is wrong, the less the threshold moves: by logarithms, because a
        # confidence may be as small as floats go.
        share = (drafted - correct) / drafted
        power = math.log(self.alpha) - share * math.log(max(confidence, LEAST))
        return Fallback(min(MOST, math.exp(min(power, 0.0))))
