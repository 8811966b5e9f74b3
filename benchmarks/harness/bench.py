"""Declares a benchmark: its sizes, its options, and its command. Importing it imports no JAX.

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Plan(BasePlan):
        rounds: int = sized(5, quick=2)
        contexts: tuple[int, ...] = sized((2, 4, 8), "Number of active contexts.", quick=(4,), low=1)

    @benchmark("contexts", Plan)
    def contexts_command(bench: Run[Plan]) -> Run[Plan]: ...

A field of a plan has a value for the whole measurement and one for a quick run; with a help text it is an
option of the command, too. Every benchmark runs without options, on packaged models and samples, in about a
minute on two cores; `--full` takes the published sizes, up to half an hour. Lists of values that other
modules define are written out here; `tests/benchmarks/test_harness.py` compares them.
"""

import dataclasses
import functools
import importlib
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import click

from jaxllm.cli.console import progress_bars
from jaxllm.cli.lazy import EngineCommand
from jaxllm.cli.shared_options import json_option
from jaxllm.formats import WeightFormat
from jaxllm.options import Declaration, click_option

if TYPE_CHECKING:
    from jaxllm.config import ModelConfig
    from jaxllm.serving.host.progress import Progress

Command = Callable[..., Any]
Tell = Callable[[str], None]
DENSE_SHAPES = ("15m", "110m", "250m", "0.5b", "1b")
MIXTURE_SHAPES = ("moe-1b",)
SEQ2SEQ_SHAPES = ("t5-base", "mt5-large")
SWITCH_SHAPES = ("switch-base-64",)
PHONES = ("real", "emmc", "eufs")
BOARDS = ("real", "tx2-ssd", "hdd", "sd")
PATH = click.Path(path_type=Path)
FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
_BOUNDS = ("low", "high", "above", "below")


