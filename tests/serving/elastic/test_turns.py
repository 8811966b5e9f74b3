"""Levels of turns in contexts: the largest in time, the nearest, or none."""

import pytest

from jaxllm.elastic.slo import Slo
from jaxllm.errors import ObjectiveMissed
from jaxllm.serving.elastic.objectives import Latency
from jaxllm.serving.elastic.planner import Load
from jaxllm.serving.elastic.turns import level_of_turn
from jaxllm.serving.ground.plan import Cost


def cost(ttft_ms, tpot_ms):
    return Cost(ttft_ms=ttft_ms, tpot_ms=tpot_ms, tokens=8)


# The context is of level 50: at the others all of it is computed again.
COSTS = {25: cost(100.0, 2.0), 50: cost(30.0, 5.0), 100: cost(400.0, 10.0)}
WHOLE = cost(60.0, 10.0)


@pytest.mark.parametrize(
    ("objective", "level"),
    [
        (Latency(ttft_ms=1000, tpot_ms=100), 100),
        (Latency(ttft_ms=300, tpot_ms=100), 50),
        (Latency(ttft_ms=300, tpot_ms=3), 25),
        # No level is in time: by how much matters.
        (Latency(ttft_ms=1, tpot_ms=100), 50),
        (Latency(ttft_ms=300, tpot_ms=0.1), 25),
        (Slo(ttft=0.9, tpot=0.9), 50),
        # 100 % asks for nothing.
        (Slo(ttft=1.0, tpot=1.0), 100),
    ],
)
def test_the_largest_in_time_or_the_nearest(objective, level):
    assert level_of_turn(COSTS, objective, WHOLE) == level


def test_what_others_take_counts():
    wanted = Latency(ttft_ms=1000, tpot_ms=20)
    assert level_of_turn(COSTS, wanted, WHOLE) == 100
    assert level_of_turn(COSTS, wanted, WHOLE, load=Load(waiting_ms=700)) == 50
    assert level_of_turn(COSTS, wanted, WHOLE, load=Load(token_share=3)) == 50


def test_strict_calls_are_refused():
    with pytest.raises(ObjectiveMissed, match="level 50 comes nearest"):
        level_of_turn(COSTS, Latency(ttft_ms=1, tpot_ms=100), WHOLE, strict=True)
    assert level_of_turn(COSTS, Latency(ttft_ms=300, tpot_ms=3), WHOLE, strict=True) == 25
