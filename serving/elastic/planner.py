"""Plans requests: chooses the level that answers, and the prompt tokens to keep.

ELMS (arXiv 2409.09071, section 3.3). The tiny LM proposes; a proposal that would miss the objective by the
device's profile, including planning, is replaced by the largest choice that meets it. The tiny LM runs only
if its own time can pay off: if a shorter prompt allows a larger level than the whole prompt without it.
"""

import copy
import dataclasses
import time
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, Self

import numpy as np

from jaxllm.config import FULL_LEVEL
from jaxllm.elastic.compression import keep_tokens, stays_anyway
from jaxllm.elastic.slo import SLOS, Slo
from jaxllm.errors import ObjectiveMissed
from jaxllm.serving.elastic.objectives import (
    START,
    Objective,
    SafetyMargin,
    as_ratios,
    expected_cost,
    expected_costs,
    overrun,
)
from jaxllm.serving.elastic.profile import DeviceProfile
from jaxllm.serving.engine.request import DEFAULT_MAX_TOKENS
from jaxllm.serving.ground.plan import Cost, Plan, Source
from jaxllm.text.droppable import PromptTokens

# Share of an objective to plan for.
MARGIN = 1 / START
# Factors on an expected time to the first token, time per further token, and energy.
_Factors = tuple[float, float, float]


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """The load by other calls.

    Attributes:
      waiting_ms: past and expected time from the request to its first token in which others use the device.
      token_share: time per further token, relative to that of an unloaded device.
      work_share: maximum times of an answer, relative to those of the whole model on an idle device: less
        than 1 while the device is hot.
    """

    waiting_ms: float = 0.0
    token_share: float = 1.0
    work_share: float = 1.0


