"""What commands share: options, input text, progress bars and JSON output."""

import contextlib
import dataclasses
import functools
import json
import logging
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jaxllm.bundle import WEIGHT_FORMATS, WeightFormat
from jaxllm.errors import ConfigError
from jaxllm.sampling import Sampling
from serving.generation import DEFAULT_MAX_TOKENS, GenerationConfig
from serving.options import EngineOptions
from serving.prefill.options import INTEGER_DEVICES, MODES, IntegerDevice, Mode, PrefillOptions
from serving.speculative.options import SpeculationOptions

if TYPE_CHECKING:
    from rich.progress import Progress

    from serving.engine import Engine
    from serving.programs.engine import ProgramEngine

ProgressCallback = Callable[[str, int, int], None]
MAX_INPUT_BYTES = 64 << 20
# Bars are for waits that people notice; loading what draws them takes a good part of a start by itself.
_PATIENCE_S = 0.5

_STAGES = {
    "prepare": "Preparing weights",
    "load": "Loading weights",
    "compile": "Compiling graphs",
    "export": "Exporting programs",
    "score": "Scoring tokens",
    "profile": "Timing levels",
    "replay": "Replaying requests",
}


@dataclasses.dataclass(frozen=True)
class ModelChoice:
    """The model that a command was told to use (see `model_options`)."""

    model: Path | None
    weights: WeightFormat | None
    context_tokens: int
    adapter: Path | None
    level: int
    memory: int = 0
    draft: str | None = None
    program: Path | None = None
    prefill: Mode | None = None
    processors: int = 1
    integer_device: IntegerDevice = "cpu"
    most_loss: float = PrefillOptions.most_loss

    def open(self, progress: ProgressCallback, *, warm_up: bool = True) -> "Engine | ProgramEngine":
        """The engine that serves it.

        Raises:
          ConfigError: it is an exported program, with options that only a bundle has.
        """
        if self.program is not None:
            return self._open_program(self.program, progress, warm_up=warm_up)
        if self.processors > 1:
            # Here, because it must come before JAX is used.
            from serving.prefill.processors import prepare_processors

            prepare_processors(self.integer_device)
        prefill = PrefillOptions(
            mode=self.prefill or "",
            processors=self.processors,
            integer_device=self.integer_device,
            most_loss=self.most_loss,
        )
        options = EngineOptions(context_tokens=self.context_tokens, memory_bytes=self.memory, prefill=prefill)
        engine = self._open(
            self.model,
            options,
            progress,
            warm_up=warm_up,
            adapter=self.adapter,
            level=self.level,
            speculation=None if self.draft is None else speculation(self.draft),
        )
        if self.prefill == "auto":
            self._choose_prefill(engine)
        return engine

    @staticmethod
    def _choose_prefill(engine: "Engine") -> None:
        # Here, because most commands need no profile.
        from serving.prefill.times import reads_both_ways
        from serving.profile import choose_prefill, load_profile, profile_path

        profile = load_profile(profile_path(engine.bundle, engine.options))
        if profile is not None:
            choose_prefill(engine, profile)
        elif reads_both_ways(engine):
            logging.getLogger("jaxllm").warning(
                "prompts are read in floats: this device has no times of both ways yet; `jaxllm profile "
                "BUNDLE --prefill auto` measures them"
            )

    def _open_program(self, folder: Path, progress: ProgressCallback, *, warm_up: bool) -> "ProgramEngine":
        for field in dataclasses.fields(self):
            # What was not given is nothing, or the default.
            given = getattr(self, field.name) not in (None, 0, field.default)
            if given and field.name not in ("program", "level", "draft"):
                option = {"context_tokens": "context"}.get(field.name, field.name)
                raise ConfigError(
                    f"--{option} cannot be given with --program, whose programs are as they were exported; "
                    "leave it or --program out"
                )
        # Here, because most commands open no program.
        from serving.programs.engine import ProgramEngine

        drafts = None if self.draft is None else speculation(self.draft)
        engine = ProgramEngine.open(folder, level=self.level, speculation=drafts)
        if warm_up:
            engine.warm_up(progress=progress)
        return engine

    def open_other(self, model: Path, progress: ProgressCallback) -> "Engine":
        """An engine for another model, likewise but for adapter, level, memory and draft."""
        return self._open(model, EngineOptions(context_tokens=self.context_tokens), progress, warm_up=False)

    def _open(
        self, model: Path | None, options: EngineOptions, progress: ProgressCallback, **more: Any
    ) -> "Engine":
        # Here, because commands that open no engine need not wait for it.
        from serving.engine import Engine

        return Engine.open(model, weights=self.weights, options=options, progress=progress, **more)


