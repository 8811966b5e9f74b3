"""Declares the options that benchmarks share; importing it imports no JAX.

Every benchmark runs without options, on packaged models and samples, in about a minute on two cores; `--full`
takes the published sizes, up to half an hour. Lists of values that other modules define are written
out here; `tests/benchmarks/test_harness.py` compares them.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from jaxllm.cli.lazy import EngineCommand
from jaxllm.cli.shared_options import json_option
from jaxllm.formats import WEIGHT_FORMATS, WeightFormat

if TYPE_CHECKING:
    from benchmarks.harness.plan import BasePlan
    from benchmarks.harness.report import Draw, Row
    from jaxllm.config import ModelConfig
    from jaxllm.serving.host.progress import Progress


Sizes = TypeVar("Sizes", bound="BasePlan")
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
DENSE_SHAPES = ("15m", "110m", "250m", "0.5b", "1b")
MIXTURE_SHAPES = ("moe-1b",)
SEQ2SEQ_SHAPES = ("t5-base", "mt5-large")
SWITCH_SHAPES = ("switch-base-64",)
PHONES = ("real", "emmc", "eufs")
BOARDS = ("real", "tx2-ssd", "hdd", "sd")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reporting:
    """How long a benchmark measures and how it reports.

    Attributes:
      quick: about a minute, not the whole measurement.
      plot: folder for figures.
      as_json: one JSON object instead of a table.
    """

    quick: bool = True
    plot: Path | None = None
    as_json: bool = False

    def plan(self, plan: type[Sizes], **chosen: Any) -> Sizes:
        """The sizes of a quick run or of the whole one, but for what was chosen."""
        sizes = plan.quick() if self.quick else plan()
        return dataclasses.replace(sizes, **{name: each for name, each in chosen.items() if each})

    def emit(self, bench: str, rows: "Sequence[Row]", draw: "Draw | None" = None) -> None:
        """Prints a benchmark's rows, and draws them if requested: by `draw`, or as bars."""
        from benchmarks.harness.report import emit

        emit(bench, rows, as_json=self.as_json)
        if self.plot is not None:
            from benchmarks.harness.figures import draw_metrics

            (draw or functools.partial(draw_metrics, bench))(rows, self.plot)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOrShape:
    """The model that is measured.

    Attributes:
      model: a bundle or a Hugging Face folder; None for a shape.
      shape: a name of `benchmarks.models.SHAPES`, for random weights of that size.
      weights: width of a shape's weights.
    """

    model: Path | None = None
    shape: str | None = None
    weights: WeightFormat = "int8"

    def path(self, progress: "Progress") -> Path:
        """The model's bundle or folder; a shape's folder is made unless it is there."""
        from benchmarks.models import shape_folder

        if self.shape is not None:
            return shape_folder(self.shape, progress)
        assert self.model is not None
        return self.model

    def config(self) -> "ModelConfig":
        """The model's sizes; a shape's weights are not made for them."""
        from benchmarks.models import SHAPES
        from jaxllm.serving.ground.bundles import open_model

        if self.shape is not None:
            return SHAPES[self.shape].cfg
        with open_model(self.model) as bundle:
            return bundle.cfg


def benchmark(
    name: str,
    packaged: str = "default",
    *options: Decorator,
    shapes: Sequence[str] = (*DENSE_SHAPES, *MIXTURE_SHAPES),
    weights: bool = False,
    parts: Mapping[str, str] | None = None,
) -> Callable[[Callable[..., Any]], click.Command]:
    """A benchmark's command, with the options that all have, and others.

    Args:
      name: of the command.
      packaged, shapes, weights: see `model_options`.
      options: among those of this module.
      parts: see `parts_option`; None for a benchmark that has none.
    """
    last = [report_options, *([parts_option(parts)] if parts else [])]
    first = [*options[::-1], model_options(packaged, shapes=shapes, weights=weights)]

    def decorate(command: Callable[..., Any]) -> click.Command:
        # Help shows a command's own options between those that all have.
        own = vars(command).pop("__click_params__", [])
        command = _with_options(command, last)
        vars(command)["__click_params__"] += own
        return click.command(name, cls=EngineCommand)(_with_options(command, first))

    return decorate


