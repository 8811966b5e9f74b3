"""Describes what hooks add to an answer: its plan, its cost, and how its context was restored."""

import dataclasses
from typing import Any, Literal

import numpy as np

Source = Literal["whole", "proposed", "fallback", "nearest"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """Time and energy of an answer, expected or measured; or of many answers, in arrays of one shape.

    Attributes:
      ttft_ms: time to the first token, planning included.
      tpot_ms: time per further token.
      tokens: of the answer.
      joules: None where the energy is not known.
    """

    ttft_ms: Any
    tpot_ms: Any
    tokens: int
    joules: Any = None

    @property
    def total_ms(self) -> Any:
        """From the request to the last token."""
        return self.ttft_ms + self.tpot_ms * max(0, self.tokens - 1)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """The plan of a request.

    Attributes:
      level: the sub-model, in percent.
      prompt_ratio: the chosen share of the prompt; more is kept where more tokens are forced.
      kept: `[n]` int64, ascending indices of the prompt's tokens that are kept.
      prompt_tokens: of the whole prompt.
      source: "whole" where the objective allows the whole model and prompt; "proposed"; "fallback" where the
        proposer was not asked or its proposal would have missed the objective; "nearest" where no choice
        meets it.
      expected: cost of the answer, tokenizing and planning included.
      whole: cost of the whole model with the whole prompt, tokenizing included.
      planning_ms: time to make this plan.
      reused_tokens: at the prompt's beginning, whose computation `expected` leaves out.
      confident: whether the objective should be met with the service's confidence, by the safety margin.
        Otherwise the plan meets it by the profile alone, or is the nearest.
    """

    level: int
    prompt_ratio: float
    kept: np.ndarray
    prompt_tokens: int
    source: Source
    expected: Cost
    whole: Cost
    planning_ms: float
    reused_tokens: int = 0
    confident: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restoration:
    """How a context was restored.

    Attributes:
      resident: number of chunks that were in memory.
      read: chunks that were read from storage.
      computed: chunks that were computed from their tokens.
      expected_ms: time that the plan expected; 0 where there was no plan.
      took_ms: time from the beginning of the call to the restored cache.
      moved: what of the context was of another model or of other settings (see `Origin`), so that all of its
        tokens were computed again by this one's.
      shared: number of its chunks that were taken from another context, which begins with the same tokens.
      cached: whether the context ran last and its cache was still there: nothing had to be restored.
      fed_tokens: tokens of the prompt that were computed meanwhile.
      fed_ms: the part of `took_ms` after the last chunk had been read, where tokens were fed; else 0.
    """

    resident: int = 0
    read: tuple[int, ...] = ()
    computed: tuple[int, ...] = ()
    expected_ms: float = 0.0
    took_ms: float = 0.0
    cached: bool = False
    moved: tuple[str, ...] = ()
    shared: int = 0
    fed_tokens: int = 0
    fed_ms: float = 0.0
