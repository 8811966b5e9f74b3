"""Names of questions, under which runs keep what was computed of them."""

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

from jaxllm.tasks.example import TaskExample
from jaxllm.text.tokenizer import Tokenizer
from tests.tiny import tiny_tokenizer
from tests.training.tiny_runs import TLM_RECIPE
from training.tiny_lm.questions import questions_digest, read_questions


def question(text: str, **example: Any) -> Any:
    return SimpleNamespace(prompt=SimpleNamespace(text=text), example=TaskExample(**example))


def test_runs_of_earlier_versions_are_found_by_the_same_digest():
    choice = question("one two", user="It's one.", answer="a", options=("a", "b"), system='Say "a".')
    free = question("three", user="three", answer="c", references=("c", "d"), form="text")
    # Of the first version.
    assert questions_digest([choice, free]) == "cba62876010e4517fb09fc0fe734d8a9"
    others = [question("three", user="three", answer="c", references=("c",), form="text")]
    assert len({questions_digest(each) for each in ([choice], [free], [free, choice], others)}) == 4


def test_questions_of_a_file_stand_beside_those_of_tasks(data, tmp_path):
    path = tmp_path / "mine.jsonl"
    records = [{"question": f"Is {n} odd?", "options": ["yes", "no"], "answer": n % 2} for n in range(40)]
    path.write_text("\n".join(map(json.dumps, records)))
    recipe = dataclasses.replace(TLM_RECIPE, tasks=("sentiment", str(path)))
    found = read_questions(recipe, data, Tokenizer(tiny_tokenizer()), 128)
    own = [each for each in found.all if "odd?" in each.example.user]
    assert len(own) == max(recipe.questions, recipe.used_questions)
    assert len(found.all) == 2 * len(own)
