"""Switching traces: patterns, real traces, files."""

import collections
import dataclasses
import itertools
import json
import os
from collections import Counter

import pytest

from benchmarks import traces
from jaxllm.elastic.slo import SLOS
from jaxllm.errors import ConfigError
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.ground.plan import Cost
from jaxllm.serving.server.service import LLMService
from jaxllm.tasks.example import TaskExample
from tests.tiny import write_tiny_bundle

QUESTIONS = {
    "news": [TaskExample(user=f"news {n}", answer="a", system="say", options=("a", "b")) for n in range(5)],
    "mood": [TaskExample(user="how?", answer="well", options=("well", "unwell"))],
}


def test_a_trace_follows_from_its_seed_and_survives_its_file(tmp_path):
    trace = traces.make_trace(QUESTIONS, requests=50, seed=3)
    assert trace == traces.make_trace(QUESTIONS, requests=50, seed=3)
    assert trace != traces.make_trace(QUESTIONS, requests=50, seed=4)
    traces.write_trace(tmp_path / "trace.jsonl", trace)
    assert traces.read_trace(tmp_path / "trace.jsonl") == trace


def test_arrivals_apps_and_tasks_are_drawn_as_asked():
    trace = traces.make_trace(QUESTIONS, requests=6000, rate_per_s=4.0)
    assert trace[-1].time_s == pytest.approx(1500, rel=0.1)
    assert all(a.time_s <= b.time_s for a, b in itertools.pairwise(trace))
    apps = Counter(each.app for each in trace)
    assert len(apps) == 6
    assert all(900 < count < 1100 for count in apps.values())
    assert {each.app: each.slo for each in trace} == {f"app-{n + 1}": slo for n, slo in enumerate(SLOS)}
    assert 2800 < sum(each.task == "mood" for each in trace) < 3200


def test_skew_favours_the_first_apps_or_the_last():
    first = Counter(each.app for each in traces.make_trace(QUESTIONS, requests=6000, skew=1.0))
    # 1, 1/2, ... 1/6 of 2.45.
    assert first["app-1"] / 6000 == pytest.approx(1 / 2.45, rel=0.05)
    assert first["app-6"] / 6000 == pytest.approx(1 / 6 / 2.45, rel=0.15)
    last = Counter(each.app for each in traces.make_trace(QUESTIONS, requests=6000, skew=-1.0))
    assert last["app-6"] > last["app-3"] > last["app-1"]


@pytest.mark.parametrize(
    ("drawn", "change", "message"),
    [
        (traces.make_trace, {"requests": 0}, "1 to 1000000 requests"),
        (traces.make_trace, {"rate_per_s": 0.0}, "must be above 0"),
        (traces.make_trace, {"skew": float("nan")}, "skew nan"),
        (traces.make_trace, {"questions": {}}, "needs questions"),
        (traces.make_trace, {"questions": {"news": []}}, "needs questions"),
        (traces.make_switching, {"pattern": "other"}, "the patterns are random, markov, gaussian"),
        (traces.make_switching, {"contexts": 0}, "1 to 100000 contexts"),
        (traces.make_switching, {"calls": 0}, "calls, got 9 and 0"),
        (traces.make_switching, {"hours": 0.0}, "lasts some hours"),
        (traces.make_switching, {"lengths": []}, "at least one real call"),
    ],
)
def test_what_cannot_be_drawn_is_refused(drawn, change, message):
    usual = {"questions": QUESTIONS, "requests": 3}
    if drawn is traces.make_switching:
        usual = {"pattern": "random", "lengths": LENGTHS, "contexts": 9, "calls": 3000}
    with pytest.raises(ConfigError, match=message):
        drawn(**{**usual, **change})


