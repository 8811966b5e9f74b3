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
from jaxllm.elastic.compression import NO_WORD, keep_tokens
from jaxllm.elastic.ladder import Ladder, sub_config, sub_model
from jaxllm.elastic.slo import SLOS, Slo, feasible, nominal_cost
from jaxllm.errors import ConfigError
from jaxllm.models import decoder
from jaxllm.models.lora import LoraConfig, adapt, init_adapter
from jaxllm.tasks.example import TaskExample
from jaxllm.tasks.questions import Question, branching
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.training.elastic.tiny_lm import labels
from jaxllm.training.elastic.tiny_lm.labels import (
    Answers,
    ElasticModel,
    answer,
    kept_answers,
    lightest,
    question_score_rows,
    questions_digest,
    token_support,
)
from jaxllm.training.elastic.tiny_lm.rows import (
    KeptWords,
    align,
    read_compressions,
    well_aligned,
)
from jaxllm.training.elastic.tiny_lm.run import Start
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
    # What is right does not meet the SLO: the largest level that does, with its longest prompt.
    assert label(table((100, 0.4)), HALF) == (50, 0.4)
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
    draw, part = np.random.default_rng(1), sub_config(CFG, LADDER, 50)
    shapes = init_adapter(part, LoraConfig(rank=2), jax.random.key(0)).items()
    moved = {name: draw.normal(0, 0.3, value.shape).astype(np.float32) for name, value in shapes}
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
    ratios = (0.3, 0.6, 1.0)
    answers = answer(model(), questions, scores, levels=(50, 100), prompt_ratios=ratios)
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


def test_questions_that_are_refused():
    with pytest.raises(ConfigError, match="without options"):
        Question.read(TOKENIZER, TaskExample(user="a", answer="b"))
    asked = Question.read(TOKENIZER, TaskExample(user="a" * 60, answer="b", options=("b",)))
    short = dataclasses.replace(model(), cfg=dataclasses.replace(CFG, window_tokens=32))
    with pytest.raises(ConfigError, match="the model reads 32"):
        answer(short, [asked], [np.ones(len(asked.prompt.ids))], levels=(100,), prompt_ratios=(1.0,))


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
    answers = answer(other, [question], [likely], levels=(100,), prompt_ratios=(0.5, 1.0))
    # The begin token, and the word `b` with its space.
    np.testing.assert_allclose(answers.shares, [[0.75, 1.0]])


def question(text: str, **example: Any) -> Any:
    return SimpleNamespace(prompt=SimpleNamespace(text=text), example=TaskExample(**example))


def test_answers_are_kept_shard_by_shard(tmp_path, monkeypatch):
    monkeypatch.setattr(labels, "SHARD_QUESTIONS", 4)
    asked = [question(str(n), user=str(n), answer="a", options=("a", "b")) for n in range(10)]
    scores = [np.full(3, n, np.float32) for n in range(10)]
    made: list[list[str]] = []

    def make(some: Any, own: Any) -> Answers:
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append([each.prompt.text for each in some])
        values = np.array([int(each.prompt.text) for each in some])
        return Answers(values[:, None, None] % np.array([[[2, 3]]]) == 0, np.stack(own)[:, :2].astype(float))

    path, seen = tmp_path / "answers", []
    with pytest.raises(KeyboardInterrupt):
        kept_answers(path, asked, scores, make)
    assert sorted(each.name for each in (tmp_path / "answers").iterdir()) == ["0.npz", "4.npz"]
    first, made[:] = list(made), []
    found = kept_answers(path, asked, scores, make, lambda *call: seen.append(call))
    assert first + made == [list("0123"), list("4567"), list("89")]
    assert seen == [(4, 10), (8, 10), (10, 10)]
    assert found.correct[:, 0].tolist() == [[n % 2 == 0, n % 3 == 0] for n in range(10)]
    np.testing.assert_array_equal(found.shares[:, 0], np.arange(10))
    again = kept_answers(path, asked, scores, lambda *_: pytest.fail("answered again"))
    np.testing.assert_array_equal(again.correct, found.correct)
    # Other questions have another digest.
    others = [question("0", user="0", answer="a", options=options) for options in (("a", "b"), ("a", "c"))]
    assert len({questions_digest(each) for each in (others, others[:1], others[1:], others[::-1])}) == 4


# The support of words for an answer: against differences of losses, and labels by hand.


# Its head is a table of its own, so that a token's embedding can be changed by itself.
UNTIED = dataclasses.replace(TINY, layers=1, attention_windows=(), tied_head=False)


