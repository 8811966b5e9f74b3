import dataclasses
import random
import statistics

import numpy as np
import pytest

from jaxllm.elastic.slo import SLOS, Slo
from jaxllm.errors import ConfigError, ObjectiveMissed
from jaxllm.serving.elastic.objectives import (
    MOST,
    START,
    Cost,
    EndToEnd,
    EnergyBudget,
    Latency,
    SafetyMargin,
    as_ratios,
    expected_cost,
    expected_costs,
    meets,
)
from jaxllm.serving.elastic.planner import Load, Planner, Proposal, described, level_of_turn, unmet
from jaxllm.serving.elastic.profile import DeviceProfile, Energy
from tests.tiny_tlm import word_prompt

LEVELS, RATIOS = (25, 50, 100), (0.25, 0.5, 1.0)
# A token of prompt takes 1 ms at the whole model, whose further tokens take 4 ms.
PROFILE = DeviceProfile(
    levels=LEVELS,
    tokens=(1, 1000),
    chunk_tokens=(1,),
    ttft_ms=tuple((25.0 * level / 2500, 25.0 * level / 2.5) for level in LEVELS),
    tpot_ms=tuple((level / 25.0,) * 2 for level in LEVELS),
)


def cost(ttft_ms=10.0, tpot_ms=2.0, tokens=8, joules=None):
    return Cost(ttft_ms=ttft_ms, tpot_ms=tpot_ms, tokens=tokens, joules=joules)