IDLE = Load()
_NONE: Mapping[int, int] = MappingProxyType({})


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Request:
    """A request for a plan (see `Planner.plan`), with the whole model's cost and the start of planning."""

    objective: Objective
    answer_tokens: int
    whole: Cost
    load: Load = IDLE
    tokenize_ms: float = 0.0
    began: float = 0.0
    reused: Mapping[int, int] = dataclasses.field(default_factory=lambda: _NONE)

    def spent_ms(self) -> float:
        """Time since the request came."""
        return self.tokenize_ms + 1000 * (time.perf_counter() - self.began)

    def excess(self, cost: Cost, factors: _Factors) -> Any:
        """`overrun` of a cost with margins, under the load."""
        return _loaded_overrun(self.objective, cost, self.whole, self.load, factors)


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
      least_ratio: the minimum share of a prompt that a plan may keep.
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
        self.least_ratio = self._ratios[0]
        self._margin, self.safety_margin = margin, safety_margin
        self._thought_tokens = 0
        self._set_profile(profile)

    def thinking(self, tokens: int) -> Self:
        """The same planner for answers whose objective counts from the end of a thought of at most `tokens`
        tokens, which are a part of the answer's."""
        found = copy.copy(self)
        found._thought_tokens = tokens
        return found

    def use(self, profile: DeviceProfile) -> None:
        """Replaces the profile, and resets the safety margin."""
        self._set_profile(profile)
        if self.safety_margin is not None:
            self.safety_margin.forget()

    def plan(
        self,
        prompt: PromptTokens,
        objective: Objective,
        *,
        answer_tokens: int,
        strict: bool = False,
        tokenize_ms: float = 0.0,
        load: Load = IDLE,
        reused: Mapping[int, int] = _NONE,
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
        request = _Request(
            objective=objective, answer_tokens=answers, load=load, began=began, reused=reused,
            whole=self._cost(FULL_LEVEL, len(prompt.ids), answers, planning_ms=tokenize_ms),
            tokenize_ms=tokenize_ms,
        )  # fmt: skip
        *higher, least = self._factors()
        # On a device that sometimes stalls no choice may meet the objective with confidence: then one that
        # meets it with less, finally by the profile only, is better than the nearest with confidence.
        for place, factors in enumerate(higher):
            if (plan := self._plan(request, prompt, factors, last=False, confident=place == 0)) is not None:
                return plan
        plan = self._plan(request, prompt, least, strict=strict, confident=not higher)
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
        answers, factors, missed = max(1, answer_tokens), self._factors()[-1], []
        for tokens in self._profile.tokens:
            whole = self._cost(FULL_LEVEL, tokens, answers)
            request = _Request(objective=objective, answer_tokens=answers, whole=whole)
            choices = [self._excess(request, factors, [tokens], 0.0)]
            if self._proposer is not None:
                planning_ms = self._proposer.planning_ms(tokens)
                choices.append(self._excess(request, factors, self._counts(tokens), planning_ms))
            if min(each.min() for each in choices) > 1:
                missed.append(tokens)
        return tuple(missed)

    def _cost(self, level: int, prompt_tokens: int, answer_tokens: int, **more: Any) -> Cost:
        thought = self._thought_tokens
        return expected_cost(
            self._profile, level, prompt_tokens, answer_tokens, thought_tokens=thought, **more
        )

    def _set_profile(self, profile: DeviceProfile) -> None:
        self._profile = profile
        # Fill the profile's caches now, so that the first request does not wait for them.
        expected_costs(profile, self._levels, (1,), 1)

    def _factors(self) -> list[_Factors]:
        """The margins to plan with, the largest first."""
        base = 1 / self._margin
        learned = [] if self.safety_margin is None else self.safety_margin.factors()
        if learned and max(learned[0]) <= base:
            return [(*learned[0], base)]
        return [*((*each, base) for each in learned if max(each) > base), (base, base, base)]

    def _plan(
        self,
        request: _Request,
        prompt: PromptTokens,
        factors: _Factors,
        *,
        last: bool = True,
        strict: bool = False,
        confident: bool = True,
    ) -> Plan | None:
        """A plan; None if no choice meets the objective and `last` is False."""
        tokens, reused, proposer = len(prompt.ids), request.reused, self._proposer

        def made(level: int, ratio: float, kept: np.ndarray, source: Source) -> Plan:
            spent_ms, cached = request.spent_ms(), reused.get(level, 0) if len(kept) == tokens else 0
            answer_tokens = request.answer_tokens
            cost = self._cost(level, len(kept), answer_tokens, planning_ms=spent_ms, reused=cached)
            return Plan(
                level=level, prompt_ratio=ratio, kept=kept, prompt_tokens=tokens, source=source,
                expected=cost, whole=request.whole, planning_ms=spent_ms - request.tokenize_ms,
                reused_tokens=cached, confident=confident and source != "nearest",
            )  # fmt: skip

        def shortened(choice: tuple[int, int], source: Source, scores: np.ndarray | None = None) -> Plan:
            level, share = self._levels[choice[0]], self._ratios[choice[1]]
            if share == 1:
                return made(level, share, np.arange(tokens), source)
            if scores is None:
                assert proposer is not None
                scores = proposer.scores(prompt)
            kept = keep_tokens(scores, prompt.words, prompt.forced, share)
            return made(level, share, np.flatnonzero(kept), source)

        cost = request.whole
        if cached := reused.get(FULL_LEVEL, 0):
            answer_tokens, spent_ms = request.answer_tokens, request.tokenize_ms
            cost = self._cost(FULL_LEVEL, tokens, answer_tokens, planning_ms=spent_ms, reused=cached)
        if request.excess(cost, factors) <= 1:
            return made(FULL_LEVEL, 1.0, np.arange(tokens), "whole")
        # The whole prompt, without the proposer's time; then all choices, with its time.
        cached_tokens = [reused.get(level, 0) for level in self._levels]
        unasked = self._excess(request, factors, [tokens], request.spent_ms(), cached_tokens)
        largest, _ = _largest(unasked <= 1)
        counts, excess = [tokens], np.full((len(self._levels), 1), np.inf)
        if proposer is not None:
            # Find droppable tokens only if dropping all of them would help.
            asked_ms, counts = request.tokenize_ms + proposer.planning_ms(tokens), self._counts(tokens)
            excess = self._excess(request, factors, counts, asked_ms)
            if _largest(excess <= 1)[0] > largest or (largest < 0 and excess.min() < unasked.min()):
                counts = self._counts(tokens, stays_anyway(prompt.words, prompt.forced))
                excess = self._excess(request, factors, counts, asked_ms)
        allowed = excess <= 1
        if not allowed.any() and largest < 0:
            if not last:
                return None
            if strict:
                by_ratio, ratios = excess, self._ratios
                if unasked.min() <= excess.min():
                    by_ratio, ratios = unasked, (1.0,)
                level, place = _smallest(by_ratio)
                raise ObjectiveMissed(
                    f"no sub-model meets {request.objective}: level {self._levels[level]} with "
                    f"{ratios[place]:.0%} of the prompt comes nearest and takes "
                    f"{by_ratio[level, place] * self._margin:.2f} times as much (of what is asked, "
                    f"{self._margin:.0%} are planned for); ask for more time, or without strict"
                )
        if proposer is None or largest >= _largest(allowed)[0]:
            if largest >= 0:
                return made(self._levels[largest], 1.0, np.arange(tokens), "fallback")
            if unasked.min() <= excess.min():
                return made(self._levels[_smallest(unasked)[0]], 1.0, np.arange(tokens), "nearest")
            return shortened(_smallest(excess), "nearest")
        found = proposer.propose(prompt, as_ratios(request.objective, request.whole), allowed)
        choice = self._levels.index(found.level), self._ratios.index(found.prompt_ratio)
        # With the time really spent by now, which may be more than the expected time of a proposal.
        allowed = self._excess(request, factors, counts, request.spent_ms()) <= 1
        if not allowed.any():
            return shortened(_smallest(excess), "nearest", found.scores) if last else None
        if allowed[choice]:
            return shortened(choice, "proposed", found.scores)
        return shortened(_largest(allowed), "fallback", found.scores)

    def _counts(self, tokens: int, must: int = 1) -> list[int]:
        """The maximum number of kept tokens at each ratio, of `tokens`, `must` of which are forced."""
        return [max(must, int(ratio * tokens + 1e-6)) for ratio in self._ratios]

    def _excess(
        self,
        request: _Request,
        factors: _Factors,
        counts: Sequence[int],
        planning_ms: float,
        reused: Sequence[int] = (),
    ) -> np.ndarray:
        """The excess of each choice `[levels, prompt_ratios]`, by the number of kept tokens at each ratio."""
        costs = expected_costs(
            self._profile, self._levels, counts, request.answer_tokens, planning_ms=planning_ms,
            reused=reused, thought_tokens=self._thought_tokens,
        )  # fmt: skip
        return request.excess(costs, factors)


def level_of_turn(
    costs: Mapping[int, Cost],
    objective: Objective,
    whole: Cost,
    *,
    margin: SafetyMargin | None = None,
    load: Load = IDLE,
    strict: bool = False,
) -> int:
    """The level of a turn in a context, where a level other than the context's must recompute all tokens: the
    largest level that meets the objective, else the nearest one.

    Args:
      costs: expected cost on an idle device, by level, including all recomputation.
      objective: objective of the answer's time.
      whole: cost that ratios refer to.
      margin: learned ratio of measured to expected times; None for the planner's own margin.
      load: load by other calls.
      strict: whether to raise if no level meets the objective.

    Raises:
      ObjectiveMissed: `strict`, and no level meets the objective.
    """
    # As the planner does: with confidence, else with less of it, at last by the profile.
    factors = [*([] if margin is None else margin.factors()), (1 / MARGIN, 1 / MARGIN)]
    shares: dict[int, float] = {}
    for pair in factors:
        shares = {
            level: float(_loaded_overrun(objective, cost, whole, load, (*pair, 1.0)))
            for level, cost in costs.items()
        }
        if fitting := [level for level, share in shares.items() if share <= 1]:
            return max(fitting)
    nearest = min(shares, key=lambda level: (shares[level], -level))
    if strict:
        raise ObjectiveMissed(
            f"no sub-model meets {objective} in this context: level {nearest} comes nearest and takes "
            f"{shares[nearest]:.2f} times as much as is planned for; ask for more time, or without strict"
        )
    return nearest


def unmet(planner: Planner, objectives: Iterable[Objective] = SLOS) -> dict[Objective, tuple[int, ...]]:
    """The objectives that no choice meets at some profiled prompt lengths, with those lengths (see
    `Planner.lengths_missed`).

    A short prompt is prefilled in one chunk, whose time hardly depends on the level: it may miss an objective
    that longer prompts meet.
    """
    missed = {each: planner.lengths_missed(each, answer_tokens=DEFAULT_MAX_TOKENS) for each in objectives}
    return {each: lengths for each, lengths in missed.items() if lengths}


def described(missed: Mapping[Objective, Sequence[int]], profiled: Sequence[int]) -> str:
    """The result of `unmet` as text, given all profiled prompt lengths; empty if every objective can be
    met."""

    def lengths(at: tuple[int, ...]) -> str:
        if len(at) == len(profiled):
            return "any length"
        if tuple(profiled[: len(at)]) == at:
            return f"up to {at[-1]} tokens"
        if tuple(profiled[-len(at) :]) == at:
            return f"{at[0]} tokens and more"
        return f"{', '.join(map(str, at))} tokens"

    return "; ".join(f"{each} for prompts of {lengths(tuple(at))}" for each, at in missed.items())


def _loaded_overrun(objective: Objective, cost: Cost, whole: Cost, load: Load, factors: _Factors) -> Any:
    """`overrun` of a cost with margins, under a load."""
    ttft, tpot, energy = factors
    planned = dataclasses.replace(
        cost,
        ttft_ms=ttft * cost.ttft_ms + load.waiting_ms,
        tpot_ms=tpot * load.token_share * cost.tpot_ms,
        joules=None if cost.joules is None else energy * cost.joules,
    )
    excess = overrun(objective, planned, whole)
    if load.work_share == 1:
        return excess
    return np.maximum(excess, overrun(Slo(ttft=load.work_share, tpot=load.work_share), cost, whole))


def _largest(allowed: np.ndarray) -> tuple[int, int]:
    """Indices of the largest allowed level, then of its largest allowed ratio; (-1, -1) for none."""
    if not allowed.any():
        return -1, -1
    level = int(np.flatnonzero(allowed.any(1))[-1])
    return level, int(np.flatnonzero(allowed[level])[-1])


def _smallest(excess: np.ndarray) -> tuple[int, int]:
    """Indices of the choice with the smallest excess; the largest choice of equal ones."""
    nearest = np.argwhere(excess <= excess.min() * (1 + 1e-9))[-1]
    return int(nearest[0]), int(nearest[1])
