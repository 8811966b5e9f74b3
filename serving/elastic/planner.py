"""Plans requests: chooses the level that answers, and the prompt tokens to keep.

ELMS (arXiv 2409.09071, section 3.3). The tiny LM proposes; a proposal that would miss the objective by the
device's profile, including planning, is replaced by the largest choice that meets it. The tiny LM runs only
if its own time can pay off: if a shorter prompt allows a larger level than the whole prompt without it.
"""

import dataclasses
import functools
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxllm.config import WHOLE
from jaxllm.elastic.compression import keep_tokens, stays_anyway
from jaxllm.errors import ObjectiveMissed
from jaxllm.serving.elastic.objectives import (
    Objective,
    as_ratios,
    expected_cost,
    expected_costs,
    overrun,
    whole_cost,
)
from jaxllm.serving.elastic.profile import DeviceProfile
from jaxllm.serving.elastic.proposer import Proposer
from jaxllm.serving.elastic.safety_margin import START, SafetyMargin
from jaxllm.serving.ground.plan import Cost, Plan, Source
from jaxllm.text.droppable import PromptTokens

# Share of an objective to plan for.
MARGIN = 1 / START


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """The load by other calls.

    Attributes:
      waiting_ms: past and expected time from the request to its first token in which others use the device.
      token_share: time per further token, relative to that of an unloaded device.
    """

    waiting_ms: float = 0.0
    token_share: float = 1.0


IDLE = Load()
NOTHING: Mapping[int, int] = MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class _Margins:
    """Factors on the expected times and energy."""

    ttft: float
    tpot: float
    energy: float


@dataclasses.dataclass(frozen=True)
class _Asked:
    """An objective with its context: see `Planner.plan`.

    Attributes:
      whole: cost of the whole model.
      load: load by other calls.
    """

    objective: Objective
    answer_tokens: int
    whole: Cost
    load: Load


@dataclasses.dataclass(frozen=True, eq=False)
class _Request(_Asked):
    """One request: see `Planner.plan`.

    Attributes:
      began: start of planning, by `time.perf_counter`.
      reused: see `Planner.plan`.
    """

    prompt: PromptTokens
    tokenize_ms: float
    began: float
    reused: Mapping[int, int]

    def spent_ms(self) -> float:
        """Time since the request came."""
        return self.tokenize_ms + 1000 * (time.perf_counter() - self.began)


