"""`jaxllm bench NAME`."""

from pathlib import Path

import click

from benchmarks import engine as engine_bench
from benchmarks.report import emit
from serving.console import engine_options, model_options, progress_bars


@click.group("bench")
def bench_command() -> None:
    """Measure this machine: one subcommand per claim."""


@bench_command.command("engine")
@model_options
@click.option("--quick", is_flag=True, help="Fewer and shorter runs (under a minute).")
@click.option("--plot", type=click.Path(path_type=Path), metavar="DIR", help="Draw figures into DIR.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def engine_command(
    model: Path | None,
    weights: str | None,
    context_tokens: int,
    quick: bool,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Load, build and run times of a model, its prefill and decode rates, peak memory."""
    plan = engine_bench.Plan.quick() if quick else engine_bench.Plan()
    with progress_bars() as progress:
        rows = engine_bench.run(
            model, weights=weights, options=engine_options(context_tokens), plan=plan, progress=progress
        )
    emit("engine", rows, as_json=as_json, plot=plot)
