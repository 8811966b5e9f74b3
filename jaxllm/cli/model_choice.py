"""Declares the options that choose a model, and opens it."""

import dataclasses
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jaxllm.errors import ConfigError
from jaxllm.formats import AUTO, WEIGHT_FORMATS
from jaxllm.int8_prefill.recipe import MOST_LOSS
from jaxllm.option_types import Level, Share, Size
from jaxllm.options import option
from jaxllm.serving.ground.int8_prefill_options import IntegerDevice, Mode, PrefillOptions
from jaxllm.serving.host.progress import Progress

if TYPE_CHECKING:
    from jaxllm.formats import WeightChoice
    from jaxllm.serving.engine.engine import Engine
    from jaxllm.serving.ground.options import EngineOptions
    from jaxllm.serving.ground.speculation_options import SpeculationOptions

_WHOLE = 100
# Fields of a choice that also apply to exported programs.
_OF_PROGRAMS = ("program", "level", "draft")


def _field(value: Any, text: str, /, *flags: str, **how: Any) -> Any:
    """A field with a default value, a help text, and arguments of `click.option`."""
    return option(value, text, flags=flags, click={"default": value, **how})


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelChoice:
    """Values of the options of `jaxllm.cli.shared_options.model_options` and `running_options`. The options'
    help describes them; numbers of bytes are in bytes, shares from 0 to 1, levels in percent.

    Attributes:
      draft: the drafter, in the format of `speculation`; None for self-drafting if supported and faster.
    """

    model: Path | None = _field(  # noqa: RUF009
        None,
        "A bundle, a Hugging Face folder, a GGUF file, a packaged model's name, package:NAME of an installed "
        "package, or hf:OWNER/NAME of the hub.  [default: default]",
        "-m",
        "--model",
        metavar="MODEL",
    )
    weights: "WeightChoice | None" = _field(  # noqa: RUF009
        None,
        "Width of the weights of a Hugging Face folder or a GGUF file; auto takes the best that --memory "
        "holds, or the smallest that loses at most 1 %.  [default: the checkpoint's own]",
        type=click.Choice((*WEIGHT_FORMATS, AUTO)),
    )
    context_tokens: int = _field(
        0,
        "Maximum number of tokens of prompt and answer together.  [default: the model's window, up to 2048]",
        "--context",
        type=int,
        metavar="TOKENS",
    )
    adapter: Path | None = _field(  # noqa: RUF009
        None, "A low-rank adapter of the model, a folder in PEFT's layout.  [default: none]", metavar="DIR"
    )
    level: int = _field(
        _WHOLE, "The level of an elastic bundle to run.  [default: the whole model]", type=Level()
    )
    memory: int = _field(
        0,
        "Memory limit of weights, context and activations, e.g. 300MB. Layers of a larger model are read "
        "from storage on demand.  [default: no limit]",
        type=Size(),
    )
    draft: str | None = _field(
        "none",
        "Draft tokens for the model to verify, with a small model of the same tokenizer (MODEL; with "
        "--program a folder of programs), a level of the model itself (level:PERCENT), the high planes of "
        "int8-nested weights (nested, nested:PERCENT), earlier continuations in the text (ngram), or not at "
        "all (none). The answer stays the same.  [default: nested for int8-nested weights, while it is "
        "measured to be faster; none for others]",
        default=None,
        metavar="DRAFT",
    )
    prefill: Mode | None = _field(  # noqa: RUF009
        None,
        "Compute prompts in floats, in 8-bit integers (requires a bundle of `jaxllm calibrate prefill`), or "
        "in whichever is faster for a prompt (requires times of `jaxllm profile --prefill auto`).  [default: "
        "float; int8 with --processors 2]",
    )
    processors: int = _field(
        1,
        "With 2, prompts run on an integer and a float processor in parallel: two cores, or a GPU and the "
        "CPU.  [default: 1]",
        type=click.IntRange(1, 2),
    )
    integer_device: IntegerDevice = _field("cpu", "The integer one of two processors.")  # noqa: RUF009
    most_loss: float | None = _field(
        None,
        "Maximum growth of the perplexity by integer prefill, as measured when the bundle was calibrated; "
        f"inf for any.  [default: {MOST_LOSS:.0%}]",
        "--max-prefill-loss",
        type=Share(most=float("inf"), allow_inf=True),
    )
    expert_loss: float = _field(
        0.0,
        "Maximum share of each token's mixture, its least probable experts, to compute with 4 of 8 bits if "
        "nested experts are read from storage.  [default: none]",
        type=Share(),
    )
    program: Path | None = _field(  # noqa: RUF009
        None,
        "Run the exported programs in this folder (see `jaxllm export`) instead of a model.  [default: none]",
        metavar="DIR",
    )

    def open(
        self, progress: Progress, *, warm_up: bool = True, images: bool = False, each_level: bool = False
    ) -> "Engine":
        """Opens the chosen engine; for prompts with images if `images`, with every level if `each_level`.

        Raises:
          ConfigError: the choice is an exported program, with options that only a bundle has; or it has one
            level, and every level was asked for.
        """
        if self.program is not None:
            if images:
                raise ConfigError("--image cannot be given with --program: no encoder of images is exported")
            return self._open_program(self.program, progress, warm_up=warm_up)
        if self.processors > 1:
            # Imported here: must run before JAX is used.
            from jaxllm.serving.int8_prefill.processors import prepare_processors

            prepare_processors(self.integer_device)
        from jaxllm.serving.ground.expert_options import ExpertOptions
        from jaxllm.serving.ground.options import EngineOptions

        options = EngineOptions(
            context_tokens=self.context_tokens,
            memory_bytes=self.memory,
            prefill=PrefillOptions(
                mode=self.prefill or "",
                processors=self.processors,
                integer_device=self.integer_device,
                most_loss=MOST_LOSS if self.most_loss is None else self.most_loss,
            ),
            experts=ExpertOptions(loss=self.expert_loss),
            prompt_embeddings=images,
            levels=self._every_level() if each_level else (),
        )
        engine = self._open(
            self.model,
            options,
            progress,
            warm_up=warm_up,
            adapter=self.adapter,
            level=self.level,
            speculation=speculation(self.draft),
        )
        if self.prefill == "auto":
            _choose_prefill(engine)
        return engine

    def _every_level(self) -> tuple[int, ...]:
        from jaxllm.serving.ground.bundles import levels_of

        if self.level != _WHOLE:
            raise ConfigError(f"--each-level measures every level; leave --level {self.level} out")
        levels = levels_of(self.model)
        if not levels:
            raise ConfigError(
                f"{self.model or 'the model'} has no levels; make an elastic bundle with `jaxllm "
                "elasticize`, or leave --each-level out"
            )
        return levels

    def open_other(self, model: Path, progress: Progress) -> "Engine":
        """Opens another model, with these options except adapter, level, memory and draft."""
        from jaxllm.serving.ground.options import EngineOptions

        return self._open(model, EngineOptions(context_tokens=self.context_tokens), progress, warm_up=False)

    def _open(
        self, model: Path | None, options: "EngineOptions", progress: Progress, **more: Any
    ) -> "Engine":
        from jaxllm.serving.opening.engine import Engine

        return Engine.open(model, weights=self.weights, options=options, progress=progress, **more)

    def _open_program(self, folder: Path, progress: Progress, *, warm_up: bool) -> "Engine":
        for field in dataclasses.fields(self):
            given = getattr(self, field.name) != field.default
            if given and field.name not in _OF_PROGRAMS:
                flags = field.metadata["option"].flags
                flag = flags[-1] if flags else f"--{field.name.replace('_', '-')}"
                raise ConfigError(
                    f"{flag} cannot be given with --program, whose programs are as they were exported; leave "
                    "it or --program out"
                )
        from jaxllm.export.programs.model import open_program

        drafts = None if self.draft is None else speculation(self.draft)
        engine = open_program(folder, level=self.level, speculation=drafts)
        if warm_up:
            engine.warm_up(progress=progress)
        return engine


