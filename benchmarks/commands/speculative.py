"""`jaxllm bench speculative`: a model larger than memory, with drafts."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import click

from benchmarks.commands.options import (
    DENSE_SHAPES,
    PHONES,
    ModelOrShape,
    Reporting,
    data_option,
    device_option,
    model_options,
    parts_option,
    report_options,
)
from benchmarks.speculative import PARTS
from jaxllm.option_types import Share
from serving.commands.console import progress_bars
from serving.commands.lazy import EngineCommand

if TYPE_CHECKING:
    from benchmarks.measuring.report import Row
    from serving.host.progress import Progress

_SHAPE_SHARES = (0.25, 0.5, 0.75)


@click.command("speculative", cls=EngineCommand)
@model_options(shapes=DENSE_SHAPES)
@click.option(
    "--draft",
    type=click.Path(path_type=Path),
    default="draft",
    show_default=True,
    metavar="MODEL",
    help="A small model of the same tokenizer, which drafts.",
)
@click.option(
    "--enlarge",
    type=click.IntRange(min=2),
    metavar="N",
    help="Make the model N times as deep and wide by units that cancel: the same answers of a model that is "
    "much larger than its draft.",
)
@data_option
@click.option(
    "--memory-share",
    "shares",
    type=Share(above_zero=True),
    multiple=True,
    help="Memory for weights, as a share of the model's. Repeatable.  "
    "[default: 50%; for a shape 25%, 50% and 75%]",
)
@device_option(PHONES)
@parts_option(PARTS)
@report_options
def speculative_command(
    subject: ModelOrShape,
    draft: Path,
    enlarge: int | None,
    data: Path | None,
    shares: tuple[float, ...],
    devices: tuple[str, ...],
    parts: tuple[str, ...],
    report: Reporting,
) -> None:
    """Measure a model larger than memory, with drafts and without.

    Times tokens of ours and of LLMCad's baselines. Of random weights, measures the memory and the reads
    of a process alone.

    \b
    Example:
      jaxllm bench speculative
      jaxllm bench speculative --enlarge 4 --memory-share 25% --device eufs
    """
    from benchmarks.measuring.storage import named_devices
    from benchmarks.models.checkpoint import Checkpoint
    from benchmarks.speculative import run
    from benchmarks.speculative.enlarged import enlarged_bundle
    from serving.bundles import find_model

    if enlarge is not None and subject.shape is not None:
        raise click.UsageError("--enlarge is for a trained model; a --shape has its size")
    if subject.shape is not None and parts != tuple(PARTS):
        raise click.UsageError("--only is for a --model; of a --shape the memory of a process is measured")
    with progress_bars() as progress:
        if subject.shape is not None:
            rows = _shape_rows(subject, shares or _SHAPE_SHARES, progress)
        else:
            assert subject.model is not None
            plan = run.Plan.quick() if report.quick else run.Plan()
            plan = dataclasses.replace(
                plan,
                shares=shares or plan.shares,
                devices=named_devices(devices) or plan.devices,
                parts=parts,
            )
            target = subject.model
            narrow = run.four_bit_bundle(target, progress) if "systems" in parts else None
            again = Checkpoint.find(target).quantized
            if enlarge is not None:
                target = enlarged_bundle(target, enlarge, progress)
                narrow = narrow and enlarged_bundle(narrow, enlarge, progress)
            asked = run.Subject(
                model=target, draft=find_model(draft), narrow=narrow, data=data, narrow_again=again
            )
            rows = run.run(asked, plan, progress)
    report.emit("speculative", rows)


def _shape_rows(subject: ModelOrShape, shares: tuple[float, ...], progress: "Progress") -> "list[Row]":
    from benchmarks.speculative.memory import memory_rows
    from serving.bundles import open_model

    with open_model(subject.path(progress), weights="int8", progress=progress) as bundle:
        budgets = [int(share * bundle.weight_bytes) for share in shares]
        return memory_rows(bundle.path, budgets, progress)
