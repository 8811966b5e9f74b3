"""The history of the dashboard: spans of time, sums by app, and bounds."""

import dataclasses

import pytest

from serving.server.dispatches import Dispatch
from serving.server.history import SPAN_S, SPANS, History
from tests.serving.server.fake_service import ENDED, STARTED

LATE = dataclasses.replace(ENDED, met=False, ttft_ms=500.0, tokens=1)


@pytest.fixture
def clock():
    return [1_000_000.0]


@pytest.fixture
def history(clock):
    return History(clock=lambda: clock[0])


def test_sums_of_apps(history, clock):
    for app, ended in (("mail", ENDED), ("mail", LATE), ("notes", dataclasses.replace(ENDED, met=None))):
        history.counted(app, "taken")
        history.ended(app, ended, STARTED)
    history.counted("notes", "refused")
    apps = history.summary()["apps"]
    mail, notes = apps["mail"], apps["notes"]
    assert (mail["taken"], mail["ended"], mail["met"], mail["missed"]) == (2, 2, 1, 1)
    # An answer of one token has no time per further token.
    assert (mail["ttft_ms"], mail["tpot_ms"]) == (350.0, 30.0)
    assert (notes["ended"], notes["met"], notes["missed"], notes["refused"]) == (1, 0, 0, 1)
    assert mail["course"] == {"met": [0] * 59 + [1], "missed": [0] * 59 + [1]}


def test_spans_move_on(history, clock):
    history.ended("mail", ENDED, None)
    history.dispatched(Dispatch(kind="decode", rows=3, took_ms=5000.0, tokens=40))
    history.dispatched(Dispatch(kind="verify", rows=5, took_ms=1000.0, tokens=10))
    for mode, length in (("int8", 64), ("float", 16), ("int8", 64)):
        history.dispatched(Dispatch(kind="prefill", rows=1, took_ms=500.0, chunk_tokens=length, mode=mode))
    history.dispatched(Dispatch(kind="finish", rows=1, took_ms=500.0))
    clock[0] += 2 * SPAN_S
    history.ended("mail", LATE, None)
    course = history.summary()["course"]
    assert course["met"][-3:] == [1, 0, 0]
    assert course["missed"][-3:] == [0, 0, 1]
    assert course["tokens_per_s"][-3:] == [5.0, 0, 0]
    assert course["rows"][-3:] == [4.0, None, None]
    assert course["busy"][-3:] == [0.8, 0, 0]
    assert history.summary()["chunks"] == [
        {"tokens": 16, "mode": "float", "count": 1}, {"tokens": 64, "mode": "int8", "count": 2},
    ]  # fmt: skip
    assert all(len(each) == SPANS for each in course.values())
    clock[0] += SPANS * SPAN_S
    assert history.summary()["course"]["met"] == [0] * SPANS
    # A clock that was set back.
    clock[0] -= 5 * SPAN_S
    history.ended("mail", ENDED, None)
    assert history.summary()["apps"]["mail"]["ended"] == 3


def test_recent_calls(history, clock):
    for _ in range(300):
        history.ended("mail", ENDED, STARTED)
    calls = history.calls_after(0)
    assert [each["number"] for each in calls] == list(range(101, 301))
    assert [each["number"] for each in history.calls_after(298)] == [299, 300]
    assert calls[-1] == {
        "number": 300, "time_s": clock[0], "app": "mail", "level": 70, "source": "proposed",
        "prompt_tokens": 120, "kept_tokens": 96, "reused_tokens": 64, "queued_ms": 12.0, "tokens": 21,
        "ttft_ms": 200.0, "tpot_ms": 30.0, "ttft_limit_ms": 400.0, "tpot_limit_ms": 50.0, "met": True,
        "drafted": 0.5,
    }  # fmt: skip
    history.ended("mail", LATE, None)
    (last,) = history.calls_after(300)
    assert (last["level"], last["tpot_ms"]) == (None, None)


def test_plans(history):
    for level, source in ((70, "proposed"), (30, "nearest"), (70, "proposed")):
        history.planned(level, source)
    assert history.summary()["plans"] == [
        {"level": 30, "source": "nearest", "count": 1},
        {"level": 70, "source": "proposed", "count": 2},
    ]
