"""Results of tasks: what counts as right, what is left out, and Rouge."""

import numpy as np
import pytest

from jaxllm.errors import ConfigError
from jaxllm.serving.evaluation.tasks import is_right, read_questions, run_task
from jaxllm.tasks import Task
from jaxllm.tasks.example import TaskExample
from jaxllm.tasks.rouge import rouge
from tests.tasks.writing import write_lines


def task(score="accuracy", **fields):
    return Task("tiny", "a tiny task", lambda data, split: iter(()), score, **fields)


def text(user, *options, answer=None):
    return TaskExample(user=user, options=options, answer=answer or options[0], form="text")


def test_the_first_of_equally_likely_options_wins(engine, monkeypatch):
    def scored(scores):
        monkeypatch.setattr("jaxllm.serving.evaluation.tasks.score_options", lambda *_, **__: scores)

    scored([np.zeros(2), np.zeros(2)])
    result, (first, second) = run_task(engine, task(), [text("x", "a", "b"), text("x", "a", "b", answer="b")])
    assert (first["prediction"], second["prediction"]) == ("a", "a")
    assert result.scores == {"accuracy": 0.5}
    scored([np.array([-3.0, -4.0])])
    result, _ = run_task(engine, task(per_byte=True), [text("x", " ab", " abcdef")])
    assert result.scores == {"accuracy": 1.0, "accuracy_per_byte": 0.0}


def test_facts(engine):
    long = text("x" * 200, "a", "b")
    examples = [text("x", "a", "b"), text("y", "a", "b"), text("z", "b", "a", "c", "d"), long]
    result, predictions = run_task(engine, task(), examples)
    assert (result.examples, result.skipped, len(predictions)) == (3, 1, 3)
    assert result.chance == pytest.approx((1 / 2 + 1 / 2 + 1 / 4) / 3)
    assert result.majority == pytest.approx(2 / 3)
    assert result.tokens > 0
    # Where nothing fits there is nothing to tell.
    for kind in ("accuracy", "exact_match", "rouge"):
        result, predictions = run_task(engine, task(kind), [long])
        assert (result.scores, result.examples, result.skipped, predictions) == ({}, 0, 1, [])


@pytest.mark.parametrize("kind", ["exact_match", "rouge"])
def test_written_answers(engine, kind):
    prompt = "the cat"
    said = engine.generate(prompt).text[:4]
    examples = [TaskExample(user=prompt, answer="x", form="text"), TaskExample(user=prompt, answer="x")]
    result, predictions = run_task(engine, task(kind, answer_tokens=4), examples)
    assert result.examples == 2
    assert said.startswith(predictions[0]["prediction"][:3])
    # The answer needs room too.
    result, _ = run_task(engine, task(kind, answer_tokens=124), examples)
    assert result.skipped == 2


@pytest.mark.parametrize(
    ("example", "said", "right"),
    [
        (TaskExample(user="x", answer="tap A"), " tap A\n", True),
        (TaskExample(user="x", answer="tap A"), "tap a", False),
        (TaskExample(user="x", answer="tap A"), "tap A now", False),
        (TaskExample(user="x", answer=" sun", form="text"), ' sun," he said', True),
        (TaskExample(user="x", answer=" sun", form="text"), " sunny", False),
        (TaskExample(user="x", answer=" don't", form="text"), " don't.", True),
        (TaskExample(user="x", answer=" sun", form="text"), "", False),
    ],
)
def test_right(example, said, right):
    assert is_right(example, said) == right


def test_rouge():
    assert rouge(["The cat sat on a mat."], "the cat sat on a mat") == dict.fromkeys(
        ("rouge1", "rouge2", "rougeL"), 1.0
    )
    assert set(rouge(["the cat"], "").values()) == {0.0}
    # 2 of 2 words, of 4 in the reference; 1 of 1 pair, of 3.
    found = rouge(["a red cat ran"], "red cat")
    assert found == pytest.approx({"rouge1": 2 / 3, "rouge2": 1 / 2, "rougeL": 2 / 3})
    assert rouge(["dogs", "a red cat ran"], "red cat") == found


def test_questions(tmp_path):
    write_lines(
        tmp_path / "tasks/sst2/valid.jsonl", *({"text": f"{n}", "label": "positive"} for n in range(9))
    )
    found = read_questions(["sentiment", "all"], tmp_path)
    assert list(found.examples) == ["sentiment"]
    assert "sentiment" not in found.missing
    assert [each.user for each in found.examples["sentiment"]] == [f"{n}" for n in range(9)]
    sample = read_questions(["sentiment"], tmp_path, 3).examples["sentiment"]
    # A larger sample begins with the smaller one.
    assert read_questions(["sentiment"], tmp_path, 5).examples["sentiment"][:3] == sample
    (tmp_path / "tasks/sst2/valid.jsonl").write_text("")
    with pytest.raises(ConfigError, match="no validation question"):
        read_questions(["sentiment"], tmp_path)
