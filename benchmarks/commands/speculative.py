"""`jaxllm bench speculative`: a model larger than memory."""

import dataclasses
from pathlib import Path

import click

from benchmarks.commands.options import device_option, report_options, shape_option
from benchmarks.devices import PHONES, Device
from benchmarks.report import emit
from benchmarks.shapes import shape_folder
from benchmarks.speculative import run
from benchmarks.speculative.grown import grown_bundle
from benchmarks.speculative.memory import memory_rows
from serving.console import Size, progress_bars
from serving.models import find_model, open_model


@click.command("speculative")
@click.option("-m", "--model", type=click.Path(path_type=Path), help="The target. [default: default]")
@click.option(
    "--draft", type=click.Path(path_type=Path), default="draft", show_default=True, help="Its draft."
)
@click.option(
    "--coarse", type=click.Path(path_type=Path), help="The target at 4 bits, for STI. [default: no STI]"
)
@click.option("--data", type=click.Path(path_type=Path), help="The folder of the tasks' files.")
@shape_option(
    "Instead of models and tasks: random weights of this size at 8 bits, for what memory and disk do."
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
@device_option(PHONES)
@click.option(
    "--prompts", type=click.IntRange(min=1), metavar="N", help="Timed prompts of each task. [default: 10]"
)
@click.option(
    "--same",
    type=click.IntRange(min=0),
    metavar="N",
    help="Compare so many answers with the target's own. [default: 200]",
)
@click.option(
    "--grow",
    type=click.IntRange(min=2),
    metavar="N",
    help="Make the target N times as deep and wide by units that cancel: the same answers of a model much "
    "larger than its draft.",
)
@click.option("--only-systems", is_flag=True, help="Leave out ours without each technique in turn.")
@report_options
def speculative_command(
    model: Path | None,
    draft: Path,
    coarse: Path | None,
    data: Path | None,
    shape: str | None,
    budgets: tuple[int, ...],
    shares: tuple[float, ...],
    devices: tuple[Device, ...],
    prompts: int | None,
    same: int | None,
    grow: int | None,
    only_systems: bool,
    quick: bool,
    plot: Path | None,
    as_json: bool,
) -> None:
    """What a token takes of a model larger than memory, with a draft and with other ways to go about it."""
    if (data is None) == (shape is None):
        raise click.UsageError("give either --data, for prompts, or --shape")
    if grow is not None and shape is not None:
        raise click.UsageError("--grow is for a trained target; a --shape has its size")
    with progress_bars() as progress:
        if shape is not None:
            with open_model(shape_folder(shape, progress), weights="int8", progress=progress) as bundle:
                chosen = budgets or tuple(int(share * bundle.weight_bytes) for share in (0.25, 0.5, 0.75))
                rows = memory_rows(bundle.path, chosen, progress)
        else:
            assert data is not None
            plan = run.Plan.quick() if quick else run.Plan()
            plan = dataclasses.replace(
                plan,
                shares=shares,
                devices=devices or plan.devices,
                prompts=prompts or plan.prompts,
                same=plan.same if same is None else same,
                ablations=not only_systems,
            )
            target = find_model(model)
            if grow is not None:
                target = grown_bundle(target, grow, progress)
                coarse = None if coarse is None else grown_bundle(coarse, grow, progress)
            subject = run.Subject(model=target, draft=find_model(draft), coarse=coarse, data=data)
            rows = run.run(subject, plan, progress)
    emit("speculative", rows, as_json=as_json, plot=plot)
