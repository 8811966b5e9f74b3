"""`jaxllm bench prefill`."""

from pathlib import Path

import click

from benchmarks.prefill import run as prefill_bench
from benchmarks.report import check_plot, emit
from benchmarks.shapes import DENSE
from serving.console import progress_bars


@click.command("prefill")
@click.option(
    "--shape", type=click.Choice(DENSE), help="Time random weights of this size, with outliers put in."
)
@click.option(
    "--folder",
    "folders",
    multiple=True,
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Judge ways to quantize activations of this trained model, a Hugging Face folder, as it is and with "
    "outliers put in. Repeatable.",
)
@click.option("--data", type=click.Path(path_type=Path), help="The folder of texts and tasks, for --folder.")
@click.option("--quick", is_flag=True, help="Fewer and shorter runs (under a minute).")
@click.option("--plot", type=click.Path(path_type=Path), metavar="DIR", help="Draw figures into DIR.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def prefill_command(
    shape: str | None,
    folders: tuple[Path, ...],
    data: Path | None,
    quick: bool,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Integer prefill: its speed, graphs and schedule on one processor and two, and what it costs a trained
    model, beside other ways to quantize activations. Without options the paper's phone alone is simulated."""
    if bool(folders) != (data is not None):
        raise click.UsageError("accuracy is judged of a trained model: --folder DIR --data DIR")
    check_plot(plot)
    plan = prefill_bench.Plan.quick() if quick else prefill_bench.Plan()
    with progress_bars() as progress:
        rows = prefill_bench.run(shape, list(folders), data, plan, progress)
    emit("prefill", rows, as_json=as_json, plot=plot)
