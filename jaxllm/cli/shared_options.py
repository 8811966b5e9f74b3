"""Declares the options that commands share; importing it imports no JAX.

Defaults that other modules define are written out here for the help texts; `tests/cli/test_cli.py` compares
them.
"""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jaxllm.cli.console import progress_bars
from jaxllm.cli.model_choice import ModelChoice
from jaxllm.errors import ConfigError
from jaxllm.options import Command, click_option, click_options, combined
from jaxllm.serving.ground.int8_prefill_options import MODES

if TYPE_CHECKING:
    from jaxllm.serving.engine.request import GenerationConfig
    from jaxllm.text.tokenizer_files import TokenizerFiles

MAX_TOKENS = 256
PATH = click.Path(path_type=Path)


def path_option(*names: str, metavar: str = "FILE", **how: Any) -> Callable[[Command], Command]:
    """`click.option` of a path."""
    return click.option(*names, **{"type": PATH, "metavar": metavar, **how})


def path_argument(name: str, **how: Any) -> Callable[[Command], Command]:
    """`click.argument` of a path."""
    return click.argument(name, type=PATH, **how)


class _Model(click.ParamType):  # pyright: ignore[reportMissingTypeArgument]: generic in stubs alone
    """A model by path or name (see `jaxllm.serving.ground.bundles.find_model`); its value is a path."""

    name = "model"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """The model's path; a model of the hub is downloaded."""
        from jaxllm.serving.ground.bundles import find_model

        with progress_bars() as progress:
            return find_model(value, progress)


MODEL = _Model()


def model_argument(name: str = "model", **how: Any) -> Callable[[Command], Command]:
    """`click.argument` of a model, for commands that read its files themselves."""
    return click.argument(name, type=MODEL, **how)


def named_folders_option(*names: str, **how: Any) -> Callable[[Command], Command]:
    """`click.option` of NAME=DIR, repeatable; its value is a dict of paths by name."""

    def read(context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]) -> dict[str, Path]:
        found: dict[str, Path] = {}
        for text in texts:
            name, equals, folder = text.partition("=")
            if not (name and equals and folder) or name in found:
                wrong = f"write NAME=DIR, each name once, got {text!r:.80}"
                raise click.BadParameter(wrong, context, parameter)
            found[name] = Path(folder)
        return found

    return click.option(*names, multiple=True, metavar="NAME=DIR", callback=read, **how)


def prefill_option(text: str) -> Callable[[Command], Command]:
    """--prefill, with a command's help text."""
    return click.option("--prefill", type=click.Choice(MODES), help=text)


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
model_option = click_option(ModelChoice, "model")
context_option = click_option(ModelChoice, "context_tokens")
processors_option = click_option(ModelChoice, "processors")
task_option = click.option(
    "--task",
    default="",
    metavar="NAME",
    help="Task of an encoder-decoder, whose prefix is added to the prompt.  [default: the model's own]",
)
image_option = path_option(
    "--image",
    "images",
    multiple=True,
    help="An image at the beginning of the prompt, for a model with an image encoder. Repeatable.",
)
model_sampling_option = click.option(
    "--model-sampling/--no-model-sampling",
    default=True,
    help="Default to the model's recommended sampling (generation_config.json) for options not given.  "
    "[default: on]",
)

listening_options = combined(
    click.option(
        "--http",
        metavar="HOST:PORT",
        help="Listen on a TCP address; port 0 chooses a free one.  [default: 127.0.0.1:8080 without "
        "--socket]",
    ),
    path_option("--socket", metavar="PATH", help="Listen on a Unix socket."),
    click.option(
        "--api-key",
        metavar="KEY",
        envvar="JAXLLM_API_KEY",
        help="Require this key over HTTP, or one of `jaxllm keys`. Other users of this machine can read "
        "command lines: set $JAXLLM_API_KEY instead.  [default: keys of `jaxllm keys` alone]",
    ),
    path_option(
        "--config",
        help="Options in TOML; the command line overrides them. SIGHUP reloads limits, objectives and "
        "context_budget.",
    ),
)
"""Where a service listens, and its file of options."""

running_options = click_options(
    ModelChoice,
    *("memory", "draft", "prefill", "processors", "integer_device", "most_loss", "expert_loss", "program"),
)
"""--memory, --draft, --program and options of prefill; applied below `model_options`."""

