"""Tests the inputs of benchmarks: models, packaged samples and data folders, and traces of requests."""

import collections
import dataclasses
import itertools
import json
import os
from collections import Counter

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks import samples, traces
from benchmarks.experts.run import TaskPairs
from benchmarks.models import Checkpoint, float_params, real_model, write_random
from benchmarks.speculation.answers import read_prompts
from jaxllm.bundle import Bundle
from jaxllm.checkpoints.huggingface import read_config, read_params
from jaxllm.cli.main import cli
from jaxllm.elastic.slo import SLOS
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.export.gguf_file import write_plain_gguf
from jaxllm.export.plain_model import read_plain
from jaxllm.prepare import prepare
from jaxllm.serving.ground.bundles import open_model
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.ground.plan import Cost
from jaxllm.serving.server.service import LLMService
from jaxllm.tasks.example import TaskExample, held_out
from jaxllm.text.tokenizer import Tokenizer
from tests import tiny_encdec
from tests.tiny import TINY, tiny_params, write_tiny_bundle


def nothing(*_):
    pass


def test_a_float_bundle_comes_back_exactly(tmp_path):
    found = Checkpoint.find(write_tiny_bundle(tmp_path / "tiny.jaxllm", "f32"))
    folder = found.folder(nothing)
    assert read_config(folder) == TINY
    for name, value in read_params(folder, TINY):
        np.testing.assert_array_equal(value, tiny_params()[name])
    prepare(folder, tmp_path / "again.jaxllm")  # the tokenizer came along


def test_a_narrow_bundle_comes_back_as_its_floats(tmp_path):
    path = write_tiny_bundle(tmp_path / "tiny.jaxllm", "int8")
    found = Checkpoint.find(path)
    folder = found.folder(nothing)
    assert found.folder(nothing) == folder  # made once
    off = [np.abs(value - tiny_params()[name]).max() for name, value in read_params(folder, TINY)]
    assert 0 < max(off) < 0.02
    assert found.widths(()) == found.widths(("int8",)) == ("int8",)
    with pytest.raises(CheckpointError, match="holds int8 weights, not int4"):
        found.widths(("int4",))
    with pytest.raises(CheckpointError, match="no such file"):
        Checkpoint.find(tmp_path / "nowhere")


def test_a_gguf_file_is_a_folder_of_its_numbers(tmp_path, monkeypatch):
    with Bundle.open(write_tiny_bundle(tmp_path / "tiny.jaxllm", "f32")) as bundle:
        path = tmp_path / "models" / "smollm2-135m-instruct" / "tiny.gguf"
        path.parent.mkdir(parents=True)
        write_plain_gguf(path, read_plain(bundle), "int8")
    found = Checkpoint.find(path)
    assert (found.widths(()), found.widths(("f32", "int4"))) == (("int8",), ("f32", "int4"))
    with open_model(path) as bundle:
        stored = float_params(bundle)
    for name, value in read_params(found.folder(nothing), found.cfg):
        # In an order that is not the file's.
        np.testing.assert_array_equal(np.sort(value, axis=None), np.sort(stored[name], axis=None))
    # And by which name it is found.
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert (real_model(tmp_path), real_model(tmp_path / "models"), real_model(None)) == (path, None, None)


def test_random_weights_are_the_same_each_time_and_make_a_model(tmp_path):
    for name in ("one", "two"):
        write_random(tmp_path / name, TINY, nothing)
    pairs = zip(read_params(tmp_path / "one", TINY), read_params(tmp_path / "two", TINY), strict=True)
    for (name, one), (_, two) in pairs:
        np.testing.assert_array_equal(one, two)
        assert one.dtype.name == "bfloat16"
        assert name.endswith("scale") or 0 < np.abs(one.astype(np.float32)).mean() < 1
    prepare(tmp_path / "one", tmp_path / "one.jaxllm", weights="int8")
    with Bundle.open(tmp_path / "one.jaxllm") as bundle:
        assert bundle.cfg == TINY


PREFIXES = {"translation_de_to_en": "to English: ", "shortening": "shorten: ", "emotion": "emotion: "}


def write_data(folder):
    files = {
        "multi30k/val.de": "ein hund\n\nzwei hunde\n",
        "multi30k/val.en": "a dog\n\ntwo dogs\n",
        "emotion/valid.jsonl": json.dumps({"text": "i feel glad", "label": "joy"}),
    }
    long = [json.dumps({"text": f"the {n} dogs ran home", "summaries": ["dogs ran"]}) for n in range(200)]
    files |= {f"compression/{name}.jsonl": "\n".join(long) for name in ("google", "broadcast", "gigaword")}
    for name, text in files.items():
        (folder / "tasks" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "tasks" / name).write_text(text)
    return folder


