"""Names of questions, under which runs keep what was computed of them."""

from types import SimpleNamespace
from typing import Any

from jaxllm.tasks.example import TaskExample
from training.tiny_lm.questions import questions_digest


def question(text: str, **example: Any) -> Any:
    return SimpleNamespace(prompt=SimpleNamespace(text=text), example=TaskExample(**example))


def test_runs_of_earlier_versions_are_found_by_the_same_digest():
    choice = question("one two", user="It's one.", answer="a", options=("a", "b"), system='Say "a".')
    free = question("three", user="three", answer="c", references=("c", "d"), form="text")
    # Of the first version.
    assert questions_digest([choice, free]) == "cba62876010e4517fb09fc0fe734d8a9"
    others = [question("three", user="three", answer="c", references=("c",), form="text")]
    assert len({questions_digest(each) for each in ([choice], [free], [free, choice], others)}) == 4
