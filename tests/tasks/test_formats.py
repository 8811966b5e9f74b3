"""Tests each form of task file on hand-made lines, splits, own questions and real data; errors name lines."""

import pytest

from jaxllm.errors import ConfigError
from jaxllm.tasks import TASKS, find_task, readers
from jaxllm.tasks.example import DataMissing, TaskExample
from tests.tasks.writing import SCREEN, call, write_calls, write_lines, write_steps


def read(name, data, split="valid"):
    return list(TASKS[name].read(data, split))


def test_labels(tmp_path):
    for name, folder, label in (("sentiment", "sst2", "negative"), ("news", "agnews", "Sci/Tech")):
        write_lines(tmp_path / "tasks" / folder / "valid.jsonl", {"text": " a b", "label": label})
        (example,) = read(name, tmp_path)
        assert (example.user, example.answer, example.form) == (" a b", label, "chat")
        # The instruction names every label, so that a model may know them from it alone.
        assert all(option in example.system for option in (label, *example.options))


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
            "question_stem": "Which is hot? ",
            "choices": {"text": ["ice", "the sun"], "label": ["1", "2"]},
            "answerKey": "2",
        },
        {
            "instruction": "Please choose the correct answer to the question: Which is hot?\n\n"
            "Answer1: ice Answer2: the sun\n\nAnswer format: answer1/answer2",
            "answer": "answer2",
        },
    ],
    ids=["official", "columns", "instruction"],
)
def test_multiple_choice(record):
    assert readers.multiple_choice(record) == QUESTION
    # An answer that is no choice.
    wrong = {"answerKey": "C"} if "answerKey" in record else {"answer": "answer3"}
    with pytest.raises(ConfigError):
        readers.multiple_choice(record | wrong)


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
    # A function is described in a sentence.
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


def test_chats_and_last_words_of_which_nothing_is_trained_on(tmp_path):
    chats = {"dialogue": "A: hi\r\nB: ho", "summary": "s "}, {"context": "A: hi\nB: ho", "response": "s"}
    write_lines(tmp_path / "tasks/samsum/valid.jsonl", *chats)
    for example in read("chat-summary", tmp_path):
        assert (example.user, example.answer, example.options) == ("A: hi\nB: ho", "s", ())
    passages = {"context": "I see the", "continuation": "sun"}, {"text": "I see the sun"}
    write_lines(tmp_path / "tasks/lambada/valid.jsonl", *passages)
    assert read("lambada", tmp_path) == [TaskExample(user="I see the", answer=" sun", form="text")] * 2
    with pytest.raises(ConfigError, match="only examples of the split valid, none of train"):
        read("lambada", tmp_path, "train")


def test_stories():
    example = readers.story_example(' "Hi!" he said. Then he left.\nThe end.')
    assert example is not None
    assert (example.user, example.answer) == ('"Hi!"', "he said. Then he left.\nThe end.")
    assert readers.story_example("One sentence only.") is None
    assert readers.story_example("A. " + "b" * 9000) is None


# Files: what is missing or malformed is named


@pytest.mark.parametrize("name", TASKS)
def test_a_missing_file_is_named(tmp_path, name):
    with pytest.raises(DataMissing, match=str(tmp_path)):
        read(name, tmp_path)


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("{", "is not JSON"),
        ("[1]", "expected an object"),
        ('{"text": 1, "label": "positive"}', "text under 'text'"),
        ('{"text": "a", "label": "fine"}', "'fine' is none of positive, negative"),
        ('{"text": "\\ud800", "label": "positive"}', "lone surrogate"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, part):
    path = write_lines(tmp_path / "tasks/sst2/valid.jsonl", {"text": "a", "label": "positive"})
    path.write_bytes(path.read_bytes() + b"\n" + line.encode(errors="surrogateescape") + b"\n")
    with pytest.raises(ConfigError, match=r"valid\.jsonl, line 3") as caught:
        read("sentiment", tmp_path)
    assert part in str(caught.value)
    assert not isinstance(caught.value, DataMissing)


@pytest.mark.parametrize("text", ["{", "[]", '{"app": {"g": {"task": "x"}}}'])
def test_wrong_steps_are_named(tmp_path, text):
    path = tmp_path / "tasks/ui_automation/steps.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"steps\.json"):
        _ = [*read("ui-step", tmp_path, "train"), *read("ui-step", tmp_path)]


