"""Questions for the tiny LM's decisions, and their labels: the lightest choice by hand, and answers against
scores of one sequence at a time.
"""

import dataclasses
import functools
import json
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.bundle.levels import Recovery
from jaxllm.elastic.compression import keep_tokens
from jaxllm.elastic.ladder import Ladder, sub_config, sub_model
from jaxllm.elastic.slo import SLOS, Slo, feasible, nominal_cost
from jaxllm.errors import ConfigError
from jaxllm.models import decoder
from jaxllm.models.lora import LoraConfig, adapt, init_adapter
from jaxllm.tasks.example import TaskExample
from jaxllm.tasks.questions import Question
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.training.elastic.tiny_lm import self_labels
from jaxllm.training.elastic.tiny_lm.self_labels import (
    Answers,
    ElasticModel,
    answer,
    kept_answers,
    lightest,
    questions_digest,
    read_questions,
)
from tests.tiny import TINY, random_params, tiny_tokenizer
from tests.training.tiny_runs import TLM_RECIPE

LEVELS, RATIOS = (20, 50, 100), (0.4, 1.0)
ALL, HALF, TIGHT = Slo(ttft=1, tpot=1), Slo(ttft=0.2, tpot=0.5), Slo(ttft=0.05, tpot=0.1)


def table(*right):
    correct = np.zeros((1, 3, 2), bool)
    for level, ratio in right:
        correct[0, LEVELS.index(level), RATIOS.index(ratio)] = True
    return correct


def label(correct, slo, **how):
    place = lightest(correct, [slo], LEVELS, RATIOS, **how)
    assert place.dtype == np.int32
    return LEVELS[place[0, 0, 0]], RATIOS[place[0, 0, 1]]


def test_labels_by_hand():
    everything = np.ones((1, 3, 2), bool)
    assert label(everything, ALL) == (20, 0.4)
    assert label(table((100, 0.4), (50, 1.0)), ALL) == (100, 0.4)
    # Equally light, 20 % each: the smaller level.
    assert label(table((20, 1.0), (50, 0.4)), ALL) == (20, 1.0)
    assert label(table((20, 1.0), (100, 1.0)), HALF) == (20, 1.0)
    # What is right does not meet the SLO: the largest level that does, with its longest prompt.
    assert label(table((100, 0.4)), HALF) == (50, 0.4)
    assert label(table(), ALL) == (100, 1.0)
    assert label(table(), Slo(ttft=0.3, tpot=1)) == (50, 0.4)
    # Nothing meets it.
    assert label(everything, TIGHT) == (20, 0.4)
    # A prompt that cannot be so short.
    assert label(everything, HALF, shares=np.array([[0.9, 1.0]])) == (20, 0.4)
    assert label(table((50, 0.4)), HALF, shares=np.array([[0.9, 1.0]])) == (20, 1.0)
    with pytest.raises(ConfigError, match=r"must be \[N, 3, 2\]"):
        lightest(np.ones((1, 2, 2)), SLOS, LEVELS, RATIOS)
    with pytest.raises(ConfigError, match="must ascend"):
        lightest(np.ones((1, 2, 2)), SLOS, (50, 20), RATIOS)


@given(st.integers(0, 2**31), st.integers(1, 4))
def test_labels_are_what_a_search_finds(seed, count):
    draw = np.random.default_rng(seed)
    levels, ratios = (20, 40, 60, 80), (0.3, 0.6, 0.9)
    correct = draw.random((count, 4, 3)) < 0.4
    places = lightest(correct, SLOS, levels, ratios)
    ttft, _ = nominal_cost(levels, ratios)
    for number in range(count):
        for s, slo in enumerate(SLOS):
            allowed = feasible(slo, levels, ratios)
            pairs = [pair for pair in np.ndindex(4, 3) if allowed[pair]]
            right = [pair for pair in pairs if correct[number][pair]]
            expected = min(right, key=lambda pair: (round(ttft[pair], 9), pair[0]), default=max(pairs))
            assert tuple(places[number, s]) == expected


# Answers

