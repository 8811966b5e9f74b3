"""`jaxllm bench prefill`: prompts read in integers."""

import dataclasses
from pathlib import Path

import click

from benchmarks.commands.options import report_options, shape_option
from benchmarks.prefill import run
from benchmarks.report import emit
from benchmarks.shapes import DENSE
from serving.console import progress_bars


@click.command("prefill")
@shape_option("Time random weights of this size, with outliers put in.", DENSE)
@click.option(
    "--folder",
    "folders",
    multiple=True,
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Judge ways to quantize activations of this trained model, a Hugging Face folder, as it is and with "
    "outliers put in. Repeatable.",
)
@click.option("--data", type=click.Path(path_type=Path), help="The folder of texts and tasks, for --folder.")
@click.option("--only-all-cores", is_flag=True, help="Of a shape: on all cores together alone.")
@click.option("--only-two-processors", is_flag=True, help="Of a shape: on two processors alone.")
@click.option("--repeats", type=click.IntRange(min=1), help="Of each prompt of a shape.  [default: 5]")
@report_options
def prefill_command(
    shape: str | None,
    folders: tuple[Path, ...],
    data: Path | None,
    only_all_cores: bool,
    only_two_processors: bool,
    repeats: int | None,
    quick: bool,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Integer prefill: its speed, graphs and schedule on one processor and two, and what it costs a trained
    model, beside other ways to quantize activations. Without options a phone alone is simulated."""
    if bool(folders) != (data is not None):
        raise click.UsageError("accuracy is judged of a trained model: --folder DIR --data DIR")
    if (only_all_cores or only_two_processors) and shape is None:
        raise click.UsageError("--only-all-cores and --only-two-processors are about a --shape")
    plan = run.Plan.quick() if quick else run.Plan()
    if repeats is not None:
        plan = dataclasses.replace(plan, speed=dataclasses.replace(plan.speed, repeats=repeats))
    if only_all_cores != only_two_processors:
        plan = dataclasses.replace(plan, processors=(1,) if only_all_cores else (2,))
    with progress_bars() as progress:
        rows = run.run(shape, list(folders), data, plan, progress)
    emit("prefill", rows, as_json=as_json, plot=plot)