def test_a_model_is_asked_its_own_tasks(tmp_path):
    data, tokenizer = write_data(tmp_path), Tokenizer(tiny_encdec.tokenizer(tasks=PREFIXES))
    assert samples.chosen_tasks(tokenizer) == list(PREFIXES)
    with pytest.raises(ConfigError, match="has no task 'summarization'; it has translation_de_to_en, short"):
        samples.chosen_tasks(tokenizer, ["summarization"])
    with pytest.raises(ConfigError, match="names none of the tasks translation_de_to_en"):
        samples.chosen_tasks(Tokenizer(tiny_encdec.tokenizer(tasks={"other": "o: "})))
    assert [each.answer for each in samples.source_examples("translation_de_to_en", data)] == [
        "a dog",
        "two dogs",
    ]
    shorter = samples.source_examples("shortening", data)
    assert shorter
    assert all(held_out(each.user, 0.03) and not each.system for each in shorter)
    with pytest.raises(ConfigError, match="translation de-en has no packaged sample; give --data DIR"):
        samples.source_examples("translation_de_to_en", None)
    # As LLMCad's rows: translation, summary, question answering.
    found = read_prompts(data, tokenizer, count=2, most_tokens=60, seed=0)
    assert list(found) == [samples.SOURCE_TASKS[name].called for name in PREFIXES]
    asked = tokenizer.decode(found["question (emotion)"][0])
    assert asked.startswith("emotion: i feel glad")
    pairs = TaskPairs.of_data("emotion", data, tokenizer)
    assert (pairs.pairs, pairs.prefix, pairs.labels) == ([("i feel glad", "joy")], "emotion: ", True)


def test_questions_come_from_a_folder_or_from_the_package(tmp_path):
    assert len(samples.read_examples(("news", "emotion"), None, 3)["emotion"]) == 3
    (tmp_path / "tasks" / "sst2").mkdir(parents=True)
    record = json.dumps({"text": "a film", "label": "positive"})
    (tmp_path / "tasks" / "sst2" / "valid.jsonl").write_text(record)
    (example,) = samples.read_examples(("sentiment",), tmp_path)["sentiment"]
    assert example.user == "a film"
    # Free answers have references.
    for task in ("shorten", "chat summary"):
        assert all(each.references == (each.answer,) for each in samples.packaged_examples(task))
    with pytest.raises(ConfigError, match=r"task mood has no packaged sample.*--data DIR"):
        samples.read_examples(("mood",), None)


# Traces.

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
    # Skew favours the first apps or the last.
    first = Counter(each.app for each in traces.make_trace(QUESTIONS, requests=6000, skew=1.0))
    # 1, 1/2, ... 1/6 of 2.45.
    assert first["app-1"] / 6000 == pytest.approx(1 / 2.45, rel=0.05)
    assert first["app-6"] / 6000 == pytest.approx(1 / 6 / 2.45, rel=0.15)
    last = Counter(each.app for each in traces.make_trace(QUESTIONS, requests=6000, skew=-1.0))
    assert last["app-6"] > last["app-3"] > last["app-1"]


@pytest.mark.parametrize("words", ["make-slo --requests 0", "make-slo --skew nan"])
def test_what_cannot_be_drawn_is_refused(words):
    asked = ["bench", "trace", *words.split(), "--data", "nowhere", "-o", "trace.jsonl"]
    assert CliRunner().invoke(cli, asked).exit_code == 2
    with pytest.raises(ConfigError, match="needs questions"):
        traces.make_trace({"news": []}, requests=3)


@pytest.mark.parametrize(
    "change",
    [
        {"slo": {"ttft": 0, "tpot": 0.1}},
        {"time_s": 10**400},
        {"example": {"user": "x", "answer": "x", "options": ["x", 1]}},
        {"example": {"user": "\ud800", "answer": "x"}},
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
    assert whole.ttft_ms == pytest.approx((outcomes[0].cost.ttft_ms + outcomes[2].cost.ttft_ms) / 2)


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
    lengths = [(1000, 50), (900, 20), (450, 10), (700, 10), (30, 10)]
    assert traces.read_mooncake(path) == list(zip([0, 0.5, 2, 3, 4], lengths, strict=True))
    path.write_text('{"timestamp": 0}')
    with pytest.raises(ConfigError, match="line 1: malformed request"):
        traces.read_mooncake(path)