def sized(full: Any, text: str = "", *flags: str, quick: Any = None, default: str = "", **how: Any) -> Any:
    """A field of a plan.

    Args:
      full: value of the whole measurement.
      text: help of its option, without a default; "" for a field that is none.
      *flags: names of the option on the command line, `--name` by default.
      quick: value of a quick run; None for the same.
      default: text for the help instead of both values.
      **how: bounds (`low`, `high`, `above`, `below`), and arguments of `click.option`.
    """
    declared = Declaration(text, **{name: how.pop(name) for name in _BOUNDS if name in how})
    several = " Repeatable." if isinstance(full, tuple) else ""
    shown = [
        ", ".join(map(str, each)) if isinstance(each, tuple) else str(each)
        for each in (full, quick)
        if each not in (None, "", (), False)
    ]
    default = default or (f"{shown[1]}; with --full {shown[0]}" if len(shown) == 2 else "".join(shown))
    how = {"help": f"{text}{several}{default and f'  [default: {default}]'}", **how}
    return dataclasses.field(
        default=full, metadata={"quick": quick, "option": declared, "flags": flags, "how": how}
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BasePlan:
    """Sizes of a run, whose defaults are those of the whole measurement."""

    @classmethod
    def quick(cls) -> Self:
        """Fits in about a minute on two cores, for the packaged models."""
        quick = {each.name: each.metadata.get("quick") for each in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in quick.items() if value is not None})


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShapePlan(BasePlan):
    """A plan with the width of a shape's weights."""

    weights: WeightFormat = sized("int8", "Width of a shape's weights.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataPlan(BasePlan):
    """A plan with a folder of texts and tasks; None for the packaged samples."""

    data: Path | None = sized(
        None, "The folder of texts and of the tasks' files.", metavar="DIR", default="packaged samples",
        type=click.Path(path_type=Path, exists=True, file_okay=False),
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextPlan(BasePlan):
    """A plan with a text; None for the packaged stories."""

    text: Path | None = sized(
        None, "A UTF-8 text for prompts and perplexity.", type=FILE, metavar="FILE",
        default="packaged stories",
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class ThreadsPlan(BasePlan):
    """A plan with the cores that each system computes with; 0 for all."""

    threads: int = sized(
        0, "Cores that each system computes with.", metavar="N", default="all that this process may use"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimedPlan(ThreadsPlan):
    """Sizes of what is timed in alternation.

    Attributes:
      decode_tokens: decoded after each prompt.
      rounds: of which medians are taken.
      context_tokens: of every context; 0 lets systems choose.
      text_windows: most windows of a text to score; 0 means all.
      patience_s: for repeating what other processes disturbed, in all.
    """

    prompt_tokens: tuple[int, ...] = ()
    decode_tokens: int = 0
    rounds: int = 1
    context_tokens: int = 0
    text_windows: int = 0
    patience_s: float = 0.0


Sizes = TypeVar("Sizes", bound=BasePlan)
# Prints a line for the user on standard error, besides the rows.
tell: Tell = functools.partial(click.echo, err=True)


def silent(stage: str, done: int, total: int) -> None:
    """Progress that is shown to nobody."""
    del stage, done, total


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run(Generic[Sizes]):
    """One run of a benchmark.

    Attributes:
      plan: how much is measured, and what else was asked for.
      model: a bundle or a Hugging Face folder; None for a shape.
      shape: a name of `benchmarks.models`, for random weights of that size.
      is_quick: whether sizes are those of a quick run.
      given: fields of the plan that were chosen on the command line.
      progress: called with (stage, done, total).
      tell: called with a line for the user, such as what is left out.
      kept: what figures are drawn of besides the rows.
    """

    plan: Sizes
    model: Path | None = None
    shape: str | None = None
    is_quick: bool = True
    given: Collection[str] = ()
    progress: "Progress" = silent
    tell: Tell = lambda message: None
    kept: list[Any] = dataclasses.field(default_factory=list)

    def changed(self, **sizes: Any) -> Self:
        """The same run with other sizes."""
        return dataclasses.replace(self, plan=dataclasses.replace(self.plan, **sizes))

    def without(self, parts: Sequence[str], why: str) -> Self:
        """The same run without the parts that cannot be measured; reports them."""
        chosen: tuple[str, ...] = self.plan.parts  # pyright: ignore[reportAttributeAccessIssue]
        unmeasured = [each for each in chosen if each in parts]
        if unmeasured and len(unmeasured) == len(chosen):
            raise click.UsageError(f"--only {' --only '.join(chosen)} measures nothing here: {why}")
        if unmeasured:
            self.tell(f"without {' and '.join(unmeasured)}: {why}")
        return self.changed(parts=tuple(each for each in chosen if each not in unmeasured))

    def path(self) -> Path:
        """The model's bundle or folder; a shape's folder is made unless it is there."""
        from benchmarks.models import shape_folder

        if self.shape is not None:
            return shape_folder(self.shape, self.progress)
        assert self.model is not None
        return self.model

    def config(self) -> "ModelConfig":
        """The model's sizes; a shape's weights are not made for them."""
        from benchmarks.models import SHAPES
        from jaxllm.serving.ground.bundles import open_model

        if self.shape is not None:
            return SHAPES[self.shape]
        with open_model(self.model) as bundle:
            return bundle.cfg


def benchmark(
    name: str,
    plan: type[BasePlan],
    packaged: str = "default",
    shapes: Sequence[str] = (*DENSE_SHAPES, *MIXTURE_SHAPES),
    *,
    real: bool = False,
) -> Callable[[Callable[[Any], Any]], click.Command]:
    """The command of a function that checks what was asked for and says what is measured, with the options of
    its plan and those that all benchmarks have. The function `run` of its package's module `run` measures it,
    and `draw`, where there is one, draws its rows.

    Args:
      packaged: name of the model that is measured where none is given.
      shapes: that may be chosen instead.
      real: whether a whole run measures SmolLM2 where none is given and it is there.
    """
    choices = [
        click.option(
            "-m",
            "--model",
            type=PATH,
            metavar="MODEL",
            help="A model's path or name, as of `jaxllm generate`.  [default: "
            + packaged
            + ("; with --full SmolLM2, if its package is installed or --data has it" if real else "")
            + "]",
        ),
        click.option(
            "--shape",
            type=click.Choice(shapes),
            help="Measure random weights of this size instead of a model, for speed alone. They are made "
            "once and kept in the cache folder.",
        ),
    ]

    def decorate(ask: Callable[[Any], Any]) -> click.Command:
        def run(model: Path | None, shape: str | None, quick: bool, **given: Any) -> None:
            from benchmarks.harness.report import emit
            from jaxllm.serving.ground.bundles import find_model

            if shape is not None and model is not None:
                raise click.UsageError("--shape and --model exclude each other")
            how = {key: given.pop(key) for key in ("plot", "as_json")}
            chosen = {key: value for key, value in given.items() if value not in (None, ())}
            sizes = dataclasses.replace(plan.quick() if quick else plan(), **chosen)
            with progress_bars() as progress:
                if model is None and shape is None and real and not quick:
                    from benchmarks.models import real_model

                    model = real_model(getattr(sizes, "data", None))
                found = None if shape is not None else find_model(model or packaged)
                bench = Run(
                    plan=sizes,
                    model=found,
                    shape=shape,
                    is_quick=quick,
                    given=chosen.keys(),
                    progress=progress,
                    tell=tell,
                )
                bench = ask(bench)
                room = importlib.import_module(f"{ask.__module__}.run")
                rows, draw = room.run(bench), getattr(room, "draw", None)
            drawn = functools.partial(draw, kept=bench.kept) if draw and bench.kept else draw
            subject = shape or (found.stem if found is not None else "")
            emit(name, rows, drawn, subject=subject, **how)

        declared = [
            click_option(plan, field.name, *field.metadata["flags"], **field.metadata["how"])
            for field in dataclasses.fields(plan)
            if "option" in field.metadata and field.metadata["option"].help
        ]
        command: Command = functools.wraps(ask)(run)
        for option in reversed((*choices, *declared, *REPORT_OPTIONS)):
            command = option(command)
        return click.command(name, cls=EngineCommand)(command)

    return decorate


def parts_of(parts: Mapping[str, str]) -> Any:
    """The field `parts` of a plan: all parts of a benchmark, unless some are chosen."""
    explained = "; ".join(f"{name}: {what}" for name, what in parts.items())
    text = f"Run this part alone ({explained})."
    return sized(tuple(parts), text, "--only", type=click.Choice(list(parts)), default="all parts")


def devices_of(names: Sequence[str], quick: str = "real") -> Any:
    """The field `devices` of a plan: names in `machine.DEVICES` of the storage that is measured."""
    text = "Storage to measure on: this machine's (real), or another, emulated by its published speeds."
    shown = f"{quick}; with --full all"
    return sized(tuple(names), text, "--device", quick=(quick,), type=click.Choice(names), default=shown)


def check_plot(
    context: click.Context | None, parameter: click.Parameter | None, plot: Path | None
) -> Path | None:
    """Refuses a folder for figures that cannot be drawn into, before anything is measured."""
    del context, parameter
    if plot is None:
        return None
    try:
        import matplotlib.pyplot  # noqa: F401
    except ImportError as error:
        raise click.UsageError("--plot needs matplotlib: pip install 'jaxllm[plot]'") from error
    try:
        plot.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=plot):
            return plot
    except OSError as error:
        raise click.UsageError(
            f"--plot {plot}: cannot be written ({error.strerror}); name another"
        ) from error


REPORT_OPTIONS = (
    click.option(
        "--quick/--full",
        default=True,
        help="Run about a minute on two cores, or the whole measurement, up to half an hour.  "
        "[default: quick]",
    ),
    click.option(
        "--plot", type=PATH, metavar="DIR", callback=check_plot, help="Draw figures into this folder."
    ),
    json_option,
)
