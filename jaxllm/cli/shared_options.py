"""Declares the options that commands share; importing it imports no JAX.

Defaults and lists of values that other modules define are written out here for the help texts;
`tests/cli/test_help.py` compares them.
"""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jaxllm.cli.model_choice import ModelChoice
from jaxllm.errors import ConfigError
from jaxllm.formats import WEIGHT_FORMATS
from jaxllm.option_types import Level, Share, Size

if TYPE_CHECKING:
    from jaxllm.serving.engine.request import GenerationConfig
    from jaxllm.text.tokenizer_files import TokenizerFiles

Command = Callable[..., Any]

PREFILL_MODES = ("float", "int8", "auto")
INTEGER_DEVICES = ("cpu", "gpu")
MAX_TOKENS = 256
MAX_PREFILL_LOSS = 0.01

task_option = click.option(
    "--task",
    default="",
    metavar="NAME",
    help="Task of an encoder-decoder, whose prefix is added to the prompt.  [default: the model's own]",
)
image_option = click.option(
    "--image",
    "images",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="An image at the beginning of the prompt, for a model with an image encoder. Repeatable.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")

model_option = click.option(
    "-m",
    "--model",
    type=click.Path(path_type=Path),
    metavar="MODEL",
    help="A bundle, a Hugging Face folder, a GGUF file, or a packaged model's name.  [default: default]",
)

context_option = click.option(
    "--context",
    "context_tokens",
    type=int,
    default=0,
    metavar="TOKENS",
    help="Maximum number of tokens of prompt and answer together.  [default: the model's window, up to 2048]",
)


def prefill_option(text: str) -> Callable[[Command], Command]:
    """--prefill, with a command's help text."""
    return click.option("--prefill", type=click.Choice(PREFILL_MODES), help=text)


processors_option = click.option(
    "--processors",
    type=click.IntRange(1, 2),
    default=1,
    help="With 2, prompts run on an integer and a float processor in parallel: two cores, or a GPU and the "
    "CPU.  [default: 1]",
)

_MODEL_OPTIONS = (
    model_option,
    click.option(
        "--weights",
        type=click.Choice(WEIGHT_FORMATS),
        help="Width of the weights of a Hugging Face folder or a GGUF file.  [default: the checkpoint's own]",
    ),
    context_option,
    click.option(
        "--adapter",
        type=click.Path(path_type=Path),
        metavar="DIR",
        help="A low-rank adapter of the model, a folder in PEFT's layout.",
    ),
    click.option(
        "--level",
        type=Level(),
        default=100,
        help="The level of an elastic bundle to run.  [default: the whole model]",
    ),
)

_RUNNING_OPTIONS = (
    click.option(
        "--memory",
        type=Size(),
        default=0,
        help="Memory limit of weights, context and activations, e.g. 300MB. Layers of a larger model are "
        "read from storage on demand.  [default: no limit]",
    ),
    click.option(
        "--draft",
        metavar="DRAFT",
        help="Draft tokens for the model to verify, with a small model of the same tokenizer (MODEL; with "
        "--program a folder of programs), a level of the model itself (level:PERCENT), the high planes of "
        "int8-nested weights (nested, nested:PERCENT), earlier continuations in the text (ngram), or not at "
        "all (none). The answer stays the same.  [default: nested for int8-nested weights, while it is "
        "measured to be faster; none for others]",
    ),
    prefill_option(
        "Compute prompts in floats, in 8-bit integers (takes a bundle of `jaxllm calibrate prefill`), or in "
        "whichever is faster for a prompt (takes times of `jaxllm profile --prefill auto`).  [default: "
        "float; int8 with --processors 2]"
    ),
    processors_option,
    click.option(
        "--integer-device",
        type=click.Choice(INTEGER_DEVICES),
        default="cpu",
        help="The integer one of two processors.  [default: cpu]",
    ),
    click.option(
        "--max-prefill-loss",
        "most_loss",
        type=Share(most=float("inf"), allow_inf=True),
        help="Maximum growth of the perplexity by integer prefill, as measured when the bundle was "
        f"calibrated; inf for any.  [default: {MAX_PREFILL_LOSS:.0%}]",
    ),
    click.option(
        "--expert-loss",
        type=Share(),
        default=0.0,
        help="Maximum share of each token's mixture, its least probable experts, to compute with 4 of 8 "
        "bits if nested experts are read from storage.  [default: none]",
    ),
    click.option(
        "--program",
        type=click.Path(path_type=Path),
        metavar="DIR",
        help="Run the exported programs in this folder (see `jaxllm export`) instead of a model.",
    ),
)