def report_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--quick or --full, --plot and --json: parameter `report`."""
    options = (
        json_option,
        click.option(
            "--plot",
            type=click.Path(path_type=Path),
            metavar="DIR",
            callback=_checked,
            help="Draw figures into this folder.",
        ),
        click.option(
            "--quick/--full",
            default=True,
            help="Run about a minute on two cores, or the whole measurement, up to half an hour.  "
            "[default: quick]",
        ),
    )
    names = [field.name for field in dataclasses.fields(Reporting)]
    return _with_options(_gathered(command, "report", Reporting, names), options)


def model_options(
    packaged: str = "default",
    *,
    shapes: Sequence[str] = (*DENSE_SHAPES, *MIXTURE_SHAPES),
    weights: bool = False,
) -> Decorator:
    """--model or --shape, and the shape's --weights where asked for: parameter `subject`.

    Args:
      packaged: name of the model that is measured where none is given.
      shapes: that may be chosen.
      weights: whether there is an option for the shape's width.
    """

    def make(model: Path | None, shape: str | None, **more: Any) -> ModelOrShape:
        from jaxllm.serving.ground.bundles import find_model

        if shape is not None and model is not None:
            raise click.UsageError("--shape and --model exclude each other")
        found = None if shape is not None else find_model(model or packaged)
        return ModelOrShape(model=found, shape=shape, **more)

    options = [
        click.option(
            "--shape",
            type=click.Choice(shapes),
            help="Measure random weights of this size instead of a model, for speed alone. They are made "
            "once and kept in the cache folder.",
        ),
        click.option(
            "-m",
            "--model",
            type=click.Path(path_type=Path),
            metavar="MODEL",
            help=f"A bundle, a Hugging Face folder, or a packaged model's name.  [default: {packaged}]",
        ),
    ]
    names = ["model", "shape"]
    if weights:
        names.append("weights")
        width = click.option(
            "--weights",
            type=click.Choice(WEIGHT_FORMATS),
            default="int8",
            show_default=True,
            help="Width of a shape's weights.",
        )
        options.insert(0, width)
    return lambda command: _with_options(_gathered(command, "subject", make, names), options)


def parts_option(parts: Mapping[str, str]) -> Decorator:
    """The parts of a benchmark to run: parameter `parts`, all of them unless some are chosen.

    Args:
      parts: name -> what it measures.
    """
    explained = "; ".join(f"{name}: {what}" for name, what in parts.items())
    return click.option(
        "--only",
        "parts",
        type=click.Choice(list(parts)),
        multiple=True,
        callback=lambda _context, _parameter, chosen: chosen or tuple(parts),
        help=f"Run this part alone ({explained}). Repeatable.  [default: all parts]",
    )


def parts_without(parts: tuple[str, ...], left_out: Sequence[str], why: str) -> tuple[str, ...]:
    """The parts without those that cannot be measured; tells which ones these are.

    Raises:
      UsageError: none remains.
    """
    unmeasured = [each for each in parts if each in left_out]
    if not unmeasured:
        return parts
    if len(unmeasured) == len(parts):
        raise click.UsageError(f"--only {' --only '.join(parts)} measures nothing here: {why}")
    tell(f"without {' and '.join(unmeasured)}: {why}")
    return tuple(each for each in parts if each not in left_out)


def device_option(names: Sequence[str], quick: str = "real") -> Decorator:
    """Storage to measure on, of these names in `DEVICES`: parameter `devices`, empty unless chosen."""
    return click.option(
        "--device",
        "devices",
        type=click.Choice(names),
        multiple=True,
        help="Storage to measure on: this machine's (real), or another, emulated by its published speeds. "
        f"Repeatable.  [default: {quick}; with --full all]",
    )


data_option = click.option(
    "--data",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    metavar="DIR",
    help="The folder of texts and of the tasks' files.  [default: packaged samples]",
)
text_option = click.option(
    "--text",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    help="A UTF-8 text for prompts and perplexity.  [default: packaged stories]",
)
threads_option = click.option(
    "--threads",
    type=int,
    default=0,
    metavar="N",
    help="Cores that each system computes with.  [default: all that this process may use]",
)


def tell(message: str) -> None:
    """Prints a line for the user on standard error, besides the rows."""
    click.echo(message, err=True)


def _gathered(
    command: Callable[..., Any], parameter: str, make: Callable[..., Any], names: Sequence[str]
) -> Callable[..., Any]:
    """Gives a command, as one parameter, what `make` makes of the options of these names."""

    @functools.wraps(command)
    def with_parameter(**options: Any) -> Any:
        return command(**{parameter: make(**{name: options.pop(name) for name in names})}, **options)

    return with_parameter


def _with_options(command: Callable[..., Any], options: Sequence[Decorator]) -> Callable[..., Any]:
    for option in options:
        command = option(command)
    return command


def _checked(context: click.Context, parameter: click.Parameter, plot: Path | None) -> Path | None:
    """Refuses a folder that cannot be drawn into before anything is measured."""
    del context, parameter
    if plot is not None:
        from benchmarks.harness.figures import check_plot

        check_plot(plot)
    return plot