@functools.cache
def untied():
    params = {name: jnp.asarray(value) * np.float32(0.3) for name, value in random_params(UNTIED).items()}
    return ElasticModel(cfg=UNTIED, params=params, ladder=Ladder(levels=(100,)), tokenizer=TOKENIZER)


def is_it(user):
    return Question.read(
        TOKENIZER, TaskExample(system="Is it?", user=user, answer="yes", options=("not", "yes"))
    )


@pytest.mark.slow
def test_support_adds_up_to_what_all_words_change():
    """Completeness (arXiv 1703.01365, proposition 1)."""
    asked = [is_it(user) for user in ("he is well", "a hill of them " * 8)]
    seen = []
    found = token_support(untied(), asked, steps=64, on_measured=lambda *call: seen.append(call))
    assert seen[-1] == (2, 2)
    table = untied().params["embed.tokens"]
    for each, support in zip(asked, found, strict=True):
        assert support.shape == each.prompt.ids.shape
        assert not support[each.prompt.forced].any()
        both = branching(TOKENIZER, each.example)
        ids = jnp.array([*both.trunk, *both.branches[1]])
        free = jnp.append(~each.prompt.forced[: len(both.trunk)], jnp.zeros(len(both.branches[1]), bool))
        whole, without = (
            loss(jnp.where(chosen[:, None], table.mean(0), table[ids]), ids, len(both.branches[1]))
            for chosen in (jnp.zeros(len(ids), bool), free)
        )
        assert abs(without - whole) > 0.01
        np.testing.assert_allclose(support.sum(), without - whole, rtol=0.01, atol=1e-4)


def loss(embedded, ids, answer):
    """Of the right answer, in nats, of tokens with these embeddings."""
    places = jnp.arange(len(ids), dtype=jnp.int32)
    hidden = decoder.forward_documents(
        {**untied().params, "embed.tokens": embedded}, places[None], cfg=UNTIED
    )
    likely = np.asarray(
        jax.nn.log_softmax(decoder.logits(untied().params, hidden, cfg=UNTIED)[0]), np.float64
    )
    scored = np.arange(len(ids) - answer, len(ids))
    return -likely[scored - 1, np.asarray(ids)[scored]].sum()


def test_words_are_labelled_by_what_they_say_beside_the_most():
    asked = is_it("he is well again")
    words, forced = asked.prompt.words, asked.prompt.forced
    free = words[~forced & (words != NO_WORD)]
    says = dict(zip(sorted(set(free.tolist())), (0.2, 0.8, -0.5, 0.4), strict=True))
    # What must stay says most, and is no word to choose.
    support = np.array([says.get(word, 5.0) for word in words.tolist()])
    reader = Start.of(TLM_RECIPE, TOKENIZER).reader(64)
    rows = question_score_rows([asked], [support], reader, source=3, weight=2.0)
    counted = rows.weights > 0
    assert (rows.sources == 3).all()
    assert set(rows.weights[counted].tolist()) == {2.0}
    assert TOKENIZER.decode(rows.tokens[counted].tolist()).split() == ["he", "is", "well", "again"]
    labels = dict(zip(says, (0.25, 1.0, 0.0, 0.5), strict=True))
    np.testing.assert_allclose(rows.labels[counted], [labels[word] for word in free.tolist()], rtol=1e-6)
    # Nothing that speaks for the answer: nothing to keep.
    silent = question_score_rows([asked], [-np.abs(support)], reader, source=3)
    assert (silent.weights > 0).sum() == counted.sum()
    assert not silent.labels.any()


def test_questions_that_teach_nothing_are_refused():
    reader = Start.of(TLM_RECIPE, TOKENIZER).reader(64)
    alone = is_it("well")
    with pytest.raises(ConfigError, match="no question has words to choose from"):
        question_score_rows([alone], [np.ones(len(alone.prompt.ids))], reader, source=0)
    with pytest.raises(ConfigError, match="the model reads 32"):
        token_support(
            dataclasses.replace(untied(), cfg=dataclasses.replace(UNTIED, window_tokens=32)),
            [is_it("a b " * 20)],
        )
    broken = {name: value * jnp.nan for name, value in untied().params.items()}
    with pytest.raises(ConfigError, match="not finite"):
        token_support(dataclasses.replace(untied(), params=broken), [alone])


