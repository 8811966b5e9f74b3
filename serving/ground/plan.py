"""Describes an answer's plan, its cost, and the restoration of its context, which hooks add."""

import dataclasses
from typing import Any, Literal

import numpy as np

Source = Literal["whole", "proposed", "fallback", "nearest"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """Time and energy of an answer, expected or measured, or of many answers as arrays of one shape.

    Attributes:
      ttft_ms: time to the first token, planning included.
      tpot_ms: time per further token.
      tokens: number of tokens of the answer.
      joules: energy; None if unknown.
      thought_tokens: number of its tokens before the first that an objective counts: those of a thought with
        a budget; 0 for none, or no known number.
    """

    ttft_ms: Any
    tpot_ms: Any
    tokens: int
    joules: Any = None
    thought_tokens: int = 0

    @property
    def counted_ttft_ms(self) -> Any:
        """Time to the first token that an objective counts."""
        return self.ttft_ms + self.tpot_ms * self.thought_tokens

    @property
    def total_ms(self) -> Any:
        """Time from the request to the last token."""
        return self.ttft_ms + self.tpot_ms * max(0, self.tokens - 1)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """The plan of a request.

    Attributes:
      level: level of the model, in percent.
      prompt_ratio: the chosen share of the prompt; more is kept if more tokens are forced.
      kept: `[n]` int64, ascending indices of the prompt tokens to keep.
      prompt_tokens: number of tokens of the whole prompt.
      source: "whole" if the objective allows the whole model and prompt; "proposed"; "fallback" if the
        proposer was not used or its proposal would have missed the objective; "nearest" if no choice meets
        it.
      expected: cost of the answer, including tokenizing and planning.
      whole: cost of the whole model with the whole prompt, including tokenizing.
      planning_ms: time to make this plan.
      reused_tokens: number of cached tokens at the prompt's start, excluded from `expected`.
      confident: whether the plan meets the objective including the safety margin, at the service's
        confidence. Otherwise it meets it by the profile only, or is the nearest.
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
    """Restoration of a context.

    Attributes:
      resident: number of chunks that were in memory.
      read: chunks that were read from storage.
      computed: chunks that were recomputed from their tokens.
      expected_ms: planned time; 0 without a plan.
      took_ms: time from the start of the call to the restored cache.
      moved: parts of the context's origin that differ (model, settings; see `Origin`), so that all of its
        tokens were recomputed.
      shared: number of chunks copied from another context with the same prefix.
      cached: whether the context ran last and its cache was still in memory: nothing was restored.
      fed_tokens: number of prompt tokens that were computed during the restore.
      fed_ms: the part of `took_ms` after the last chunk was read, if tokens were fed; else 0.
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