CFG = dataclasses.replace(TINY, layers=1, attention_windows=())
LADDER = Ladder(levels=(50, 100))
TOKENIZER = Tokenizer(tiny_tokenizer())


@functools.cache
def model():
    params = {name: value * np.float32(0.3) for name, value in random_params(CFG).items()}
    draw = np.random.default_rng(1)
    adapter = init_adapter(sub_config(CFG, LADDER, 50), LoraConfig(rank=2), jax.random.key(0))
    moved = {
        name: draw.normal(size=value.shape).astype(np.float32) * np.float32(0.3)
        for name, value in adapter.items()
    }
    return ElasticModel(
        cfg=CFG, params=jax.tree.map(jnp.asarray, params), ladder=LADDER, tokenizer=TOKENIZER,
        recoveries={50: Recovery(moved, 0.7)},
    )  # fmt: skip


@jax.jit
def log_probabilities(params, tokens):
    """Of the next token at every place `[T, V]`."""

    def of(cfg, params):
        hidden = decoder.forward_documents(params, tokens[None], jnp.zeros_like(tokens)[None], cfg=cfg)
        return jax.nn.log_softmax(decoder.logits(params, hidden, cfg=cfg)[0])

    small = sub_config(CFG, LADDER, 50)
    recovery = model().recoveries[50]
    return of(small, adapt(sub_model(params, small), recovery.adapter, recovery.scaling)), of(CFG, params)


def one_by_one(question, scores, ratio):
    """The right answers `[2]` of both levels."""
    keep = keep_tokens(scores, question.prompt.words, question.prompt.forced, ratio)
    prompt = question.prompt.ids[keep].tolist()
    likely = []
    for option in question.example.options:
        branch = [*TOKENIZER.encode(option, add_special_tokens=False), TOKENIZER.eos_ids[0]]
        whole = np.zeros(64, np.int32)
        whole[: len(prompt) + len(branch)] = [*prompt, *branch]
        places = np.arange(len(branch)) + len(prompt) - 1
        each = [float(level[places, branch].sum()) for level in log_probabilities(model().params, whole)]
        likely.append(np.array(each) / (len(option) if question.per_byte else 1))
    return [question.example.options[place] == question.example.answer for place in np.argmax(likely, 0)]


@pytest.mark.slow
def test_answers_are_those_of_one_sequence_at_a_time():
    draw, options = np.random.default_rng(0), ("yes", "not", "any")
    users = ["he is well", "the hill", "tell me more of the hills", "x", "a b c d e f", "why not?"]
    examples = [
        TaskExample(system="Is it?", user=user, answer=options[number % 3], options=options)
        for number, user in enumerate(users)
    ]
    questions = [Question.read(TOKENIZER, each, per_byte=each is examples[1]) for each in examples]
    scores = [draw.random(len(question.prompt.ids)) for question in questions]
    seen, ratios = [], (0.3, 0.6, 1.0)
    answers = answer(
        model(), questions, scores, levels=(50, 100), prompt_ratios=ratios, row_tokens=(64,),
        on_answered=lambda *call: seen.append(call),
    )  # fmt: skip
    assert answers.correct.shape == (6, 2, 3)
    for number, (question, each) in enumerate(zip(questions, scores, strict=True)):
        for place, ratio in enumerate(ratios):
            assert answers.correct[number, :, place].tolist() == one_by_one(question, each, ratio)
            keep = keep_tokens(each, question.prompt.words, question.prompt.forced, ratio)
            assert answers.shares[number, place] == pytest.approx(keep.mean())
    # Levels and lengths differ, or the test would show nothing.
    assert answers.correct.any()
    assert not np.array_equal(answers.correct[:, 0], answers.correct[:, 1])
    assert not np.array_equal(answers.correct[..., 0], answers.correct[..., 2])
    assert {call[0] for call in seen} == {50, 100}
    assert seen[-1][1] == seen[-1][2]


