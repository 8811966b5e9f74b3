"""`jaxllm bench NAME`."""

import dataclasses
from pathlib import Path

import click

from benchmarks import engine as engine_bench
from benchmarks import export as export_bench
from benchmarks.contexts import quality as contexts_quality
from benchmarks.contexts import run as contexts_bench
from benchmarks.contexts.figures import draw as draw_contexts
from benchmarks.devices import DEVICES
from benchmarks.elastic import run as elastic_bench
from benchmarks.elastic.figures import draw
from benchmarks.elastic.shape import elastic_shape
from benchmarks.experts import run as experts_bench
from benchmarks.experts.figures import draw as draw_experts
from benchmarks.experts.systems import random_mixed
from benchmarks.peers import PEERS
from benchmarks.prefill.cli import prefill_command
from benchmarks.report import check_plot, emit
from benchmarks.shapes import MIXTURES, SHAPES, shape_folder
from benchmarks.speculative import run as speculative_bench
from benchmarks.speculative.memory import memory_rows
from jaxllm.bundle import WEIGHT_FORMATS, WeightFormat
from serving.console import Size, progress_bars
from serving.contexts.switching import PATTERNS
from serving.models import find_model, open_model
from serving.options import EngineOptions
from serving.user_cache import cache_folder


@click.group("bench")
def bench_command() -> None:
    """Measure this machine: one subcommand per claim."""


