"""Tests each form of task file on hand-made lines."""

import pytest

from jaxllm.errors import ConfigError
from jaxllm.tasks import TASKS, find_task, readers
from jaxllm.tasks.example import TaskExample
from tests.tasks.writing import SCREEN, call, write_lines


def read(name, data, split="valid"):
    return list(TASKS[name].read(data, split))


@pytest.mark.parametrize(
    ("name", "folder", "label"),
    [("sentiment", "sst2", "negative"), ("news", "agnews", "Sci/Tech"), ("emotion", "emotion", "fear")],
)
def test_labels(tmp_path, name, folder, label):
    write_lines(tmp_path / "tasks" / folder / "valid.jsonl", {"text": " a b", "label": label})
    (example,) = read(name, tmp_path)
    assert (example.user, example.answer, example.form) == (" a b", label, "chat")
    assert label in example.options
    # The instruction names every label, so that a model may know them from it alone.
    assert all(option in example.system for option in example.options)
    assert example.messages() == [
        {"role": "system", "content": example.system},
        {"role": "user", "content": " a b"},
    ]


QUESTION = TaskExample(
    user="Question: Which is hot?\nAnswer:", options=(" ice", " the sun"), answer=" the sun", form="text"
)


@pytest.mark.parametrize(
    "record",
    [
        {
            "id": "x",
            "question": {
                "stem": "Which is hot?",
                "choices": [{"text": "ice", "label": "A"}, {"text": "the sun ", "label": "B"}],
            },
            "answerKey": "B",
        },
        {
            "question": "Which is hot? ",
            "choices": {"text": ["ice", "the sun"], "label": ["1", "2"]},
            "answerKey": "2",
        },
        {
            "question_stem": "Which is hot?",
            "choices": {"text": ["ice", "the sun"], "label": ["A", "B"]},
            "answerKey": "B",
        },
        {
            "instruction": "Please choose the correct answer to the question: Which is hot?\n\n"
            "Answer1: ice Answer2: the sun\n\nAnswer format: answer1/answer2",
            "answer": "answer2",
        },
    ],
    ids=["official", "columns", "stem", "instruction"],
)
def test_multiple_choice(record):
    assert readers.multiple_choice(record) == QUESTION


@pytest.mark.parametrize(
    "record",
    [
        {"question": "Q", "choices": {"text": ["a", "b"], "label": ["A", "B"]}, "answerKey": "C"},
        {"question": {"stem": "Q", "choices": [{"text": "a", "label": "A"}]}, "answerKey": 1},
        {"instruction": "What?", "answer": "answer1"},
        {
            "instruction": "Please choose the correct answer to the question: Q\n\nAnswer1: a\n\nAnswer",
            "answer": "answer2",
        },
    ],
)
def test_malformed_multiple_choice(record):
    with pytest.raises(ConfigError):
        readers.multiple_choice(record)


def test_an_element_is_named_by_its_text():
    assert readers.screen_actions(SCREEN) == {
        0: "type in Search folders",
        1: "tap What's new Menu",
        2: "check Dark mode",
        3: "tap Internal 2",
        4: "tap Photo",
        5: "tap Photo",
        6: "tap",
    }


def test_ui_step():
    step = {"label": [5, "null"], "history": "\n- TapOn: <button id=7>x</button>", "state": SCREEN}
    example = readers.ui_step("gallery", "see it", step)
    assert example.answer == "tap Photo"
    assert example.options[0] == "finish"
    # Two elements of one text are one option.
    assert example.options.count("tap Photo") == 1
    assert example.user.startswith(
        "App: gallery\nGoal: see it\nDone:\n- TapOn: <button>x</button>\nScreen:\n<input >"
    )
    assert " id=" not in example.user
    assert readers.ui_step("a", "b", step | {"label": [-1, "null"]}).answer == "finish"


def test_api_choice_offers_four():
    offered = {name: f"- {name}: x" for name in "abcdefgh"}
    examples = [readers.api_choice(call(1, "c", "d"), "c", offered, variant) for variant in range(12)]
    for example in examples:
        assert len(set(example.options)) == 4
        assert {"c", "d"} <= set(example.options)
        assert example.user.split("\n") == ["Do thing 1", *(offered[name] for name in example.options)]
    assert len({example.options for example in examples}) > 6
    assert readers.api_choice(call(1, "c", "d"), "c", offered, 0) == examples[0]
    many = readers.api_choice(call(2, *"abcdef"), "a", offered, 0)
    assert sorted(many.options) == list("abcdef")


def test_a_function_is_told_in_a_sentence():
    assert readers.function_lines([call(1, "f")]) == {"f": "- f: Does f"}


def test_free_answers(tmp_path):
    for name in ("google", "broadcast", "gigaword"):
        lines = [{"text": f"{name} {n}", "summaries": [f"{n}", "b"]} for n in range(60)]
        write_lines(
            tmp_path / "tasks" / "compression" / f"{name}.jsonl", *lines, {"text": "x", "summaries": []}
        )
    valid, train = read("shorten", tmp_path), read("shorten", tmp_path, "train")
    assert len(valid) + len(train) == 180
    assert 0 < len(valid) < 60
    assert valid[0].references == (valid[0].answer, "b")


@pytest.mark.parametrize(
    "record", [{"dialogue": "A: hi\r\nB: ho", "summary": "s "}, {"context": "A: hi\nB: ho", "response": "s"}]
)
def test_chats(tmp_path, record):
    write_lines(tmp_path / "tasks/samsum/valid.jsonl", record)
    (example,) = read("chat-summary", tmp_path)
    assert (example.user, example.answer, example.options) == ("A: hi\nB: ho", "s", ())


@pytest.mark.parametrize(
    "record", [{"context": "I see the", "continuation": "sun"}, {"text": "I see the sun"}]
)
def test_last_words(tmp_path, record):
    write_lines(tmp_path / "tasks/lambada/valid.jsonl", record)
    assert read("lambada", tmp_path) == [TaskExample(user="I see the", answer=" sun", form="text")]


@pytest.mark.parametrize("name", ["chat-summary", "lambada"])
def test_nothing_is_trained_on_what_has_no_training_split(tmp_path, name):
    with pytest.raises(ConfigError, match="only a validation split"):
        read(name, tmp_path, "train")


def test_stories():
    example = readers.story_example(' "Hi!" he said. Then he left.\nThe end.')
    assert example is not None
    assert (example.user, example.answer) == ('"Hi!"', "he said. Then he left.\nThe end.")
    assert readers.story_example("One sentence only.") is None
    assert readers.story_example("A. " + "b" * 9000) is None


def test_unknown_task():
    with pytest.raises(ConfigError, match="the tasks are sentiment, news"):
        find_task("chess")


def test_the_answer_is_among_the_options():
    with pytest.raises(ConfigError, match="not among the options"):
        TaskExample(user="x", answer="a", options=("b", "c"))
