"""Answers are those that were recorded, token for token (see `record`)."""

import json
from collections.abc import Iterator

import pytest

from tests.goldens.cases import CASES, Models, reason_to_skip
from tests.goldens.record import read_golden, recorded_names

pytestmark = pytest.mark.usefixtures("shipped_compilations")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    models = Models(tmp_path_factory.mktemp("goldens"))
    yield models
    models.close()


@pytest.mark.parametrize("name", CASES)
def test_answers_are_as_recorded(models: Models, name: str) -> None:
    if (reason := reason_to_skip(name)) is not None:
        pytest.skip(reason)
    golden = read_golden(name)
    assert golden is not None, f"python -m tests.goldens.record {name}"
    # As JSON has them: keys are strings, and tuples lists.
    answers = json.loads(json.dumps(CASES[name](models)))
    for answer, wanted in zip(answers, golden, strict=True):
        assert answer == wanted


def test_no_golden_is_left_without_a_case() -> None:
    assert recorded_names() == set(CASES)