class Size(click.ParamType):
    """A number of bytes, such as 300MB, 1.5GiB or 4096."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number; fails the command where it is none."""
        if isinstance(value, int):
            return value
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", str(value), re.IGNORECASE)
        if found is None:
            self.fail(f"{value!r} is no size; give one such as 300MB, 1.5GiB or 4096", param, ctx)
        number, prefix, binary = found.groups()
        power = "kmgt".find(prefix.lower()) + 1 if prefix else 0
        return int(float(number) * (1024 if binary else 1000) ** power)


def speculation(draft: str) -> SpeculationOptions:
    """What --draft means: "ngram", "level:PERCENT", or a model.

    Raises:
      ConfigError: the level is no number.
    """
    name, _, level = draft.partition(":")
    if draft == "ngram":
        return SpeculationOptions(drafter="ngram")
    if name == "level":
        if not level.isdecimal():
            raise ConfigError(f"--draft level: takes a percentage, such as level:30, got {draft!r:.80}")
        return SpeculationOptions(drafter="level", level=int(level))
    return SpeculationOptions(model=draft)


prefill_option = click.option(
    "--prefill",
    type=click.Choice(MODES),
    help="How prompts are read: in static 8-bit steps with shadow outliers, which takes a bundle of "
    "`jaxllm calibrate --prefill`; in floats; or by whichever is faster for a prompt, by `jaxllm profile "
    "--prefill auto`. [default: float; int8 if calibrated on two processors]",
)
processors_option = click.option(
    "--processors",
    type=click.IntRange(1, 2),
    default=1,
    help="2 reads prompts on an integer and a float processor: two cores, or a GPU and the CPU. [default: 1]",
)


def running_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--program, --memory, --draft and how prompts are read, for commands that answer; beneath
    `model_options`."""
    for option in (
        click.option(
            "--program",
            type=click.Path(path_type=Path),
            metavar="DIR",
            help="Run the exported programs in this folder (see `jaxllm export`) instead of a model.",
        ),
        click.option(
            "--most-loss",
            type=click.FloatRange(min=0),
            default=PrefillOptions.most_loss,
            help="By which share the perplexity may grow, by the bundle's own account, where prompts are "
            "read in 8-bit steps. [default: 0.01]",
        ),
        click.option(
            "--integer-device",
            type=click.Choice(INTEGER_DEVICES),
            default="cpu",
            help="What the integer one of two processors is. [default: cpu]",
        ),
        processors_option,
        prefill_option,
        click.option(
            "--draft",
            metavar="DRAFT",
            help="What drafts the answer, for the model to verify: a small model of the same tokenizer (for "
            "--program, a folder of programs), level:PERCENT for a level of the model itself, or ngram for "
            "what the text has said before. The answer stays the same.",
        ),
        click.option(
            "--memory",
            type=Size(),
            default=0,
            metavar="SIZE",
            help="Most memory for weights, context and activations, such as 300MB; of a larger model layers "
            "are read from storage as they are needed. [default: no limit]",
        ),
    ):
        command = option(command)
    return command


context_option = click.option(
    "--context",
    "context_tokens",
    type=int,
    default=0,
    metavar="TOKENS",
    help="Most tokens of prompt and answer together. [default: the model's window, up to 2048]",
)


def model_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--model, --level, --adapter, --weights and --context, given to the command as one `choice`."""

    @functools.wraps(command)
    def with_choice(**options: Any) -> Any:
        names = [field.name for field in dataclasses.fields(ModelChoice) if field.name in options]
        fields = {name: options.pop(name) for name in names}
        return command(choice=ModelChoice(**fields), **options)

    for option in (
        click.option(
            "--level",
            type=click.IntRange(1, 100),
            default=100,
            metavar="PERCENT",
            help="The sub-model of an elastic bundle to use. [default: the whole model]",
        ),
        click.option(
            "--adapter",
            type=click.Path(path_type=Path),
            help="A low-rank adapter of the model, a folder in PEFT's layout.",
        ),
        context_option,
        click.option(
            "--weights",
            type=click.Choice(WEIGHT_FORMATS),
            help="Weight width for a Hugging Face folder. [default: the checkpoint's own]",
        ),
        click.option(
            "-m",
            "--model",
            type=click.Path(path_type=Path),
            help="A bundle, a Hugging Face folder, or a packaged model's name. [default: default]",
        ),
    ):
        with_choice = option(with_choice)
    return with_choice


