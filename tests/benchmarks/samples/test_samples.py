"""The packaged texts and questions, and those of a data folder."""

import json

import pytest

from benchmarks.samples.questions import packaged_examples, read_examples
from benchmarks.samples.stories import read_stories, stories_file
from jaxllm.errors import ConfigError
from serving.traces.trace import TRACE_TASKS


@pytest.mark.parametrize("task", TRACE_TASKS)
def test_every_task_of_a_trace_has_questions_with_a_right_answer_among_the_options(task):
    examples = packaged_examples(task)
    assert len(examples) >= 8
    assert all(each.answer in each.options for each in examples)
    # A constant answer is no way to be right.
    assert len({each.answer for each in examples}) > 1


def test_free_answers_have_references():
    for task in ("shorten", "chat summary"):
        assert all(each.references == (each.answer,) for each in packaged_examples(task))


def test_a_task_without_samples_is_refused():
    with pytest.raises(ConfigError, match=r"task mood has no packaged sample.*--data DIR"):
        read_examples(("mood",), None)


def test_questions_come_from_a_folder_or_from_the_package(tmp_path):
    assert len(read_examples(("news", "emotion"), None, 3)["emotion"]) == 3
    (tmp_path / "tasks" / "sst2").mkdir(parents=True)
    record = json.dumps({"text": "a film", "label": "positive"})
    (tmp_path / "tasks" / "sst2" / "valid.jsonl").write_text(record)
    (example,) = read_examples(("sentiment",), tmp_path)["sentiment"]
    assert example.user == "a film"


def test_stories_are_whole_and_many():
    stories = read_stories(None)
    assert len(stories) > 30
    assert all(each[-1] in '."' and "<|" not in each for each in stories)
    with pytest.raises(ConfigError, match=r"tinystories_valid\.txt: cannot be read"):
        read_stories(stories_file(None).parent)
