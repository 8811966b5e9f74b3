"""`jaxllm bench export`: exported programs beside the live engine."""

from pathlib import Path

import click

from benchmarks.commands.options import (
    ModelOrShape,
    Reporting,
    model_options,
    report_options,
    tell,
    text_option,
    threads_option,
)
from serving.commands.console import progress_bars
from serving.commands.lazy import EngineCommand


@click.command("export", cls=EngineCommand)
@model_options()
@text_option
@threads_option
@report_options
def export_command(subject: ModelOrShape, text: Path | None, threads: int, report: Reporting) -> None:
    """Measure exported programs beside the live engine.

    Exports a model as StableHLO, TFLite and LiteRT-LM, and compares load times, sizes, speed, memory and
    answers.

    \b
    Example:
      jaxllm bench export
      jaxllm bench export --shape 110m --threads 1
    """
    from benchmarks.export import run
    from benchmarks.samples.stories import stories_file

    if subject.shape is not None and text is not None:
        raise click.UsageError("--shape does not go with --text")
    if subject.shape is None:
        text = text or stories_file(None)
    plan = run.Plan.quick() if report.quick else run.Plan()
    with progress_bars() as progress:
        asked = run.Subject(model=subject.path(progress), text=text, threads=threads)
        rows = run.run(asked, plan, progress, tell)
    report.emit("export", rows)
