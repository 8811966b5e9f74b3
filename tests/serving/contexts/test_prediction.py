"""Predicting the context that is called next: laws of probabilities, and habits that are learned."""

import math
import random

import pytest

from serving.contexts.prediction import CallPredictor


def learned(calls, hour=9, **sizes):
    predictor = CallPredictor(**sizes)
    for each in calls:
        predictor.called(each, hour)
    return predictor


@pytest.mark.parametrize("seed", range(5))
def test_probabilities_sum_to_one(seed):
    """Whatever was called, forgotten, and beyond what it has room for."""
    draw = random.Random(seed)
    predictor = CallPredictor(most_contexts=8, most_followers=3)
    assert predictor.likely(0) == {}
    for number in range(300):
        predictor.called(f"c{draw.randrange(12)}", draw.randrange(24))
        if number % 17 == 0:
            predictor.forget(f"c{draw.randrange(12)}")
        found = predictor.likely(draw.randrange(24))
        if found:
            assert math.isclose(sum(found.values()), 1.0)
        assert all(0 < each <= 1 for each in found.values())
        assert [*found.values()] == sorted(found.values(), reverse=True)
        assert predictor.size <= 8 * (1 + 3) + 24 * 3


@pytest.mark.parametrize(("last", "following"), ["ab", "bc", "ca"])
def test_a_cycle_is_learned(last, following):
    predictor = learned("abc" * 8 + "abc"[: "abc".index(last) + 1])
    found = predictor.likely(9)
    assert next(iter(found)) == following
    assert found[following] > 0.8


def test_hours_tell_where_the_last_call_does_not():
    predictor = CallPredictor()
    for _ in range(6):
        for hour, name in ((8, "mail"), (20, "diary")):
            predictor.called(name, hour)
            predictor.called("chat", 12)
    predictor.forget("chat")
    predictor.called("new", 13)
    assert next(iter(predictor.likely(8))) == "mail"
    assert next(iter(predictor.likely(20))) == "diary"


def test_habits_change():
    predictor = learned("ab" * 200 + "ac" * 40)
    predictor.called("a", 9)
    assert next(iter(predictor.likely(9))) == "c"


def test_what_was_forgotten_is_not_predicted():
    predictor = learned("abababab")
    predictor.forget("b")
    assert [*predictor.likely(9)] == ["a"]
    assert predictor.calls("b") == 0
