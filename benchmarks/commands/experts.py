"""`jaxllm bench experts`: a mixture of experts larger than memory."""

import dataclasses
from pathlib import Path

import click

from benchmarks.commands.options import device_option, report_options, shape_option
from benchmarks.devices import BOARDS, Device
from benchmarks.experts import run
from benchmarks.experts.figures import draw
from benchmarks.experts.systems import random_mixed
from benchmarks.report import emit
from benchmarks.shapes import MIXTURES, shape_folder
from serving.console import progress_bars
from serving.user_cache import cache_folder


@click.command("experts")
@click.option(
    "--folder",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="The Hugging Face folder of a mixture of experts; baselines are made of it.",
)
@click.option(
    "-m",
    "--model",
    "models",
    multiple=True,
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="A bundle that `jaxllm calibrate` made of it. Repeatable: the first is ours, others have other "
    "losses.",
)
@shape_option("Instead: random weights of this size, for speed alone.", MIXTURES)
@click.option(
    "--text",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    help="A UTF-8 text that prompts are pieces of. [default: tokens drawn at random]",
)
@device_option(BOARDS)
@click.option(
    "--only-systems", is_flag=True, help="Leave out ablations, sweeps, and predictors and policies replayed."
)
@report_options
def experts_command(
    folder: Path | None,
    models: tuple[Path, ...],
    shape: str | None,
    text: Path | None,
    devices: tuple[Device, ...],
    only_systems: bool,
    quick: bool,
    plot: Path | None,
    as_json: bool,
) -> None:
    """What a token takes of a mixture of experts larger than memory, beside other ways to run it."""
    if (shape is None) != (folder is not None and bool(models)) or (shape and (folder or models)):
        raise click.UsageError("give either --shape, or --folder and --model")
    plan = run.Plan.quick() if quick else run.Plan()
    plan = dataclasses.replace(plan, devices=devices or plan.devices, text=text)
    if only_systems:
        plan = dataclasses.replace(plan, variants=False, watched_tokens=0)
    cache = cache_folder() / "benchmarks" / "experts"
    with progress_bars() as progress:
        if shape is not None:
            folder = shape_folder(shape, progress)
            models = (random_mixed(folder, cache / f"{shape}.jaxllm", progress),)
        assert folder is not None
        rows = run.run(folder, models, cache, plan, progress)
    emit("experts", rows, as_json=as_json, plot=plot, draw=draw)
