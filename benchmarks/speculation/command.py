"""`jaxllm bench speculative`: a model larger than memory, with drafts."""

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from benchmarks.harness.options import (
    DENSE_SHAPES,
    PHONES,
    SEQ2SEQ_SHAPES,
    ModelOrShape,
    Reporting,
    benchmark,
    data_option,
    device_option,
    tell,
)
from jaxllm.cli.console import progress_bars
from jaxllm.errors import ConfigError
from jaxllm.option_types import Share

if TYPE_CHECKING:
    from benchmarks.harness.report import Row
    from benchmarks.speculation.run import Plan
    from jaxllm.serving.host.progress import Progress
from benchmarks.speculation import PARTS, PRESETS

_SHAPE_SHARES = (0.25, 0.5, 0.75)


# Options that say how a trained model is asked, with the names of their parameters.
_ANSWERED = {"prompts": "prompts", "count": "count", "preset": "presets"}


@benchmark(
    "speculative",
    "default",
    data_option,
    device_option(PHONES),
    shapes=(*DENSE_SHAPES, *SEQ2SEQ_SHAPES),
    parts=PARTS,
)
@click.option(
    "--draft",
    type=click.Path(path_type=Path),
    default="draft",
    show_default=True,
    metavar="MODEL",
    help="A small model of the same tokenizer, which drafts; nested for the high planes of an int8-nested "
    "model.",
)
@click.option(
    "--enlarge",
    type=click.IntRange(min=2),
    metavar="N",
    help="Make the model N times as deep and wide by units that cancel: the same answers of a model that is "
    "much larger than its draft.",
)
@click.option(
    "--prompts",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Ask the prompts of Spec-Bench's FILE instead of the tasks'; `spec-bench` finds it as "
    "prompts/spec_bench.jsonl in the folder of --data or $JAXLLM_DATA. For an encoder-decoder a FILE with a "
    "source on each line, or source and answer with a tab between, instead of its own tasks' in --data.",
)
@click.option(
    "--count",
    type=click.IntRange(min=1),
    metavar="N",
    help="Time N prompts of each task; intervals are over all of them.  [default: 1; with --full 10]",
)
@click.option(
    "--budget",
    "shares",
    type=Share(above_zero=True),
    multiple=True,
    help="Memory for weights, as a share of the model's. Repeatable.  "
    "[default: 50%; for a shape 25%, 50% and 75%]",
)
@click.option(
    "--preset",
    "presets",
    type=click.Choice(list(PRESETS)),
    multiple=True,
    help="Run this set of options alone beside ours ("
    + "; ".join(f"{name}: {what}" for name, what in PRESETS.items())
    + "). Repeatable.  [default: all]",
)
def speculative_command(
    subject: ModelOrShape,
    draft: Path,
    enlarge: int | None,
    data: Path | None,
    report: Reporting,
    shares: tuple[float, ...],
    parts: tuple[str, ...],
    **asked: Any,
) -> None:
    """Measure a model larger than memory, with drafts and without.

    Times tokens of ours and of LLMCad's baselines, which are tuned on other prompts with --full. The model
    and its draft are decoders, or both encoder-decoders. Of random weights, measures the memory and the reads
    of a process alone.

    \b
    Example:
      jaxllm bench speculative
      jaxllm bench speculative --enlarge 4 --budget 25% --device eufs
      jaxllm bench speculative --full --prompts spec-bench --preset published
      jaxllm bench speculative --model translate --draft translate-draft --prompts val.de
      jaxllm bench speculative --model nested.jaxllm --draft nested --only same-answers
      jaxllm bench speculative --enlarge 8 --only in-memory
    """
    from benchmarks.speculation import run
    from benchmarks.speculation.in_memory import enlarged_bundle
    from jaxllm.serving.ground.bundles import find_model

    if enlarge is not None and subject.shape is not None:
        raise click.UsageError("--enlarge is for a trained model; a --shape has its size")
    if subject.shape is not None and parts != tuple(PARTS):
        raise click.UsageError("--only is for a --model; of a --shape the memory of a process is measured")
    unused = [f"--{name}" for name, key in _ANSWERED.items() if asked[key]]
    if subject.shape is not None and unused:
        raise click.UsageError(f"{' and '.join(unused)}: for a --model; a --shape is not asked for answers")
    prompts = _prompts_file(asked.pop("prompts"), data)
    with progress_bars() as progress:
        if subject.shape is not None:
            rows = _shape_rows(subject, shares or _SHAPE_SHARES, progress)
        else:
            assert subject.model is not None
            target = subject.model
            if enlarge is not None:
                target = enlarged_bundle(target, enlarge, progress)
            plan = _plan(report, shares=shares, parts=parts, **asked)
            drafts = None if str(draft) == "nested" else find_model(draft)
            models = run.Subject(model=target, draft=drafts, data=data, prompts=prompts)
            rows = run.run(models, plan, progress, tell)
    report.emit("speculative", rows)


def _prompts_file(prompts: Path | None, data: Path | None) -> Path | None:
    """The file that --prompts names, checked before anything is measured."""
    if prompts is None:
        return None
    if str(prompts) == "spec-bench":
        folder = data or os.environ.get("JAXLLM_DATA")
        if not folder:
            raise click.UsageError(
                "--prompts spec-bench needs the folder it lies in: --data, or $JAXLLM_DATA"
            )
        prompts = Path(folder) / "prompts" / "spec_bench.jsonl"
    if not prompts.is_file():
        raise click.UsageError(
            f"--prompts {prompts}: there is no such file; give Spec-Bench's question.jsonl"
        )
    return prompts


def _plan(
    report: Reporting,
    *,
    shares: tuple[float, ...],
    parts: tuple[str, ...],
    presets: tuple[str, ...],
    devices: tuple[str, ...],
    count: int | None,
) -> "Plan":
    """What was asked for, and for the rest the whole measurement or the quick one."""
    from benchmarks.harness.machine import named_devices
    from benchmarks.speculation.run import Plan
    from jaxllm.tasks.rouge import require_rouge

    judged = True
    if report.quick and parts == tuple(PARTS):
        parts = tuple(part for part in parts if part != "in-memory")
    try:
        require_rouge()
    except ConfigError:
        judged = False
        if "systems" in parts:
            tell("without BLD and STI, whose answers are judged by Rouge: pip install 'jaxllm[bench]'")
    chosen = {"prompts": count, "shares": shares, "devices": named_devices(devices), "presets": presets}
    return dataclasses.replace(report.plan(Plan, parts=parts, **chosen), judged=judged)


def _shape_rows(subject: ModelOrShape, shares: tuple[float, ...], progress: "Progress") -> "list[Row]":
    from benchmarks.speculation.memory import memory_rows
    from jaxllm.serving.ground.bundles import open_model

    with open_model(subject.path(progress), weights="int8", progress=progress) as bundle:
        budgets = [int(share * bundle.weight_bytes) for share in shares]
        return memory_rows(bundle.path, budgets, progress)