@bench_command.command("engine")
@click.option(
    "-m",
    "--model",
    type=click.Path(path_type=Path),
    help="A bundle or a Hugging Face model folder. [default: the packaged model]",
)
@click.option(
    "--shape",
    type=click.Choice(list(SHAPES)),
    help="Instead of a model: random weights of this size, made once and kept in the cache directory.",
)
@click.option(
    "--weights",
    multiple=True,
    type=click.Choice(WEIGHT_FORMATS),
    help="Weight width for a folder or a shape. Repeatable: one run compares them. [default: its own]",
)
@click.option(
    "--context",
    "context_tokens",
    type=int,
    default=0,
    metavar="TOKENS",
    help="Most tokens of prompt and answer together. [default: the model's window, up to 2048]",
)
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
@click.option("--quick", is_flag=True, help="Fewer and shorter runs (under a minute).")
@click.option("--plot", type=click.Path(path_type=Path), metavar="DIR", help="Draw figures into DIR.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
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
    check_plot(plot)
    subject = engine_bench.Subject(
        model=model,
        shape=shape,
        weights=weights,
        peers=() if "none" in peers else peers,
        threads=threads,
        text=text,
        separator=separator,
    )
    plan = engine_bench.Plan.quick() if quick else engine_bench.Plan()
    with progress_bars() as progress:
        rows = engine_bench.run(
            subject,
            options=EngineOptions(context_tokens=context_tokens),
            plan=plan,
            progress=progress,
            tell=lambda message: click.echo(message, err=True),
        )
    emit("engine", rows, as_json=as_json, plot=plot)


@bench_command.command("elastic")
@click.option("-m", "--model", type=click.Path(path_type=Path), help="An elastic bundle.")
@click.option(
    "--shape",
    type=click.Choice(list(SHAPES)),
    help="Instead of a model: random weights of this size, for what levels cost alone.",
)
@click.option(
    "--weights", type=click.Choice(WEIGHT_FORMATS), default="int8", show_default=True, help="Of a shape."
)
@click.option("--data", type=click.Path(path_type=Path), help="Run the trace, of the tasks' files in here.")
@click.option(
    "--pfs",
    "plain",
    multiple=True,
    type=click.Path(path_type=Path),
    help="A plain model of another size, trained from nothing. Repeatable.",
)
@click.option(
    "--pruned",
    type=click.Path(path_type=Path),
    help="An elastic bundle made without anchors, for LLM-Pruner. [default: the model itself]",
)
@click.option(
    "--beside",
    multiple=True,
    type=click.Path(path_type=Path),
    help="An elastic bundle made in another way, to compare level by level. Repeatable.",
)
@click.option(
    "--times",
    type=click.Choice(list(SHAPES)),
    help="Take the times of the trace from random weights of this size, with the model's levels and "
    "tokenizer, and only the answers from the model.",
)
@click.option("--quick", is_flag=True, help="Fewer and shorter runs (under a minute).")
@click.option("--plot", type=click.Path(path_type=Path), metavar="DIR", help="Draw figures into DIR.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def elastic_command(
    model: Path | None,
    shape: str | None,
    times: str | None,
    weights: WeightFormat,
    data: Path | None,
    plain: tuple[Path, ...],
    pruned: Path | None,
    beside: tuple[Path, ...],
    quick: bool,
    plot: Path | None,
    as_json: bool,
) -> None:
    """What the levels of an elastic model cost, what changing them costs, and how right answers are in time,
    beside other ways to be elastic."""
    check_plot(plot)
    if (model is None) == (shape is None):
        raise click.UsageError("give either --model or --shape")
    if shape is not None and data is not None:
        raise click.UsageError("random weights have no right answers: --data takes a --model")
    if times is not None and data is None:
        raise click.UsageError("--times are those of a trace: give --data, or --shape for levels alone")
    chosen = elastic_bench.Plan.quick() if quick else elastic_bench.Plan()
    with progress_bars() as progress:
        if shape is not None:
            model = elastic_shape(shape, weights, progress)
        assert model is not None
        timed = None
        if times is not None:
            with open_model(model) as bundle:
                timed = elastic_shape(times, weights, progress, like=bundle)
        subject = elastic_bench.Subject(
            model=model, data=data, plain=plain, pruned=pruned, beside=beside, times=timed
        )
        rows = elastic_bench.run(subject, chosen, progress)
    emit("elastic", rows, as_json=as_json, plot=None)
    if plot is not None:
        draw(rows, plot)


@bench_command.command("speculative")
@click.option("-m", "--model", type=click.Path(path_type=Path), help="The target. [default: default]")
@click.option(
    "--draft", type=click.Path(path_type=Path), default="draft", show_default=True, help="Its draft."
)
@click.option(
    "--coarse", type=click.Path(path_type=Path), help="The target at 4 bits, for STI. [default: no STI]"
)
@click.option("--data", type=click.Path(path_type=Path), help="The folder of the tasks' files.")
@click.option(
    "--shape",
    type=click.Choice(list(SHAPES)),
    help="Instead of models and tasks: random weights of this size at 8 bits, for what memory and disk do.",
)
@click.option(
    "--memory",
    "budgets",
    type=Size(),
    multiple=True,
    metavar="SIZE",
    help="A budget for the shape. Repeatable. [default: 25, 50 and 75 % of its weights]",
)
@click.option(
    "--share",
    "shares",
    type=click.FloatRange(0, 1, min_open=True),
    multiple=True,
    default=(0.5,),
    show_default=True,
    help="Memory for weights, as a share of the target's. Repeatable.",
)
@click.option("--quick", is_flag=True, help="Fewer and shorter runs (under a minute).")
@click.option("--plot", type=click.Path(path_type=Path), metavar="DIR", help="Draw figures into DIR.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def speculative_command(
    model: Path | None,
    draft: Path,
    coarse: Path | None,
    data: Path | None,
    shape: str | None,
    budgets: tuple[int, ...],
    shares: tuple[float, ...],
    quick: bool,
    plot: Path | None,
    as_json: bool,
) -> None:
    """What a token takes of a model larger than memory, with a draft and with other ways to go about it."""
    if (data is None) == (shape is None):
        raise click.UsageError("give either --data, for prompts, or --shape")
    check_plot(plot)
    with progress_bars() as progress:
        if shape is not None:
            with open_model(shape_folder(shape, progress), weights="int8", progress=progress) as bundle:
                chosen = budgets or tuple(int(share * bundle.weight_bytes) for share in (0.25, 0.5, 0.75))
                rows = memory_rows(bundle.path, chosen, progress)
        else:
            assert data is not None
            plan = speculative_bench.Plan(shares=shares)
            subject = speculative_bench.Subject(
                model=find_model(model), draft=find_model(draft), coarse=coarse, data=data
            )
            if quick:
                plan, subject = speculative_bench.Plan.quick(), subject.quick()
            rows = speculative_bench.run(subject, plan, progress)
    emit("speculative", rows, as_json=as_json, plot=plot)


@bench_command.command("contexts")
@click.option("-m", "--model", type=click.Path(path_type=Path), help="A bundle or a Hugging Face folder.")
@click.option(
    "--shape",
    type=click.Choice(list(SHAPES)),
    help="Instead of a model: random weights of this size.  [default: 110m]",
)
@click.option(
    "--weights", type=click.Choice(WEIGHT_FORMATS), default="int8", show_default=True, help="Of a shape."
)
@click.option(
    "--quality",
    type=click.Path(path_type=Path),
    metavar="BUNDLE",
    help="Measure what compression costs this trained model too, on --data.",
)
@click.option("--data", type=click.Path(path_type=Path), help="The folder of texts and tasks.")
@click.option("--only-quality", is_flag=True, help="Leave out all that is timed.")
@click.option(
    "--contexts", "counts", type=click.IntRange(min=1), multiple=True, help="Only so many active contexts."
)
@click.option(
    "--pattern", "patterns", type=click.Choice(list(PATTERNS)), multiple=True, help="Only this pattern."
)
@click.option(
    "--device", "devices", type=click.Choice(list(DEVICES)), multiple=True, help="Only this storage."
)
@click.option("--only-switches", is_flag=True, help="Leave out ablations, sizes of chunks and speed.")
@click.option("--quick", is_flag=True, help="Fewer and shorter runs (under a minute).")
@click.option("--plot", type=click.Path(path_type=Path), metavar="DIR", help="Draw figures into DIR.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def contexts_command(
    model: Path | None,
    shape: str | None,
    weights: WeightFormat,
    quality: Path | None,
    data: Path | None,
    only_quality: bool,
    counts: tuple[int, ...],
    patterns: tuple[str, ...],
    devices: tuple[str, ...],
    only_switches: bool,
    quick: bool,
    plot: Path | None,
    as_json: bool,
) -> None:
    """How long it takes to switch between the contexts of apps in a tight memory budget, beside other ways to
    keep them."""
    check_plot(plot)
    if shape is not None and model is not None:
        raise click.UsageError("--shape and --model exclude each other")
    if (quality is None) != (data is None) or (only_quality and quality is None):
        raise click.UsageError("quality is measured of a trained model: --quality BUNDLE --data DIR")
    plan = contexts_bench.Plan.quick() if quick else contexts_bench.Plan()
    chosen = tuple(sorted(set(counts))) or plan.contexts
    plan = dataclasses.replace(
        plan,
        contexts=chosen,
        fitting=min(plan.fitting, chosen[-1]),
        patterns=patterns or plan.patterns,
        devices=tuple(DEVICES[name] for name in devices) or plan.devices,
        variants=not only_switches,
    )
    judged = contexts_quality.QualityPlan.quick() if quick else contexts_quality.QualityPlan()
    rows = []
    with progress_bars() as progress:
        if not only_quality:
            path = shape_folder(shape or "110m", progress) if model is None else model
            rows += contexts_bench.run(
                path,
                weights if model is None else None,
                plan,
                progress,
                tell=lambda message: click.echo(message, err=True),
            )
        if quality is not None and data is not None:
            rows += contexts_quality.quality_rows(quality, data, judged, progress)
    emit("contexts", rows, as_json=as_json, plot=None)
    if plot is not None:
        draw_contexts(rows, plot)


@bench_command.command("experts")
@click.option(
    "--folder",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="The Hugging Face folder of a mixture of experts; baselines are made of it.",
)
@click.option(
    "-m",
    "--model",
    "models",
    multiple=True,
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="A bundle that `jaxllm calibrate` made of it. Repeatable: the first is ours, others have other "
    "losses.",
)
@click.option(
    "--shape", type=click.Choice(MIXTURES), help="Instead: random weights of this size, for speed alone."
)
@click.option("--quick", is_flag=True, help="Fewer and shorter runs (under a minute).")
@click.option("--plot", type=click.Path(path_type=Path), metavar="DIR", help="Draw figures into DIR.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def experts_command(
    folder: Path | None,
    models: tuple[Path, ...],
    shape: str | None,
    quick: bool,
    plot: Path | None,
    as_json: bool,
) -> None:
    """What a token takes of a mixture of experts larger than memory, beside other ways to run it."""
    if (shape is None) != (folder is not None and bool(models)) or (shape and (folder or models)):
        raise click.UsageError("give either --shape, or --folder and --model")
    check_plot(plot)
    plan = experts_bench.Plan.quick() if quick else experts_bench.Plan()
    cache = cache_folder() / "benchmarks" / "experts"
    with progress_bars() as progress:
        if shape is not None:
            folder = shape_folder(shape, progress)
            models = (random_mixed(folder, cache / f"{shape}.jaxllm", progress),)
        assert folder is not None
        rows = experts_bench.run(folder, models, cache, plan, progress)
    emit("experts", rows, as_json=as_json, plot=None)
    if plot is not None:
        draw_experts(rows, plot)


@bench_command.command("export")
@click.option(
    "-m",
    "--model",
    type=click.Path(path_type=Path),
    help="A bundle or a Hugging Face folder. [default: the packaged model]",
)
@click.option(
    "--shape", type=click.Choice(list(SHAPES)), help="Instead: random weights of this size, for speed alone."
)
@click.option(
    "--text",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    help="A UTF-8 text for prompts and perplexity; its end calibrates w8a8.",
)
@click.option(
    "--threads", type=int, default=0, metavar="N", help="Cores that each system computes with. [default: all]"
)
@click.option("--quick", is_flag=True, help="Fewer and shorter runs (under a minute).")
@click.option("--plot", type=click.Path(path_type=Path), metavar="DIR", help="Draw figures into DIR.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
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
    check_plot(plot)
    plan = export_bench.Plan.quick() if quick else export_bench.Plan()
    with progress_bars() as progress:
        if shape is not None:
            model = shape_folder(shape, progress)
        rows = export_bench.run(
            export_bench.Subject(model=model, text=text, threads=threads),
            plan,
            progress,
            lambda message: click.echo(message, err=True),
        )
    emit("export", rows, as_json=as_json, plot=plot)


bench_command.add_command(prefill_command)
