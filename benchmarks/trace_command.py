"""`jaxllm bench trace`: makes request traces, and replays them on a service."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import click

from jaxllm.cli.console import print_columns, print_json, progress_bars
from jaxllm.cli.lazy import EngineCommand
from jaxllm.cli.shared_options import json_option, model_option

ANSWER_TOKENS = 32
_COLUMNS = (
    "objective", "calls", "right", "in time", "both", "level", "prompt", "TTFT ms", "TPOT ms", "plan ms",
)  # fmt: skip


class _Range(click.FloatRange):
    """A range without NaN, which compares with nothing."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Converts text."""
        found = super().convert(value, param, ctx)
        return self.fail("not a number", param, ctx) if found != found else found


_PATH, _COUNT = click.Path(path_type=Path), click.IntRange(1, 1_000_000)
_shown = functools.partial(click.option, show_default=True)


@click.group("trace")
def trace_command() -> None:
    """Make request traces, and replay them on a service."""


@trace_command.command("make-slo", cls=EngineCommand)
@click.option(
    "--data", required=True, type=_PATH, metavar="DIR", help="The folder of tasks/, the tasks' files."
)
@click.option(
    "-o", "--output", required=True, type=_PATH, metavar="FILE", help="The trace to write, JSON lines."
)
@_shown("-n", "--requests", type=_COUNT, default=600, help="Number of requests.")
@click.option(
    "--task",
    "names",
    multiple=True,
    metavar="NAME",
    help="Ask questions of this task. Repeatable.  [default: the five with labels]",
)
@_shown(
    "--skew",
    type=_Range(-100, 100),
    default=0.0,
    help="Skew of objectives: with 0 all come alike, above 0 loose ones more often, below 0 tight ones.",
)
@_shown(
    "--rate",
    "rate_per_s",
    type=_Range(0, 1e9, min_open=True),
    default=1.0,
    metavar="REQUESTS/S",
    help="Mean rate of arrivals.",
)
@_shown("--seed", default=0, help="Seed of the draw.")
def make_slo_command(
    data: Path, output: Path, requests: int, names: tuple[str, ...], skew: float, rate_per_s: float, seed: int
) -> None:
    """Draw a trace of six apps, one per latency objective.

    Reads the tasks' validation questions from DIR and writes FILE, a request a line, for `jaxllm bench trace
    replay`.

    \b
    Example:
      jaxllm bench trace make-slo --data DIR --output trace.jsonl
    """
    from benchmarks.traces import TRACE_TASKS, make_trace, write_trace
    from jaxllm.serving.evaluation.tasks import read_questions

    questions = read_questions(names or TRACE_TASKS, data)
    trace = make_trace(questions.examples, requests=requests, skew=skew, rate_per_s=rate_per_s, seed=seed)
    write_trace(output, trace)
    click.echo(f"{len(trace)} requests over {trace[-1].time_s:.0f} s in {output}")


@trace_command.command("replay", cls=EngineCommand)
@click.argument("trace", type=_PATH)
@model_option
@click.option("--limit", type=_COUNT, metavar="N", help="Make only the first N requests.")
@_shown("-n", "--max-tokens", type=_COUNT, default=ANSWER_TOKENS, help="Most tokens of an answer.")
@json_option
def replay_command(
    trace: Path, model: Path | None, limit: int | None, max_tokens: int, as_json: bool
) -> None:
    """Replay a trace on a service.

    Reads TRACE, made by `jaxllm bench trace make-slo`, makes its calls one after another, and writes a row
    per objective: how many answers were right and how many in time. The row `limited` sums up the calls whose
    objective can be missed, that is, all but <100,100>.

    \b
    Example:
      jaxllm bench trace replay trace.jsonl --model model.jaxllm --limit 60
    """
    from benchmarks.traces import read_trace, replay, totals, totals_by_slo
    from jaxllm.serving.server.service import LLMService

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
                "model": service.engine.model.bundle.layout.name,
                **{name: dataclasses.asdict(each) for name, each in sums.items()},
                "by_slo": {slo: dataclasses.asdict(each) for slo, each in by_slo.items()},
            }
        )
        return
    cells = ("{0.requests}", "{0.accuracy:.1%}", "{0.met:.1%}", "{0.right_and_met:.1%}", "{0.level:.0f} %")
    cells += ("{0.kept_share:.0%}", "{0.ttft_ms:.2f}", "{0.tpot_ms:.2f}", "{0.planning_ms:.2f}")
    rows = {**by_slo, **sums}.items()
    print_columns(_COLUMNS, [[name, *(cell.format(each) for cell in cells)] for name, each in rows])
    if whole.failed:
        click.echo(f"{whole.failed} calls failed: {next(each.failure for each in outcomes if each.failure)}")
