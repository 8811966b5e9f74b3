"""Records the rows of the README's table, each by its command, and writes the table.

    python -m benchmarks.readme --data DIR             # all of them, on a machine with nothing else running
    python -m benchmarks.readme --data DIR contexts    # those of one command
    python -m benchmarks.readme --data DIR --try       # shorter runs, printed and not recorded
    python -m benchmarks.readme --table                # the table anew, of what is recorded

What a command's `--json` printed is kept in `docs/results/readme.json`, and the table is made of that alone:
a claim that was not recorded has no row. Each row names the strongest of the baselines that were measured,
so that none can be picked. `contexts` and `prefill` measure no time and may run beside other work.
"""

import dataclasses
import datetime
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.harness.report import less_is_better

ROOT = Path(__file__).resolve().parent.parent
README, RECORDED = ROOT / "README.md", ROOT / "docs" / "results" / "readme.json"
MARK = "<!-- made of docs/results/readme.json by `python -m benchmarks.readme` -->"
# Stands for the folder of texts and tasks in a command.
DATA = "DIR"
_OURS = "jaxllm"
_BYTES = r"([\d,]+ bytes per token)"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim:
    """A row of the table.

    Attributes:
      name: of the command that prints it; claims of one name are of one run.
      command: that prints it, without `--json`.
      case: a pattern that matches one case of the rows whole.
      rivals: systems of which the strongest is named; all must have been measured.
      also: systems that are named besides, for what they say about the first two.
      detail: a pattern of what its row's note says of each system; "" for nothing.
    """

    name: str
    claim: str
    command: str
    case: str
    metric: str
    rivals: tuple[str, ...]
    also: tuple[str, ...] = ()
    detail: str = ""


_ENGINE = "jaxllm bench engine --full --shape 250m --weights int8 --peer llama.cpp"
CLAIMS = (
    Claim(
        name="engine", claim="prefill of 256 tokens, 258 M int8", command=_ENGINE,
        case=r".*, prompt 256", metric="prefill_tokens_per_s", rivals=("llama.cpp",),
    ),
    Claim(
        name="engine", claim="decode behind them", command=_ENGINE,
        case=r".*, decode \d+ after 256", metric="decode_tokens_per_s", rivals=("llama.cpp",),
    ),
    Claim(
        name="engine", claim="peak memory of that process", command=_ENGINE,
        case=r".*, run", metric="peak_memory_bytes", rivals=("llama.cpp",),
    ),
    Claim(
        name="elastic", claim="right answers in time under six SLOs",
        command="jaxllm bench elastic --full --only trace --trace-times-of 250m --plain-model medium "
        "--plain-model small --plain-model draft --data DIR",
        case="trace all six", metric="right_and_met",
        rivals=("PFS", "PFS-swap", "LLM-Pruner", "LE (no recovery)", "LG2+CS (no sparsity)"),
        also=("jaxllm-fixed", "jaxllm-oracle"),
    ),
    Claim(
        name="contexts", claim="perplexity behind stored contexts",
        command="jaxllm bench contexts --full --only quality --data DIR",
        case=r"text behind \d+ stored tokens", metric="perplexity", rivals=("8 bit", "4 bit"), also=("raw",),
        detail=_BYTES,
    ),
    Claim(
        name="speculation", claim="a token of a model twice its memory, eMMC emulated",
        command="jaxllm bench speculative --enlarge 4 --device emmc --count 4 --only systems --data DIR",
        case=".*: all tasks", metric="tpot_ms", rivals=("Std", "StdPL", "SP", "LLMCad"), also=("Std",),
    ),
    Claim(
        name="prefill", claim="perplexity by integer prefill, outliers put in",
        command="jaxllm bench prefill --full --only accuracy --model draft --data DIR",
        case=".*, with outliers put in", metric="perplexity",
        rivals=("naive-int8", "SmoothQuant", "SmoothQuant-all", "LLM.int8()", "K-Quant", "Hadamard"),
        also=("float",),
    ),
)  # fmt: skip


def recorded() -> list[dict[str, Any]]:
    """The runs that were recorded, by name in the order of `CLAIMS`."""
    return json.loads(RECORDED.read_text()) if RECORDED.exists() else []


