"""Latency objectives of requests (SLOs), how the tiny LM is told them, and which choices meet them.

ELMS (arXiv 2409.09071, sections 2 and 3.4): a request asks for a time to its first token (TTFT) and a time
per further token (TPOT), each as a share of the whole model's with the whole prompt. To the tiny LM an
objective is two tokens in front of the prompt. What a choice of level and prompt really costs on a device is
for its profile to say; the nominal costs here are by the count of parameters and tokens.
"""

import dataclasses
import math
import re
from collections.abc import Sequence

import numpy as np

from jaxllm.errors import ConfigError

# In percent of the whole model's time: what the marks can say.
MARK_PERCENTS = tuple(range(20, 101, 10))
# Shares of a prompt to choose from, beside the levels of a ladder.
PROMPT_RATIOS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)

_WRITTEN = re.compile(r"\s*<?\s*(\d+(?:\.\d+)?)\s*,\s*(\d+(?:\.\d+)?)\s*>?\s*")
# What a ratio may be off by, since 0.3 · 0.7 is not quite 0.21.
_SLACK = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slo:
    """A latency objective, in shares of the whole model's times.

    Attributes:
      ttft: of the time to the first token, in (0, 1].
      tpot: of the time per further token, in (0, 1].
    """

    ttft: float
    tpot: float

    def __post_init__(self) -> None:
        for name in ("ttft", "tpot"):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not 0 < value <= 1:
                raise ConfigError(f"an SLO's {name} must be a ratio in (0, 1], got {value!r:.80}")
            object.__setattr__(self, name, float(value))

    @classmethod
    def parse(cls, text: str) -> "Slo":
        """Reads `<40,70>` or `40,70`: percents of TTFT and TPOT.

        Raises:
          ConfigError: the text has another form, or a percentage is out of (0, 100].
        """
        found = _WRITTEN.fullmatch(text) if isinstance(text, str) else None
        if found is None:
            raise ConfigError(
                f"an SLO is written like <40,70>, in percent of TTFT and TPOT, got {text!r:.80}"
            )
        return cls(ttft=float(found[1]) / 100, tpot=float(found[2]) / 100)

    @property
    def has_limit(self) -> bool:
        """Whether it asks for anything: all of both times is no demand, which every answer meets."""
        return self.ttft < 1 or self.tpot < 1

    def limits(self, ttft: float, tpot: float) -> tuple[float, float]:
        """The most that times to the first and per further token may be, where the whole model's are these.

        All of a time is no demand: infinity.
        """
        return (
            math.inf if self.ttft == 1 else self.ttft * ttft,
            math.inf if self.tpot == 1 else self.tpot * tpot,
        )

    def __str__(self) -> str:
        return f"<{100 * self.ttft:.6g},{100 * self.tpot:.6g}>"


# The paper's, from loose to tight.
SLOS = tuple(map(Slo.parse, ("<100,100>", "<80,90>", "<60,80>", "<40,70>", "<20,60>", "<20,50>")))


def marks() -> tuple[str, ...]:
    """The tokens that tell the tiny LM an SLO, in the order of `marks_of`: TTFTs ascending, then TPOTs."""
    return tuple(f"<|{kind}:{percent}|>" for kind in ("ttft", "tpot") for percent in MARK_PERCENTS)


def marks_of(slo: Slo) -> tuple[int, int]:
    """The places in `marks()` of an SLO's two marks, TTFT's first.

    A ratio between two marks has the lower one, so that no mark promises more time than there is. Below the
    least mark there is none to say it, and the ratio has that one: what is chosen must be held against
    `feasible` all the same.
    """

    def place(ratio: float) -> int:
        percent = math.floor(100 * ratio + 100 * _SLACK)
        return max(0, sum(each <= percent for each in MARK_PERCENTS) - 1)

    return place(slo.ttft), len(MARK_PERCENTS) + place(slo.tpot)


def nominal_cost(levels: Sequence[int], prompt_ratios: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """What choices cost by their count of parameters and tokens, in shares of the whole model's times.

    Args:
      levels: in percent of the model.
      prompt_ratios: shares of the prompt.

    Returns:
      TTFT and TPOT `[levels, prompt_ratios]` float64: prefill takes a product of both shares, a further token
      the model's alone.
    """
    model = np.asarray(levels, np.float64)[:, None] / 100
    prompt = np.asarray(prompt_ratios, np.float64)[None, :]
    return model * prompt, np.broadcast_to(model, (len(levels), len(prompt_ratios)))


def feasible(slo: Slo, levels: Sequence[int], prompt_ratios: Sequence[float]) -> np.ndarray:
    """Which choices meet an SLO at their nominal cost: `[levels, prompt_ratios]` bool."""
    ttft, tpot = nominal_cost(levels, prompt_ratios)
    return (ttft <= slo.ttft + _SLACK) & (tpot <= slo.tpot + _SLACK)
