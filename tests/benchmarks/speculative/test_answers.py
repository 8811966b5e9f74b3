"""Figures of answers by hand, and what tuning takes."""

from types import SimpleNamespace

import pytest

from benchmarks.speculative import tuning
from benchmarks.speculative.answers import agreement, mean_interval, ratio_interval, rouge_l, spent, token_ms
from benchmarks.speculative.rows import quality_rows, time_rows
from benchmarks.speculative.tuning import fastest, tuned
from jaxllm.errors import ConfigError
from serving.request import GenerationConfig


def said(tokens, ttft_ms, total_ms, text=""):
    timings = SimpleNamespace(ttft_ms=ttft_ms, total_ms=total_ms)
    return SimpleNamespace(tokens=tokens, timings=timings, text=text)


def took(*each_ms, tokens=10):
    """Answers of one task, each of so many tokens after the first and so many milliseconds for them."""
    return {"a": [said([1] * (tokens + 1), 5.0, 5.0 + ms) for ms in each_ms]}


def test_tasks_count_alike_however_long_their_answers_are():
    answers = {
        "long": [said([1] * 11, 5.0, 105.0), said([1] * 11, 5.0, 25.0)],
        "short": [said([1, 2], 5.0, 7.0), said([1], 5.0, 5.0)],
    }
    assert token_ms(spent(answers)) == pytest.approx(((100 + 20) / 20 + 2) / 2)
    with pytest.raises(ConfigError, match="no answer had more than one token"):
        token_ms(spent({"none": [said([1], 5.0, 5.0)]}))


def test_agreement_is_of_tokens_at_their_places():
    ours, theirs = {"a": [said([1, 2, 3, 9], 0, 0)]}, {"a": [said([1, 5, 3, 4, 7], 0, 0)]}
    assert agreement(ours, theirs) == pytest.approx(2 / 5)


def test_intervals_are_paired():
    def interval(ours, theirs):
        return ratio_interval(spent(ours), spent(theirs))

    # Prompts differ much, the systems by the same factor at each: the interval is a point.
    assert interval(took(10, 100, 1000), took(20, 200, 2000)) == pytest.approx((2, 2))
    # One of two prompts is 1, the other 3 times as fast, and as long in ours: draws are 1, 2 and 3.
    assert interval(took(10, 10), took(10, 30)) == pytest.approx((1, 3))
    both = {**took(10), "b": took(10)["a"], "none": [said([1], 5.0, 5.0)]}
    other = {**took(30), "b": took(10)["a"], "none": both["none"]}
    assert interval(both, other) == pytest.approx((2, 2))
    assert mean_interval([0.5, 0.5]) == (0.5, 0.5)
    low, high = mean_interval([0.0, 1.0] * 50)
    assert low == pytest.approx(0.4, abs=0.02)
    assert high == pytest.approx(0.6, abs=0.02)


def test_rouge_is_of_the_targets_own_answers():
    target = {"a": [said([], 0, 0, "the cat sat on a mat"), said([], 0, 0, "")]}
    ours = {"a": [said([], 0, 0, "the cat sat"), said([], 0, 0, "")]}
    # Three words of three, and three of six; an empty answer to an empty one is right.
    assert rouge_l(ours, target) == pytest.approx([2 * 1 * 0.5 / 1.5, 1])


def test_rows_compare_ours_and_what_is_published():
    names = ("jaxllm", "LLMCad", "StdPL", "BLD", "LLMCad-no-tree")
    answers = {name: took(ms, ms) for name, ms in zip(names, (10, 20, 40, 30, 50), strict=True)}
    for each in answers["BLD"]["a"]:
        each.text = "other"
    rows = time_rows("case", answers, dict.fromkeys(names, "so"))
    whole = {(r.system, r.baseline): r for r in rows if r.case == "case: all tasks"}
    assert {key: row.ratio for key, row in whole.items() if key[1]} == {
        ("jaxllm", "LLMCad"): 2,
        ("jaxllm", "StdPL"): 4,
        ("jaxllm", "BLD"): 3,
        ("LLMCad", "LLMCad-no-tree"): 2.5,
    }
    assert whole["jaxllm", "StdPL"].note == "paired 95 % in [4.00x, 4.00x] of 2 prompts; so"
    assert whole["StdPL", None].note == "so"
    # One prompt says nothing of others.
    alone = {name: {"a": each["a"][:1]} for name, each in answers.items()}
    assert {row.note for row in time_rows("case", alone, dict.fromkeys(names, "so"))} == {None, "so"}
    quality = {(r.system, r.baseline): r.value for r in quality_rows("case", answers)}
    assert quality == {("jaxllm", "BLD"): 1, ("BLD", None): 0}
    assert quality_rows("case", {name: answers[name] for name in ("jaxllm", "StdPL")}) == []


def test_the_fastest_of_the_accurate_ones_is_taken():
    times = {"a": 1.0, "b": 2.0, "c": 3.0}
    assert fastest(times, dict.fromkeys(times, 1.0)) == "a"
    assert fastest(times, {"a": 0.5, "b": 0.92, "c": 0.96}) == "b"
    assert fastest(times, {"a": 0.5, "b": 0.6, "c": 0.96}) == "c"


class Candidate:
    """Answers in so many milliseconds."""

    def __init__(self, ms, text):
        self.ms, self.text, self.asked, self.closed = ms, text, 0, False

    def generate(self, prompt, config):
        self.asked += 1
        return said([1] * 11, 5.0, 5.0 + self.ms, self.text)

    def close(self):
        self.closed = True


def test_tuning_opens_all_and_keeps_one():
    made = {
        "quick": Candidate(10, "no"),
        "right": Candidate(20, "so it is"),
        "slow": Candidate(30, "so it is"),
    }
    candidates = {name: lambda _, engine=engine: engine for name, engine in made.items()}
    target, config = Candidate(40, "so it is"), GenerationConfig()
    asked = {"a": [[1], [2]]}
    engine, how = tuned("BLD", candidates, None, target, asked, config)  # pyright: ignore
    assert engine is made["right"]
    tried = "quick: 1.0 ms at a Rouge-L of 0.00, right: 2.0 ms, slow: 3.0 ms"
    assert how == f"right, the best of these on 2 other prompts ({tried})"
    assert [each.closed for each in (*made.values(), target)] == [True, False, True, False]
    assert [each.asked for each in made.values()] == [2, 2, 2]
    engine, how = tuned("BLD", candidates, None, target, {}, config)  # pyright: ignore
    assert (engine, how) == (made["right"], "right, not tuned")
    assert tuning._TOLERANCE < 0.1
