"""`jaxllm bench prepare`: preparing folders and GGUF files."""

from pathlib import Path

import click

from benchmarks.harness.options import (
    ModelOrShape,
    Reporting,
    benchmark,
    parts_without,
    tell,
    text_option,
    threads_option,
)
from benchmarks.prepare import PARTS
from jaxllm.cli.console import progress_bars

KINDS = ("F16", "Q8_0", "Q4_0", "Q4_1", "Q4_K")


VOCABULARY_SHAPES = ("0.5b-128k",)


@benchmark("prepare", "default", text_option, threads_option, shapes=VOCABULARY_SHAPES, parts=PARTS)
@click.option(
    "--kind",
    "kinds",
    multiple=True,
    type=click.Choice(KINDS),
    help="Write GGUF files of this type. Repeatable.  [default: Q8_0 and Q4_0; with --full all]",
)
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Learn the vocabulary of a shape of the texts in this folder.  [default: packaged stories]",
)
def prepare_command(
    subject: ModelOrShape,
    kinds: tuple[str, ...],
    data: Path | None,
    text: Path | None,
    threads: int,
    parts: tuple[str, ...],
    report: Reporting,
) -> None:
    """Measure preparing a folder and GGUF files of the same weights.

    Time and peak memory of preparing, speed of the bundles beside those prepared from floats, and perplexity
    beside llama.cpp's on the same files.

    \b
    Example:
      jaxllm bench prepare
      jaxllm bench prepare --full --model path/to/folder --only perplexity
      jaxllm bench prepare --full --shape 0.5b-128k --kind Q4_0 --data path/to/texts
    """
    from benchmarks.prepare import run

    if data is not None and subject.shape is None:
        raise click.UsageError("--data goes with --shape")
    if data is not None and not data.is_dir():
        raise click.UsageError(f"--data names a folder of texts; {data} is none")
    if subject.shape is not None:
        parts = parts_without(parts, ("perplexity",), "random weights have no meaningful one")
    plan = report.plan(run.Plan, kinds=kinds, parts=parts, threads=threads)
    model = subject.shape or subject.model
    assert model is not None
    with progress_bars() as progress:
        rows = run.run(model, plan, data=data, text=text, progress=progress, tell=tell)
    report.emit("prepare", rows)
