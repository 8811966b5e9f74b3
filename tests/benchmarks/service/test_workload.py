"""Requests of the apps: times, lengths, conversations, and traces of real services."""

import json
import random
import statistics

import pytest

from benchmarks.service.workload import (
    APPS,
    FIRST_TOKEN,
    Arrivals,
    Sizes,
    back_to_back,
    draw_lengths,
    from_trace,
    poisson,
)
from jaxllm.elastic.slo import SLOS
from jaxllm.errors import ConfigError

SIZES = Sizes(prompt_tokens=64, answer_tokens=16, context_tokens=256, vocab_size=300)


def test_there_is_an_app_for_every_objective():
    assert len(APPS) == len(SLOS) == 6


def test_lengths_are_around_the_medians_and_fit_the_context():
    lengths = draw_lengths(SIZES, 2000, random.Random(0))
    prompts, answers = zip(*lengths, strict=True)
    assert statistics.median(prompts) == pytest.approx(64, rel=0.1)
    assert statistics.median(answers) == pytest.approx(16, rel=0.1)
    assert SIZES.within(1e9, 1e9) == (128, 128)
    assert SIZES.within(0, 0) == (16, 4)
    with pytest.raises(ConfigError, match="context of 40 tokens"):
        Sizes(prompt_tokens=8, answer_tokens=8, context_tokens=39, vocab_size=300)


def test_arrivals_have_the_rate_and_the_same_seed_gives_the_same():
    made = poisson(SIZES, rate_per_s=50, duration_s=20, seed=3)
    assert made == poisson(SIZES, rate_per_s=50, duration_s=20, seed=3)
    assert made != poisson(SIZES, rate_per_s=50, duration_s=20, seed=4)
    assert len(made) == pytest.approx(1000, rel=0.15)
    times = [each.time_s for each in made]
    assert times == sorted(times)
    assert 0 <= times[0] <= times[-1] < 20
    assert {each.app for each in made} == {*range(6)}
    for each in made:
        assert len(each.prompt) + each.answer_tokens <= 256
        assert all(FIRST_TOKEN <= token < 300 for token in each.prompt)


def test_about_half_of_the_calls_send_a_conversation_again():
    made = back_to_back(SIZES, count=600, seed=0)
    followed, last = 0, {}
    for each in made:
        before = last.get(each.app)
        if before is not None and each.prompt[: len(before.prompt)] == before.prompt:
            assert len(each.prompt) >= len(before.prompt) + before.answer_tokens + 16
            followed += 1
        last[each.app] = each
    assert 0.2 < followed / len(made) < 0.55


def test_a_trace_of_azure_keeps_its_bursts(tmp_path):
    path = tmp_path / "azure.csv"
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    lines += [f"2023-11-16 18:15:{second:02}.0000000,{1000 + second},100" for second in (1, 2, 2, 2, 11)]
    path.write_text("\n".join(lines))
    arrivals = Arrivals.read(path)
    assert arrivals.times_s == [0, 1, 1, 1, 10]
    made, faster = from_trace(SIZES, arrivals, rate_per_s=5, duration_s=1, seed=0)
    assert faster == 10
    assert [each.time_s for each in made] == [0, 0.1, 0.1, 0.1, 1]
    # Their median becomes the one that was asked for.
    assert {each.answer_tokens for each in made} == {16}


def test_a_trace_of_mooncake(tmp_path):
    path = tmp_path / "mooncake.jsonl"
    requests = [
        {"timestamp": 1000 * at, "input_length": 50, "output_length": 5, "hash_ids": [0, at]}
        for at in (3, 1, 2)
    ]
    path.write_text("\n".join(map(json.dumps, requests)))
    assert Arrivals.read(path).times_s == [1, 2, 3]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("trace.txt", "", "Azure's .csv or Mooncake's .jsonl"),
        ("trace.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nnow,1,1", "line 2"),
        ("trace.csv", "TIMESTAMP,ContextTokens,GeneratedTokens", "at least two"),
        ("trace.jsonl", "{}", "line 1"),
    ],
)
def test_other_traces_are_refused(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        Arrivals.read(tmp_path / name)
