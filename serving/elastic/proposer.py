"""Defines the interface of proposers of a level and a shorter prompt, such as a tiny LM."""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from jaxllm.elastic.slo import Slo
from jaxllm.text.droppable import PromptTokens


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Proposal:
    """A proposer's choice for a request.

    Attributes:
      level: one of the allowed levels.
      prompt_ratio: one of the allowed ratios.
      scores: `[T]` float, for each token of the prompt; the highest ones are kept.
    """

    level: int
    prompt_ratio: float
    scores: np.ndarray


class Proposer(Protocol):
    """Proposes a level and a prompt ratio, such as a tiny LM; may compute only scores."""

    @property
    def prompt_ratios(self) -> Sequence[float]:
        """Shares of a prompt to choose from, ascending."""
        ...

    def propose(self, prompt: PromptTokens, slo: Slo, allowed: np.ndarray) -> Proposal:
        """A choice of level and prompt ratio; `allowed` is `[levels, prompt_ratios]`, True if the SLO is
        met."""
        ...

    def scores(self, prompt: PromptTokens) -> np.ndarray:
        """Scores of the tokens, `[T]`; the highest ones are kept."""
        ...

    def planning_ms(self, tokens: int) -> float:
        """Time to propose for a prompt of so many tokens."""
        ...