_number = functools.partial(click.option, type=float)
sampling_options = combined(
    click.option(
        "-n",
        "--max-tokens",
        type=int,
        default=MAX_TOKENS,
        help=f"Maximum number of tokens of an answer.  [default: {MAX_TOKENS}]",
    ),
    click.option("--stop", multiple=True, metavar="TEXT", help="End the answer at TEXT. Repeatable."),
    click.option("--stop-token", type=int, multiple=True, metavar="ID", help="End at token ID. Repeatable."),
    click.option("--ignore-eos", is_flag=True, help="Continue past the model's end token."),
    _number(
        "-t",
        "--temperature",
        help="Divide logits by this before sampling; 0 is greedy.  [default: the model's, or 0]",
    ),
    click.option(
        "--top-k", type=int, help="Sample from the k likeliest tokens.  [default: the model's, or all]"
    ),
    _number(
        "--top-p",
        metavar="PROBABILITY",
        help="Sample from the likeliest tokens up to this total probability.  [default: the model's, or 1]",
    ),
    _number(
        "--min-p",
        metavar="PROBABILITY",
        help="Drop tokens less probable than this times the likeliest one.  [default: the model's, or 0]",
    ),
    _number(
        "--repetition-penalty",
        help="Divide logits of tokens in prompt and answer by this.  [default: the model's, or 1]",
    ),
    _number("--presence-penalty", default=0.0, help="Subtract this from logits of tokens in the answer."),
    _number("--frequency-penalty", default=0.0, help="Subtract this times a token's count in the answer."),
    click.option(
        "--logit-bias",
        multiple=True,
        metavar="ID=VALUE",
        help="Add VALUE to the logit of token ID. Repeatable.",
    ),
    click.option("--seed", type=int, help="Sampling seed.  [default: a new one each time]"),
    model_sampling_option,
)
"""Length, stops and sampling of an answer; parsed by `answer_options`."""


def model_options(command: Command) -> Command:
    """Adds --model, --weights, --context, --adapter and --level, passed to the command as one `choice`.

    `choice` also has the values of `running_options` and `prefill_option` if they are applied below it.
    """

    @functools.wraps(command)
    def with_choice(**options: Any) -> Any:
        names = [field.name for field in dataclasses.fields(ModelChoice) if field.name in options]
        fields = {name: options.pop(name) for name in names}
        return command(choice=ModelChoice(**fields), **options)

    return click_options(ModelChoice, "model", "weights", "context_tokens", "adapter", "level")(with_choice)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """Length, stops and sampling of answers, from options.

    Attributes:
      config: config with neutral values for options not given.
      named: names of given sampling options.
      model_sampling: whether the others default to the model's recommended sampling.
    """

    config: "GenerationConfig"
    named: frozenset[str] = frozenset()
    model_sampling: bool = True

    def of(self, files: "TokenizerFiles") -> "GenerationConfig":
        """The config of a model's answer."""
        own = {name: value for name, value in files.sampling.items() if name not in self.named}
        if not self.model_sampling or not own:
            return self.config
        sampling = dataclasses.replace(self.config.sampling, **own)  # pyright: ignore[reportArgumentType]
        return dataclasses.replace(self.config, sampling=sampling)


def answer_options(options: dict[str, Any]) -> AnswerOptions:
    """Pops the values of `sampling_options` from `options`, which may lack all of them.

    Raises:
      ConfigError: a value is out of range.
    """
    from jaxllm.sampling_state import Sampling
    from jaxllm.serving.engine.request import GenerationConfig

    fields = {name: options.pop(name) for name in ("max_tokens", "ignore_eos", "task") if name in options}
    fields |= {"stop": tuple(options.pop("stop", ())), "stop_token_ids": tuple(options.pop("stop_token", ()))}
    bias = tuple(_bias(pair) for pair in options.pop("logit_bias", ()))
    named = {each.name: options.pop(each.name, None) for each in dataclasses.fields(Sampling)}
    named = {name: value for name, value in named.items() if value is not None}
    return AnswerOptions(
        config=GenerationConfig(sampling=Sampling(logit_bias=bias, **named), **fields),
        named=frozenset(named),
        model_sampling=options.pop("model_sampling", True),
    )


def _bias(pair: str) -> tuple[int, float]:
    token, _, value = pair.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise ConfigError(f"--logit-bias takes ID=VALUE, such as 42=-5, got {pair!r}") from None
