"""Which sub-model answers a request, and how much of the prompt it reads (ELMS, arXiv 2409.09071, section
3.4).

The tiny LM proposes, the device's profile disposes: a proposal that would miss the objective, the planning
itself included, is replaced by the largest choice that meets it. It is asked only where the time that it
takes can be won back: where a shorter prompt leaves room for a larger level than the whole one does without.
"""

import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import numpy as np

from jaxllm.config import WHOLE
from jaxllm.elastic.compression import keep_tokens, stays_anyway
from jaxllm.elastic.slo import Slo
from jaxllm.errors import ObjectiveMissed
from jaxllm.text.droppable import PromptTokens
from serving.planning.objectives import (
    Cost,
    Objective,
    as_ratios,
    expected_cost,
    expected_costs,
    overrun,
    whole_cost,
)
from serving.planning.profile import DeviceProfile
from serving.planning.safety_margin import START, SafetyMargin

# Of an objective, so much is left for what a profile cannot foresee.
MARGIN = 1 / START
Source = Literal["whole", "proposed", "fallback", "nearest"]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Proposal:
    """What a proposer would do with a request.

    Attributes:
      level: one of the levels it was asked about.
      prompt_ratio: one of the ratios it was asked about.
      scores: `[T]` float, how much each token of the prompt should be kept.
    """

    level: int
    prompt_ratio: float
    scores: np.ndarray