def test_questions_that_are_refused():
    with pytest.raises(ConfigError, match="without options"):
        Question.read(TOKENIZER, TaskExample(user="a", answer="b"))
    example = TaskExample(user="a" * 60, answer="b", options=("b",))
    question = Question.read(TOKENIZER, example)
    with pytest.raises(ConfigError, match="the model reads 32"):
        answer(
            model(), [question], [np.ones(len(question.prompt.ids))], levels=(100,), prompt_ratios=(1.0,),
            row_tokens=(32,),
        )  # fmt: skip


def test_the_token_that_options_are_scored_from_stays():
    """Also where a template has nothing behind the user's text."""
    bare = dataclasses.replace(
        tiny_tokenizer(),
        chat_template="{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}",
    )
    other = dataclasses.replace(model(), tokenizer=Tokenizer(bare))
    question = Question.read(other.tokenizer, TaskExample(user="a b", answer="c", options=("c", "d")))
    np.testing.assert_array_equal(question.prompt.forced, [True, False, False, False])
    likely = np.array([1.0, 0.9, 0.1, 0.1])
    answers = answer(other, [question], [likely], levels=(100,), prompt_ratios=(0.5, 1.0), row_tokens=(64,))
    # The begin token, and the word `b` with its space.
    np.testing.assert_allclose(answers.shares, [[0.75, 1.0]])


def question(text: str, **example: Any) -> Any:
    return SimpleNamespace(prompt=SimpleNamespace(text=text), example=TaskExample(**example))


def test_other_questions_have_another_digest():
    choice = question("one two", user="It's one.", answer="a", options=("a", "b"), system='Say "a".')
    free = question("three", user="three", answer="c", references=("c", "d"), form="text")
    assert questions_digest([choice, free]) == "cba62876010e4517fb09fc0fe734d8a9"
    others = [question("three", user="three", answer="c", references=("c",), form="text")]
    assert len({questions_digest(each) for each in ([choice], [free], [free, choice], others)}) == 4


def test_answers_are_kept_shard_by_shard(tmp_path, monkeypatch):
    monkeypatch.setattr(self_labels, "SHARD_QUESTIONS", 4)
    asked = [question(str(n), user=str(n), answer="a", options=("a", "b")) for n in range(10)]
    scores = [np.full(3, n, np.float32) for n in range(10)]
    made: list[list[str]] = []

    def make(some: Any, own: Any) -> Answers:
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append([each.prompt.text for each in some])
        values = np.array([int(each.prompt.text) for each in some])
        return Answers(values[:, None, None] % np.array([[[2, 3]]]) == 0, np.stack(own)[:, :2].astype(float))

    path, told = tmp_path / "answers", []
    with pytest.raises(KeyboardInterrupt):
        kept_answers(path, asked, scores, make)
    assert sorted(each.name for each in (tmp_path / "answers").iterdir()) == ["0.npz", "4.npz"]
    first, made[:] = list(made), []
    found = kept_answers(path, asked, scores, make, lambda *call: told.append(call))
    assert first + made == [list("0123"), list("4567"), list("89")]
    assert told == [(4, 10), (8, 10), (10, 10)]
    assert found.correct[:, 0].tolist() == [[n % 2 == 0, n % 3 == 0] for n in range(10)]
    np.testing.assert_array_equal(found.shares[:, 0], np.arange(10))
    again = kept_answers(path, asked, scores, lambda *_: pytest.fail("answered again"))
    np.testing.assert_array_equal(again.correct, found.correct)


def test_questions_of_a_file_stand_beside_those_of_tasks(data, tmp_path):
    path = tmp_path / "mine.jsonl"
    records = [{"question": f"Is {n} odd?", "options": ["yes", "no"], "answer": n % 2} for n in range(40)]
    path.write_text("\n".join(map(json.dumps, records)))
    recipe = dataclasses.replace(TLM_RECIPE, tasks=("sentiment", str(path)))
    found = read_questions(recipe, data, Tokenizer(tiny_tokenizer()), 128)
    own = [each for each in found.all if "odd?" in each.example.user]
    assert len(own) == max(recipe.questions, recipe.used_questions)
    assert len(found.all) == 2 * len(own)
