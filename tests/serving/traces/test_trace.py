import dataclasses
import itertools
import json
import os
from collections import Counter

import pytest

from jaxllm.elastic.slo import SLOS
from jaxllm.errors import ConfigError
from jaxllm.tasks.example import TaskExample
from serving.options import EngineOptions
from serving.planning.objectives import Cost
from serving.service import LLMService
from serving.traces.trace import (
    Outcome,
    TraceRequest,
    make_trace,
    read_trace,
    replay,
    totals,
    totals_by_slo,
    write_trace,
)
from tests.tiny import write_tiny_bundle

QUESTIONS = {
    "news": [TaskExample(user=f"news {n}", answer="a", system="say", options=("a", "b")) for n in range(5)],
    "mood": [TaskExample(user="how?", answer="well", options=("well", "unwell"))],
}


def test_a_trace_follows_from_its_seed_and_survives_its_file(tmp_path):
    trace = make_trace(QUESTIONS, requests=50, seed=3)
    assert trace == make_trace(QUESTIONS, requests=50, seed=3)
    assert trace != make_trace(QUESTIONS, requests=50, seed=4)
    write_trace(tmp_path / "trace.jsonl", trace)
    assert read_trace(tmp_path / "trace.jsonl") == trace


def test_arrivals_apps_and_tasks_are_drawn_as_asked():
    trace = make_trace(QUESTIONS, requests=6000, rate_per_s=4.0)
    assert trace[-1].time_s == pytest.approx(1500, rel=0.1)
    assert all(a.time_s <= b.time_s for a, b in itertools.pairwise(trace))
    apps = Counter(each.app for each in trace)
    assert len(apps) == 6
    assert all(900 < count < 1100 for count in apps.values())
    assert {each.app: each.slo for each in trace} == {f"app-{n + 1}": slo for n, slo in enumerate(SLOS)}
    assert 2800 < sum(each.task == "mood" for each in trace) < 3200


def test_skew_favours_the_first_apps_or_the_last():
    first = Counter(each.app for each in make_trace(QUESTIONS, requests=6000, skew=1.0))
    # 1, 1/2, ... 1/6 of 2.45.
    assert first["app-1"] / 6000 == pytest.approx(1 / 2.45, rel=0.05)
    assert first["app-6"] / 6000 == pytest.approx(1 / 6 / 2.45, rel=0.15)
    last = Counter(each.app for each in make_trace(QUESTIONS, requests=6000, skew=-1.0))
    assert last["app-6"] > last["app-3"] > last["app-1"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"requests": 0}, "1 to 1000000 requests"),
        ({"rate_per_s": 0.0}, "must be above 0"),
        ({"skew": float("nan")}, "skew nan"),
        ({"questions": {}}, "needs questions"),
        ({"questions": {"news": []}}, "needs questions"),
    ],
)
def test_impossible_traces_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        make_trace(**{"questions": QUESTIONS, "requests": 3, **change})


@pytest.mark.parametrize(
    "change",
    [
        {"slo": "<0,10>"},
        {"time_s": -1},
        {"time_s": 10**400},
        {"example": {"user": 3}},
        {"example": {"user": 3, "answer": "x"}},
        {"example": {"user": "x", "answer": "x", "options": ["x", 1]}},
        {"example": {"user": "x", "answer": "x", "form": "song"}},
        {"example": {"user": "\ud800", "answer": "x"}},
        {"example": []},
        {"app": None},
        {"slo": None},
    ],
)
def test_malformed_requests_are_named_by_their_line(tmp_path, change):
    good = make_trace(QUESTIONS, requests=1)[0].to_json()
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(good) + "\n" + json.dumps({**good, **change}) + "\n")
    with pytest.raises(ConfigError, match=r"trace\.jsonl, line 2: "):
        read_trace(path)


def test_files_that_are_no_traces(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "nothing")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "pipe")
    (tmp_path / "empty").write_text("")
    with pytest.raises(ConfigError, match="has no request"):
        read_trace(tmp_path / "empty")
    (tmp_path / "long").write_bytes(b" " * (2 << 20))
    with pytest.raises(ConfigError, match="too long"):
        read_trace(tmp_path / "long")


def test_a_replay_asks_every_question(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXLLM_CACHE", str(tmp_path / "cache"))
    options = EngineOptions(context_tokens=64, chunk_tokens=(16, 64), buckets_bytes=0)
    service = LLMService.open(write_tiny_bundle(tmp_path / "tiny.jaxllm"), options=options)
    trace = make_trace(QUESTIONS, requests=4)
    seen = []
    outcomes = replay(service, trace, answer_tokens=3, progress=lambda *step: seen.append(step))
    assert [each.request for each in outcomes] == trace
    assert seen[-1] == ("replay", 4, 4)
    for each in outcomes:
        assert (each.level, each.kept_share) == (100, 1.0)
        assert 0 < each.cost.tokens <= 3


def test_a_request_that_does_not_fit_has_failed_and_the_replay_goes_on(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXLLM_CACHE", str(tmp_path / "cache"))
    options = EngineOptions(context_tokens=64, chunk_tokens=(16, 64), buckets_bytes=0)
    service = LLMService.open(write_tiny_bundle(tmp_path / "tiny.jaxllm"), options=options)
    trace = make_trace(QUESTIONS, requests=3)
    too_long = dataclasses.replace(trace[1].example, user="how? " * 100)
    trace[1] = dataclasses.replace(trace[1], example=too_long)
    outcomes = replay(service, trace, answer_tokens=3)
    assert [each.request for each in outcomes] == trace
    assert [each.failure is None for each in outcomes] == [True, False, True]
    assert "the context holds 64" in outcomes[1].failure
    assert not outcomes[1].right
    assert not outcomes[1].met
    whole = totals(outcomes)
    assert (whole.requests, whole.failed, whole.level, whole.kept_share) == (3, 1, 100, 1.0)
    assert whole.met <= 2 / 3
    assert whole.ttft_ms == pytest.approx((outcomes[0].cost.ttft_ms + outcomes[2].cost.ttft_ms) / 2)
    nothing = totals(outcomes[1:2])
    assert (nothing.failed, nothing.accuracy, nothing.level) == (1, 0.0, 0.0)


def outcome(slo, right, met, level=50):
    request = TraceRequest(
        time_s=0.0, app=f"app-{slo}", slo=SLOS[slo], task="news", example=QUESTIONS["news"][0]
    )
    cost = Cost(ttft_ms=2.0 * (slo + 1), tpot_ms=1.0, tokens=4)
    return Outcome(
        request=request, right=right, met=met, cost=cost, level=level, kept_share=0.5, source="proposed",
        planning_ms=0.1,
    )  # fmt: skip


def test_totals():
    outcomes = [outcome(1, True, True), outcome(0, True, False, 100), outcome(0, False, True)]
    # Two apps may have one objective.
    other = dataclasses.replace(outcomes[0].request, app="another")
    assert (
        totals_by_slo([*outcomes, dataclasses.replace(outcomes[0], request=other)])["<80,90>"].requests == 2
    )
    by_slo = totals_by_slo(outcomes)
    assert list(by_slo) == ["<100,100>", "<80,90>"]
    assert (by_slo["<100,100>"].requests, by_slo["<100,100>"].accuracy) == (2, 0.5)
    assert by_slo["<100,100>"].level == 75
    whole = totals(outcomes)
    assert (whole.accuracy, whole.met) == (pytest.approx(2 / 3), pytest.approx(2 / 3))
    # One was right and late, one wrong in time.
    assert whole.right_and_met == pytest.approx(1 / 3)
    assert whole.ttft_ms == pytest.approx(8 / 3)
