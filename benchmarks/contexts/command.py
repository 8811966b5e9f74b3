"""`jaxllm bench contexts`: switching between the contexts of apps."""

import dataclasses
from pathlib import Path

import click

from benchmarks.contexts import PARTS
from benchmarks.harness.options import (
    PHONES,
    ModelOrShape,
    Reporting,
    benchmark,
    data_option,
    device_option,
    parts_without,
    tell,
)
from jaxllm.cli.console import progress_bars

PATTERNS = ("random", "markov", "gaussian")


@benchmark("contexts", "default", data_option, device_option(PHONES), weights=True, parts=PARTS)
@click.option(
    "--contexts",
    "counts",
    type=click.IntRange(min=1),
    multiple=True,
    help="Number of active contexts. Repeatable.  [default: 4; with --full 2, 4, 8 and 16]",
)
@click.option(
    "--pattern",
    "patterns",
    type=click.Choice(PATTERNS),
    multiple=True,
    help="Order in which contexts are called. Repeatable.  [default: random; with --full all]",
)
@click.option(
    "--calls",
    type=click.IntRange(min=4),
    help="Calls of each trace, over 72 hours: 864 are one in five minutes.  [default: 10; with --full 30]",
)
def contexts_command(
    subject: ModelOrShape,
    data: Path | None,
    counts: tuple[int, ...],
    patterns: tuple[str, ...],
    calls: int | None,
    devices: tuple[str, ...],
    parts: tuple[str, ...],
    report: Reporting,
) -> None:
    """Measure switching between contexts of apps, and the quality of compressed ones.

    Contexts share a tight memory budget; ours and the baselines of LLMS evict, store and restore them.

    \b
    Example:
      jaxllm bench contexts
      jaxllm bench contexts --shape 110m --only switching --contexts 8 --device emmc
    """
    from benchmarks.contexts import density, quality, run, traffic
    from benchmarks.contexts.run import draw
    from benchmarks.harness.machine import named_devices
    from jaxllm.kernels import native

    if subject.shape is not None:
        parts = parts_without(parts, ("quality", "density"), "random weights have none")
    if not native.kernels().native:
        parts = parts_without(parts, ("resident",), "no native kernels run here")
    asked = {"patterns": patterns, "calls": calls, "devices": named_devices(devices), "parts": parts}
    plan = report.plan(run.Plan, contexts=tuple(sorted(set(counts))), **asked)
    plan = dataclasses.replace(plan, fitting=min(plan.fitting, plan.contexts[-1]))
    rows = []
    with progress_bars() as progress:
        if "traffic" in parts:
            rows += traffic.traffic_rows(subject.config(), plan, tell)
        path = subject.path(progress) if set(parts) - {"traffic"} else Path()
        weights = subject.weights if subject.shape else None
        if plan.timed:
            rows += run.run(path, weights, plan, progress, tell)
        if "quality" in parts:
            rows += quality.quality_rows(path, data, report.plan(quality.QualityPlan), progress)
        if "density" in parts:
            rows += density.density_rows(path, data, report.plan(density.DensityPlan), progress)
    report.emit("contexts", rows, draw)
