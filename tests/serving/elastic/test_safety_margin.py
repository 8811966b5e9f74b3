"""Tests learning from answers that took longer than expected."""

import random
import statistics

import pytest

from jaxllm.errors import ConfigError
from jaxllm.serving.elastic.safety_margin import MOST, START, SafetyMargin
from jaxllm.serving.ground.plan import Cost


def cost(ttft_ms=10.0, tpot_ms=2.0, tokens=8):
    return Cost(ttft_ms=ttft_ms, tpot_ms=tpot_ms, tokens=tokens)


@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.99])
def test_so_many_answers_stay_within_it_as_was_asked(confidence):
    draw, margin, within = random.Random(0), SafetyMargin(confidence), []
    for _ in range(3000):
        share = 1.05 + min(0.8, draw.expovariate(8))
        within.append(share <= margin.ttft)
        margin.saw_first(cost(), cost(ttft_ms=10 * share))
    assert abs(statistics.mean(within) - confidence) < 0.02


def test_it_forgets_and_stays_within_its_bounds():
    margin = SafetyMargin(0.9, window=20)
    assert (margin.ttft, margin.tpot) == (START, START)
    for ttft_ms, expected in ((1e6, MOST), (3.0, 1.0)):
        for _ in range(20):
            margin.saw_first(cost(), cost(ttft_ms=ttft_ms))
        assert (margin.ttft, margin.tpot) == (expected, START)
    # An answer of one token says nothing of further ones.
    for tokens, expected in ((1, START), (8, 1.5)):
        for _ in range(20):
            margin.saw_further(cost(), cost(tpot_ms=3.0 * (tokens > 1), tokens=tokens))
        assert margin.tpot == expected


@pytest.mark.parametrize("wrong", [0, 1, 1.5, -0.1, True, "0.9", float("nan")])
def test_a_confidence_is_a_share(wrong):
    with pytest.raises(ConfigError, match="confidence must be in"):
        SafetyMargin(wrong)
    with pytest.raises(ConfigError, match="window must be"):
        SafetyMargin(window=0)


def test_smaller_confidences_come_after_the_one_that_was_asked_for():
    margin = SafetyMargin(window=100)
    assert margin.factors() == [(START, START)]
    for place in range(100):
        margin.saw_first(cost(), cost(ttft_ms=10 + 0.1 * place))
        margin.saw_further(cost(), cost(tpot_ms=2.0))
    found = margin.factors()
    assert found[0] == (margin.ttft, margin.tpot)
    assert [first for first, _ in found] == pytest.approx([1.98, 1.89, 1.74, 1.49])
    assert [further for _, further in found] == [1.0] * 4
    loose = SafetyMargin(0.75, window=100)
    for place in range(100):
        loose.saw_first(cost(), cost(ttft_ms=10 + 0.1 * place))
    assert [first for first, _ in loose.factors()] == pytest.approx([1.74, 1.49])
