"""Questions of the user's own, from a file."""

import json

import pytest

from jaxllm.errors import ConfigError
from jaxllm.tasks import find_task

GOOD = {"question": "Is it red?", "options": ["yes", "no"], "answer": "no", "id": 7}


def read(folder, *records):
    (folder / "mine.jsonl").write_text("\n".join(map(json.dumps, records)))
    return list(find_task("mine.jsonl").read(folder, "train"))


def test_a_file_is_a_task(tmp_path):
    text = {"question": "It is", "options": ["a", "b", "c"], "answer": 2, "form": "text"}
    first, second, third = read(tmp_path, GOOD, text, {**GOOD, "system": "Be brief."})
    assert (first.user, first.options, first.answer, first.form) == (
        "Is it red?",
        ("yes", "no"),
        "no",
        "chat",
    )
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
        read(tmp_path, GOOD, GOOD | change)


def test_what_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*none\.jsonl"):
        list(find_task("none.jsonl").read(tmp_path, "train"))
    with pytest.raises(ConfigError, match="only questions to train on, none of the split valid"):
        list(find_task("none.jsonl").read(tmp_path, "valid"))
    with pytest.raises(ConfigError, match=r"no task 'mine'.*files of questions \(\*\.jsonl\)"):
        find_task("mine")
