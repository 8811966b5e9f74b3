"""Objectives: how they are written, told and met."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.elastic.ladder import LEVELS
from jaxllm.elastic.slo import (
    MARK_PERCENTS,
    PROMPT_RATIOS,
    SLOS,
    Slo,
    feasible,
    marks,
    marks_of,
    nominal_cost,
)
from jaxllm.errors import ConfigError
from jaxllm.training.data.documents import SPECIAL_TOKENS

RATIOS = st.floats(1e-3, 1.0)


def told(slo):
    return [marks()[place] for place in marks_of(slo)]


def test_written_and_read():
    assert Slo.parse("<40,70>") == Slo.parse(" 40 , 70") == Slo(ttft=0.4, tpot=0.7)
    assert Slo.parse("<12.5,100>") == Slo(ttft=0.125, tpot=1)
    assert [str(each) for each in SLOS] == [
        "<100,100>", "<80,90>", "<60,80>", "<40,70>", "<20,60>", "<20,50>",
    ]  # fmt: skip
    for text in ("", "40", "<40;70>", "<0,50>", "<50,101>", "40,70,10", "<-40,70>", "nan,1", None):
        with pytest.raises(ConfigError):
            Slo.parse(text)  # pyright: ignore[reportArgumentType]
    for ratio in (0, 1.01, -1, float("nan"), True, "1"):
        for name in ("ttft", "tpot"):
            with pytest.raises(ConfigError, match=f"{name} must be a ratio"):
                dataclasses.replace(SLOS[0], **{name: ratio})


@given(st.integers(1, 100), st.integers(1, 100))
def test_whole_percents_survive_writing(ttft, tpot):
    slo = Slo(ttft=ttft / 100, tpot=tpot / 100)
    assert Slo.parse(str(slo)) == slo


def test_marks():
    assert marks()[:3] == ("<|ttft:20|>", "<|ttft:30|>", "<|ttft:40|>")
    assert marks()[9] == "<|tpot:20|>"
    assert len(set(marks())) == 18
    # The default family's vocabulary reserves them, at ids that may not move.
    assert SPECIAL_TOKENS[6:] == marks()
    assert told(Slo(ttft=1, tpot=1)) == ["<|ttft:100|>", "<|tpot:100|>"]
    assert told(Slo(ttft=0.4, tpot=0.7)) == ["<|ttft:40|>", "<|tpot:70|>"]
    assert told(Slo(ttft=0.499, tpot=0.99)) == ["<|ttft:40|>", "<|tpot:90|>"]
    assert told(Slo(ttft=0.05, tpot=0.2)) == ["<|ttft:20|>", "<|tpot:20|>"]
    # 0.57 · 100 is a little less than 57.
    assert told(Slo(ttft=0.1 + 0.2, tpot=0.6 - 1e-9)) == ["<|ttft:30|>", "<|tpot:60|>"]


@given(RATIOS, RATIOS)
def test_no_mark_promises_more_time_than_there_is(ttft, tpot):
    for name, ratio in zip(told(Slo(ttft=ttft, tpot=tpot)), (ttft, tpot), strict=True):
        percent = int(name.partition(":")[2].removesuffix("|>"))
        assert percent == MARK_PERCENTS[0] or percent <= 100 * ratio + 0.01
        assert 100 * ratio < percent + 10 + 0.01


def test_limits_are_shares_and_all_of_a_time_is_none():
    assert Slo(ttft=0.4, tpot=0.5).limits(10.0, 2.0) == (4.0, 1.0)
    assert Slo(ttft=1.0, tpot=0.5).limits(10.0, 2.0) == (np.inf, 1.0)
    assert [slo.has_limit for slo in SLOS] == [False, True, True, True, True, True]
    assert Slo(ttft=1.0, tpot=0.5).has_limit
    assert Slo(ttft=0.4, tpot=1).limits(10.0, 2.0) == (4.0, np.inf)


def test_nominal_cost_and_feasibility_by_hand():
    ttft, tpot = nominal_cost((20, 50, 100), (0.2, 1.0))
    np.testing.assert_allclose(ttft, [[0.04, 0.2], [0.1, 0.5], [0.2, 1.0]])
    np.testing.assert_allclose(tpot, [[0.2, 0.2], [0.5, 0.5], [1.0, 1.0]])
    wanted = {"<100,100>": [[1, 1], [1, 1], [1, 1]], "<20,50>": [[1, 1], [1, 0], [0, 0]]}
    for text, expected in wanted.items():
        got = feasible(Slo.parse(text), (20, 50, 100), (0.2, 1.0))
        assert got.dtype == bool
        np.testing.assert_array_equal(got, np.array(expected, bool))
    # On the edge: 0.7 · 0.3 exceeds 0.21 by a rounding.
    assert feasible(Slo(ttft=0.21, tpot=0.7), (70,), (0.3,)).all()


@given(RATIOS, RATIOS, RATIOS, RATIOS)
def test_more_time_never_excludes(ttft, tpot, more_ttft, more_tpot):
    tight = Slo(ttft=min(ttft, more_ttft), tpot=min(tpot, more_tpot))
    loose = Slo(ttft=max(ttft, more_ttft), tpot=max(tpot, more_tpot))
    assert not np.any(feasible(tight, LEVELS, PROMPT_RATIOS) & ~feasible(loose, LEVELS, PROMPT_RATIOS))
