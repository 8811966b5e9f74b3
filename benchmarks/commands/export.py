"""`jaxllm bench export`: exported programs."""

from pathlib import Path

import click

from benchmarks import export
from benchmarks.commands.options import report_options, shape_option
from benchmarks.report import emit
from benchmarks.shapes import shape_folder
from serving.console import progress_bars


@click.command("export")
@click.option(
    "-m",
    "--model",
    type=click.Path(path_type=Path),
    help="A bundle or a Hugging Face folder. [default: the packaged model]",
)
@shape_option("Instead: random weights of this size, for speed alone.")
@click.option(
    "--text",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    help="A UTF-8 text for prompts and perplexity; its end calibrates w8a8.",
)
@click.option(
    "--threads", type=int, default=0, metavar="N", help="Cores that each system computes with. [default: all]"
)
@report_options
def export_command(
    model: Path | None,
    shape: str | None,
    text: Path | None,
    threads: int,
    quick: bool,
    plot: Path | None,
    as_json: bool,
) -> None:
    """A model live and as StableHLO, TFLite and LiteRT-LM: load times, sizes, speed, memory and answers."""
    if shape is not None and (model is not None or text is not None):
        raise click.UsageError("--shape goes with neither --model nor --text")
    plan = export.Plan.quick() if quick else export.Plan()
    with progress_bars() as progress:
        if shape is not None:
            model = shape_folder(shape, progress)
        rows = export.run(
            export.Subject(model=model, text=text, threads=threads),
            plan,
            progress,
            lambda message: click.echo(message, err=True),
        )
    emit("export", rows, as_json=as_json, plot=plot)
