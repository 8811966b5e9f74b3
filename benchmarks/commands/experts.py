"""`jaxllm bench experts`: a mixture of experts larger than memory."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from benchmarks.commands.options import (
    BOARDS,
    MIXTURE_SHAPES,
    SWITCH_SHAPES,
    ModelOrShape,
    Reporting,
    device_option,
    model_options,
    parts_option,
    parts_without,
    report_options,
    tell,
    text_option,
)
from benchmarks.experts import PARTS
from jaxllm.errors import ConfigError
from jaxllm.option_types import Size, pairs_options
from serving.commands.console import progress_bars
from serving.commands.lazy import EngineCommand

if TYPE_CHECKING:
    from benchmarks.experts.run import Plan
    from benchmarks.measuring.report import Row
    from benchmarks.models.checkpoint import Checkpoint
    from serving.host.progress import Progress

# What the random weights of an encoder-decoder are measured in.
_MEMORY_BYTES = 300_000_000


@click.command("experts", cls=EngineCommand)
@model_options("moe", shapes=(*MIXTURE_SHAPES, *SWITCH_SHAPES))
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path),
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
@pairs_options("answer")
@click.option(
    "--memory",
    "budgets",
    type=Size(),
    multiple=True,
    help="Also measure the memory of a process under this budget; of switch-base-64 nothing else. "
    "Repeatable.  [default: 300MB for switch-base-64]",
)
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
    budgets: tuple[int, ...],
    report: Reporting,
    **task: Any,
) -> None:
    """Measure a mixture of experts larger than memory.

    Times tokens of ours and of EdgeMoE's baselines, and judges predictors and eviction policies. Of Switch
    Transformers measures the answers to the sources of a task, too, and the experts of both sides.

    \b
    Example:
      jaxllm bench experts
      jaxllm bench experts --shape moe-1b --only systems --device sd
      jaxllm bench experts -m switch.jaxllm --checkpoint runs/switch/hf --pairs val.de val.en
    """
    from benchmarks.experts import run
    from benchmarks.experts.figures import draw
    from benchmarks.experts.systems import random_mixed
    from benchmarks.measuring.storage import named_devices
    from benchmarks.models.checkpoint import Checkpoint
    from benchmarks.models.shapes import switch_bundle
    from benchmarks.samples.stories import stories_file
    from serving.host.user_cache import cache_folder

    chosen = checkpoint is not None or others or text is not None or any(task.values())
    if subject.shape is not None and chosen:
        raise click.UsageError("--shape goes with none of --checkpoint, --other-loss, --text and --pairs")
    if task["pairs"] is None and task["prefix"] is not None:
        raise click.UsageError("--prefix goes with --pairs")
    if task["pairs"] is not None and text is not None:
        raise click.UsageError("--pairs and --text exclude each other")
    if subject.shape in SWITCH_SHAPES:
        if parts != tuple(PARTS):
            raise click.UsageError("random weights of an encoder-decoder are measured for memory alone")
        with progress_bars() as progress:
            rows = _memory_rows(switch_bundle(subject.shape, progress), budgets or (_MEMORY_BYTES,), progress)
        report.emit("experts", rows, draw)
        return
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
            found = Checkpoint.find(model)
            _require_task(found, task["pairs"] is not None)
            if checkpoint is None:
                # Bundles of a checkpoint are others than those of the same model's dequantized weights.
                cache, again = cache / "dequantized", found.quantized
            folder = checkpoint or found.folder(progress)
            plan = dataclasses.replace(plan, text=text or stories_file(None), quantized_again=again)
        if task["pairs"] is not None:
            rows = _task_rows(folder, (model, *others), cache, plan, report.quick, progress, **task)
        else:
            rows = run.run(folder, (model, *others), cache, plan, progress)
        rows += _memory_rows(model, budgets, progress)
    report.emit("experts", rows, draw)


def _require_task(checkpoint: "Checkpoint", pairs: bool) -> None:
    """Refuses --pairs for a decoder, and an encoder-decoder without them."""
    if (checkpoint.cfg.encoder is not None) == pairs:
        return
    of = f"{checkpoint.model} is of {checkpoint.cfg.model_type}"
    if pairs:
        raise ConfigError(f"{of}, a decoder alone: it is measured on a text; give --text instead of --pairs")
    raise ConfigError(f"{of}, an encoder-decoder: it is measured on a task; give its --pairs")


def _task_rows(
    folder: Path,
    mixed: tuple[Path, ...],
    cache: Path,
    plan: "Plan",
    quick: bool,
    progress: "Progress",
    *,
    pairs: tuple[Path, Path],
    prefix: str | None,
) -> "list[Row]":
    """What is measured of an encoder-decoder by its task."""
    from benchmarks.experts.seq2seq import LEFT_OUT, WHY, Seq2SeqPlan, TaskPairs, run_seq2seq

    parts = parts_without(plan.parts, LEFT_OUT, WHY)
    task = TaskPairs.read(*pairs, prefix)
    own = Seq2SeqPlan(devices=plan.devices, task=task, parts=parts, tell=tell)
    return run_seq2seq(folder, mixed, cache, own.quicker() if quick else own, progress)


def _memory_rows(model: Path, budgets: tuple[int, ...], progress: "Progress") -> "list[Row]":
    from benchmarks.speculative.memory import memory_rows

    return memory_rows(model, budgets, progress) if budgets else []