def speculation(draft: str | None) -> "SpeculationOptions | None":
    """Parses --draft: "none", "ngram", "level:PERCENT", "nested", "nested:PERCENT", a model, or an added
    drafter; None means `SpeculationOptions.by_itself`.

    Raises:
      ConfigError: the level is not a number.
    """
    from jaxllm.serving.ground.speculation_options import SpeculationOptions

    if not draft:
        return SpeculationOptions.by_itself()
    if draft == "none":
        return None
    name, _, level = draft.partition(":")
    if draft in ("ngram", "nested"):
        return SpeculationOptions(drafter=draft)
    if name in ("level", "nested"):
        if not level.removesuffix("%").isdecimal():
            raise ConfigError(f"--draft {name}: takes a percentage, such as {name}:30, got {draft!r:.80}")
        return SpeculationOptions(drafter=name, level=int(level.removesuffix("%")))
    from jaxllm.registry import is_added

    if is_added("jaxllm.drafters", draft) and not Path(draft).exists():
        return SpeculationOptions(drafter=draft)
    return SpeculationOptions(model=draft)


def _choose_prefill(engine: "Engine") -> None:
    """Chooses the faster prefill mode for each prompt from this device's profile."""
    from jaxllm.serving.elastic.profile import load_profile
    from jaxllm.serving.elastic.profiling import choose_prefill, has_both_modes, profile_path

    profile = load_profile(profile_path(engine.model.bundle, engine.options))
    if profile is not None:
        choose_prefill(engine, profile)
    elif has_both_modes(engine):
        logging.getLogger("jaxllm").warning(
            "prompts are prefilled in floats: this device has no times of both modes yet; `jaxllm profile "
            "BUNDLE --prefill auto` measures them"
        )
