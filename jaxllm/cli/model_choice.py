"""Opens the model chosen by a command's options."""

import dataclasses
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxllm.errors import ConfigError
from jaxllm.serving.host.progress import Progress

if TYPE_CHECKING:
    from jaxllm.formats import WeightFormat
    from jaxllm.serving.engine.engine import Engine
    from jaxllm.serving.ground.int8_prefill_options import IntegerDevice, Mode, PrefillOptions
    from jaxllm.serving.ground.options import EngineOptions
    from jaxllm.serving.ground.speculation_options import SpeculationOptions

_WHOLE = 100
# Fields of a choice that also apply to exported programs.
_OF_PROGRAMS = ("program", "level", "draft")
# Options whose names differ from their fields.
_OPTION_NAMES = {"context_tokens": "context", "most_loss": "max-prefill-loss"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelChoice:
    """Values of the options of `jaxllm.cli.shared_options.model_options` and `running_options`.

    Attributes:
      model: a bundle, a Hugging Face folder, or a packaged model's name; None for the packaged default.
      weights: width of a folder's weights; None for the checkpoint's own.
      context_tokens: maximum number of tokens of prompt and answer together; 0 for the model's window,
        within bounds.
      adapter: folder of a low-rank adapter.
      level: level of an elastic bundle, in percent.
      memory: memory limit in bytes of weights, context and activations; 0 for no limit.
      draft: the drafter, in the format of `speculation`; None for self-drafting if supported and faster.
      program: folder of exported programs, instead of a model.
      prefill: the prefill mode; None for the engine's default.
      processors: number of prefill processors, 1 or 2.
      integer_device: device of the integer processor of two.
      most_loss: maximum growth of the perplexity by integer prefill, a share; None for the engine's default.
      expert_loss: share of a mixture that may be computed with high planes only (see `ExpertOptions`).
    """

    model: Path | None = None
    weights: "WeightFormat | None" = None
    context_tokens: int = 0
    adapter: Path | None = None
    level: int = _WHOLE
    memory: int = 0
    draft: str | None = "none"
    program: Path | None = None
    prefill: "Mode | None" = None
    processors: int = 1
    integer_device: "IntegerDevice" = "cpu"
    most_loss: float | None = None
    expert_loss: float = 0.0

    def open(self, progress: Progress, *, warm_up: bool = True, images: bool = False) -> "Engine":
        """Opens the chosen engine; for prompts with images if `images`.

        Raises:
          ConfigError: the choice is an exported program, with options that only a bundle has.
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
            prefill=self._prefill_options(),
            experts=ExpertOptions(loss=self.expert_loss),
            prompt_rows=images,
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

    def open_other(self, model: Path, progress: Progress) -> "Engine":
        """Opens another model, with these options except adapter, level, memory and draft."""
        from jaxllm.serving.ground.options import EngineOptions

        return self._open(model, EngineOptions(context_tokens=self.context_tokens), progress, warm_up=False)

    def _prefill_options(self) -> "PrefillOptions":
        from jaxllm.serving.ground.int8_prefill_options import PrefillOptions

        options = PrefillOptions(
            mode=self.prefill or "", processors=self.processors, integer_device=self.integer_device
        )
        return options if self.most_loss is None else dataclasses.replace(options, most_loss=self.most_loss)

    def _open(
        self, model: Path | None, options: "EngineOptions", progress: Progress, **more: Any
    ) -> "Engine":
        from jaxllm.serving.opening.engine import Engine

        return Engine.open(model, weights=self.weights, options=options, progress=progress, **more)

    def _open_program(self, folder: Path, progress: Progress, *, warm_up: bool) -> "Engine":
        for field in dataclasses.fields(self):
            given = getattr(self, field.name) != field.default
            if given and field.name not in _OF_PROGRAMS:
                option = _OPTION_NAMES.get(field.name, field.name.replace("_", "-"))
                raise ConfigError(
                    f"--{option} cannot be given with --program, whose programs are as they were exported; "
                    "leave it or --program out"
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
    if draft == "ngram":
        return SpeculationOptions(drafter="ngram")
    if draft == "nested":
        return SpeculationOptions(drafter="nested")
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