# Keep labels: alignments by hand, laws, what is left out, and the two kinds of files.
NEWS = "Five people have been taken to hospital with minor injuries following a crash this morning."
ALIGNED = [
    (NEWS, "Five people taken to hospital following crash.", [0, 1, 4, 5, 6, 10, 12], 0, 0),
    # Case, endings and marks play no role; a word that was made up is a variation.
    ("He makes big plans, they stopped", "big plan stop everything", [2, 3, 5], 0.25, 0),
    # The nearest place that is free: each of two words is found once, a third time is a gap.
    ("the cat saw the dog", "the dog", [0, 4], 0, 0),
    ("the cat saw it , the dog", "saw the dog", [0, 2, 6], 0, 0),
    ("the cat saw the dog", "saw the dog", [2, 3, 4], 0, 0),
    ("the cat saw the dog", "the the the", [0, 3], 0, 1 / 5),
    # A step back is found, too.
    ("a b c d", "c a", [0, 2], 0, 0),
    # Marks that stand alone are labelled and not counted.
    ("well , he left .", "he left , ' .", [1, 2, 3, 4], 0, 0),
    # Nothing is found further away than the window.
    (" ".join(f"w{i}x" for i in range(400)), "w0x w300x", [0], 0, 1 / 400),
]


@pytest.mark.parametrize(("text", "shorter", "kept", "variation", "gap"), ALIGNED)
def test_alignments_by_hand(text, shorter, kept, variation, gap):
    row = align(text, shorter)
    assert np.flatnonzero(row.kept).tolist() == kept
    assert (row.variation, row.gap) == (variation, pytest.approx(gap))


SOME_WORDS = st.lists(st.sampled_from(["dog", "cat", "The", "runs", ",", "x1"]), min_size=1, max_size=20)


@given(SOME_WORDS, st.lists(st.booleans(), min_size=20, max_size=20))
def test_a_shorter_version_made_by_dropping_words_is_found_whole(words, chosen):
    shorter = [word for word, each in zip(words, chosen, strict=False) if each]
    row = align(" ".join(words), " ".join(shorter))
    assert row.kept.sum() == len(shorter)
    assert row.gap == pytest.approx(0)
    assert row.variation == (0 if any(word != "," for word in shorter) else 1)
    assert sorted(np.array(words)[row.kept]) == sorted(shorter)


def row_of(text, variation=0.0, gap=0.0, kept=True):
    return KeptWords(text, np.array([kept]), variation, gap)


def test_bad_rows_are_left_out():
    rows = [row_of(str(i), variation=i / 100) for i in range(20)]
    assert well_aligned(rows) == rows[:19]
    rows = [row_of(str(i), gap=i / 100) for i in range(10)]
    assert well_aligned(rows) == rows[:9]
    # Where all are alike, all stay, but for those of which nothing is kept.
    rows = [row_of(str(i), variation=0.5, gap=0.5) for i in range(10)]
    assert well_aligned([*rows, row_of("none", kept=False)]) == rows


def test_files(tmp_path):
    lines = tmp_path / "google.jsonl"
    record = {"id": "http://a.b/c-test-12", "text": "a b c", "summaries": ["a b", "", "c"]}
    lines.write_text(json.dumps(record))
    assert list(read_compressions(lines)) == [("a b c", "a b"), ("a b c", "c")]
    meetings = tmp_path / "meetings.json"
    records = [
        {"prompt": "x y", "compressed_prompt": "x"},
        {"prompt_list": ["p q", "r"], "compressed_prompt_list": ["p", "r"], "prompt": "p q r"},
        {"prompt_list": ["p q"], "compressed_prompt_list": ["p", "r"]},
    ]
    meetings.write_text(json.dumps(records))
    assert list(read_compressions(meetings)) == [
        ("x y", "x"), ("p q", "p"), ("r", "r"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", {"id": "gigaword-test-0", "text": "a", "summaries": ["a"]}, "one to test with"),
        ("x.jsonl", {"text": "a", "summaries": "a"}, "list of texts"),
        ("meeting_test.json", [], "tests by its name"),
        ("x.json", {}, "list of records"),
        ("x.json", [{"prompt_list": "a", "compressed_prompt_list": []}], "must be a list of texts"),
        ("x.json", [{"prompt_list": ["a"]}], "record 0 is no prompt"),
    ],
)
def test_what_is_refused(tmp_path, name, content, message):
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=message):
        list(read_compressions(tmp_path / name))
    with pytest.raises(ConfigError, match="cannot read"):
        list(read_compressions(tmp_path / "contest.jsonl"))
