"""Options that benchmarks share."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.devices import named_devices
from benchmarks.report import check_plot
from benchmarks.shapes import SHAPES
from jaxllm.bundle import WEIGHT_FORMATS

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def report_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """How long a benchmark measures and how it reports: parameters `quick`, `plot` and `as_json`."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object."),
        click.option(
            "--plot",
            type=click.Path(path_type=Path),
            metavar="DIR",
            callback=_checked,
            help="Draw figures into DIR.",
        ),
        click.option("--quick", is_flag=True, help="Fewer and shorter runs (under a minute)."),
    ):
        command = option(command)
    return command


def shape_option(help_: str, shapes: Sequence[str] = tuple(SHAPES)) -> Decorator:
    """Random weights in the place of a model: parameter `shape`."""
    return click.option("--shape", type=click.Choice(shapes), help=help_)


def device_option(names: Sequence[str]) -> Decorator:
    """Storage to measure on, of these names in `DEVICES`: parameter `devices`, empty for all of them."""
    return click.option(
        "--device",
        "devices",
        type=click.Choice(names),
        multiple=True,
        callback=lambda _context, _parameter, chosen: named_devices(chosen),
        help="Only this storage. Repeatable. [default: all]",
    )


shape_weights_option = click.option(
    "--weights", type=click.Choice(WEIGHT_FORMATS), default="int8", show_default=True, help="Of a shape."
)


def _checked(context: click.Context, parameter: click.Parameter, plot: Path | None) -> Path | None:
    """Refuses a folder that cannot be drawn into before anything is measured."""
    del context, parameter
    check_plot(plot)
    return plot
