"""Switching traces: patterns, real traces, files."""

import collections
import dataclasses
import itertools
import json

import pytest

from jaxllm.errors import ConfigError
from serving.traces.switching import (
    PATTERNS,
    ContextCall,
    make_switching,
    read_azure_lengths,
    read_mooncake,
    read_switching,
    write_switching,
)

LENGTHS = [(10, 3), (200, 40)]


def draw(pattern, **changes):
    return make_switching(pattern, LENGTHS, **{"contexts": 9, "calls": 3000, **changes})


@pytest.mark.parametrize("pattern", PATTERNS)
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
    counts = {name: collections.Counter(each.context for each in draw(name)) for name in PATTERNS}
    share = {name: [count[i] / 3000 for i in range(9)] for name, count in counts.items()}
    assert all(0.08 < each < 0.14 for each in share["random"])
    assert share["gaussian"][4] > 1.5 * share["gaussian"][1] > 2 * share["gaussian"][0]
    assert share["gaussian"][0] == pytest.approx(share["gaussian"][8], abs=0.02)
    again = {
        name: sum(a.context == b.context for a, b in itertools.pairwise(trace)) / 3000
        for name, trace in ((name, draw(name)) for name in PATTERNS)
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
    trace = make_switching("gaussian", lengths, contexts=9, calls=2000)
    assert {(each.context, each.prompt_tokens) for each in trace} == {(n, 10 * (n + 1)) for n in range(9)}
    prompts = collections.Counter(each.prompt_tokens for each in trace)
    assert prompts[50] > 1.5 * prompts[20] > 0
    assert prompts[50] > 1.5 * prompts[80] > 0
    few = make_switching("random", LENGTHS, contexts=9, calls=200)
    assert all(each.prompt_tokens == (10 if each.context < 5 else 200) for each in few)


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(ConfigError, match="the patterns are random, markov, gaussian"):
        draw("other")
    for change, message in (
        ({"contexts": 0}, "1 to 100000 contexts"),
        ({"calls": 0}, "calls, got 9 and 0"),
        ({"hours": 0.0}, "lasts some hours"),
    ):
        with pytest.raises(ConfigError, match=message):
            draw("random", **change)
    with pytest.raises(ConfigError, match="at least one real call"):
        make_switching("random", [], contexts=1, calls=1)


def test_written_and_read(tmp_path):
    trace = draw("markov", calls=20)
    write_switching(tmp_path / "trace.jsonl", trace)
    assert read_switching(tmp_path / "trace.jsonl") == trace


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context": -1}, "numbered from 0"),
        ({"context": 1.5}, "whole numbers"),
        ({"prompt_tokens": 0}, "1 to 16777216 tokens"),
        ({"answer_tokens": 1 << 40}, "1 to 16777216 tokens"),
        ({"time_s": -1}, "a call at"),
        ({"time_s": "soon"}, "malformed call"),
        ({"more": 1}, "malformed call"),
    ],
)
def test_a_malformed_call_is_refused_with_its_line(tmp_path, change, message):
    good = dataclasses.asdict(ContextCall(time_s=1, context=2, prompt_tokens=3, answer_tokens=4))
    lines = [json.dumps(each) for each in (good, {**good, **change})]
    (tmp_path / "trace.jsonl").write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=f"line 2: .*{message}"):
        read_switching(tmp_path / "trace.jsonl")


def test_lengths_of_azures_trace(tmp_path):
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,3180,0\n"
        "2023-11-16 18:17:05.0319600,110,27\n"
    )
    assert read_azure_lengths(path) == [(4808, 10), (110, 27)]
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,many,10\n")
    with pytest.raises(ConfigError, match=r"azure\.csv, line 2"):
        read_azure_lengths(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_azure_lengths(tmp_path / "none.csv")


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
    trace = read_mooncake(path, time_scale=10)
    assert [each.context for each in trace] == [0, 1, 0, 1, 2]
    assert [each.prompt_tokens for each in trace] == [1000, 900, 450, 700, 30]
    assert [each.time_s for each in trace] == [0, 5, 20, 30, 40]
    half = read_mooncake(path, token_scale=0.01)
    assert [(each.prompt_tokens, each.answer_tokens) for each in half][:3] == [(10, 1), (9, 1), (4, 1)]
    with pytest.raises(ConfigError, match="time_scale must be above 0"):
        read_mooncake(path, time_scale=0)
    path.write_text('{"timestamp": 0}')
    with pytest.raises(ConfigError, match="line 1: malformed request"):
        read_mooncake(path)


def test_real_traces(data_dir):
    lengths = read_azure_lengths(data_dir / "traces/AzureLLMInferenceTrace_conv.csv")
    assert len(lengths) > 19_000
    trace = read_mooncake(data_dir / "traces/mooncake_conversation.jsonl", token_scale=0.05)
    contexts = collections.Counter(each.context for each in trace)
    assert len(trace) > 12_000 > len(contexts) > 1_000
    assert max(contexts.values()) > 5
