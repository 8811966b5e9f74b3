"""The policies of the elastic bench, by hand."""

import dataclasses

import numpy as np
import pytest

from benchmarks.elastic.bootstrap import interval, lead
from benchmarks.elastic.decisions import Asked
from benchmarks.elastic.policies import OURS, Choices, at_random, best, largest, run_trace
from benchmarks.elastic.rows import trace_rows
from jaxllm.elastic.slo import Slo
from tests.benchmarks.elastic.answers import VARIANTS, WHOLE, request_of


def chosen(slo, policy=largest, variants=VARIANTS, questions=(0, 1), **more):
    done = run_trace(variants, questions, [slo] * len(questions), WHOLE, policy, **more)
    return done.right.tolist(), done.met.tolist()


def test_the_largest_in_time():
    assert chosen(Slo(ttft=1.0, tpot=1.0)) == ([True, True], [True, True])
    assert chosen(Slo(ttft=0.5, tpot=0.5)) == ([False, True], [True, True])
    assert chosen(Slo(ttft=0.5, tpot=0.4)) == ([True, False], [True, True])
    # Nothing is in time: the quickest is used, and misses.
    assert chosen(Slo(ttft=0.1, tpot=1.0)) == ([True, False], [False, False])


def test_a_margin_is_planned_for_and_the_objective_is_what_counts():
    assert chosen(Slo(ttft=0.52, tpot=1.0), margin=0.9) == ([True, False], [True, True])
    assert chosen(Slo(ttft=0.21, tpot=1.0), margin=0.9) == ([True, False], [True, True])


def test_times_per_token_may_be_taken_as_met():
    assert chosen(Slo(ttft=1.0, tpot=0.1), ignore_tpot=True) == ([True, True], [True, True])


def test_changing_costs_time():
    swapped = dataclasses.replace(VARIANTS, change_ms=np.array([1.0, 6.0, 0.0]))
    tight = Slo(ttft=0.5, tpot=0.5)
    # To the middle size takes too long for both questions, to the small one not.
    assert chosen(tight, variants=swapped) == ([True, False], [True, True])
    # Once it is there it stays in use.
    free = dataclasses.replace(VARIANTS, change_ms=np.array([0.0, 6.0, 0.0]))
    done = run_trace(free, [1, 1, 0], [Slo(ttft=0.8, tpot=0.5), tight, tight], WHOLE, largest)
    assert done.right.tolist() == [True, True, False]


def test_the_oracle_takes_the_smallest_right_answer_in_time():
    policy = best(VARIANTS.right)
    assert chosen(Slo(ttft=0.5, tpot=0.5), policy) == ([True, True], [True, True])
    assert chosen(Slo(ttft=0.3, tpot=0.5), policy) == ([True, False], [True, True])


def test_random_choices_are_in_time():
    many = [0] * 300
    done = run_trace(VARIANTS, many, [Slo(ttft=0.5, tpot=0.5)] * 300, WHOLE, at_random(0))
    assert done.met.all()
    assert 0.4 < done.right.mean() < 0.6


def test_right_answers_count_in_time():
    done = run_trace(VARIANTS, [0, 1], [Slo(ttft=0.1, tpot=1.0)] * 2, WHOLE, largest)
    assert (done.right.tolist(), done.right_and_met.tolist()) == ([True, False], [False, False])
    done = run_trace(VARIANTS, [0, 1], [Slo(ttft=0.5, tpot=0.5)] * 2, WHOLE, largest)
    assert done.right_and_met.tolist() == [False, True]
    assert done.questions.tolist() == [0, 1]


def test_what_the_context_does_not_hold_is_never_in_time():
    ttft = VARIANTS.ttft_ms.copy()
    ttft[0] = np.inf
    ttft[1, 2] = np.inf
    some = dataclasses.replace(VARIANTS, ttft_ms=ttft, right=VARIANTS.right & np.isfinite(ttft))
    for policy in (largest, at_random(0)):
        right, held = chosen(Slo(ttft=1.0, tpot=1.0), policy, some)
        assert (right[0], held) == (False, [False, True])
    assert chosen(Slo(ttft=1.0, tpot=1.0), largest, some)[0] == [False, True]


def test_confidence_intervals_hold_the_mean_and_shrink():
    draw = np.random.default_rng(0)
    few, many = draw.random(50) < 0.8, draw.random(5000) < 0.8
    low, high = interval(many, np.arange(5000))
    assert low < many.mean() < high
    assert high - low == pytest.approx(2 * 1.96 * np.sqrt(0.16 / 5000), rel=0.15)
    assert np.diff(interval(few, np.arange(50))) > 5 * (high - low)


def test_a_question_that_is_asked_again_says_nothing_new():
    right = np.random.default_rng(0).random(100) < 0.7
    questions = np.arange(100)
    once = interval(right, questions)
    assert interval(np.tile(right, 6), np.tile(questions, 6)) == pytest.approx(once)
    # As if all were new, the interval would be less than half as wide.
    assert np.diff(interval(np.tile(right, 6), np.arange(600))) < 0.5 * np.diff(once)
    # A question that is asked often counts as often.
    heavy = interval(np.array([1, 1, 1, 0]), np.array([7, 7, 7, 3]))
    assert heavy == (0.0, 1.0)


def test_comparisons_are_paired():
    right = np.random.default_rng(0).random(200) < 0.5
    questions = np.arange(200)
    assert "by +0.0 points, paired 95 % in [+0.0, +0.0]" in lead(right, right, questions)
    # Ahead on every tenth question, whatever else is hard about them.
    behind = right & (questions % 10 > 0)
    low, high = interval(right.astype(float) - behind, questions)
    assert 0 < low < (right.mean() - behind.mean()) < high < 0.12


def test_rows_say_both_shares_and_how_far_ours_is_ahead():
    slos = [Slo(ttft=1.0, tpot=1.0), Slo(ttft=0.5, tpot=0.5)] * 10
    questions = np.arange(20) // 2
    trace = [request_of(slo) for slo in slos]
    asked = Asked(trace=trace, questions=(), indices=questions.tolist(), whole_ms=WHOLE)
    ours = Choices(questions, np.ones(20, bool), np.arange(20) % 2 == 0)
    other = Choices(questions, np.arange(20) % 2 == 0, np.ones(20, bool))
    rows = trace_rows({OURS: ours, "other": other}, asked, {"other": "as it is"})
    by = {(row.case, row.metric, row.system): row for row in rows}
    assert by["trace all six", "accuracy", OURS].value == 1.0
    assert by["trace all six", "right_and_met", OURS].value == 0.5
    assert by["trace <50,50>", "right_and_met", OURS].value == 0.0
    theirs = by["trace all six", "accuracy", "other"]
    assert theirs.value == 0.5
    # Every question has one right and one wrong answer of theirs, so that drawing questions changes nothing.
    assert theirs.note.startswith("95 % in [50.0%, 50.0%]; ours ahead by +50.0 points, paired 95 % in [+50.0")
    assert theirs.note.endswith("; as it is")