class Fixed:
    """Proposes one choice; later tokens matter more."""

    prompt_ratios = RATIOS

    def __init__(self, level, ratio, planning_ms=0.0):
        self.choice, self.cost_ms, self.asked = (level, ratio), planning_ms, []

    def propose(self, prompt, slo, allowed):
        self.asked.append((slo, allowed))
        return Proposal(level=self.choice[0], prompt_ratio=self.choice[1], scores=self.scores(prompt))

    def scores(self, prompt):
        return np.linspace(0, 1, len(prompt.ids))

    def planning_ms(self, tokens):
        return self.cost_ms


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Time stands still unless a test moves it."""
    now_s = [0.0]
    monkeypatch.setattr("jaxllm.serving.elastic.planner.time.perf_counter", lambda: now_s[0])
    return now_s


def planner(proposer=None, margin=1.0):
    return Planner(PROFILE, LEVELS, proposer, margin=margin)


def test_a_proposal_that_meets_its_objective_is_taken():
    proposer = Fixed(50, 0.5)
    plan = planner(proposer).plan(word_prompt(), Slo(ttft=0.4, tpot=0.6), answer_tokens=8)
    assert (plan.level, plan.source, plan.prompt_tokens) == (50, "proposed", 100)
    # What must stay, and of the others the last.
    assert plan.kept.tolist() == [*range(10), *range(60, 100)]
    assert plan.expected.ttft_ms - plan.planning_ms == pytest.approx(PROFILE.ttft(50, 50))
    assert (plan.whole.ttft_ms, plan.whole.tpot_ms) == (PROFILE.ttft(100, 100), 4.0)
    ((slo, allowed),) = proposer.asked
    assert slo == Slo(ttft=0.4, tpot=0.6)
    assert allowed.tolist() == [[True, True, True], [True, True, False], [False, False, False]]


def test_what_may_go_is_looked_up_only_where_it_would_help():
    # Not where only the smallest level is fast enough per token with any prompt, but where a shorter prompt
    # leaves room for more.
    for slo, looked_up in ((Slo(ttft=0.9, tpot=0.3), False), (Slo(ttft=0.3, tpot=0.6), True)):
        whole, asked = word_prompt(), []
        watched = dataclasses.replace(whole, find_spans=lambda: asked.append(1) or whole.spans)  # noqa: B023
        plan = planner(Fixed(25, 0.25)).plan(watched, slo, answer_tokens=8)
        assert bool(asked) == looked_up == (len(plan.kept) < 100)


def planned(proposer, slo, prompt=None, **how):
    """The level, the number of tokens that are kept, and the source of a plan."""
    margin = how.pop("margin", 1.0)
    plan = planner(proposer, margin).plan(prompt or word_prompt(), slo, **{"answer_tokens": 8} | how)
    return plan.level, len(plan.kept), plan.source


@pytest.mark.parametrize(
    ("proposer", "slo", "how", "expected"),
    [
        # A proposal that would miss its objective is replaced by the largest that does not.
        (Fixed(100, 0.25), Slo(ttft=0.4, tpot=0.6), {}, (50, 50, "fallback")),
        # With one token to answer, the time per further token does not count.
        (Fixed(100, 0.25), Slo(ttft=0.4, tpot=0.6), {"answer_tokens": 1}, (100, 25, "proposed")),
        # A margin is left.
        (Fixed(50, 0.5), Slo(ttft=0.25, tpot=0.5), {}, (50, 50, "proposed")),
        (Fixed(50, 0.5), Slo(ttft=0.25, tpot=0.5), {"margin": 0.9}, (25, 50, "fallback")),
        # A quarter of the prompt cannot be kept: sixty tokens must stay, and take 0.3 at half the model.
        (
            Fixed(50, 0.25),
            Slo(ttft=0.28, tpot=1.0),
            {"prompt": word_prompt(forced=60)},
            (25, 100, "fallback"),
        ),
        # A short prompt that may go altogether keeps a word: a quarter of three tokens is less than one.
        (Fixed(50, 0.25), Slo(ttft=0.4, tpot=0.6), {"prompt": word_prompt(3, forced=0)}, (50, 1, "proposed")),
        # An objective with room for all is met with all.
        (Fixed(25, 0.25), Slo(ttft=1.0, tpot=1.0), {}, (100, 100, "whole")),
        (Fixed(25, 0.25), Latency(ttft_ms=1e4, tpot_ms=1e4), {}, (100, 100, "whole")),
        # On a hot device every call has less than the whole model's work.
        (None, Slo(ttft=1.0, tpot=1.0), {"load": Load(work_share=0.5)}, (50, 100, "fallback")),
        (None, Latency(ttft_ms=1e4, tpot_ms=1e4), {"load": Load(work_share=0.2)}, (25, 100, "nearest")),
        # Without a proposer prompts stay whole.
        (None, Slo(ttft=0.6, tpot=0.6), {}, (50, 100, "fallback")),
        (None, Slo(ttft=0.1, tpot=0.6), {}, (25, 100, "nearest")),
        # What cannot be met is come near: of choices that miss it alike by the largest.
        (Fixed(50, 0.5), Slo(ttft=0.01, tpot=0.2), {}, (25, 25, "nearest")),
        (Fixed(50, 0.5), Slo(ttft=1.0, tpot=0.1), {}, (25, 100, "nearest")),
        # Half the model reads all of the prompt in time; with a proposer's 30 ms only a quarter of it.
        (Fixed(50, 0.5, 30.0), Slo(ttft=0.5, tpot=0.6), {}, (50, 100, "fallback")),
        # A shorter prompt would not come as near as a small level with the whole one.
        (Fixed(50, 0.5, 30.0), Slo(ttft=0.2, tpot=1.0), {}, (25, 100, "nearest")),
        # All of the model within the time: that takes a shorter prompt.
        (Fixed(100, 0.25), Slo(ttft=0.5, tpot=1.0), {}, (100, 25, "proposed")),
    ],
)
def test_what_is_planned(proposer, slo, how, expected):
    if proposer is not None:
        proposer.asked.clear()
    assert planned(proposer, slo, **how) == expected
    if proposer is not None and (proposer.cost_ms or expected[2] == "whole"):
        # Nobody is asked who has no say, or whose time would not be won back.
        assert not proposer.asked
    if expected[2] == "nearest":
        with pytest.raises(ObjectiveMissed, match="no sub-model meets"):
            planned(proposer, slo, **how, strict=True)


@pytest.mark.parametrize(
    ("spent_ms", "choice"), [(0, (50, 50, "proposed")), (16, (50, 25, "fallback")), (99, (25, 25, "nearest"))]
)
def test_planning_itself_takes_time(clock, spent_ms, choice):
    slow = Fixed(50, 0.5, planning_ms=16.0)
    propose = slow.propose

    def proposed(*asked):
        clock[0] += spent_ms / 1000
        return propose(*asked)

    slow.propose = proposed
    plan = planner(slow).plan(word_prompt(), Slo(ttft=0.4, tpot=0.6), answer_tokens=8)
    # It is asked about what it takes as a rule, and held against what it took.
    assert slow.asked[0][1].tolist() == [[True, True, False], [True, False, False], [False] * 3]
    assert (plan.level, len(plan.kept), plan.source) == choice
    assert plan.planning_ms == pytest.approx(spent_ms)


def late(share):
    """A margin after answers that took so many times what was expected."""
    margin, expected = SafetyMargin(0.9), Cost(ttft_ms=10.0, tpot_ms=2.0, tokens=8)
    for _ in range(256):
        margin.saw_first(expected, dataclasses.replace(expected, ttft_ms=10.0 * share))
        margin.saw_further(expected, expected)
    return margin


def test_answers_that_came_late_make_plans_careful():
    def plan(margin, slo, **how):
        found = Planner(PROFILE, LEVELS, Fixed(50, 0.5), margin=1.0, safety_margin=margin).plan(
            word_prompt(), slo, answer_tokens=8, **how
        )
        return found.level, len(found.kept), found.source, found.confident

    slo = Slo(ttft=0.3, tpot=0.6)
    assert plan(None, slo) == plan(late(1.0), slo) == (50, 50, "proposed", True)
    # Half the prompt takes a quarter of the time, and may now take 1.5 times as long.
    assert plan(late(1.5), slo) == (50, 25, "fallback", True)
    # Of a time that nothing meets surely the likeliest to meet it is taken, and said to be no more.
    tight = Slo(ttft=0.08, tpot=0.3)
    assert plan(late(1.0), tight) == (25, 25, "fallback", True)
    assert plan(late(1.5), tight) == plan(late(1.5), tight, strict=True) == (25, 25, "fallback", False)
    # What no plan meets at all is the nearest, or refused.
    missed = Slo(ttft=0.02, tpot=0.3)
    assert plan(late(1.5), missed) == (25, 25, "nearest", False)
    assert plan(None, missed) == (25, 25, "nearest", False)
    with pytest.raises(ObjectiveMissed):
        plan(late(1.5), missed, strict=True)


def test_what_nothing_meets_surely_is_planned_with_the_most_confidence_that_there_can_be():
    margin, expected = SafetyMargin(0.99), Cost(ttft_ms=10.0, tpot_ms=2.0, tokens=8)
    for place in range(256):
        # Three quarters of the answers take up to 1.25 times what was expected, the others twice as much.
        margin.saw_first(expected, dataclasses.replace(expected, ttft_ms=20.0 if place % 4 == 0 else 12.5))
        margin.saw_further(expected, expected)

    levels = (25, 30, 100)
    profile = dataclasses.replace(
        PROFILE,
        levels=levels,
        ttft_ms=tuple((each / 100, each * 10.0) for each in levels),
        tpot_ms=tuple((each / 25.0,) * 2 for each in levels),
    )

    def plan(ttft, margin):
        planner = Planner(profile, levels, margin=1.0, safety_margin=margin)
        found = planner.plan(word_prompt(), Slo(ttft=ttft, tpot=1.0), answer_tokens=8)
        return found.level, found.confident

    assert plan(0.51, margin) == (25, True)
    # By the profile the larger level is in time; three quarters of the answers are with the smaller one.
    assert plan(0.33, None) == (30, True)
    assert plan(0.33, margin) == (25, False)
    assert plan(0.39, margin) == (30, False)


def test_what_a_cache_has_already_need_not_be_computed():
    slo = Slo(ttft=0.5, tpot=1.0)
    # Alone the half-sized level is the largest in time; the whole model's cache has all but 10 tokens.
    assert planner().plan(word_prompt(), slo, answer_tokens=8).level == 50
    plan = planner().plan(word_prompt(), slo, answer_tokens=8, reused={100: 90})
    assert (plan.level, plan.source, plan.reused_tokens) == (100, "whole", 90)
    assert plan.expected.ttft_ms == pytest.approx(PROFILE.ttft(100, 10))
    # What the objective is relative to stays the whole prompt's time.
    assert plan.whole.ttft_ms == PROFILE.ttft(100, 100)
    # A cache of a smaller level helps where none is in time without it, and no larger one.
    strict = Slo(ttft=0.1, tpot=1.0)
    plan = planner().plan(word_prompt(), strict, answer_tokens=8, reused={50: 90})
    assert (plan.level, plan.source, plan.reused_tokens) == (50, "fallback", 90)
    # A prompt that is shortened is another one.
    plan = planner(Fixed(50, 0.5)).plan(word_prompt(), slo, answer_tokens=8, reused={50: 20})
    assert (plan.level, len(plan.kept), plan.reused_tokens) == (50, 50, 0)


@pytest.mark.parametrize(
    ("objective", "thought_tokens", "level"),
    [
        (Latency(ttft_ms=300, tpot_ms=9), 0, 100),
        # 100 ms, and 50 tokens of 4 ms.
        (Latency(ttft_ms=300, tpot_ms=9), 50, 100),
        (Latency(ttft_ms=299, tpot_ms=9), 50, 50),
        (Slo(ttft=0.5, tpot=1.0), 50, 50),
        (Slo(ttft=0.49, tpot=1.0), 50, 25),
        # The thought is a part of the answer.
        (EndToEnd(total_ms=100 + 99 * 4), 50, 100),
    ],
)  # fmt: skip
def test_a_thought_with_a_budget_is_before_the_first_token(objective, thought_tokens, level):
    plan = planner().thinking(thought_tokens).plan(word_prompt(), objective, answer_tokens=100)
    first_ms = level * (1 + thought_tokens / 25)
    assert (plan.level, plan.expected.counted_ttft_ms) == (level, pytest.approx(first_ms))
    costs = {each: expected_cost(PROFILE, each, 100, 100, thought_tokens=thought_tokens) for each in LEVELS}
    # With the planner's own margin a turn in a context may get a smaller level.
    assert level_of_turn(costs, objective, costs[100]) <= level


def test_the_lengths_at_which_nothing_meets_an_objective():
    # Of a prompt of one token a quarter of the model takes all that is in time of <25,25>.
    assert planner().lengths_missed(Slo(ttft=0.25, tpot=0.25), answer_tokens=8) == ()
    assert planner().lengths_missed(Slo(ttft=0.2, tpot=0.9), answer_tokens=8) == (1, 1000)
    assert planner().lengths_missed(Slo(ttft=0.9, tpot=0.2), answer_tokens=8) == (1, 1000)
    # An answer of one token has no further ones.
    assert planner().lengths_missed(Slo(ttft=0.9, tpot=0.2), answer_tokens=1) == ()
    # Shortening helps long prompts, but the tiny LM takes its time.
    asked = Slo(ttft=0.2, tpot=0.9)
    assert planner(Fixed(25, 0.25)).lengths_missed(asked, answer_tokens=8) == (1,)
    assert planner(Fixed(25, 0.25, planning_ms=200.0)).lengths_missed(asked, answer_tokens=8) == (1, 1000)
    assert planner().lengths_missed(Latency(ttft_ms=100, tpot_ms=9), answer_tokens=8) == (1000,)
    assert planner(margin=0.9).lengths_missed(Slo(ttft=0.25, tpot=0.25), answer_tokens=8) == (1, 1000)
    with pytest.raises(ConfigError, match="no energy"):
        planner().lengths_missed(EnergyBudget(joules=1), answer_tokens=8)
    # Only what is missed somewhere is reported.
    slow, both = Slo(ttft=0.2, tpot=0.9), (Slo(ttft=0.25, tpot=0.25), Slo(ttft=0.2, tpot=0.9))
    assert unmet(planner(), both) == {slow: (1, 1000)}
    assert unmet(planner()).keys() == {SLOS[4], SLOS[5]}


@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.99])
def test_so_many_answers_stay_within_it_as_was_asked(confidence):
    draw, margin, within = random.Random(0), SafetyMargin(confidence), []
    for _ in range(3000):
        share = 1.05 + min(0.8, draw.expovariate(8))
        within.append(share <= margin.factors()[0][0])
        margin.saw_first(cost(), cost(ttft_ms=10 * share))
    assert abs(statistics.mean(within) - confidence) < 0.02


def test_it_forgets_and_stays_within_its_bounds():
    margin = SafetyMargin(0.9)
    assert margin.factors() == [(START, START)]
    for ttft_ms, expected in ((1e6, MOST), (3.0, 1.0)):
        for _ in range(256):
            margin.saw_first(cost(), cost(ttft_ms=ttft_ms))
        assert margin.factors() == [(expected, START)]
    # An answer of one token says nothing of further ones.
    for tokens, expected in ((1, START), (8, 1.5)):
        for _ in range(256):
            margin.saw_further(cost(), cost(tpot_ms=3.0 * (tokens > 1), tokens=tokens))
        assert margin.factors() == [(1.0, expected)]


@pytest.mark.parametrize("wrong", [0, 1, 1.5, -0.1, True, "0.9", float("nan")])
def test_a_confidence_is_a_share(wrong):
    with pytest.raises(ConfigError, match="confidence must be in"):
        SafetyMargin(wrong)


# Objectives: what meets them, expected costs, and levels of turns.

FULL_LEVEL = cost(tokens=5)


@pytest.mark.parametrize(
    ("objective", "met", "missed"),
    [
        (Slo(ttft=0.4, tpot=0.7), cost(4.0, 1.4), cost(4.1, 1.4)),
        (Slo(ttft=1.0, tpot=0.5), cost(99.0, 1.0), cost(1.0, 1.1)),
        (Latency(ttft_ms=4.0, tpot_ms=1.4), cost(4.0, 1.4), cost(4.0, 1.5)),
        (EndToEnd(total_ms=12.0), cost(4.0, 2.0, 5), cost(4.1, 2.0, 5)),
        (EnergyBudget(joules=3.0), cost(1.0, 1.0, joules=3.0), cost(1.0, 1.0, joules=3.1)),
        # An answer of one token has no further ones.
        (Slo(ttft=0.5, tpot=0.1), cost(5.0, 0.0, tokens=1), cost(5.1, 0.0, tokens=1)),
        (EndToEnd(total_ms=5.0), cost(5.0, 9.0, tokens=1), cost(5.1, 0.0, tokens=1)),
        # All of the time is no demand.
        (Slo(ttft=1.0, tpot=1.0), cost(1e9, 1e9), None),
    ],
)
def test_what_meets_an_objective(objective, met, missed):
    assert meets(objective, met, FULL_LEVEL)
    assert missed is None or not meets(objective, missed, FULL_LEVEL)


def test_objectives_as_ratios():
    assert as_ratios(Slo(ttft=0.4, tpot=0.7), FULL_LEVEL) == Slo(ttft=0.4, tpot=0.7)
    assert as_ratios(Latency(ttft_ms=2.0, tpot_ms=50.0), FULL_LEVEL) == Slo(ttft=0.2, tpot=1.0)
    # The whole model takes 18 ms.
    assert as_ratios(EndToEnd(total_ms=9.0), FULL_LEVEL) == Slo(ttft=0.5, tpot=0.5)
    whole = dataclasses.replace(FULL_LEVEL, joules=4.0)
    assert as_ratios(EnergyBudget(joules=1.0), whole) == Slo(ttft=0.25, tpot=0.25)


def test_energy_needs_a_profile_that_knows_it():
    with pytest.raises(ConfigError, match="has no energy, so no energy budget"):
        meets(EnergyBudget(joules=1.0), FULL_LEVEL, FULL_LEVEL)
    energy = Energy(prefill_joules=(1.0, 2.0, 3.0), decode_joules=(3.0, 5.0, 7.0))
    assert expected_cost(dataclasses.replace(PROFILE, energy=energy), 50, 16, 3).joules == 32 + 15


def test_expected_costs_are_the_profiles():
    found = expected_cost(PROFILE, 50, 64, 9, planning_ms=0.5)
    assert (found.ttft_ms, found.tpot_ms, found.tokens) == (pytest.approx(32.5), 2.0, 9)
    assert found.total_ms == pytest.approx(32.5 + 8 * 2.0)
    # What a cache has costs no computing, but attention to it does; at least one token is fed.
    times = dict(tokens=(1, 500, 1000), ttft_ms=((1.0, 90.0, 400.0),) * 3, tpot_ms=((1.0,) * 3,) * 3)
    steep = dataclasses.replace(PROFILE, **times)
    assert expected_cost(steep, 50, 1000, 9, reused=500).ttft_ms == 400.0 - 90.0
    assert expected_cost(steep, 50, 500, 9, reused=499).ttft_ms == 1.0
    both = expected_costs(steep, (50, 100), (1000,), 9, reused=(0, 1000))
    assert both.ttft_ms[:, 0].tolist() == [400.0, 1.0]


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), True, "3"])
@pytest.mark.parametrize("make", [EndToEnd, EnergyBudget, Latency])
def test_impossible_objectives_are_refused(make, value):
    names = [field.name for field in dataclasses.fields(make)]
    with pytest.raises(ConfigError, match="of an objective must be a number above 0"):
        make(**dict.fromkeys(names, value))


# Turns in a context of level 50: at the others all of it is computed again.
COSTS = {25: cost(100.0, 2.0, 8), 50: cost(30.0, 5.0, 8), 100: cost(400.0, 10.0, 8)}
ROOMY, NONE = Latency(ttft_ms=1000, tpot_ms=20), Latency(ttft_ms=1, tpot_ms=100)


@pytest.mark.parametrize(
    ("objective", "more", "level"),
    [
        (Latency(ttft_ms=1000, tpot_ms=100), {}, 100),
        (Latency(ttft_ms=300, tpot_ms=100), {}, 50),
        (Latency(ttft_ms=300, tpot_ms=3), {}, 25),
        (Latency(ttft_ms=300, tpot_ms=3), {"strict": True}, 25),
        # No level is in time: by how much matters.
        (NONE, {}, 50),
        (Latency(ttft_ms=300, tpot_ms=0.1), {}, 25),
        (Slo(ttft=0.9, tpot=0.9), {}, 50),
        # 100 % asks for nothing.
        (Slo(ttft=1.0, tpot=1.0), {}, 100),
        # What others take counts.
        (ROOMY, {}, 100),
        (ROOMY, {"load": Load(waiting_ms=700)}, 50),
        (ROOMY, {"load": Load(token_share=3)}, 50),
    ],
)
def test_the_largest_in_time_or_the_nearest(objective, more, level):
    assert level_of_turn(COSTS, objective, cost(60.0, 10.0, 8), **more) == level


def test_strict_turns_are_refused():
    with pytest.raises(ObjectiveMissed, match="level 50 comes nearest"):
        level_of_turn(COSTS, NONE, cost(60.0, 10.0, 8), strict=True)


def test_objectives_in_words():
    for lengths, words in (
        ((16, 64), "up to 64 tokens"), ((16, 64, 512), "any length"), ((512,), "512 tokens and more"),
        ((16, 512), "16, 512 tokens"),
    ):  # fmt: skip
        missed = {Slo(ttft=0.4, tpot=0.7): lengths}
        assert described(missed, (16, 64, 512)) == f"<40,70> for prompts of {words}"
    both = {SLOS[5]: (16,), Latency(ttft_ms=1, tpot_ms=2): (16,)}
    told = (
        "<20,50> for prompts of any length; 1 ms to the first token, 2 ms per token for prompts of any length"
    )
    assert (described(both, (16,)), described({}, (16,))) == (told, "")