def kept_rows(claims: Sequence[Claim], rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What the table takes of a command's rows, each system once."""
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for claim in claims:
        fits = [each for each in rows if _is_of(claim, each)]
        if len(cases := {each["case"] for each in fits}) != 1:
            raise click.ClickException(f"{claim.claim}: {claim.case!r} must match one case, not {cases}")
        for system in (_OURS, *claim.rivals, *claim.also):
            own = [each for each in fits if each["system"] == system]
            if not own:
                raise click.ClickException(f"{claim.claim}: {system} was not measured")
            # Ours has a row for each baseline; ratios are computed anew.
            kept = {name: own[0][name] for name in ("case", "system", "metric", "value", "unit", "note")}
            found[kept["case"], system, claim.metric] = kept
    return list(found.values())


def table(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The lines of the README's table; none where nothing was recorded."""
    if not runs:
        return []
    lines = ["| claim | ours | strongest baseline | besides | command |", "|---|---|---|---|---|"]
    of = {each["name"]: each for each in runs}
    last = ""
    for claim in CLAIMS:
        if claim.name in of:
            command = "the same" if claim.name == last else f"`{of[claim.name]['command']}`"
            lines.append(f"| {' | '.join((*_cells(claim, of[claim.name]['rows']), command))} |")
            last = claim.name
    return lines


def written(text: str, lines: Sequence[str]) -> str:
    """A README with the table in the place of its last one, behind `MARK`."""
    before, mark, behind = text.partition(f"{MARK}\n")
    if not mark:
        raise click.ClickException(f"{README} has no line {MARK}")
    rest = behind.lstrip("\n").split("\n")
    after = next((at for at, line in enumerate(rest) if not line.startswith("|")), len(rest))
    shown = [*lines, ""] if lines else []
    return "\n".join((f"{before}{mark}", *shown, "\n".join(rest[after:]).lstrip("\n")))


def _is_of(claim: Claim, row: Mapping[str, Any]) -> bool:
    return row["metric"] == claim.metric and re.fullmatch(claim.case, row["case"]) is not None


def _cells(claim: Claim, rows: Sequence[Mapping[str, Any]]) -> tuple[str, str, str, str]:
    own = {each["system"]: each for each in rows if _is_of(claim, each)}
    ours, lower = own[_OURS], less_is_better(claim.metric)

    def better(system: str) -> float:
        value = own[system]["value"]
        return -value if lower else value

    def beside(system: str) -> str:
        said = f"{system} {_shown(claim, own[system])}"
        if own[system]["unit"] in ("share", ""):
            return said
        pair = ours["value"], own[system]["value"]
        top, bottom = reversed(pair) if lower else pair
        return f"{said}, {top / bottom:.2f}x"

    strongest = max(claim.rivals, key=better)
    others = [each for each in claim.also if each != strongest]
    others += [each for each in claim.rivals if each != strongest and each not in others and claim.detail]
    return claim.claim, _shown(claim, ours), beside(strongest), "; ".join(map(beside, others))


def _shown(claim: Claim, row: Mapping[str, Any]) -> str:
    value, unit = row["value"], row["unit"]
    if unit == "share":
        shown = f"{100 * value:.1f} %"
    elif unit == "bytes":
        shown = f"{value / 1e6:,.0f} MB"
    elif unit == "":
        shown = f"{value:,.3f}"
    else:
        shown = f"{value:,.0f} {unit}" if value >= 100 else f"{value:,.1f} {unit}"
    if claim.detail and (found := re.search(claim.detail, row["note"] or "")):
        shown += f" in {found[1]}"
    return shown


def _run(name: str, data: Path, *, short: bool) -> dict[str, Any]:
    """Runs a command, and what the table takes of it."""
    claims = [each for each in CLAIMS if each.name == name]
    words = shlex.split(claims[0].command)
    given = [str(data) if each == DATA else each for each in words if not (short and each == "--full")]
    # The command of the environment that this runs in.
    command = [str(Path(sys.executable).with_name(given[0])), *given[1:], "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, cwd=ROOT)
    if done.returncode:
        raise click.ClickException(f"{shlex.join(given)} ended with {done.returncode}")
    printed = json.loads(done.stdout.splitlines()[-1])
    return {
        "name": name,
        "command": claims[0].command,
        "recorded": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "machine": printed["machine"],
        "rows": kept_rows(claims, printed["rows"]),
    }


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(dict.fromkeys(each.name for each in CLAIMS))))
@click.option("--data", type=click.Path(path_type=Path, exists=True, file_okay=False), help="Of the tasks.")
@click.option("--try", "short", is_flag=True, help="Run without --full, print, and record nothing.")
@click.option("--table", "again", is_flag=True, help="Write the table of what is recorded.")
def main(names: tuple[str, ...], data: Path | None, short: bool, again: bool) -> None:
    """Record rows of the README's table, those of NAMES or all, and write the table."""
    runs = {each["name"]: each for each in recorded()}
    if not again:
        if data is None:
            raise click.UsageError("--data is missing: the folder of texts and of the tasks' files")
        order = list(dict.fromkeys(each.name for each in CLAIMS))
        for name in names or order:
            found = _run(name, data.resolve(), short=short)
            click.echo("\n".join(table([found])[2:]))
            if short:
                continue
            runs[name] = found
            kept = [runs[each] for each in order if each in runs]
            RECORDED.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
    if not short:
        README.write_text(written(README.read_text(), table(list(runs.values()))))


if __name__ == "__main__":
    main()