model_sampling_option = click.option(
    "--model-sampling/--no-model-sampling",
    default=True,
    help="Default to the model's recommended sampling (generation_config.json) for options not given.  "
    "[default: on]",
)

_SAMPLING_OPTIONS = (
    click.option(
        "-n",
        "--max-tokens",
        type=int,
        default=MAX_TOKENS,
        show_default=True,
        help="Maximum number of tokens of an answer.",
    ),
    click.option("--stop", multiple=True, metavar="TEXT", help="End the answer at TEXT. Repeatable."),
    click.option("--stop-token", type=int, multiple=True, metavar="ID", help="End at token ID. Repeatable."),
    click.option("--ignore-eos", is_flag=True, help="Continue past the model's end token."),
    click.option(
        "-t",
        "--temperature",
        type=float,
        help="Divide logits by this before sampling; 0 is greedy.  [default: the model's, or 0]",
    ),
    click.option(
        "--top-k", type=int, help="Sample from the k likeliest tokens.  [default: the model's, or all]"
    ),
    click.option(
        "--top-p",
        type=float,
        metavar="PROBABILITY",
        help="Sample from the likeliest tokens up to this total probability.  [default: the model's, or 1]",
    ),
    click.option(
        "--min-p",
        type=float,
        metavar="PROBABILITY",
        help="Drop tokens less probable than this times the likeliest one.  [default: the model's, or 0]",
    ),
    click.option(
        "--repetition-penalty",
        type=float,
        help="Divide logits of tokens in prompt and answer by this.  [default: the model's, or 1]",
    ),
    click.option(
        "--presence-penalty",
        type=float,
        default=0.0,
        show_default=True,
        help="Subtract this from logits of tokens in the answer.",
    ),
    click.option(
        "--frequency-penalty",
        type=float,
        default=0.0,
        show_default=True,
        help="Subtract this times a token's count in the answer.",
    ),
    click.option(
        "--logit-bias",
        multiple=True,
        metavar="ID=VALUE",
        help="Add VALUE to the logit of token ID. Repeatable.",
    ),
    click.option("--seed", type=int, help="Sampling seed.  [default: a new one each time]"),
    model_sampling_option,
)


def model_options(command: Command) -> Command:
    """Adds --model, --weights, --context, --adapter and --level, passed to the command as one `choice`.

    `choice` also has the values of `running_options` and `prefill_option` if they are applied below it.
    """

    @functools.wraps(command)
    def with_choice(**options: Any) -> Any:
        names = [field.name for field in dataclasses.fields(ModelChoice) if field.name in options]
        fields = {name: options.pop(name) for name in names}
        return command(choice=ModelChoice(**fields), **options)

    return _with_options(with_choice, _MODEL_OPTIONS)


def running_options(command: Command) -> Command:
    """Adds --memory, --draft, --program and options of prefill; applied below `model_options`."""
    return _with_options(command, _RUNNING_OPTIONS)


def sampling_options(command: Command) -> Command:
    """Adds length, stops and sampling of an answer; parsed by `answer_options`."""
    return _with_options(command, _SAMPLING_OPTIONS)


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


def _with_options(command: Command, options: tuple[Callable[[Command], Command], ...]) -> Command:
    # The last applied option comes first in the help text.
    for option in reversed(options):
        command = option(command)
    return command


def _bias(pair: str) -> tuple[int, float]:
    token, _, value = pair.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise ConfigError(f"--logit-bias takes ID=VALUE, such as 42=-5, got {pair!r}") from None
