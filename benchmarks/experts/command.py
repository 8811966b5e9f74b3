"""`jaxllm bench experts`: a mixture of experts larger than memory."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from benchmarks.harness.options import (
    BOARDS,
    MIXTURE_SHAPES,
    SWITCH_SHAPES,
    ModelOrShape,
    Reporting,
    benchmark,
    device_option,
    parts_without,
    tell,
    text_option,
)
from jaxllm.cli.console import progress_bars
from jaxllm.cli.training_options import pairs_options
from jaxllm.errors import ConfigError
from jaxllm.option_types import Size

if TYPE_CHECKING:
    from benchmarks.experts.run import Plan
    from benchmarks.experts.seq2seq import TaskPairs
    from benchmarks.harness.report import Row
    from benchmarks.models import Checkpoint
    from jaxllm.serving.host.progress import Progress
from benchmarks.experts import PARTS

# What random weights of an encoder-decoder are measured in: a context of 512 tokens takes a quarter of it.
_MEMORY_BYTES, _SWITCH_CONTEXT_TOKENS = 300_000_000, 128


@benchmark(
    "experts",
    "moe",
    text_option,
    device_option(BOARDS, "tx2-ssd"),
    shapes=(*MIXTURE_SHAPES, *SWITCH_SHAPES),
    parts=PARTS,
)
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
@click.option(
    "--task",
    "tasks",
    multiple=True,
    metavar="NAME",
    help="Answer one of an encoder-decoder's own tasks, such as translation_de_to_en. Repeatable.",
)
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="The folder of the tasks' files.",
)
@pairs_options("answer")
@click.option(
    "--memory",
    "budgets",
    type=Size(),
    multiple=True,
    help="Also measure the memory of a process under this budget; of switch-base-64 nothing else. "
    "Repeatable.  [default: 300MB for switch-base-64]",
)
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
    Transformers measures the answers to the sources of tasks, too, and the experts of both sides.

    \b
    Example:
      jaxllm bench experts
      jaxllm bench experts --shape moe-1b --only systems --device sd
      jaxllm bench experts -m switch.jaxllm --data DIR --task translation_de_to_en --task emotion
      jaxllm bench experts -m switch.jaxllm --checkpoint runs/switch/hf --pairs val.de val.en
    """
    from benchmarks.experts import run
    from benchmarks.experts.run import draw
    from benchmarks.experts.systems import random_mixed
    from benchmarks.harness.machine import named_devices
    from benchmarks.models import Checkpoint, switch_bundle
    from benchmarks.samples import stories_file
    from jaxllm.serving.host.user_cache import cache_folder

    chosen = checkpoint is not None or others or text is not None or any(task.values())
    if subject.shape is not None and chosen:
        raise click.UsageError(
            "--shape goes with none of --checkpoint, --other-loss, --text, --task and --pairs"
        )
    if task["pairs"] is None and task["prefix"] is not None:
        raise click.UsageError("--prefix goes with --pairs")
    asked = task["pairs"] is not None or bool(task["tasks"])
    if (task["pairs"] is not None) + bool(task["tasks"]) + (text is not None) > 1:
        raise click.UsageError("--pairs, --task and --text exclude each other")
    if task["data"] is not None and not task["tasks"]:
        raise click.UsageError("--data goes with --task")
    if subject.shape in SWITCH_SHAPES:
        if parts != tuple(PARTS):
            raise click.UsageError("random weights of an encoder-decoder are measured for memory alone")
        with progress_bars() as progress:
            bundle = switch_bundle(subject.shape, progress)
            rows = _memory_rows(
                bundle, budgets or (_MEMORY_BYTES,), progress, context_tokens=_SWITCH_CONTEXT_TOKENS
            )
        report.emit("experts", rows, draw)
        return
    if subject.shape is not None:
        parts = parts_without(parts, ("losses",), "random weights are not calibrated")
    plan = report.plan(run.Plan, devices=named_devices(devices), parts=parts)
    cache = cache_folder() / "benchmarks" / "experts"
    again = False
    with progress_bars() as progress:
        if subject.shape is not None:
            folder = subject.path(progress)
            model = random_mixed(folder, cache / f"{subject.shape}.jaxllm", progress)
        else:
            model = subject.path(progress)
            found = Checkpoint.find(model)
            _require_task(found, asked)
            if checkpoint is None:
                # Bundles of a checkpoint are others than those of the same model's dequantized weights.
                cache, again = cache / "dequantized", found.quantized
            folder = checkpoint or found.folder(progress)
            plan = dataclasses.replace(plan, text=text or stories_file(None), quantized_again=again)
        if asked:
            asked_tasks = _tasks(model, **task)
            rows = _task_rows(folder, (model, *others), cache, plan, report.quick, asked_tasks, progress)
        else:
            rows = run.run(folder, (model, *others), cache, plan, progress)
        rows += _memory_rows(model, budgets, progress)
    report.emit("experts", rows, draw)


def _require_task(checkpoint: "Checkpoint", asked: bool) -> None:
    """Refuses tasks for a decoder, and an encoder-decoder without one."""
    if (checkpoint.cfg.encoder is not None) == asked:
        return
    of = f"{checkpoint.model} is of {checkpoint.cfg.model_type}"
    if asked:
        raise ConfigError(f"{of}, a decoder alone: it is measured on a text; give --text instead")
    raise ConfigError(f"{of}, an encoder-decoder: it is measured on a task; give --task or its --pairs")


def _tasks(
    model: Path,
    *,
    pairs: tuple[Path, Path] | None,
    prefix: str | None,
    tasks: tuple[str, ...],
    data: Path | None,
) -> "list[TaskPairs]":
    """What is answered: the pairs of two files, or tasks of the model."""
    from benchmarks.experts.seq2seq import TaskPairs
    from jaxllm.serving.ground.bundles import open_model, open_tokenizer

    if pairs is not None:
        return [TaskPairs.read(*pairs, prefix)]
    with open_model(model) as bundle:
        tokenizer = open_tokenizer(bundle.tokenizer_files())
    return [TaskPairs.of_data(name, data, tokenizer) for name in tasks]


def _task_rows(
    folder: Path,
    mixed: tuple[Path, ...],
    cache: Path,
    plan: "Plan",
    quick: bool,
    tasks: "list[TaskPairs]",
    progress: "Progress",
) -> "list[Row]":
    """What is measured of an encoder-decoder by its tasks."""
    from benchmarks.experts.seq2seq import LEFT_OUT, WHY, Seq2SeqPlan, run_seq2seq

    parts = parts_without(plan.parts, LEFT_OUT, WHY)
    rows: list[Row] = []
    for task in tasks:
        own = Seq2SeqPlan(devices=plan.devices, task=task, parts=parts, tell=tell)
        rows += run_seq2seq(folder, mixed, cache, own.quicker() if quick else own, progress)
    return rows


def _memory_rows(model: Path, budgets: tuple[int, ...], progress: "Progress", **options: int) -> "list[Row]":
    from benchmarks.speculation.memory import memory_rows

    return memory_rows(model, budgets, progress, **options) if budgets else []
