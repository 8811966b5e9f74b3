"""Writes results and predictions of tasks as JSON."""

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jaxllm.errors import ConfigError
from jaxllm.files.atomic import atomic_file
from jaxllm.serving.evaluation.tasks import Prediction, TaskResult


def as_json(results: Sequence[TaskResult]) -> list[dict[str, Any]]:
    """Results as plain dicts, with scores next to the other fields."""
    facts = []
    for result in results:
        fields = dataclasses.asdict(result)
        facts.append({"task": fields.pop("task"), **fields.pop("scores"), **fields})
    return facts


def check_predictions(path: Path) -> None:
    """Checks that predictions can be written to a path, before the evaluation.

    Raises:
      ConfigError: the folder is missing, or `path` is a folder.
    """
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ConfigError(f"--predictions {path}: name a file in a folder that is there")


def write_predictions(path: Path, predictions: Iterable[Prediction]) -> None:
    """Writes one JSON object a line, all or nothing."""
    with atomic_file(path) as file:
        for prediction in predictions:
            file.write(json.dumps(prediction, ensure_ascii=False).encode() + b"\n")
