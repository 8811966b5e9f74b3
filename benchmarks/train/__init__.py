"""`jaxllm bench train`: training and serving on one accelerator: attention, speed, memory, resuming, levels.

Each check runs in a process of its own, so that each has the whole device. `steps` has the checks, which need
neither a network nor data. `projection` says what a preparation costs at the measured rates.
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from benchmarks.harness.bench import REPORT_OPTIONS, tell
from jaxllm.errors import JaxllmError

if TYPE_CHECKING:
    from benchmarks.harness.report import Row

# Of one check.
LIMIT_S = 300


def checks_of(*, tiny: bool, cpu: bool, repetitions: int) -> "dict[str, Callable[[], list[Row]]]":
    """The checks by name, in order; the quickest and most telling come first.

    Args:
      tiny: whether models are small, to try the checks.
    """
    from benchmarks.train import steps

    sizes = [(256, 4, 2, 64)] if tiny else [(4096, 32, 8, 128), (8192, 16, 8, 64)]

    def size(full: str) -> str:
        return "tiny" if tiny else full

    def pretrained(full: str, remat: str, optimizer: str) -> "Callable[[], list[Row]]":
        return lambda: steps.measure_pretraining(size(full), remat, optimizer, repetitions)  # pyright: ignore

    def resumed() -> "list[Row]":
        with tempfile.TemporaryDirectory() as folder:
            return steps.check_resuming(size("60m"), Path(folder), cpu)

    return {
        "attention": lambda: [row for each in sizes for row in steps.check_attention(*each, repetitions)],
        "pretrain-350m": pretrained("350m", "none", "adamw"),
        "pretrain-350m-dots": pretrained("350m", "dots", "adamw"),
        "pretrain-60m": pretrained("60m", "none", "adamw"),
        "pretrain-60m-muon": pretrained("60m", "none", "muon"),
        "lora-8b-bf16": lambda: steps.measure_lora(size("8b"), "bf16", repetitions),
        "lora-8b-int4": lambda: steps.measure_lora(size("8b"), "int4", repetitions),
        "importance-1b": lambda: steps.measure_importance(size("1b"), repetitions),
        "joint-1b": lambda: steps.measure_joint(size("1b"), False, repetitions),
        "joint-1b-bound": lambda: steps.measure_joint(size("1b"), True, repetitions),
        "resume": resumed,
        **steps.serving_checks(tiny),
    }


@click.command("train")
@click.option("--only", multiple=True, metavar="NAME", help="Run checks whose name begins so. Repeatable.")
@click.option("--cpu", is_flag=True, help="Measure the CPU, to try the checks.")
@click.option(
    "--repetitions",
    type=click.IntRange(min=1),
    metavar="N",
    help="Timed steps of each kind.  [default: 2; with --full 10]",
)
@click.option("--minutes", type=float, default=9.0, show_default=True, help="Begin no check after this time.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Append each check's rows as JSON lines when it ends, so that a time limit loses none.",
)
@click.option("--list", "listed", is_flag=True, help="Print the names of the checks.")
@click.option("--child", hidden=True, help="Run this check in this process.")
@REPORT_OPTIONS[0]
@REPORT_OPTIONS[1]
@REPORT_OPTIONS[2]
def train_command(
    only: tuple[str, ...],
    cpu: bool,
    repetitions: int | None,
    minutes: float,
    out: Path | None,
    listed: bool,
    child: str | None,
    quick: bool,
    **how: Any,
) -> None:
    """Measure training and serving on one accelerator.

    With --quick, models are tiny, and attention and pretraining alone are checked.

    \b
    Example:
      jaxllm bench train --cpu
      jaxllm bench train --full --only pretrain --only lora --out gpu.jsonl
    """
    if cpu:
        os.environ["JAX_PLATFORMS"] = "cpu"
    repetitions = repetitions or (2 if quick else 10)
    checks = checks_of(tiny=quick, cpu=cpu, repetitions=repetitions)
    if child is not None:
        for row in checks[child]():
            click.echo(json.dumps(dataclasses.asdict(row)))
        return
    if listed:
        click.echo("\n".join(checks))
        return
    names = [name for name in checks if name.startswith(only or ("",))]
    if quick and not only:
        names = ["attention", "pretrain-60m"]
    if not names:
        raise click.UsageError(f"--only: choose among {', '.join(checks)}")
    words = [*["--cpu"] * cpu, "--repetitions", str(repetitions), "--quick" if quick else "--full"]
    from benchmarks.harness.report import emit

    rows, failed = run(names, words, out, minutes)
    emit("train", rows, subject=", ".join(names), **how)
    if failed:
        raise JaxllmError(f"failed or not begun: {', '.join(failed)}")


def run(
    names: Sequence[str], words: Sequence[str], out: Path | None, minutes: float
) -> "tuple[list[Row], list[str]]":
    """Runs checks, each in a process of its own.

    Args:
      out: where rows are appended as JSON lines; None for nowhere.

    Returns:
      Rows, and the names of checks that failed or were not begun.
    """
    from benchmarks.harness.report import Row

    began, rows, failed = time.monotonic(), list[Row](), list[str]()
    for name in names:
        if time.monotonic() - began > 60 * minutes:
            tell(f"{name}: not begun, {minutes:g} minutes are over")
            failed.append(name)
            continue
        started = time.monotonic()
        try:
            child = subprocess.run(
                [sys.executable, "-m", "benchmarks.train", *words, "--child", name],
                stdout=subprocess.PIPE, text=True, timeout=LIMIT_S, check=False,
                env={"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92", **os.environ},
            )  # fmt: skip
            lines, wrong = child.stdout, child.returncode
        except subprocess.TimeoutExpired:
            lines, wrong = "", f"more than {LIMIT_S} s"
        if wrong:
            failed.append(name)
            lines = json.dumps({"case": name, "failed": str(wrong)}) + "\n"
        else:
            rows += [Row(**json.loads(line)) for line in lines.splitlines()]
        tell(f"{name}: {time.monotonic() - started:.0f} s")
        if out is not None:
            with out.open("a", encoding="utf-8") as file:
                file.write(lines)
    return rows, failed