def sampling_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Length, stops and sampling of an answer; read them back with `generation_config`."""
    for option in (
        click.option("--seed", type=int, help="Seed of the draw. [default: a new one each time]"),
        click.option(
            "--logit-bias",
            multiple=True,
            metavar="ID=VALUE",
            help="Add VALUE to the logit of token ID. Repeatable.",
        ),
        click.option("--frequency-penalty", type=float, default=0.0, show_default=True),
        click.option("--presence-penalty", type=float, default=0.0, show_default=True),
        click.option("--repetition-penalty", type=float, default=1.0, show_default=True),
        click.option("--min-p", type=float, default=0.0, help="Drop tokens below this share of the best."),
        click.option("--top-p", type=float, default=1.0, help="Keep the most likely tokens up to this mass."),
        click.option("--top-k", type=int, default=0, help="Keep the k most likely tokens."),
        click.option("-t", "--temperature", type=float, default=0.0, help="0 is greedy. [default: 0]"),
        click.option("--ignore-eos", is_flag=True, help="Go on past the model's end token."),
        click.option(
            "--stop-token", type=int, multiple=True, metavar="ID", help="End at token ID. Repeatable."
        ),
        click.option("--stop", multiple=True, metavar="TEXT", help="End the answer at TEXT. Repeatable."),
        click.option("-n", "--max-tokens", type=int, default=DEFAULT_MAX_TOKENS, show_default=True),
    ):
        command = option(command)
    return command


def generation_config(options: dict[str, Any]) -> GenerationConfig:
    """Takes the values of `sampling_options` out of `options`.

    Raises:
      ConfigError: a value is out of its domain.
    """
    bias = tuple(_bias(pair) for pair in options.pop("logit_bias"))
    length = {name: options.pop(name) for name in ("max_tokens", "ignore_eos")}
    stop, stop_token_ids = tuple(options.pop("stop")), tuple(options.pop("stop_token"))
    names = ("temperature", "top_k", "top_p", "min_p", "seed")
    penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    sampling = Sampling(logit_bias=bias, **{name: options.pop(name) for name in (*names, *penalties)})
    return GenerationConfig(stop=stop, stop_token_ids=stop_token_ids, sampling=sampling, **length)


def read_text(path: Path | None) -> str:
    """The UTF-8 text of a file, or of standard input for None or "-".

    Raises:
      ConfigError: it cannot be read, is too large, or is not UTF-8.
    """
    source = "standard input" if path is None or str(path) == "-" else str(path)
    try:
        if source == "standard input":
            raw = sys.stdin.buffer.read(MAX_INPUT_BYTES + 1)
        else:
            with Path(source).open("rb") as file:
                raw = file.read(MAX_INPUT_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{source}: cannot be read ({error.strerror})") from error
    if len(raw) > MAX_INPUT_BYTES:
        raise ConfigError(f"{source}: more than {MAX_INPUT_BYTES >> 20} MiB of text; give less")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{source}: not UTF-8 (byte {raw[error.start]:#04x} at offset {error.start}); convert it first"
        ) from error


def print_json(value: Any) -> None:
    """One JSON object on standard output."""
    click.echo(json.dumps(value, ensure_ascii=False))


@contextlib.contextmanager
def progress_bars() -> Iterator[ProgressCallback]:
    """A callback (stage, done, total) that draws a bar per stage on stderr, gone when done.

    Nothing is drawn where stderr is no terminal, nor during the first moment.
    """
    began = time.monotonic()
    bars, tasks = None, {}
    with contextlib.ExitStack() as stack:

        def update(stage: str, done: int, total: int) -> None:
            nonlocal bars
            if bars is None:
                if not sys.stderr.isatty() or time.monotonic() - began < _PATIENCE_S:
                    return
                bars = stack.enter_context(_bars())
            if stage not in tasks:
                tasks[stage] = bars.add_task(_STAGES.get(stage, stage), total=total)
            bars.update(tasks[stage], completed=done, total=total)

        yield update


def _bars() -> "Progress":
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


def _bias(pair: str) -> tuple[int, float]:
    token, _, value = pair.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise ConfigError(f"--logit-bias takes ID=VALUE, such as 42=-5, got {pair!r}") from None