# Splits that follow from contents


def test_a_goal_is_on_one_side(tmp_path):
    goals = {app: [f"goal {n}" for n in range(40)] for app in ("a", "b")}
    write_steps(tmp_path, goals)
    sides = {split: read("ui-step", tmp_path, split) for split in ("train", "valid")}
    keys = {split: {each.user.split("\nDone")[0] for each in found} for split, found in sides.items()}
    assert not keys["train"] & keys["valid"]
    assert len(keys["train"] | keys["valid"]) == 80
    assert 6 <= len(keys["valid"]) <= 28
    assert len(sides["valid"]) == 2 * len(keys["valid"])


def test_training_sees_no_held_out_request_or_function(tmp_path):
    # Copies of a request are on one side.
    write_calls(tmp_path, [call(n, f"own{n}", f"near{n}", request=f"request {n % 50}") for n in range(60)])
    train, valid = read("api-choice", tmp_path, "train"), read("api-choice", tmp_path)
    requests = [{each.user.split("\n")[0] for each in side} for side in (train, valid)]
    offered = [{name for each in side for name in each.options} for side in (train, valid)]
    assert not requests[0] & requests[1]
    assert not offered[0] & offered[1]
    assert len(valid) >= len(requests[1]) > 3
    assert len(train) + 12 * len(valid) == 12 * 60
    assert len({(each.user, each.options) for each in train}) > 10 * len(requests[0])
    write_lines(tmp_path / "tasks/api_calling/BFCL_v4_multiple_answers.jsonl")
    with pytest.raises(ConfigError, match="no answer to the question 'q"):
        read("api-choice", tmp_path, "train")


# The user's own questions

GOOD = {"question": "Is it red?", "options": ["yes", "no"], "answer": "no", "id": 7}


def read_own(folder, *records):
    write_lines(folder / "mine.jsonl", *records)
    return list(find_task("mine.jsonl").read(folder, "train"))


def test_a_file_is_a_task(tmp_path):
    text = {"question": "It is", "options": ["a", "b", "c"], "answer": 2, "form": "text"}
    first, second, third = read_own(tmp_path, GOOD, text, {**GOOD, "system": "Be brief."})
    assert (first.user, first.options) == ("Is it red?", ("yes", "no"))
    assert (first.answer, first.form) == ("no", "chat")
    assert (second.answer, second.form) == ("c", "text")
    assert third.system == "Be brief."
    assert next(find_task(str(tmp_path / "mine.jsonl")).read(tmp_path / "elsewhere", "train")) == first
    assert find_task("mine.jsonl").score == "accuracy"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"question": None}, "needs text under 'question'"),
        ({"options": ["yes"]}, "at least two different texts"),
        ({"answer": "maybe"}, "not among the options"),
        ({"answer": 2}, "the answer 2 is none of the 2 options, counted from 0"),
        ({"form": "song"}, "form must be chat or text"),
    ],
)
def test_a_bad_line_is_named(change, message, tmp_path):
    with pytest.raises(ConfigError, match=rf"mine\.jsonl, line 2: .*{message}"):
        read_own(tmp_path, GOOD, GOOD | change)


def test_what_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*none\.jsonl"):
        list(find_task("none.jsonl").read(tmp_path, "train"))
    with pytest.raises(ConfigError, match="only examples of the split train, none of valid"):
        list(find_task("none.jsonl").read(tmp_path, "valid"))
    with pytest.raises(ConfigError, match=r"no task 'mine'.*files of questions \(\*\.jsonl\)"):
        find_task("mine")


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_reads(data_dir, name):
    task = TASKS[name]
    try:
        valid = list(task.read(data_dir, "valid"))
    except DataMissing as error:
        pytest.skip(str(error))
    assert len(valid) > 50
    assert all(example.user.strip() and example.answer.strip() for example in valid)
    assert all(bool(example.options) == (task.score == "accuracy") for example in valid)
    # A screen has no rest of a tag in its answers.
    assert not [option for each in valid for option in each.options if "'>" in option or "text=" in option]
    if name in ("chat-summary", "lambada"):
        return
    train = {(each.system, each.user) for each in task.read(data_dir, "train")}
    assert len(train) > len(valid)
    if name in ("ui-step", "api-choice", "shorten"):
        assert not train & {(each.system, each.user) for each in valid}
