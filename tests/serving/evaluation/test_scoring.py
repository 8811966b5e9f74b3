"""Packed and branching scores equal the engine's own, one sequence after another."""

import dataclasses
import itertools
import json

import numpy as np
import pytest

from jaxllm import Engine, EngineOptions
from jaxllm.errors import ConfigError, ContextOverflow
from jaxllm.serving.evaluation.scoring import score_options
from jaxllm.serving.runners.scorer import Scorer
from jaxllm.steps.branching import Branching, cut, pack
from jaxllm.tasks.example import TaskExample
from jaxllm.tasks.questions import branching
from jaxllm.text.prompts import prompt_ids
from jaxllm.text.tokenizer import Tokenizer
from tests.tiny import END_ID, TINY, tiny_tokenizer, write_tiny_bundle


def random_questions(count, context, seed=0, vocab=TINY.vocab_size):
    draw = np.random.default_rng(seed)

    def ids(size):
        return tuple(int(each) for each in draw.integers(0, vocab, size))

    questions = []
    for _ in range(count):
        trunk = ids(draw.integers(1, context // 2))
        sizes = draw.integers(1, context - len(trunk) + 2, draw.integers(1, 7))
        questions.append(Branching(trunk, tuple(ids(size) for size in sizes)))
    return questions


def one_by_one(engine, question):
    scorer = Scorer(engine.runner)
    scorer.prepare(engine.options.context_tokens)
    sums = []
    for branch in question.branches:
        whole = [*question.trunk, *branch]
        scores = scorer.score(whole[:-1], whole[1:])
        sums.append(scores[len(question.trunk) - 1 :].sum(dtype="float64"))
    return sums


def assert_equal_scores(engine, questions, **tolerance):
    scores = score_options(engine, questions)
    assert len(scores) == len(questions)
    for question, each in zip(questions, scores, strict=True):
        np.testing.assert_allclose(each, one_by_one(engine, question), **tolerance)


def test_equal_to_sequential_scores(engine, compiles):
    questions, seen = random_questions(40, 128), []
    assert_equal_scores(engine, questions, rtol=1e-4, atol=1e-3)
    with compiles() as count:
        score_options(engine, questions, progress=lambda *call: seen.append(call), stage="x")
    assert count() == 0, "something compiles twice"
    mine = [call[1:] for call in seen if call[0] == "x"]
    total = sum(len(branch) for each in questions for branch in each.branches)
    assert len(mine) > 1
    assert mine == sorted(mine)
    assert mine[-1] == (total, total)
    with pytest.raises(ContextOverflow, match="129 tokens"):
        score_options(engine, [Branching((1,) * 128, ((1, 2),))])
    assert score_options(engine, []) == []


@pytest.mark.parametrize("weights", ["int8", pytest.param("int4", marks=pytest.mark.campaign)])
def test_equal_at_the_width_that_is_served(tmp_path, weights):
    """In floats every family is: `test_rooms.py`."""
    options = EngineOptions(context_tokens=64, chunk_tokens=(32,), score_tokens=256)
    engine = Engine.open(write_tiny_bundle(tmp_path / "m", weights), options=options, warm_up=False)
    # The engine's cache holds halves where native kernels serve quantized weights.
    assert_equal_scores(engine, random_questions(12, 64), rtol=5e-3, atol=5e-2)


def test_what_stands_beside_a_question_plays_no_role(engine):
    questions = random_questions(30, 128, seed=1)
    questions.append(Branching((1, 2, 3), ((4, 5), (6,), (4, 5))))
    together = score_options(engine, questions)
    reversed_ = score_options(engine, questions[::-1])[::-1]
    for a, b, question in zip(together, reversed_, questions, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4)
        np.testing.assert_allclose(a, score_options(engine, [question])[0], rtol=1e-5, atol=1e-4)
    # Equal branches score alike.
    assert together[-1][0] == pytest.approx(together[-1][2], rel=1e-6)
    assert together[-1][0] != pytest.approx(together[-1][1], rel=1e-3)


def test_every_answer_is_packed_once():
    questions = random_questions(50, 96, seed=3)
    expected = sorted(
        (owner, branch)
        for owner, branch in enumerate(itertools.chain.from_iterable(q.branches for q in questions))
    )
    lengths = (32, 96)
    pieces = cut(questions, lengths)
    assert sorted(each for group in pieces.values() for piece in group for each in piece.branches) == expected
    scored = []
    for length, group in pieces.items():
        assert all(piece.fed_tokens <= length for piece in group)
        for packed in pack(group, 3, length):
            assert max(packed.used) <= length
            owners, targets = packed.owners[: packed.count], packed.targets[: packed.count]
            scored += [
                (int(owner), tuple(int(token) for token in targets[owners == owner]))
                for owner in np.unique(owners)
            ]
    assert sorted(scored) == expected


# From a question to ids


CHAT = TaskExample(system="S", user="U", options=("he", "hell"), answer="he")


def test_a_chat_ends_with_the_end_token():
    tokenizer = Tokenizer(tiny_tokenizer())
    question = branching(tokenizer, CHAT)
    assert list(question.trunk) == tokenizer.encode_chat(CHAT.messages()) == prompt_ids(tokenizer, CHAT)
    assert [tokenizer.decode(branch) for branch in question.branches] == ["he", "hell"]
    assert all(branch[-1] == END_ID for branch in question.branches)
    # A template without a system turn gets it with the question; without a template it is plain text.
    template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
        "{{ messages[0].content }}>"
    )
    tokenizer = Tokenizer(dataclasses.replace(tiny_tokenizer(), chat_template=template))
    assert tokenizer.decode(prompt_ids(tokenizer, CHAT)) == "S\nU>"
    tokenizer = Tokenizer(tiny_tokenizer(chat=False))
    question = branching(tokenizer, CHAT)
    assert tokenizer.decode(question.trunk) == "S\nU\n"
    assert all(branch[-1] != END_ID for branch in question.branches)


def test_an_option_that_joins_the_question_is_scored_from_before_the_join():
    tokenizer = Tokenizer(tiny_tokenizer())
    example = TaskExample(user="a th", options=("e", "at"), answer="e", form="text")
    question = branching(tokenizer, example)
    # " t" + "he" is one token (the merge "Ġthe"), " th" two: the last place where both agree is behind "a".
    for option, branch in zip(example.options, question.branches, strict=True):
        assert [*question.trunk, *branch] == tokenizer.encode(f"a th{option}")
    assert tokenizer.decode(question.trunk) == "a"


def test_all_in_one_token():
    files = tiny_tokenizer()
    plain = json.dumps({**json.loads(files.tokenizer_json), "post_processor": None})
    tokenizer = Tokenizer(dataclasses.replace(files, tokenizer_json=plain))
    example = TaskExample(user="h", options=("e", "ell"), answer="e", form="text")
    question = branching(tokenizer, example)
    assert tokenizer.decode(question.trunk) == "h"
    assert [tokenizer.decode(branch) for branch in question.branches] == ["e", "ell"]
    with pytest.raises(ConfigError, match="without a token"):
        prompt_ids(tokenizer, TaskExample(user="", answer="x", form="text"))
