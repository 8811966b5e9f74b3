"""The real files, where they are: every task reads, with answers that can be right."""

import pytest

from jaxllm.tasks import TASKS
from jaxllm.tasks.example import DataMissing

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
