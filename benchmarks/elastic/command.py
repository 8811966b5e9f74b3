"""`jaxllm bench elastic`: the levels of an elastic model."""

from pathlib import Path

import click

from benchmarks.elastic import PARTS
from benchmarks.harness.options import (
    DENSE_SHAPES,
    ModelOrShape,
    Reporting,
    benchmark,
    data_option,
    parts_without,
)
from jaxllm.cli.console import progress_bars


@benchmark("elastic", "default", data_option, shapes=DENSE_SHAPES, weights=True, parts=PARTS)
@click.option(
    "--plain-model",
    "plain",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="MODEL",
    help="A plain model of another size, trained from scratch, for the baseline PFS. Repeatable.  "
    "[default: small]",
)
@click.option(
    "--pruned-model",
    "pruned",
    type=click.Path(path_type=Path),
    metavar="BUNDLE",
    help="An elastic bundle made without anchors, for the baseline LLM-Pruner.  [default: the model itself]",
)
@click.option(
    "--compare-levels-with",
    "compared",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="BUNDLE",
    help="An elastic bundle made otherwise, whose accuracy is compared level by level. Repeatable.",
)
@click.option(
    "--trace-times-of",
    "timed_shape",
    type=click.Choice(DENSE_SHAPES),
    help="Take the times of the trace from random weights of this size, with the model's levels and "
    "tokenizer, and only the answers from the model.",
)
def elastic_command(
    subject: ModelOrShape,
    data: Path | None,
    plain: tuple[Path, ...],
    pruned: Path | None,
    compared: tuple[Path, ...],
    timed_shape: str | None,
    parts: tuple[str, ...],
    report: Reporting,
) -> None:
    """Measure the cost of a model's levels, and right answers in time.

    The model is an elastic bundle with a tiny LM; apps with objectives ask it questions, and the baselines of
    ELMS answer the same ones. Random weights are measured for costs alone.

    \b
    Example:
      jaxllm bench elastic
      jaxllm bench elastic --shape 250m --only costs
    """
    from benchmarks.elastic import run
    from benchmarks.elastic.baselines import elastic_shape
    from benchmarks.elastic.run import draw
    from jaxllm.serving.ground.bundles import find_model, open_model

    if subject.shape is not None and timed_shape is not None:
        raise click.UsageError("--trace-times-of goes with a --model, whose trace it times")
    if subject.shape is not None:
        parts = parts_without(parts, ("accuracy", "trace"), "random weights have no right answers")
    plan = report.plan(run.Plan, parts=parts)
    with progress_bars() as progress:
        if subject.shape is not None:
            model = elastic_shape(subject.shape, subject.weights, progress)
        else:
            assert subject.model is not None
            model = subject.model
        timed = None
        if timed_shape is not None:
            with open_model(model) as bundle:
                timed = elastic_shape(timed_shape, subject.weights, progress, like=bundle)
        asked = run.Subject(
            model=model,
            data=data,
            plain=tuple(find_model(each) for each in plain or ("small",)),
            pruned=pruned,
            compared=compared,
            timed=timed,
        )
        rows = run.run(asked, plan, progress)
    report.emit("elastic", rows, draw)
