"""Results of tasks for people and for programs."""

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxllm.errors import ConfigError
from jaxllm.files.atomic import atomic_file
from serving.evaluation.tasks import Prediction, TaskResult

_TABLE_CHARACTERS = 100


def as_json(results: Sequence[TaskResult]) -> list[dict[str, Any]]:
    """Results as programs read them, with scores beside the other facts."""
    facts = []
    for result in results:
        fields = dataclasses.asdict(result)
        facts.append({"task": fields.pop("task"), **fields.pop("scores"), **fields})
    return facts


def print_table(results: Sequence[TaskResult], missing: Sequence[str] = ()) -> None:
    """A table on standard output, in percent, and what was left out."""
    table = Table(box=None, pad_edge=False)
    table.add_column("task", no_wrap=True)
    table.add_column("score", no_wrap=True)
    for name in ("%", "chance", "majority", "examples", "skipped", "tokens", "seconds"):
        table.add_column(name, justify="right", no_wrap=True)
    for result in results:
        scores = list(result.scores.items()) or [("nothing fits", None)]
        for index, (measure, value) in enumerate(scores):
            facts = (
                _percent(result.chance),
                _percent(result.majority),
                f"{result.examples:,}",
                f"{result.skipped:,}",
                f"{result.tokens:,}",
                f"{result.seconds:.1f}",
            )
            first = index == 0
            table.add_row(result.task if first else "", measure, _percent(value), *(facts if first else ()))
    # Whole rows even where nobody looks: a pipe has no width.
    console = Console(width=max(Console().width, _TABLE_CHARACTERS), highlight=False)
    console.print(table)
    skipped = sum(result.skipped for result in results)
    if skipped:
        console.print(f"{skipped} questions are longer than the context and were skipped.")
    if missing:
        console.print(f"No files of: {', '.join(missing)}.")


def check_predictions(path: Path) -> None:
    """Refuses a place where predictions cannot be written, before the work.

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


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"
