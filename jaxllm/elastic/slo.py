"""Latency objectives of requests (SLOs): their marks for the tiny LM, and the choices that meet them.

ELMS (arXiv 2409.09071, sections 3.1 and 3.3): an SLO limits the time to the first token (TTFT) and the time
per further token (TPOT), each as a share of the whole model's with the whole prompt. The tiny LM receives
it as two tokens before the prompt, its marks. Nominal costs here count parameters and tokens; measured
costs are in the device's profile.
"""

import dataclasses
import math
import re
from collections.abc import Sequence

import numpy as np

from jaxllm.errors import ConfigError

# Percentages of the whole model's time with a mark.
MARK_PERCENTS = tuple(range(20, 101, 10))
# Shares of a prompt to choose from, besides the levels of a ladder.
PROMPT_RATIOS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)

_WRITTEN = re.compile(r"\s*<?\s*(\d+(?:\.\d+)?)\s*,\s*(\d+(?:\.\d+)?)\s*>?\s*")
# Tolerance of comparisons of ratios: in floats 0.3 · 0.7 differs from 0.21.
_TOLERANCE = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slo:
    """A latency objective, in shares of the whole model's times.

    Attributes:
      ttft: share of the time to the first token, in (0, 1].
      tpot: share of the time per further token, in (0, 1].
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
        """Whether it limits any time: `<100,100>` does not, and every answer meets it."""
        return self.ttft < 1 or self.tpot < 1

    def limits(self, ttft: float, tpot: float) -> tuple[float, float]:
        """The greatest allowed TTFT and TPOT, in the unit of the whole model's times `ttft` and `tpot`.

        A share of 1 is no limit: infinity.
        """
        return (
            math.inf if self.ttft == 1 else self.ttft * ttft,
            math.inf if self.tpot == 1 else self.tpot * tpot,
        )

    def __str__(self) -> str:
        return f"<{100 * self.ttft:.6g},{100 * self.tpot:.6g}>"


# The SLOs of the paper's evaluation, from loose to tight.
SLOS = tuple(map(Slo.parse, ("<100,100>", "<80,90>", "<60,80>", "<40,70>", "<20,60>", "<20,50>")))


def marks() -> tuple[str, ...]:
    """The tiny LM's tokens for SLOs: TTFTs ascending, then TPOTs ascending."""
    return tuple(f"<|{kind}:{percent}|>" for kind in ("ttft", "tpot") for percent in MARK_PERCENTS)


def marks_of(slo: Slo) -> tuple[int, int]:
    """Indices in `marks()` of an SLO's two marks, TTFT's first.

    A ratio between two marks gets the lower one, so that the mark never allows more time than the SLO. A
    ratio below the lowest mark gets the lowest mark, so a proposal must be checked with `feasible`.
    """

    def place(ratio: float) -> int:
        percent = math.floor(100 * ratio + 100 * _TOLERANCE)
        return max(0, sum(each <= percent for each in MARK_PERCENTS) - 1)

    return place(slo.ttft), len(MARK_PERCENTS) + place(slo.tpot)


def nominal_cost(levels: Sequence[int], prompt_ratios: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Nominal costs of choices, by counts of parameters and tokens, in shares of the whole model's times:
    TTFT `[levels, prompt_ratios]` float64, the product of both shares, and TPOT, the level's share."""
    model = np.asarray(levels, np.float64)[:, None] / 100
    prompt = np.asarray(prompt_ratios, np.float64)[None, :]
    return model * prompt, np.broadcast_to(model, (len(levels), len(prompt_ratios)))


def feasible(slo: Slo, levels: Sequence[int], prompt_ratios: Sequence[float]) -> np.ndarray:
    """Choices that meet an SLO at their nominal cost: `[levels, prompt_ratios]` bool."""
    ttft, tpot = nominal_cost(levels, prompt_ratios)
    return (ttft <= slo.ttft + _TOLERANCE) & (tpot <= slo.tpot + _TOLERANCE)
