"""Names of questions, under which runs keep what was computed of them."""

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxllm.tasks.example import TaskExample
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.training.elastic.tiny_lm import questions
from jaxllm.training.elastic.tiny_lm.questions import kept_answers, questions_digest, read_questions
from jaxllm.training.elastic.tiny_lm.self_labels import Answers
from tests.tiny import tiny_tokenizer
from tests.training.tiny_runs import TLM_RECIPE


def question(text: str, **example: Any) -> Any:
    return SimpleNamespace(prompt=SimpleNamespace(text=text), example=TaskExample(**example))


def test_runs_of_earlier_versions_are_found_by_the_same_digest():
    choice = question("one two", user="It's one.", answer="a", options=("a", "b"), system='Say "a".')
    free = question("three", user="three", answer="c", references=("c", "d"), form="text")
    # Of the first version.
    assert questions_digest([choice, free]) == "cba62876010e4517fb09fc0fe734d8a9"
    others = [question("three", user="three", answer="c", references=("c",), form="text")]
    assert len({questions_digest(each) for each in ([choice], [free], [free, choice], others)}) == 4


def test_answers_are_kept_shard_by_shard(tmp_path, monkeypatch):
    monkeypatch.setattr(questions, "SHARD_QUESTIONS", 4)
    asked = [question(str(n), user=str(n), answer="a", options=("a", "b")) for n in range(10)]
    scores = [np.full(3, n, np.float32) for n in range(10)]
    made: list[list[str]] = []

    def make(some: Any, own: Any) -> Answers:
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append([each.prompt.text for each in some])
        values = np.array([int(each.prompt.text) for each in some])
        return Answers(values[:, None, None] % np.array([[[2, 3]]]) == 0, np.stack(own)[:, :2].astype(float))

    path, told = tmp_path / "answers.npz", []
    with pytest.raises(KeyboardInterrupt):
        kept_answers(path, asked, scores, make)
    assert sorted(each.name for each in (tmp_path / "answers").iterdir()) == ["0.npz", "4.npz"]
    first, made[:] = list(made), []
    found = kept_answers(path, asked, scores, make, lambda *call: told.append(call))
    assert first + made == [list("0123"), list("4567"), list("89")]
    assert told == [(4, 10), (8, 10), (10, 10)]
    assert found.correct[:, 0].tolist() == [[n % 2 == 0, n % 3 == 0] for n in range(10)]
    np.testing.assert_array_equal(found.shares[:, 0], np.arange(10))
    # One file remains, and answers nothing twice.
    assert [each.name for each in tmp_path.iterdir()] == ["answers.npz"]
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
