"""`jaxllm bench elastic`: an elastic model."""

import dataclasses
from pathlib import Path

import click

from benchmarks.commands.options import report_options, shape_option, shape_weights_option
from benchmarks.elastic import run
from benchmarks.elastic.figures import draw
from benchmarks.elastic.shape import elastic_shape
from benchmarks.report import emit
from benchmarks.shapes import SHAPES
from jaxllm.bundle import WeightFormat
from serving.console import progress_bars
from serving.models import open_model


@click.command("elastic")
@click.option("-m", "--model", type=click.Path(path_type=Path), help="An elastic bundle.")
@shape_option("Instead of a model: random weights of this size, for what levels cost alone.")
@shape_weights_option
@click.option("--data", type=click.Path(path_type=Path), help="Run the trace, of the tasks' files in here.")
@click.option(
    "--pfs",
    "plain",
    multiple=True,
    type=click.Path(path_type=Path),
    help="A plain model of another size, trained from nothing. Repeatable.",
)
@click.option(
    "--pruned",
    type=click.Path(path_type=Path),
    help="An elastic bundle made without anchors, for LLM-Pruner. [default: the model itself]",
)
@click.option(
    "--beside",
    multiple=True,
    type=click.Path(path_type=Path),
    help="An elastic bundle made in another way, to compare level by level. Repeatable.",
)
@click.option(
    "--times",
    type=click.Choice(list(SHAPES)),
    help="Take the times of the trace from random weights of this size, with the model's levels and "
    "tokenizer, and only the answers from the model.",
)
@click.option(
    "--only-levels", is_flag=True, help="Only how right levels are, of the model and of those beside it."
)
@click.option(
    "--questions", type=click.IntRange(min=1), metavar="N", help="Of each task. [default: 40, quick 8]"
)
@report_options
def elastic_command(
    model: Path | None,
    shape: str | None,
    times: str | None,
    weights: WeightFormat,
    data: Path | None,
    plain: tuple[Path, ...],
    pruned: Path | None,
    beside: tuple[Path, ...],
    only_levels: bool,
    questions: int | None,
    quick: bool,
    plot: Path | None,
    as_json: bool,
) -> None:
    """What the levels of an elastic model cost, what changing them costs, and how right answers are in time,
    beside other ways to be elastic."""
    if (model is None) == (shape is None):
        raise click.UsageError("give either --model or --shape")
    if shape is not None and data is not None:
        raise click.UsageError("random weights have no right answers: --data takes a --model")
    if times is not None and data is None:
        raise click.UsageError("--times are those of a trace: give --data, or --shape for levels alone")
    if only_levels and data is None:
        raise click.UsageError("--only-levels asks the tasks' questions: give --data")
    chosen = run.Plan.quick() if quick else run.Plan()
    chosen = dataclasses.replace(chosen, questions=questions or chosen.questions)
    with progress_bars() as progress:
        if shape is not None:
            model = elastic_shape(shape, weights, progress)
        assert model is not None
        timed = None
        if times is not None:
            with open_model(model) as bundle:
                timed = elastic_shape(times, weights, progress, like=bundle)
        subject = run.Subject(model=model, data=data, plain=plain, pruned=pruned, beside=beside, times=timed)
        measure = run.compare_levels if only_levels else run.run
        rows = measure(subject, chosen, progress)
    emit("elastic", rows, as_json=as_json, plot=plot, draw=draw)
