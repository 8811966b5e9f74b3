"""Reads texts, summarizes answers, prints JSON and columns, and draws progress bars for all commands."""

import contextlib
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jaxllm.errors import ConfigError
from jaxllm.serving.host.progress import Progress

if TYPE_CHECKING:
    from jaxllm.serving.engine.step import Answer
    from jaxllm.serving.speculation.speculation import Speculation

MAX_INPUT_BYTES = 64 << 20
# Bars appear only after this time.
_PATIENCE_S = 0.5
_LEAST_CHARACTERS = 100

_IN_BYTES = ("download", "load")
_STAGES = {
    "download": "Downloading",
    "prepare": "Preparing weights",
    "load": "Loading weights",
    "compile": "Compiling buckets",
    "export": "Exporting programs",
    "score": "Scoring tokens",
    "profile": "Timing levels",
    "replay": "Replaying requests",
}


def read_text(path: Path | None) -> str:
    """The UTF-8 text of a file, or of standard input for None or "-".

    Raises:
      ConfigError: the text cannot be read, is too large, or is not UTF-8.
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


def answer_facts(answer: "Answer") -> dict[str, Any]:
    """Text, tokens and times of a finished answer; times in milliseconds."""
    tokens, timings = len(answer.tokens), answer.timings
    tpot_ms = timings.tpot_ms(tokens)
    return {
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "stop_string": answer.stop_string,
        "prompt_tokens": answer.prompt_tokens,
        "reused_tokens": answer.reused_tokens,
        "completion_tokens": tokens,
        "seed": answer.seed,
        "ttft_ms": round(timings.ttft_ms, 3),
        "tpot_ms": round(tpot_ms, 3),
        "decode_tokens_per_s": round(1000 / tpot_ms, 1) if tpot_ms else None,
    }


def speed_line(answer: "Answer") -> str:
    """Tokens, time to the first and rate of a finished answer, for people."""
    facts = answer_facts(answer)
    rate = facts["decode_tokens_per_s"]
    further = f", then {rate:,.0f} tokens/s" if rate else ""
    return f"[{facts['completion_tokens']} tokens, first after {facts['ttft_ms']:.1f} ms{further}]"


def draft_facts(speculation: "Speculation | None") -> dict[str, Any]:
    """Counts of drafts, and whether drafting is faster (None: not measured yet); empty without
    speculation."""
    if speculation is None:
        return {}
    counts, payoff = speculation.counts, speculation.payoff
    drafted_ms, plain_ms = payoff.token_ms, payoff.plain_token_ms
    return {
        "drafts": {
            "drafter": speculation.options.drafter,
            "pays": payoff.pays,
            "drafted_token_ms": None if drafted_ms is None else round(drafted_ms, 3),
            "plain_token_ms": None if plain_ms is None else round(plain_ms, 3),
            "verifications": counts.verifications,
            "acceptance_length": round(counts.acceptance_length, 2),
            "useful_share": round(counts.useful_share, 3),
            "plain_tokens": counts.plain_tokens,
        }
    }


def print_json(value: Any) -> None:
    """Prints one JSON object on standard output."""
    click.echo(json.dumps(value, ensure_ascii=False))


def print_columns(
    names: Sequence[str], rows: Iterable[Sequence[str]], *, title: str | None = None, texts: int = 1
) -> None:
    """Prints rows in aligned columns on standard output.

    Args:
      names: names of the columns.
      rows: one cell per column; shorter rows are padded with empty cells.
      title: title above the columns, in a frame whose cells may wrap; None prints neither title nor frame.
      texts: number of first columns that are left-aligned.
    """
    from rich.console import Console
    from rich.table import Table as Grid

    framing: dict[str, Any] = {"title": title} if title else {"box": None, "pad_edge": False}
    grid = Grid(**framing)
    for index, name in enumerate(names):
        grid.add_column(name, justify="left" if index < texts else "right", no_wrap=title is None)
    for row in rows:
        grid.add_row(*row)
    # A pipe has no width: do not cut rows.
    Console(width=max(Console().width, _LEAST_CHARACTERS), highlight=False).print(grid)


@contextlib.contextmanager
def progress_bars() -> Iterator[Progress]:
    """Yields a callback (stage, done, total) that draws a bar per stage on stderr, removed at the end.

    Draws nothing if stderr is not a terminal, and nothing in the first half second.
    """
    began = time.monotonic()
    bars, tasks = None, {}
    with contextlib.ExitStack() as stack:

        def update(stage: str, done: int, total: int) -> None:
            nonlocal bars
            if bars is None:
                if not sys.stderr.isatty() or time.monotonic() - began < _PATIENCE_S:
                    return
                # Imported here: it is a large part of startup time.
                from rich.console import Console
                from rich.progress import (
                    BarColumn,
                    DownloadColumn,
                    MofNCompleteColumn,
                    ProgressColumn,
                    Task,
                    TextColumn,
                    TimeElapsedColumn,
                    TransferSpeedColumn,
                )
                from rich.progress import Progress as Bars
                from rich.text import Text

                class Amount(ProgressColumn):
                    """What is done of all, of bytes with their speed."""

                    def render(self, task: Task) -> Text:
                        if not task.fields["in_bytes"]:
                            return MofNCompleteColumn().render(task)
                        speed = TransferSpeedColumn().render(task)
                        return Text.assemble(DownloadColumn().render(task), "  ", speed)

                columns = (TextColumn("{task.description}"), BarColumn(), Amount(), TimeElapsedColumn())
                bars = stack.enter_context(Bars(*columns, console=Console(stderr=True), transient=True))
            if stage not in tasks:
                tasks[stage] = bars.add_task(
                    _STAGES.get(stage, stage), completed=done, total=total, in_bytes=stage in _IN_BYTES
                )
            bars.update(tasks[stage], completed=done, total=total)

        yield update
