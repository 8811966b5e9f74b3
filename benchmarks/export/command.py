"""`jaxllm bench export`: exported programs beside the live engine."""

from pathlib import Path

import click

from benchmarks.export import PARTS
from benchmarks.harness.options import (
    ModelOrShape,
    Reporting,
    benchmark,
    parts_without,
    tell,
    text_option,
    threads_option,
)
from jaxllm.cli.console import progress_bars


@benchmark("export", "default", text_option, threads_option, parts=PARTS)
def export_command(
    subject: ModelOrShape, text: Path | None, threads: int, parts: tuple[str, ...], report: Reporting
) -> None:
    """Measure exported programs beside the live engine.

    Exports a model as StableHLO, TFLite and LiteRT-LM, and compares load times, sizes, speed, memory and
    answers.

    \b
    Example:
      jaxllm bench export
      jaxllm bench export --shape 110m --threads 1
      jaxllm bench export --only sampling
    """
    from benchmarks.export import run
    from benchmarks.int8_prefill import accuracy as exported
    from benchmarks.int8_prefill.models import calibrated_model, calibrated_shapes
    from benchmarks.samples import stories_file
    from jaxllm.errors import ConfigError

    if subject.shape is not None and text is not None:
        raise click.UsageError("--shape does not go with --text")
    if subject.shape is None:
        text = text or stories_file(None)
    plan = report.plan(run.Plan, threads=threads)
    if missing := exported.missing():
        parts = parts_without(parts, ("sampling", "shadow", "stages"), f"{missing} is not installed")
    with progress_bars() as progress:
        asked = run.Subject(model=subject.path(progress), text=text)
        integer = asked.model
        if {"shadow", "stages"} & {*parts}:
            try:
                integer, _ = (
                    calibrated_model(integer, progress)
                    if subject.shape is None
                    else calibrated_shapes(subject.shape, progress)
                )
            except ConfigError as error:
                parts = parts_without(parts, ("shadow", "stages"), str(error))
        rows = run.run_parts(asked, integer, parts, plan, progress, tell)
    report.emit("export", rows)
