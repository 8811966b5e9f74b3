"""Reads texts, prints JSON and draws progress bars: what all commands do with the terminal."""

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jaxllm.errors import ConfigError
from serving.host.progress import Progress

if TYPE_CHECKING:
    from rich.progress import Progress as Bars

MAX_INPUT_BYTES = 64 << 20
# Bars are for waits that people notice; loading what draws them takes a good part of a start by itself.
_PATIENCE_S = 0.5

_STAGES = {
    "prepare": "Preparing weights",
    "load": "Loading weights",
    "compile": "Compiling graphs",
    "export": "Exporting programs",
    "score": "Scoring tokens",
    "profile": "Timing levels",
    "replay": "Replaying requests",
}


def read_text(path: Path | None) -> str:
    """The UTF-8 text of a file, or of standard input for None or "-".

    Raises:
      ConfigError: it cannot be read, is too large, or is not UTF-8.
    """
    source = "standard input" if path is None or str(path) == "-" else str(path)
    try:
        if source == "standard input":
            raw = sys.stdin.buffer.read(MAX_INPUT_BYTES + 1)
        else:
            with Path(source).open("rb") as file:
                raw = file.read(MAX_INPUT_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{source}: cannot be read ({error.strerror})") from error
    if len(raw) > MAX_INPUT_BYTES:
        raise ConfigError(f"{source}: more than {MAX_INPUT_BYTES >> 20} MiB of text; give less")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{source}: not UTF-8 (byte {raw[error.start]:#04x} at offset {error.start}); convert it first"
        ) from error


def print_json(value: Any) -> None:
    """One JSON object on standard output."""
    click.echo(json.dumps(value, ensure_ascii=False))


@contextlib.contextmanager
def progress_bars() -> Iterator[Progress]:
    """A callback (stage, done, total) that draws a bar per stage on stderr, gone when done.

    Nothing is drawn where stderr is no terminal, nor during the first moment.
    """
    began = time.monotonic()
    bars, tasks = None, {}
    with contextlib.ExitStack() as stack:

        def update(stage: str, done: int, total: int) -> None:
            nonlocal bars
            if bars is None:
                if not sys.stderr.isatty() or time.monotonic() - began < _PATIENCE_S:
                    return
                bars = stack.enter_context(_bars())
            if stage not in tasks:
                tasks[stage] = bars.add_task(_STAGES.get(stage, stage), total=total)
            bars.update(tasks[stage], completed=done, total=total)

        yield update


def _bars() -> "Bars":
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Bars(*columns, console=Console(stderr=True), transient=True)
