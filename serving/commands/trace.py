"""`jaxllm trace`: make request traces, and replay them on a service."""

import dataclasses
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from jaxllm.tasks.prompts import prompt_ids
from jaxllm.tokenizer import Tokenizer
from serving.console import print_json, progress_bars
from serving.contexts.switching import (
    HOURS,
    MAX_CONTEXTS,
    PATTERNS,
    Lengths,
    make_switching,
    read_azure_lengths,
    read_mooncake,
    write_switching,
)
from serving.evaluation.tasks import ALL, read_questions
from serving.models import open_model
from serving.service import LLMService
from serving.trace import (
    ANSWER_TOKENS,
    TRACE_TASKS,
    Totals,
    make_trace,
    read_trace,
    replay,
    totals,
    totals_by_slo,
    write_trace,
)

_COLUMNS = (
    "objective", "calls", "right", "in time", "both", "level", "prompt", "TTFT ms", "TPOT ms", "plan ms",
)  # fmt: skip


@click.group("trace")
def trace_command() -> None:
    """Make request traces, and replay them on a service."""


@trace_command.command("make")
@click.option(
    "--data", required=True, type=click.Path(path_type=Path), metavar="DIR", help="The tasks' files."
)
@click.option("-o", "--out", required=True, type=click.Path(path_type=Path), help="The trace, a .jsonl file.")
@click.option("-n", "--requests", type=click.IntRange(min=1), default=600, show_default=True)
@click.option("--task", "names", multiple=True, help="Repeatable.  [default: the five with labels]")
@click.option("--alpha", type=float, default=0.0, show_default=True, help="Above 0, loose objectives lead.")
@click.option("--rate", "rate_per_s", type=float, default=1.0, show_default=True, help="Arrivals per second.")
@click.option("--seed", type=int, default=0, show_default=True)
def make_command(
    data: Path, out: Path, requests: int, names: tuple[str, ...], alpha: float, rate_per_s: float, seed: int
) -> None:
    """Draw a trace of six apps, one per objective, from the tasks' validation questions."""
    questions = read_questions(names or TRACE_TASKS, data)
    trace = make_trace(questions.examples, requests=requests, alpha=alpha, rate_per_s=rate_per_s, seed=seed)
    write_trace(out, trace)
    click.echo(f"{len(trace)} requests over {trace[-1].time_s:.0f} s in {out}")


@trace_command.command("switching")
@click.option("-o", "--out", required=True, type=click.Path(path_type=Path), help="The trace, a .jsonl file.")
@click.option(
    "--pattern", type=click.Choice(list(PATTERNS)), default="markov", show_default=True,
    help="In which contexts follow each other.",
)  # fmt: skip
@click.option("--contexts", type=click.IntRange(1, MAX_CONTEXTS), default=8, show_default=True)
@click.option("-n", "--calls", type=click.IntRange(min=1), default=600, show_default=True)
@click.option("--hours", type=float, default=HOURS, show_default=True)
@click.option(
    "--data", type=click.Path(path_type=Path), metavar="DIR",
    help="The tasks' files: prompts and answers are as long as those of their validation questions.",
)  # fmt: skip
@click.option(
    "--azure", type=click.Path(path_type=Path), metavar="CSV",
    help="A trace of Azure's LLM inference service instead: as long as its requests.",
)  # fmt: skip
@click.option(
    "--mooncake", type=click.Path(path_type=Path), metavar="JSONL",
    help="Mooncake's conversation trace instead: its own calls, contexts and lengths.",
)  # fmt: skip
@click.option("--slower", type=float, default=1.0, show_default=True, help="Times of --mooncake times this.")
@click.option("--token-scale", type=float, default=1.0, show_default=True, help="Its lengths times this.")
@click.option("-m", "--model", type=click.Path(path_type=Path), help="Whose tokens --data is counted in.")
@click.option("--seed", type=int, default=0, show_default=True)
def switching_command(
    out: Path,
    pattern: str,
    contexts: int,
    calls: int,
    hours: float,
    data: Path | None,
    azure: Path | None,
    mooncake: Path | None,
    slower: float,
    token_scale: float,
    model: Path | None,
    seed: int,
) -> None:
    """Draw a trace of apps that switch between contexts, or take a real one."""
    if sum(each is not None for each in (data, azure, mooncake)) != 1:
        raise click.UsageError("say where calls come from: one of --data, --azure and --mooncake")
    if mooncake is not None:
        trace = read_mooncake(mooncake, slower=slower, token_scale=token_scale)[:calls]
    else:
        lengths = read_azure_lengths(azure) if azure is not None else _task_lengths(data, model)
        trace = make_switching(pattern, lengths, contexts=contexts, calls=calls, hours=hours, seed=seed)
    write_switching(out, trace)
    active = len({each.context for each in trace})
    click.echo(f"{len(trace)} calls of {active} contexts over {trace[-1].time_s / 3600:.1f} hours in {out}")


def _task_lengths(data: Path | None, model: Path | None) -> list[Lengths]:
    """(prompt, answer) tokens of all tasks' validation questions."""
    assert data is not None
    tokenizer = Tokenizer(open_model(model).tokenizer_files())
    questions = read_questions([ALL], data)
    return [
        (len(prompt_ids(tokenizer, each)), len(tokenizer.encode(each.answer, add_special_tokens=False)) + 1)
        for examples in questions.examples.values()
        for each in examples
    ]


@trace_command.command("replay")
@click.argument("trace", type=click.Path(path_type=Path))
@click.option("-m", "--model", type=click.Path(path_type=Path), help="A bundle. [default: the packaged one]")
@click.option("--limit", type=click.IntRange(min=1), help="Only the first requests.")
@click.option("-n", "--max-tokens", type=click.IntRange(min=1), default=ANSWER_TOKENS, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def replay_command(
    trace: Path, model: Path | None, limit: int | None, max_tokens: int, as_json: bool
) -> None:
    """Make the calls of TRACE one after another, and say how many were right and how many in time.

    <100,100> asks for nothing and is always met: `limited` are the calls that ask for something.
    """
    requests = read_trace(trace)[:limit]
    with progress_bars() as progress:
        service = LLMService.open(model, progress=progress)
        outcomes = replay(service, requests, answer_tokens=max_tokens, progress=progress)
    by_slo, whole = totals_by_slo(outcomes), totals(outcomes)
    limited = [each for each in outcomes if each.request.slo.has_limit]
    sums = {"limited": totals(limited)} if limited else {}
    sums["all"] = whole
    if as_json:
        print_json(
            {
                "model": service.engine.bundle.layout.name,
                **{name: dataclasses.asdict(each) for name, each in sums.items()},
                "by_slo": {slo: dataclasses.asdict(each) for slo, each in by_slo.items()},
            }
        )
        return
    table = Table(box=None, pad_edge=False, collapse_padding=True)
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column == "objective" else "right", no_wrap=True)
    for name, each in [*by_slo.items(), *sums.items()]:
        table.add_row(name, *_cells(each))
    Console().print(table)
    if whole.failed:
        click.echo(f"{whole.failed} calls failed: {next(each.failure for each in outcomes if each.failure)}")


def _cells(each: Totals) -> list[str]:
    return [
        str(each.requests),
        f"{each.accuracy:.1%}",
        f"{each.held:.1%}",
        f"{each.right_and_held:.1%}",
        f"{each.level:.0f} %",
        f"{each.kept_share:.0%}",
        f"{each.ttft_ms:.2f}",
        f"{each.tpot_ms:.2f}",
        f"{each.planning_ms:.2f}",
    ]