class Proposer(Protocol):
    """What decides, such as a tiny LM. It may be asked for scores alone."""

    @property
    def prompt_ratios(self) -> Sequence[float]:
        """Shares of a prompt that it chooses from, ascending."""
        ...

    def propose(self, prompt: PromptTokens, slo: Slo, allowed: np.ndarray) -> Proposal:
        """A choice of level and prompt; `allowed` `[levels, prompt_ratios]` says which would meet the SLO."""
        ...

    def scores(self, prompt: PromptTokens) -> np.ndarray:
        """How much each token should be kept, `[T]`."""
        ...

    def planning_ms(self, tokens: int) -> float:
        """What proposing takes for a prompt of so many tokens."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """What the engine is told of a request.

    Attributes:
      level: the sub-model, in percent.
      prompt_ratio: the share of the prompt that was chosen; more is kept where more must stay.
      kept: `[n]` int64, ascending places of the prompt's tokens that are read.
      prompt_tokens: of the whole prompt.
      source: "whole" where the objective leaves room for everything, "proposed", "fallback" where nobody was
        asked or the proposal would have missed the objective, "nearest" where nothing meets it.
      expected: what the answer should take, reading the request and planning included.
      whole: what the whole model would take with the whole prompt, reading the request included.
      planning_ms: what making this plan took.
      confident: whether the objective should be met as surely as was asked, by what earlier answers took; a
        plan that is not meets it by what the profile expects, or is the nearest.
    """

    level: int
    prompt_ratio: float
    kept: np.ndarray
    prompt_tokens: int
    source: Source
    expected: Cost
    whole: Cost
    planning_ms: float
    confident: bool = True


@dataclasses.dataclass(frozen=True)
class _Margins:
    """How many times the expected times are planned for."""

    ttft: float
    tpot: float
    energy: float


@dataclasses.dataclass(frozen=True)
class _Asked:
    """What is asked of an answer's time: see `Planner.plan`.

    Attributes:
      whole: what the whole model would take.
    """

    objective: Objective
    answer_tokens: int
    whole: Cost


@dataclasses.dataclass(frozen=True, eq=False)
class _Request(_Asked):
    """One request: see `Planner.plan`.

    Attributes:
      began: when planning did.
    """

    prompt: PromptTokens
    reading_ms: float
    began: float

    def spent_ms(self) -> float:
        """Since the request came."""
        return self.reading_ms + 1000 * (time.perf_counter() - self.began)


class Planner:
    """Plans requests for one device.

    Args:
      profile: of the device.
      levels: served, ascending.
      proposer: None plans by the profile alone, and keeps prompts whole.
      margin: share of an objective to plan for, where the safety margin says no more.
      safety_margin: learns what answers take beyond what was expected; None plans by `margin` alone.

    Attributes:
      safety_margin: the same.
    """

    def __init__(
        self,
        profile: DeviceProfile,
        levels: Sequence[int],
        proposer: Proposer | None = None,
        *,
        margin: float = MARGIN,
        safety_margin: SafetyMargin | None = None,
    ) -> None:
        self._profile, self._levels, self._proposer = profile, tuple(levels), proposer
        self._ratios = (1.0,) if proposer is None else tuple(proposer.prompt_ratios)
        self._margin, self.safety_margin = margin, safety_margin
        # Now, so that no request waits for what the profile makes when it is asked first.
        expected_costs(profile, self._levels, (1,), 1)

    @property
    def least_ratio(self) -> float:
        """The smallest share of a prompt that a plan may keep."""
        return self._ratios[0]

    def plan(
        self,
        prompt: PromptTokens,
        objective: Objective,
        *,
        answer_tokens: int,
        strict: bool = False,
        reading_ms: float = 0.0,
    ) -> Plan:
        """Plans one request.

        Args:
          prompt: rendered and encoded.
          objective: what the answer's time must be.
          answer_tokens: how long the answer may get.
          strict: refuse what cannot be met instead of coming near it.
          reading_ms: what rendering and encoding the prompt took.

        Raises:
          ObjectiveMissed: `strict`, and no choice meets the objective; the message has the nearest.
          ConfigError: the objective is about energy and the profile has none.
        """
        began = time.perf_counter()
        answers = max(1, answer_tokens)
        whole = whole_cost(self._profile, len(prompt.ids), answers, reading_ms=reading_ms)
        asked = _Request(objective, answers, whole, prompt, reading_ms, began)
        margin_sets = self._margin_sets()
        # A device that stalls now and then leaves no choice that is sure: better one that mostly is in time
        # than the nearest to that.
        for margins in margin_sets[:-1]:
            if (plan := self._plan(asked, margins, last=False)) is not None:
                return plan
        plan = self._plan(asked, margin_sets[-1], strict=strict, confident=len(margin_sets) == 1)
        assert plan is not None
        return plan

    def lengths_missed(self, objective: Objective, *, answer_tokens: int) -> tuple[int, ...]:
        """The prompt lengths that were profiled at which no choice is in time, even of a prompt all of whose
        words may go, and without what a request takes besides: rendering, encoding and planning.

        Args:
          objective: what the answer's time must be.
          answer_tokens: how long the answer may get.

        Raises:
          ConfigError: the objective is about energy and the profile has none.
        """
        return tuple(
            tokens
            for tokens in self._profile.tokens
            if self._least_overrun(objective, tokens, answer_tokens) > 1
        )

    def _least_overrun(self, objective: Objective, tokens: int, answer_tokens: int) -> float:
        """What share of its time the choice that comes nearest takes, of a prompt of so many tokens."""
        answers = max(1, answer_tokens)
        asked = _Asked(objective, answers, whole_cost(self._profile, tokens, answers))
        margins = self._margin_sets()[-1]
        tables = [self._table(asked, margins, [tokens], 0.0)]
        if self._proposer is not None:
            planning_ms = self._proposer.planning_ms(tokens)
            tables.append(self._table(asked, margins, self._counts(tokens), planning_ms))
        return float(min(table.min() for table in tables))

    def _margin_sets(self) -> list[_Margins]:
        """What to plan for, the most careful first."""
        base = 1 / self._margin
        least = _Margins(base, base, base)
        if self.safety_margin is None:
            return [least]
        learned = _Margins(self.safety_margin.ttft, self.safety_margin.tpot, base)
        return [learned] if learned.ttft <= base and learned.tpot <= base else [learned, least]

    def _plan(
        self,
        asked: _Request,
        margins: _Margins,
        *,
        last: bool = True,
        strict: bool = False,
        confident: bool = True,
    ) -> Plan | None:
        """A plan; None where no choice is in time and this is not the last try."""
        prompt, whole, tokens = asked.prompt, asked.whole, len(asked.prompt.ids)
        table_of = functools.partial(self._table, asked, margins)

        def made(level: int, ratio: float, kept: np.ndarray, source: Source) -> Plan:
            spent_ms = asked.spent_ms()
            cost = expected_cost(self._profile, level, len(kept), asked.answer_tokens, planning_ms=spent_ms)
            return Plan(
                level=level, prompt_ratio=ratio, kept=kept, prompt_tokens=tokens, source=source,
                expected=cost, whole=whole, planning_ms=spent_ms - asked.reading_ms,
                confident=confident and source != "nearest",
            )  # fmt: skip

        if self._excess(asked, margins, whole) <= 1:
            return made(WHOLE, 1.0, np.arange(tokens), "whole")
        # The whole prompt, which needs nobody's advice; then all choices of one who takes time to give it.
        unasked = table_of([tokens], asked.spent_ms())
        largest, _ = self._largest(unasked <= 1)
        proposer, counts, excess = self._proposer, [tokens], np.full((len(self._levels), 1), np.inf)
        if proposer is not None:
            # What may go of a prompt is looked up only where it would help if all of it might.
            asked_ms, counts = asked.reading_ms + proposer.planning_ms(tokens), self._counts(tokens)
            excess = table_of(counts, asked_ms)
            if self._largest(excess <= 1)[0] > largest or (largest < 0 and excess.min() < unasked.min()):
                counts = self._counts(tokens, stays_anyway(prompt.words, prompt.forced))
                excess = table_of(counts, asked_ms)
        allowed = excess <= 1
        if not allowed.any() and largest < 0:
            if not last:
                return None
            if strict:
                raise ObjectiveMissed(self._refusal(asked.objective, excess, unasked))
        if proposer is None or largest >= self._largest(allowed)[0]:
            if largest >= 0:
                return made(self._levels[largest], 1.0, np.arange(tokens), "fallback")
            if unasked.min() <= excess.min():
                nearest, _ = self._smallest(unasked)
                return made(self._levels[nearest], 1.0, np.arange(tokens), "nearest")
            return made(*self._shortened(prompt, *self._smallest(excess)), "nearest")
        found = proposer.propose(prompt, as_ratios(asked.objective, whole), allowed)
        place = self._levels.index(found.level), self._ratios.index(found.prompt_ratio)
        # Against the time that is really spent by now, which may be more than a proposal takes as a rule.
        allowed = table_of(counts, asked.spent_ms()) <= 1
        if not allowed.any():
            if not last:
                return None
            return made(*self._shortened(prompt, *self._smallest(excess), found.scores), "nearest")
        if allowed[place]:
            return made(*self._shortened(prompt, *place, found.scores), "proposed")
        return made(*self._shortened(prompt, *self._largest(allowed), found.scores), "fallback")

    def _excess(self, asked: _Asked, margins: _Margins, cost: Cost) -> Any:
        """What share of the time that it may take a cost takes."""
        planned = dataclasses.replace(
            cost,
            ttft_ms=margins.ttft * cost.ttft_ms,
            tpot_ms=margins.tpot * cost.tpot_ms,
            joules=None if cost.joules is None else margins.energy * cost.joules,
        )
        return overrun(asked.objective, planned, asked.whole)

    def _counts(self, tokens: int, must: int = 1) -> list[int]:
        """How many of so many tokens, of which some must stay, are kept at each ratio at most, whatever their
        scores."""
        return [max(must, int(ratio * tokens + 1e-6)) for ratio in self._ratios]

    def _table(
        self, asked: _Asked, margins: _Margins, counts: Sequence[int], planning_ms: float
    ) -> np.ndarray:
        """`_excess` of each choice `[levels, prompt_ratios]`, by how many tokens are read at each ratio."""
        costs = expected_costs(
            self._profile, self._levels, counts, asked.answer_tokens, planning_ms=planning_ms
        )
        return self._excess(asked, margins, costs)

    def _shortened(
        self, prompt: PromptTokens, level: int, ratio: int, scores: np.ndarray | None = None
    ) -> tuple[int, float, np.ndarray]:
        """The level, the ratio and the tokens kept of a choice, by places."""
        share = self._ratios[ratio]
        if share == 1:
            return self._levels[level], share, np.arange(len(prompt.ids))
        if scores is None:
            assert self._proposer is not None
            scores = self._proposer.scores(prompt)
        kept = keep_tokens(scores, prompt.words, prompt.forced, share)
        return self._levels[level], share, np.flatnonzero(kept)

    @staticmethod
    def _largest(allowed: np.ndarray) -> tuple[int, int]:
        """The largest level that is allowed, then the largest ratio, by places; (-1, -1) where none is."""
        if not allowed.any():
            return -1, -1
        level = int(np.flatnonzero(allowed.any(1))[-1])
        return level, int(np.flatnonzero(allowed[level])[-1])

    @staticmethod
    def _smallest(excess: np.ndarray) -> tuple[int, int]:
        """The choice that comes nearest; of equals the largest."""
        nearest = np.argwhere(excess <= excess.min() * (1 + 1e-9))[-1]
        return int(nearest[0]), int(nearest[1])

    def _refusal(self, objective: Objective, excess: np.ndarray, unasked: np.ndarray) -> str:
        ratios = self._ratios
        if unasked.min() <= excess.min():
            excess, ratios = unasked, (1.0,)
        level, place = self._smallest(excess)
        share, times = ratios[place], excess[level, place] * self._margin
        return (
            f"no sub-model meets {objective}: level {self._levels[level]} with {share:.0%} of the prompt "
            f"comes nearest and takes {times:.2f} times as much (of what is asked, {self._margin:.0%} are "
            "planned for); ask for more time, or without strict"
        )
