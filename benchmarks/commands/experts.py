"""`jaxllm bench experts`: a mixture of experts larger than memory."""

import dataclasses
from pathlib import Path

import click

from benchmarks.commands.options import (
    BOARDS,
    MIXTURE_SHAPES,
    ModelOrShape,
    Reporting,
    device_option,
    model_options,
    parts_option,
    parts_without,
    report_options,
    text_option,
)
from benchmarks.experts import PARTS
from serving.commands.console import progress_bars
from serving.commands.lazy import EngineCommand


@click.command("experts", cls=EngineCommand)
@model_options("moe", shapes=MIXTURE_SHAPES)
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    metavar="DIR",
    help="The Hugging Face folder that the model was calibrated from; baselines are made of it.  "
    "[default: the model's own weights as floats]",
)
@click.option(
    "--other-loss",
    "others",
    multiple=True,
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="BUNDLE",
    help="The same mixture calibrated to another tolerable loss. Repeatable.",
)
@text_option
@device_option(BOARDS, "tx2-ssd")
@parts_option(PARTS)
@report_options
def experts_command(
    subject: ModelOrShape,
    checkpoint: Path | None,
    others: tuple[Path, ...],
    text: Path | None,
    devices: tuple[str, ...],
    parts: tuple[str, ...],
    report: Reporting,
) -> None:
    """Measure a mixture of experts larger than memory.

    Times tokens of ours and of EdgeMoE's baselines, and judges predictors and eviction policies.

    \b
    Example:
      jaxllm bench experts
      jaxllm bench experts --shape moe-1b --only systems --device sd
    """
    from benchmarks.experts import run
    from benchmarks.experts.figures import draw
    from benchmarks.experts.systems import random_mixed
    from benchmarks.measuring.storage import named_devices
    from benchmarks.models.checkpoint import Checkpoint
    from benchmarks.samples.stories import stories_file
    from serving.host.user_cache import cache_folder

    if subject.shape is not None and (checkpoint is not None or others or text is not None):
        raise click.UsageError("--shape goes with none of --checkpoint, --other-loss and --text")
    if subject.shape is not None:
        parts = parts_without(parts, ("losses",), "random weights are not calibrated")
    plan = run.Plan.quick() if report.quick else run.Plan()
    plan = dataclasses.replace(plan, devices=named_devices(devices) or plan.devices, parts=parts)
    cache = cache_folder() / "benchmarks" / "experts"
    again = False
    with progress_bars() as progress:
        if subject.shape is not None:
            folder = subject.path(progress)
            model = random_mixed(folder, cache / f"{subject.shape}.jaxllm", progress)
        else:
            model = subject.path(progress)
            if checkpoint is None:
                # Bundles of a checkpoint are others than those of the same model's dequantized weights.
                cache, again = cache / "dequantized", Checkpoint.find(model).quantized
            folder = checkpoint or Checkpoint.find(model).folder(progress)
            plan = dataclasses.replace(plan, text=text or stories_file(None), quantized_again=again)
        rows = run.run(folder, (model, *others), cache, plan, progress)
    report.emit("experts", rows, draw)
