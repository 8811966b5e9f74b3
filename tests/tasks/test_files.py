"""Tests files of tasks: splits, own questions, real data; errors name file and line, missing or malformed."""

import pytest

from jaxllm.errors import ConfigError
from jaxllm.tasks import TASKS, find_task
from jaxllm.tasks.example import DataMissing, read_jsonl
from tests.tasks.writing import call, write_calls, write_lines, write_steps


def read(name, data, split="valid"):
    return list(TASKS[name].read(data, split))


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
        ('{"text": "a"}', "text under 'label'"),
        ('{"text": "a", "label": "fine"}', "'fine' is none of positive, negative"),
        ('{"text": "\\ud800", "label": "positive"}', "lone surrogate"),
        ("\udcff", "is not JSON"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, part):
    path = write_lines(tmp_path / "tasks/sst2/valid.jsonl", {"text": "a", "label": "positive"})
    path.write_bytes(path.read_bytes() + b"\n" + line.encode(errors="surrogateescape") + b"\n")
    with pytest.raises(ConfigError, match=r"valid\.jsonl, line 3") as caught:
        read("sentiment", tmp_path)
    assert part in str(caught.value)
    assert not isinstance(caught.value, DataMissing)


@pytest.mark.parametrize(
    ("name", "file", "record"),
    [
        ("arc-easy", "tasks/arc_easy/valid.jsonl", {"question": "Q", "choices": {}, "answerKey": "A"}),
        ("openbookqa", "tasks/openbookqa/valid.jsonl", {"question": {"stem": "Q"}, "answerKey": "A"}),
        ("shorten", "tasks/compression/google.jsonl", {"text": "a", "summaries": "abc"}),
        ("lambada", "tasks/lambada/valid.jsonl", {"text": "word"}),
        ("chat-summary", "tasks/samsum/valid.jsonl", {"dialogue": "a"}),
        ("api-choice", "tasks/api_calling/BFCL_v4_simple_python.jsonl", {"function": [{"name": "f"}]}),
    ],
)
def test_every_format_names_the_line(tmp_path, name, file, record):
    write_lines(tmp_path / file, record)
    with pytest.raises(ConfigError, match=r"jsonl, line 1"):
        read(name, tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"app": {"g": {"task": "x"}}}'])
def test_wrong_steps_are_named(tmp_path, text):
    path = tmp_path / "tasks/ui_automation/steps.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"steps\.json"):
        _ = [*read("ui-step", tmp_path, "train"), *read("ui-step", tmp_path)]


def test_a_question_without_an_answer_is_named(tmp_path):
    write_calls(tmp_path, [call(1, "a")])
    write_lines(tmp_path / "tasks/api_calling/BFCL_v4_multiple_answers.jsonl")
    with pytest.raises(ConfigError, match="no answer to the question 'q1'"):
        [*read("api-choice", tmp_path, "train"), *read("api-choice", tmp_path)]


def test_lines_are_read_as_they_are_asked_for(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n\n{"a": 2}\nbroken\n')
    lines = read_jsonl(path, lambda record: [record["a"]])
    assert [next(lines), next(lines)] == [1, 2]
    with pytest.raises(ConfigError, match="line 4"):
        next(lines)


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
    write_calls(tmp_path, [call(n, f"own{n}", f"near{n}") for n in range(60)])
    train, valid = read("api-choice", tmp_path, "train"), read("api-choice", tmp_path)
    requests = [{each.user.split("\n")[0] for each in side} for side in (train, valid)]
    offered = [{name for each in side for name in each.options} for side in (train, valid)]
    assert not requests[0] & requests[1]
    assert not offered[0] & offered[1]
    assert len(valid) == len(requests[1]) > 3
    assert len(train) == 12 * len(requests[0])
    assert len({(each.user, each.options) for each in train}) > 11 * len(requests[0])


def test_copies_of_a_request_are_on_one_side(tmp_path):
    records = [call(n, f"f{n}", request=f"request {n % 20}") for n in range(60)]
    write_calls(tmp_path, records)
    train, valid = read("api-choice", tmp_path, "train"), read("api-choice", tmp_path)
    assert not {each.user.split("\n")[0] for each in train} & {each.user.split("\n")[0] for each in valid}


def test_the_order_of_lines_plays_no_role(tmp_path):
    records = [call(n, f"own{n}", f"near{n}") for n in range(30)]
    write_calls(tmp_path / "a", records)
    write_calls(tmp_path / "b", records[::-1])
    a, b = read("api-choice", tmp_path / "a"), read("api-choice", tmp_path / "b")
    assert set(a) == set(b)
    assert a


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
        ({"options": "yes or no"}, "at least two different texts"),
        ({"answer": "maybe"}, "not among the options"),
        ({"answer": 2}, "the answer 2 is none of the 2 options, counted from 0"),
        ({"answer": None}, "must be an option or its number"),
        ({"form": "song"}, "form must be chat or text"),
        ({"system": ["x"]}, "needs text under 'system'"),
    ],
)
def test_a_bad_line_is_named(change, message, tmp_path):
    with pytest.raises(ConfigError, match=rf"mine\.jsonl, line 2: .*{message}"):
        read_own(tmp_path, GOOD, GOOD | change)


def test_what_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*none\.jsonl"):
        list(find_task("none.jsonl").read(tmp_path, "train"))
    with pytest.raises(ConfigError, match="only questions to train on, none of the split valid"):
        list(find_task("none.jsonl").read(tmp_path, "valid"))
    with pytest.raises(ConfigError, match=r"no task 'mine'.*files of questions \(\*\.jsonl\)"):
        find_task("mine")


# The real files, where they are

VALIDATION_ALONE = ("chat-summary", "lambada")


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
    if name in VALIDATION_ALONE:
        return
    train = {(each.system, each.user) for each in task.read(data_dir, "train")}
    assert len(train) > len(valid)
    if name in ("ui-step", "api-choice", "shorten"):
        assert not train & {(each.system, each.user) for each in valid}


def test_a_screen_has_no_rest_of_a_tag_in_its_answers(data_dir):
    try:
        examples = [each for split in ("train", "valid") for each in TASKS["ui-step"].read(data_dir, split)]
    except DataMissing as error:
        pytest.skip(str(error))
    assert not [option for each in examples for option in each.options if "'>" in option or "text=" in option]
