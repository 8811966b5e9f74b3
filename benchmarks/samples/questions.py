"""Reads the questions of tasks, each with its right answer."""

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxllm.errors import ConfigError
from jaxllm.tasks import api_choice, labels, ui_steps
from jaxllm.tasks.example import TaskExample
from jaxllm.tasks.free_text import SHORTEN, SUM_UP
from serving.evaluation.tasks import read_questions

_FILE = Path(__file__).with_name("questions.json")
_LABELS = {"sentiment": labels.SENTIMENT, "news": labels.NEWS, "emotion": labels.EMOTION}
_FREE = {"shorten": SHORTEN, "chat summary": SUM_UP}


def read_examples(tasks: Sequence[str], data: Path | None, limit: int = 0) -> dict[str, list[TaskExample]]:
    """The validation questions of tasks, by task.

    Args:
      tasks: names of `jaxllm.tasks`.
      data: the folder of the tasks' files; None takes the packaged samples.
      limit: most questions of a task; 0 takes all.

    Raises:
      ConfigError: a file is missing or malformed, or a task has no packaged sample.
    """
    if data is not None:
        return read_questions(tasks, data, limit).examples
    return {task: packaged_examples(task)[: limit or None] for task in tasks}


def packaged_examples(task: str) -> list[TaskExample]:
    """The packaged questions of a task.

    Raises:
      ConfigError: there are none.
    """
    samples = _samples()
    if task not in samples:
        raise ConfigError(f"task {task} has no packaged sample, only {', '.join(samples)}; give --data DIR")
    return list(_examples(task, samples[task]))


@functools.cache
def _samples() -> Mapping[str, list[Any]]:
    return json.loads(_FILE.read_text(encoding="utf-8"))


def _examples(task: str, samples: Sequence[Any]) -> Iterator[TaskExample]:
    for number, sample in enumerate(samples):
        if task in _LABELS:
            text, label = sample
            yield _LABELS[task].example({"text": text, "label": label})
        elif task in _FREE:
            text, answer = sample
            yield TaskExample(system=_FREE[task], user=text, answer=answer, references=(answer,))
        elif task == "ui-step":
            yield _step(sample)
        else:
            yield _call(sample, number)


def _step(sample: Mapping[str, Any]) -> TaskExample:
    history = "\n".join(f"- {each}" for each in sample["done"])
    step = {"label": [sample["chosen"], "null"], "history": history, "state": "\n".join(sample["screen"])}
    return ui_steps.example(sample["app"], sample["goal"], step)


def _call(sample: Mapping[str, Any], number: int) -> TaskExample:
    functions = [{"name": name, "description": text} for name, text in sample["functions"].items()]
    record = {
        "id": f"sample {number}",
        "question": [[{"role": "user", "content": sample["request"]}]],
        "function": functions,
    }
    return api_choice.example(record, sample["answer"], api_choice.lines([record]), 0)
