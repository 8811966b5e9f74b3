import dataclasses

import pytest

from jaxllm.elastic.slo import SLOS, Slo
from jaxllm.errors import ConfigError, ObjectiveMissed
from jaxllm.serving.elastic.objectives import (
    Cost,
    EndToEnd,
    EnergyBudget,
    Latency,
    as_ratios,
    expected_cost,
    expected_costs,
    meets,
)
from jaxllm.serving.elastic.planner import Load, described, level_of_turn
from jaxllm.serving.elastic.profile import Energy
from tests.serving.elastic.test_profile import PROFILE

WHOLE = Cost(ttft_ms=10.0, tpot_ms=2.0, tokens=5)


def cost(ttft_ms, tpot_ms, tokens=5, joules=None):
    return Cost(ttft_ms=ttft_ms, tpot_ms=tpot_ms, tokens=tokens, joules=joules)


@pytest.mark.parametrize(
    ("objective", "met", "missed"),
    [
        (Slo(ttft=0.4, tpot=0.7), cost(4.0, 1.4), cost(4.1, 1.4)),
        (Slo(ttft=0.4, tpot=0.7), cost(1.0, 1.4), cost(1.0, 1.5)),
        (Slo(ttft=1.0, tpot=0.5), cost(99.0, 1.0), cost(1.0, 1.1)),
        (Latency(ttft_ms=4.0, tpot_ms=1.4), cost(4.0, 1.4), cost(4.0, 1.5)),
        (EndToEnd(total_ms=12.0), cost(4.0, 2.0), cost(4.1, 2.0)),
        (EnergyBudget(joules=3.0), cost(1.0, 1.0, joules=3.0), cost(1.0, 1.0, joules=3.1)),
        # An answer of one token has no further ones.
        (Slo(ttft=0.5, tpot=0.1), cost(5.0, 0.0, tokens=1), cost(5.1, 0.0, tokens=1)),
        (EndToEnd(total_ms=5.0), cost(5.0, 9.0, tokens=1), cost(5.1, 0.0, tokens=1)),
        # All of the time is no demand.
        (Slo(ttft=1.0, tpot=1.0), cost(1e9, 1e9), None),
    ],
)
def test_what_meets_an_objective(objective, met, missed):
    assert meets(objective, met, WHOLE)
    assert missed is None or not meets(objective, missed, WHOLE)


def test_objectives_as_ratios():
    assert as_ratios(Slo(ttft=0.4, tpot=0.7), WHOLE) == Slo(ttft=0.4, tpot=0.7)
    assert as_ratios(Latency(ttft_ms=2.0, tpot_ms=50.0), WHOLE) == Slo(ttft=0.2, tpot=1.0)
    # The whole model takes 18 ms.
    assert as_ratios(EndToEnd(total_ms=9.0), WHOLE) == Slo(ttft=0.5, tpot=0.5)
    whole = dataclasses.replace(WHOLE, joules=4.0)
    assert as_ratios(EnergyBudget(joules=1.0), whole) == Slo(ttft=0.25, tpot=0.25)


def test_energy_needs_a_profile_that_knows_it():
    with pytest.raises(ConfigError, match="has no energy, so no energy budget"):
        meets(EnergyBudget(joules=1.0), WHOLE, WHOLE)
    known = dataclasses.replace(PROFILE, energy=Energy(prefill_joules=(1.0, 2.0), decode_joules=(3.0, 5.0)))
    assert expected_cost(known, 50, 16, 3).joules == 16 + 9
    assert expected_cost(known, 100, 16, 3).joules == 32 + 15


def test_expected_costs_are_the_profiles():
    found = expected_cost(PROFILE, 50, 64, 9, planning_ms=0.5)
    assert found == Cost(ttft_ms=4.5, tpot_ms=0.6, tokens=9)
    assert found.total_ms == pytest.approx(4.5 + 8 * 0.6)
    # What a cache has costs no computing; at least one token is fed.
    steep = dataclasses.replace(PROFILE, ttft_ms=tuple((1.0, 9.0 * level) for level in PROFILE.levels))
    tokens = PROFILE.tokens[-1]
    computed = expected_cost(steep, 50, tokens, 9, reused=tokens - 1)
    whole = expected_cost(steep, 50, tokens, 9)
    assert computed.ttft_ms == max(steep.ttft(50, 1), whole.ttft_ms - steep.ttft(50, tokens - 1))
    assert computed.tpot_ms == whole.tpot_ms
    assert expected_cost(steep, 50, tokens, 9, reused=tokens).ttft_ms == steep.ttft(50, 1)
    both = expected_costs(steep, (50, 100), (tokens,), 9, reused=(0, tokens))
    assert both.ttft_ms[:, 0].tolist() == [steep.ttft(50, tokens), steep.ttft(100, 1)]


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), True, "3"])
@pytest.mark.parametrize("make", [EndToEnd, EnergyBudget, Latency])
def test_impossible_objectives_are_refused(make, value):
    names = [field.name for field in dataclasses.fields(make)]
    with pytest.raises(ConfigError, match="of an objective must be a number above 0"):
        make(**dict.fromkeys(names, value))


# Levels of turns in contexts: the largest in time, the nearest, or none. The context is of level 50: at the
# others all of it is computed again.
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


# The report of objectives that cannot be met.
PROFILED = (16, 64, 512)


@pytest.mark.parametrize(
    ("missed", "told"),
    [
        *(
            ({Slo(ttft=0.4, tpot=0.7): lengths}, f"<40,70> for prompts of {words}")
            for lengths, words in (
                ((16,), "up to 16 tokens"), ((16, 64), "up to 64 tokens"), (PROFILED, "any length"),
                ((512,), "512 tokens and more"), ((64,), "64 tokens"), ((16, 512), "16, 512 tokens"),
            )
        ),
        (
            {SLOS[5]: PROFILED, Latency(ttft_ms=1, tpot_ms=2): (16,)},
            "<20,50> for prompts of any length; 1 ms to the first token, 2 ms per token for prompts of up to "
            "16 tokens",
        ),
        ({}, ""),
    ],
)  # fmt: skip
def test_objectives_in_words(missed, told):
    assert described(missed, PROFILED) == told