class Planner:
    """Plans requests for one device.

    Args:
      profile: profile of the device.
      levels: served levels, ascending.
      proposer: proposer of choices; None plans by the profile only, and keeps prompts whole.
      margin: maximum share of an objective to plan for.
      safety_margin: learned ratio of measured to expected times; None plans with `margin` only.

    Attributes:
      safety_margin: see the argument.
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
        self._levels, self._proposer = tuple(levels), proposer
        self._ratios = (1.0,) if proposer is None else tuple(proposer.prompt_ratios)
        self._margin, self.safety_margin = margin, safety_margin
        self._use(profile)

    def use(self, profile: DeviceProfile) -> None:
        """Replaces the profile, and resets the safety margin."""
        self._use(profile)
        if self.safety_margin is not None:
            self.safety_margin.forget()

    @property
    def least_ratio(self) -> float:
        """The minimum share of a prompt that a plan may keep."""
        return self._ratios[0]

    def plan(
        self,
        prompt: PromptTokens,
        objective: Objective,
        *,
        answer_tokens: int,
        strict: bool = False,
        tokenize_ms: float = 0.0,
        load: Load = IDLE,
        reused: Mapping[int, int] = NOTHING,
    ) -> Plan:
        """Plans one request.

        The load counts against the objective, but the plan's expected cost, from which the safety margin
        learns, and the whole model's, to which ratios refer, are those of an idle device.

        Args:
          prompt: rendered and encoded prompt.
          objective: objective of the answer's time or energy.
          answer_tokens: maximum number of tokens of the answer.
          strict: whether to raise if no choice meets the objective, instead of using the nearest choice.
          tokenize_ms: time to render and encode the prompt.
          load: load by other calls.
          reused: level -> number of cached tokens at the prompt's start; none for missing levels. They need
            not be computed if the prompt is kept whole.

        Raises:
          ObjectiveMissed: `strict`, and no choice meets the objective; the message has the nearest.
          ConfigError: the objective limits energy and the profile has none.
        """
        began = time.perf_counter()
        answers = max(1, answer_tokens)
        whole = whole_cost(self._profile, len(prompt.ids), answers, tokenize_ms=tokenize_ms)
        asked = _Request(objective, answers, whole, load, prompt, tokenize_ms, began, reused)
        margin_sets = self._margin_sets()
        # On a device that sometimes stalls no choice may meet the objective with confidence: then one that
        # meets it with less, finally by the profile only, is better than the nearest with confidence.
        for place, margins in enumerate(margin_sets[:-1]):
            if (plan := self._plan(asked, margins, last=False, confident=place == 0)) is not None:
                return plan
        plan = self._plan(asked, margin_sets[-1], strict=strict, confident=len(margin_sets) == 1)
        assert plan is not None
        return plan

    def lengths_missed(self, objective: Objective, *, answer_tokens: int) -> tuple[int, ...]:
        """The profiled prompt lengths at which no choice meets an objective, even if all words may be dropped
        and rendering, encoding and planning cost no time.

        Args:
          objective: objective of the answer's time or energy.
          answer_tokens: maximum number of tokens of the answer.

        Raises:
          ConfigError: the objective limits energy and the profile has none.
        """
        return tuple(
            tokens
            for tokens in self._profile.tokens
            if self._least_overrun(objective, tokens, answer_tokens) > 1
        )

    def _use(self, profile: DeviceProfile) -> None:
        self._profile = profile
        # Fill the profile's caches now, so that the first request does not wait for them.
        expected_costs(profile, self._levels, (1,), 1)

    def _least_overrun(self, objective: Objective, tokens: int, answer_tokens: int) -> float:
        """The overrun of the nearest choice for a prompt of so many tokens."""
        answers = max(1, answer_tokens)
        asked = _Asked(objective, answers, whole_cost(self._profile, tokens, answers), IDLE)
        margins = self._margin_sets()[-1]
        choices = [self._choices_excess(asked, margins, [tokens], 0.0)]
        if self._proposer is not None:
            planning_ms = self._proposer.planning_ms(tokens)
            choices.append(self._choices_excess(asked, margins, self._counts(tokens), planning_ms))
        return float(min(each.min() for each in choices))

    def _margin_sets(self) -> list[_Margins]:
        """The margins to plan with, the largest first."""
        base = 1 / self._margin
        learned = [] if self.safety_margin is None else self.safety_margin.factors()
        if learned and max(learned[0]) <= base:
            return [_Margins(*learned[0], base)]
        above = [_Margins(*factors, base) for factors in learned if max(factors) > base]
        return [*above, _Margins(base, base, base)]

    def _plan(
        self,
        asked: _Request,
        margins: _Margins,
        *,
        last: bool = True,
        strict: bool = False,
        confident: bool = True,
    ) -> Plan | None:
        """A plan; None if no choice meets the objective and `last` is False."""
        prompt, whole, tokens = asked.prompt, asked.whole, len(asked.prompt.ids)
        excess_of = functools.partial(self._choices_excess, asked, margins)

        def made(level: int, ratio: float, kept: np.ndarray, source: Source) -> Plan:
            spent_ms, reused = asked.spent_ms(), asked.reused.get(level, 0) if len(kept) == tokens else 0
            cost = expected_cost(
                self._profile, level, len(kept), asked.answer_tokens, planning_ms=spent_ms, reused=reused
            )
            return Plan(
                level=level, prompt_ratio=ratio, kept=kept, prompt_tokens=tokens, source=source,
                expected=cost, whole=whole, planning_ms=spent_ms - asked.tokenize_ms, reused_tokens=reused,
                confident=confident and source != "nearest",
            )  # fmt: skip

        if self._excess(asked, margins, self._whole_again(asked)) <= 1:
            return made(WHOLE, 1.0, np.arange(tokens), "whole")
        # The whole prompt, without the proposer's time; then all choices, with its time.
        unasked = excess_of([tokens], asked.spent_ms(), [asked.reused.get(each, 0) for each in self._levels])
        largest, _ = self._largest(unasked <= 1)
        proposer, counts, excess = self._proposer, [tokens], np.full((len(self._levels), 1), np.inf)
        if proposer is not None:
            # Find droppable tokens only if dropping all of them would help.
            asked_ms, counts = asked.tokenize_ms + proposer.planning_ms(tokens), self._counts(tokens)
            excess = excess_of(counts, asked_ms)
            if self._largest(excess <= 1)[0] > largest or (largest < 0 and excess.min() < unasked.min()):
                counts = self._counts(tokens, stays_anyway(prompt.words, prompt.forced))
                excess = excess_of(counts, asked_ms)
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
        # With the time really spent by now, which may be more than the expected time of a proposal.
        allowed = excess_of(counts, asked.spent_ms()) <= 1
        if not allowed.any():
            if not last:
                return None
            return made(*self._shortened(prompt, *self._smallest(excess), found.scores), "nearest")
        if allowed[place]:
            return made(*self._shortened(prompt, *place, found.scores), "proposed")
        return made(*self._shortened(prompt, *self._largest(allowed), found.scores), "fallback")

    def _whole_again(self, asked: _Request) -> Cost:
        """The cost of the whole model with the whole prompt, without its cached part."""
        reused = asked.reused.get(WHOLE, 0)
        if not reused:
            return asked.whole
        tokens, spent_ms = len(asked.prompt.ids), asked.tokenize_ms
        return expected_cost(
            self._profile, WHOLE, tokens, asked.answer_tokens, planning_ms=spent_ms, reused=reused
        )

    def _excess(self, asked: _Asked, margins: _Margins, cost: Cost) -> Any:
        """`overrun` of a cost with margins."""
        planned = dataclasses.replace(
            cost,
            ttft_ms=margins.ttft * cost.ttft_ms + asked.load.waiting_ms,
            tpot_ms=margins.tpot * asked.load.token_share * cost.tpot_ms,
            joules=None if cost.joules is None else margins.energy * cost.joules,
        )
        return overrun(asked.objective, planned, asked.whole)

    def _counts(self, tokens: int, must: int = 1) -> list[int]:
        """The maximum number of kept tokens at each ratio, of `tokens`, `must` of which are forced."""
        return [max(must, int(ratio * tokens + 1e-6)) for ratio in self._ratios]

    def _choices_excess(
        self,
        asked: _Asked,
        margins: _Margins,
        counts: Sequence[int],
        planning_ms: float,
        reused: Sequence[int] = (),
    ) -> np.ndarray:
        """`_excess` of each choice `[levels, prompt_ratios]`, by the number of kept tokens at each ratio."""
        costs = expected_costs(
            self._profile, self._levels, counts, asked.answer_tokens, planning_ms=planning_ms, reused=reused
        )
        return self._excess(asked, margins, costs)

    def _shortened(
        self, prompt: PromptTokens, level: int, ratio: int, scores: np.ndarray | None = None
    ) -> tuple[int, float, np.ndarray]:
        """The level, the ratio and the kept tokens of a choice, which is given by indices."""
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
        """Indices of the largest allowed level, then of its largest allowed ratio; (-1, -1) for none."""
        if not allowed.any():
            return -1, -1
        level = int(np.flatnonzero(allowed.any(1))[-1])
        return level, int(np.flatnonzero(allowed[level])[-1])

    @staticmethod
    def _smallest(excess: np.ndarray) -> tuple[int, int]:
        """Indices of the choice with the smallest excess; the largest choice of equal ones."""
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
