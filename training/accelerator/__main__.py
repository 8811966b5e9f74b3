"""Runs `python -m training.accelerator`: all checks on one accelerator, each in a process of its own.

Each check prints its rows as JSON lines; `--out FILE` appends them to a file as well, so that what was
measured before a time limit is kept. `--only NAME` picks checks, `--tiny` tries all of them on small models.
It needs neither a network nor data, and of packages those that `jaxllm` itself depends on.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from training.accelerator.rows import Row

_Check = Callable[[], list[Row]]
# Of one check.
LIMIT_S = 300


@dataclasses.dataclass(frozen=True)
class Asked:
    """What is measured: at which size, and how often each step is timed."""

    tiny: bool
    cpu: bool
    repetitions: int

    def size(self, full: str) -> str:
        """The size of a check."""
        return "tiny" if self.tiny else full


def checks_of(asked: Asked) -> dict[str, _Check]:
    """The checks by name, in order; the quickest and most telling come first."""
    from training.accelerator import attention, resuming, serving, steps

    times = asked.repetitions

    def attending() -> list[Row]:
        if asked.tiny:
            return attention.check_attention(256, 4, 2, 64, times)
        wide = attention.check_attention(4096, 32, 8, 128, times)
        return wide + attention.check_attention(8192, 16, 8, 64, times)

    def resumed() -> list[Row]:
        with tempfile.TemporaryDirectory() as folder:
            return resuming.check_resuming(asked.size("60m"), Path(folder), asked.cpu)

    return {
        "attention": attending,
        "pretrain-350m": lambda: steps.measure_pretraining(asked.size("350m"), "none", "adamw", times),
        "pretrain-350m-dots": lambda: steps.measure_pretraining(asked.size("350m"), "dots", "adamw", times),
        "pretrain-60m": lambda: steps.measure_pretraining(asked.size("60m"), "none", "adamw", times),
        "pretrain-60m-muon": lambda: steps.measure_pretraining(asked.size("60m"), "none", "muon", times),
        "lora-8b-bf16": lambda: steps.measure_lora(asked.size("8b"), "bf16", times),
        "lora-8b-int4": lambda: steps.measure_lora(asked.size("8b"), "int4", times),
        "importance-1b": lambda: steps.measure_importance(asked.size("1b"), times),
        "joint-1b": lambda: steps.measure_joint(asked.size("1b"), False, times),
        "joint-1b-bound": lambda: steps.measure_joint(asked.size("1b"), True, times),
        "resume": resumed,
        **serving.checks(asked.tiny),
    }


def main(words: Sequence[str]) -> int:
    """Runs checks; the exit status is 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m training.accelerator", description=__doc__)
    parser.add_argument("--only", action="append", metavar="NAME", help="checks whose name begins so")
    parser.add_argument("--tiny", action="store_true", help="try all of it on small models")
    parser.add_argument("--cpu", action="store_true", help="measure the CPU, for trying")
    parser.add_argument("--repetitions", type=int, default=10, metavar="N", help="timed steps of each kind")
    parser.add_argument("--minutes", type=float, default=9.0, help="begin no check after so many")
    parser.add_argument("--out", type=Path, metavar="FILE", help="append rows as JSON lines")
    parser.add_argument("--list", action="store_true", help="print the names of the checks")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--size", help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    if given.cpu:
        os.environ["JAX_PLATFORMS"] = "cpu"
    asked = Asked(given.tiny, given.cpu, given.repetitions)
    if given.train is not None:
        from training.accelerator import resuming

        resuming.main(given.size, given.train)
        return 0
    checks = checks_of(asked)
    if given.child:
        for row in checks[given.child]():
            print(row.line(), end="", flush=True)
        return 0
    names = [name for name in checks if not given.only or name.startswith(tuple(given.only))]
    if given.list or not names:
        print("\n".join(checks))
        return 0 if given.list else 2
    return _run_all(names, words, given.out, given.minutes)


def _run_all(names: Sequence[str], words: Sequence[str], out: Path | None, minutes: float) -> int:
    began, failed = time.monotonic(), []
    for name in names:
        if time.monotonic() - began > 60 * minutes:
            print(f"{name}: not begun, {minutes:g} minutes are over", file=sys.stderr)
            failed.append(name)
            continue
        started = time.monotonic()
        environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92", **os.environ}
        try:
            child = subprocess.run(
                [sys.executable, "-m", "training.accelerator", *words, "--child", name],
                stdout=subprocess.PIPE, text=True, timeout=LIMIT_S, env=environment, check=False,
            )  # fmt: skip
            lines, wrong = child.stdout, child.returncode
        except subprocess.TimeoutExpired:
            lines, wrong = "", f"more than {LIMIT_S} s"
        if wrong:
            failed.append(name)
            lines = json.dumps({"case": name, "failed": str(wrong)}) + "\n"
        print(lines, end="", flush=True)
        print(f"{name}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
        if out is not None:
            with out.open("a", encoding="utf-8") as file:
                file.write(lines)
    if failed:
        print(f"failed or left out: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