@pytest.mark.parametrize(
    "change",
    [
        {"slo": {"ttft": 0, "tpot": 0.1}},
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
    good = dataclasses.asdict(traces.make_trace(QUESTIONS, requests=1)[0])
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(good) + "\n" + json.dumps({**good, **change}) + "\n")
    with pytest.raises(ConfigError, match=r"trace\.jsonl, line 2: "):
        traces.read_trace(path)


def test_files_that_are_no_traces(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        traces.read_trace(tmp_path / "nothing")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="cannot be read"):
        traces.read_trace(tmp_path / "pipe")
    (tmp_path / "empty").write_text("")
    with pytest.raises(ConfigError, match="has no request"):
        traces.read_trace(tmp_path / "empty")
    (tmp_path / "long").write_bytes(b" " * (2 << 20))
    with pytest.raises(ConfigError, match="too long"):
        traces.read_trace(tmp_path / "long")


def test_a_replay_asks_every_question_and_goes_on_behind_one_that_does_not_fit(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXLLM_CACHE", str(tmp_path / "cache"))
    options = EngineOptions(context_tokens=64, chunk_tokens=(16, 64), buckets_bytes=0)
    service = LLMService.open(write_tiny_bundle(tmp_path / "tiny.jaxllm"), options=options)
    trace, seen = traces.make_trace(QUESTIONS, requests=3), []
    too_long = dataclasses.replace(trace[1].example, user="how? " * 100)
    trace[1] = dataclasses.replace(trace[1], example=too_long)
    outcomes = traces.replay(service, trace, answer_tokens=3, progress=lambda *step: seen.append(step))
    assert [each.request for each in outcomes] == trace
    assert seen[-1] == ("replay", 3, 3)
    assert [each.failure is None for each in outcomes] == [True, False, True]
    assert all((each.level, each.kept_share) == (100, 1.0) for each in outcomes[::2])
    assert all(0 < each.cost.tokens <= 3 for each in outcomes[::2])
    assert "the context holds 64" in outcomes[1].failure
    assert not outcomes[1].right
    assert not outcomes[1].met
    whole = traces.totals(outcomes)
    assert (whole.requests, whole.failed, whole.level, whole.kept_share) == (3, 1, 100, 1.0)
    assert whole.met <= 2 / 3
    assert whole.ttft_ms == pytest.approx((outcomes[0].cost.ttft_ms + outcomes[2].cost.ttft_ms) / 2)
    nothing = traces.totals(outcomes[1:2])
    assert (nothing.failed, nothing.accuracy, nothing.level) == (1, 0.0, 0.0)


def outcome(slo, right, met, level=50):
    request = traces.TraceRequest(
        time_s=0.0, app=f"app-{slo}", slo=SLOS[slo], task="news", example=QUESTIONS["news"][0]
    )
    cost = Cost(ttft_ms=2.0 * (slo + 1), tpot_ms=1.0, tokens=4)
    return traces.Outcome(
        request=request, right=right, met=met, cost=cost, level=level, kept_share=0.5, source="proposed",
        planning_ms=0.1,
    )  # fmt: skip


def test_totals():
    outcomes = [outcome(1, True, True), outcome(0, True, False, 100), outcome(0, False, True)]
    # Two apps may have one objective.
    other = dataclasses.replace(outcomes[0].request, app="another")
    assert (
        traces.totals_by_slo([*outcomes, dataclasses.replace(outcomes[0], request=other)])["<80,90>"].requests
        == 2
    )
    by_slo = traces.totals_by_slo(outcomes)
    assert list(by_slo) == ["<100,100>", "<80,90>"]
    assert (by_slo["<100,100>"].requests, by_slo["<100,100>"].accuracy) == (2, 0.5)
    assert by_slo["<100,100>"].level == 75
    whole = traces.totals(outcomes)
    assert (whole.accuracy, whole.met) == (pytest.approx(2 / 3), pytest.approx(2 / 3))
    # One was right and late, one wrong in time.
    assert whole.right_and_met == pytest.approx(1 / 3)
    assert whole.ttft_ms == pytest.approx(8 / 3)


LENGTHS = [(10, 3), (200, 40)]


def draw(pattern, **changes):
    return traces.make_switching(pattern, LENGTHS, **{"contexts": 9, "calls": 3000, **changes})


@pytest.mark.parametrize("pattern", traces.PATTERNS)
def test_every_pattern_calls_all_contexts_over_the_hours(pattern):
    trace = draw(pattern)
    assert {each.context for each in trace} == set(range(9))
    times = [each.time_s for each in trace]
    assert times == sorted(times)
    assert 0 <= times[0] < 3600
    assert 71 * 3600 < times[-1] <= 72 * 3600
    assert {(each.prompt_tokens, each.answer_tokens) for each in trace} == set(LENGTHS)
    assert draw(pattern) == trace != draw(pattern, seed=1)
    assert {each.context for each in draw(pattern, contexts=1, calls=5)} == {0}


def test_patterns_differ_as_their_names_say():
    counts = {name: collections.Counter(each.context for each in draw(name)) for name in traces.PATTERNS}
    share = {name: [count[i] / 3000 for i in range(9)] for name, count in counts.items()}
    assert all(0.08 < each < 0.14 for each in share["random"])
    assert share["gaussian"][4] > 1.5 * share["gaussian"][1] > 2 * share["gaussian"][0]
    assert share["gaussian"][0] == pytest.approx(share["gaussian"][8], abs=0.02)
    again = {
        name: sum(a.context == b.context for a, b in itertools.pairwise(trace)) / 3000
        for name, trace in ((name, draw(name)) for name in traces.PATTERNS)
    }
    assert again["random"] == pytest.approx(1 / 9, abs=0.03)
    # One of 1, 1/2, ... 1/9.
    assert again["markov"] == pytest.approx(1 / sum(1 / rank for rank in range(1, 10)), abs=0.03)
    recent, ranks = [], collections.Counter()
    for each in draw("markov"):
        if each.context in recent:
            ranks[recent.index(each.context)] += 1
            recent.remove(each.context)
        recent.insert(0, each.context)
    assert ranks[0] > 1.5 * ranks[1] > 1.5 * ranks[2] > 1.5 * ranks[5] > 0


def test_each_context_has_its_own_workload():
    """In the Gaussian pattern contexts of moderate lengths are called most."""
    lengths = [(10 * each, each) for each in (3, 1, 2, 9, 5, 7, 4, 6, 8)]
    trace = traces.make_switching("gaussian", lengths, contexts=9, calls=2000)
    assert {(each.context, each.prompt_tokens) for each in trace} == {(n, 10 * (n + 1)) for n in range(9)}
    prompts = collections.Counter(each.prompt_tokens for each in trace)
    assert prompts[50] > 1.5 * prompts[20] > 0
    assert prompts[50] > 1.5 * prompts[80] > 0
    few = traces.make_switching("random", LENGTHS, contexts=9, calls=200)
    assert all(each.prompt_tokens == (10 if each.context < 5 else 200) for each in few)


def test_lengths_of_azures_trace(tmp_path):
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,3180,0\n"
        "2023-11-16 18:17:05.0319600,110,27\n"
    )
    assert traces.read_azure(path) == [(0.0, (4808, 10)), (pytest.approx(1.052), (110, 27))]
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,many,10\n")
    with pytest.raises(ConfigError, match=r"azure\.csv, line 2"):
        traces.read_azure(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        traces.read_azure(tmp_path / "none.csv")


def test_conversations_of_mooncakes_trace(tmp_path):
    requests = [
        {"timestamp": 0, "input_length": 1000, "output_length": 50, "hash_ids": [0, 1, 2]},
        {"timestamp": 500, "input_length": 900, "output_length": 20, "hash_ids": [0, 3]},
        # Goes on with the first one: its second block is the same, the third was not yet full.
        {"timestamp": 2000, "input_length": 1500, "output_length": 10, "hash_ids": [0, 1, 4, 5]},
        # Says something else than before: the whole prompt is new.
        {"timestamp": 3000, "input_length": 700, "output_length": 10, "hash_ids": [0, 3]},
        {"timestamp": 4000, "input_length": 30, "output_length": 10, "hash_ids": [0]},
    ]
    path = tmp_path / "mooncake.jsonl"
    path.write_text("\n".join(map(json.dumps, requests)))
    trace = traces.read_mooncake(path, time_scale=10)
    assert [each.context for each in trace] == [0, 1, 0, 1, 2]
    assert [each.prompt_tokens for each in trace] == [1000, 900, 450, 700, 30]
    assert [each.time_s for each in trace] == [0, 5, 20, 30, 40]
    half = traces.read_mooncake(path, token_scale=0.01)
    assert [(each.prompt_tokens, each.answer_tokens) for each in half][:3] == [(10, 1), (9, 1), (4, 1)]
    with pytest.raises(ConfigError, match="time_scale must be above 0"):
        traces.read_mooncake(path, time_scale=0)
    path.write_text('{"timestamp": 0}')
    with pytest.raises(ConfigError, match="line 1: malformed request"):
        traces.read_mooncake(path)


def test_real_traces(data_dir):
    lengths = traces.read_azure(data_dir / "traces/AzureLLMInferenceTrace_conv.csv")
    assert len(lengths) > 19_000
    trace = traces.read_mooncake(data_dir / "traces/mooncake_conversation.jsonl", token_scale=0.05)
    contexts = collections.Counter(each.context for each in trace)
    assert len(trace) > 12_000 > len(contexts) > 1_000
    assert max(contexts.values()) > 5
