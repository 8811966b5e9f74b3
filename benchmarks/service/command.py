"""`jaxllm bench service`: the service under load."""

import functools
from pathlib import Path

import click

from benchmarks.harness.options import DENSE_SHAPES, ModelOrShape, Reporting, benchmark, tell, threads_option
from benchmarks.service import PARTS
from jaxllm.cli.console import progress_bars

SYSTEMS = ("no-batching", "no-planning", "no-prefix-reuse", "llama.cpp")


@benchmark("service", "default", threads_option, shapes=DENSE_SHAPES, weights=True, parts=PARTS)
@click.option(
    "--system",
    "systems",
    multiple=True,
    type=click.Choice([*SYSTEMS, "none"]),
    help="Ours without one of its techniques, or llama.cpp's server, beside ours. Repeatable.  "
    "[default: all that run here]",
)
@click.option(
    "--llama-server",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The binary of llama.cpp's server.  [default: llama-cpp-python's server, one request at a time]",
)
@click.option(
    "--slots",
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    help="Answers that --llama-server decodes together.",
)
@click.option(
    "--load",
    "loads",
    type=click.FloatRange(min=0, min_open=True),
    multiple=True,
    help="Requests per second of the six apps, in those that the idle whole model answers one after another. "
    "Repeatable.  [default: 1; with --full 1 and 2]",
)
@click.option(
    "--trace",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    help="Take arrivals and lengths from a trace of Azure (.csv) or Mooncake (.jsonl), compressed in time "
    "and scaled.  [default: a Poisson process]",
)
@click.option(
    "--clients",
    type=click.IntRange(min=1, max=1024),
    multiple=True,
    help="Number of clients that call as soon as they are answered. Repeatable.  "
    "[default: 8; with --full 1, 8 and 64]",
)
@click.option(
    "--prompt-tokens",
    type=click.IntRange(min=16),
    help="Median length of prompts.  [default: 128; with --full 256]",
)
@click.option(
    "--answer-tokens",
    type=click.IntRange(min=4),
    help="Median length of answers.  [default: 32; with --full 48]",
)
@click.option(
    "--slo-scale",
    type=click.FloatRange(min=0, min_open=True),
    help="Objectives are shares of so many times the idle whole model's times.  [default: 3]",
)
@click.option(
    "--repetitions",
    type=click.IntRange(min=1),
    help="Repetitions of everything, the systems in turns.  [default: 1; with --full 3]",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    help="Seconds of each load, at least: more where a large model answers few calls in them.  "
    "[default: 4, of clients 2.5; with --full 40 and 10]",
)
@click.option(
    "--outcomes",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the outcome of every request, a JSON line each.",
)
def service_command(
    subject: ModelOrShape,
    systems: tuple[str, ...],
    llama_server: Path | None,
    slots: int,
    loads: tuple[float, ...],
    trace: Path | None,
    clients: tuple[int, ...],
    prompt_tokens: int | None,
    answer_tokens: int | None,
    slo_scale: float | None,
    repetitions: int | None,
    seconds: float | None,
    outcomes: Path | None,
    threads: int,
    parts: tuple[str, ...],
    report: Reporting,
) -> None:
    """Measure the service under load: answers in time, times, tokens per second and memory.

    Six apps call at their own times, each with an objective, and clients call as soon as they are answered.
    Every system is a server process with the same weights and threads, and gets the same requests.

    \b
    Example:
      jaxllm bench service
      jaxllm bench service --shape 250m --weights int8 --full --plot figures
    """
    from benchmarks.service import run
    from benchmarks.service.outcomes import draw

    plan = report.plan(
        run.Plan,
        loads=tuple(dict.fromkeys(loads)), clients=tuple(dict.fromkeys(clients)), parts=parts,
        prompt_tokens=prompt_tokens, answer_tokens=answer_tokens, slo_scale=slo_scale,
        repetitions=repetitions, load_s=seconds, clients_s=seconds,
    )  # fmt: skip
    kept: list[run.Measured] = []
    with progress_bars() as progress:
        asked = run.Subject(
            model=subject.model,
            shape=subject.shape,
            weights=subject.weights,
            systems=systems,
            llama_server=llama_server,
            slots=slots,
            trace=trace,
            threads=threads,
        )
        rows = run.run(asked, plan, progress, tell, kept)
    if outcomes is not None:
        run.write_outcomes(outcomes, kept)
    report.emit("service", rows, functools.partial(draw, kept=kept))
