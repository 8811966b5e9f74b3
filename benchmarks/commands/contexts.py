"""`jaxllm bench contexts`: app contexts."""

import dataclasses
from pathlib import Path

import click

from benchmarks.commands.options import device_option, report_options, shape_option, shape_weights_option
from benchmarks.contexts import quality as compression
from benchmarks.contexts import run
from benchmarks.contexts.figures import draw
from benchmarks.devices import PHONES, Device
from benchmarks.report import emit
from benchmarks.shapes import shape_folder
from jaxllm.bundle import WeightFormat
from serving.console import progress_bars
from serving.contexts.switching import PATTERNS


@click.command("contexts")
@click.option("-m", "--model", type=click.Path(path_type=Path), help="A bundle or a Hugging Face folder.")
@shape_option("Instead of a model: random weights of this size.  [default: 110m]")
@shape_weights_option
@click.option(
    "--quality",
    type=click.Path(path_type=Path),
    metavar="BUNDLE",
    help="Measure what compression costs this trained model too, on --data.",
)
@click.option("--data", type=click.Path(path_type=Path), help="The folder of texts and tasks.")
@click.option("--only-quality", is_flag=True, help="Leave out all that is timed.")
@click.option(
    "--contexts", "counts", type=click.IntRange(min=1), multiple=True, help="Only so many active contexts."
)
@click.option(
    "--pattern", "patterns", type=click.Choice(list(PATTERNS)), multiple=True, help="Only this pattern."
)
@device_option(PHONES)
@click.option("--only-switches", is_flag=True, help="Leave out ablations, sizes of chunks and speed.")
@report_options
def contexts_command(
    model: Path | None,
    shape: str | None,
    weights: WeightFormat,
    quality: Path | None,
    data: Path | None,
    only_quality: bool,
    counts: tuple[int, ...],
    patterns: tuple[str, ...],
    devices: tuple[Device, ...],
    only_switches: bool,
    quick: bool,
    plot: Path | None,
    as_json: bool,
) -> None:
    """How long it takes to switch between the contexts of apps in a tight memory budget, beside other ways to
    keep them."""
    if shape is not None and model is not None:
        raise click.UsageError("--shape and --model exclude each other")
    if (quality is None) != (data is None) or (only_quality and quality is None):
        raise click.UsageError("quality is measured of a trained model: --quality BUNDLE --data DIR")
    plan = run.Plan.quick() if quick else run.Plan()
    chosen = tuple(sorted(set(counts))) or plan.contexts
    plan = dataclasses.replace(
        plan,
        contexts=chosen,
        fitting=min(plan.fitting, chosen[-1]),
        patterns=patterns or plan.patterns,
        devices=devices or plan.devices,
        variants=not only_switches,
    )
    judged = compression.QualityPlan.quick() if quick else compression.QualityPlan()
    rows = []
    with progress_bars() as progress:
        if not only_quality:
            path = shape_folder(shape or "110m", progress) if model is None else model
            rows += run.run(
                path,
                weights if model is None else None,
                plan,
                progress,
                tell=lambda message: click.echo(message, err=True),
            )
        if quality is not None and data is not None:
            rows += compression.quality_rows(quality, data, judged, progress)
    emit("contexts", rows, as_json=as_json, plot=plot, draw=draw)
