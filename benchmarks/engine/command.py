"""`jaxllm bench engine`: the engine beside other engines."""

from pathlib import Path

import click

from benchmarks.harness.options import ModelOrShape, Reporting, benchmark, tell, threads_option
from jaxllm.cli.console import progress_bars
from jaxllm.cli.shared_options import context_option
from jaxllm.formats import WEIGHT_FORMATS

PEERS = ("llama.cpp", "transformers")


@benchmark("engine", "default", threads_option)
@click.option(
    "--weights",
    multiple=True,
    type=click.Choice(WEIGHT_FORMATS),
    help="Weight width for a folder or a shape. Repeatable: one run compares them.  [default: its own]",
)
@context_option
@click.option(
    "--peer",
    "peers",
    multiple=True,
    default=("all",),
    type=click.Choice([*PEERS, "all", "none"]),
    help="Another engine that runs the same weights. Repeatable.  [default: all that are installed]",
)
@click.option(
    "--text",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Measure every system's perplexity on this UTF-8 text too.",
)
@click.option(
    "--separator", metavar="TEXT", help="Split the text into documents at this string, scored apart."
)
def engine_command(
    subject: ModelOrShape,
    weights: tuple[str, ...],
    context_tokens: int,
    peers: tuple[str, ...],
    threads: int,
    text: Path | None,
    separator: str | None,
    report: Reporting,
) -> None:
    """Measure load, build and run times, speed and memory beside other engines.

    All engines run the same weights at the same width, in turns, each in a process of its own.

    \b
    Example:
      jaxllm bench engine
      jaxllm bench engine --shape 250m --weights int8 --peer llama.cpp --full
    """
    from benchmarks.engine import run
    from jaxllm.serving.ground.options import EngineOptions

    if separator == "":
        raise click.UsageError("--separator must not be empty")
    asked = run.Subject(
        model=subject.model,
        shape=subject.shape,
        weights=weights,
        peers=() if "none" in peers else peers,
        text=text,
        separator=separator,
    )
    options = EngineOptions(context_tokens=context_tokens)
    with progress_bars() as progress:
        rows = run.run(
            asked, options=options, plan=report.plan(run.Plan, threads=threads), progress=progress, tell=tell
        )
    report.emit("engine", rows)
