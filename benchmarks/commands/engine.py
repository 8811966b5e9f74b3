"""`jaxllm bench engine`: the engine."""

from pathlib import Path

import click

from benchmarks import engine
from benchmarks.commands.options import report_options, shape_option
from benchmarks.peers import PEERS
from benchmarks.report import emit
from jaxllm.bundle import WEIGHT_FORMATS
from serving.console import context_option, progress_bars
from serving.options import EngineOptions


@click.command("engine")
@click.option(
    "-m",
    "--model",
    type=click.Path(path_type=Path),
    help="A bundle or a Hugging Face model folder. [default: the packaged model]",
)
@shape_option("Instead of a model: random weights of this size, made once and kept in the cache directory.")
@click.option(
    "--weights",
    multiple=True,
    type=click.Choice(WEIGHT_FORMATS),
    help="Weight width for a folder or a shape. Repeatable: one run compares them. [default: its own]",
)
@context_option
@click.option(
    "--peer",
    "peers",
    multiple=True,
    default=("all",),
    type=click.Choice([*PEERS, "all", "none"]),
    help="Another engine to run beside ours, on the same weights. Repeatable. [default: all installed]",
)
@click.option(
    "--threads",
    type=int,
    default=0,
    metavar="N",
    help="Cores that each system computes with. [default: all that this process may use]",
)
@click.option(
    "--text",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Measure every system's perplexity on this UTF-8 text too.",
)
@click.option("--separator", help="Split the text into documents at this string, scored apart.")
@report_options
def engine_command(
    model: Path | None,
    shape: str | None,
    weights: tuple[str, ...],
    context_tokens: int,
    peers: tuple[str, ...],
    threads: int,
    text: Path | None,
    separator: str | None,
    quick: bool,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Load, build and run times of a model, its prefill and decode rates, memory and perplexity, beside
    other engines that run the same weights at the same width."""
    if shape is not None and model is not None:
        raise click.UsageError("--shape and --model exclude each other")
    if separator == "":
        raise click.UsageError("--separator must not be empty")
    subject = engine.Subject(
        model=model,
        shape=shape,
        weights=weights,
        peers=() if "none" in peers else peers,
        threads=threads,
        text=text,
        separator=separator,
    )
    plan = engine.Plan.quick() if quick else engine.Plan()
    with progress_bars() as progress:
        rows = engine.run(
            subject,
            options=EngineOptions(context_tokens=context_tokens),
            plan=plan,
            progress=progress,
            tell=lambda message: click.echo(message, err=True),
        )
    emit("engine", rows, as_json=as_json, plot=plot)
