"""Describes a tiny LM's training: one frozen value, read from TOML."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from jaxllm.config import WHOLE
from jaxllm.elastic.ladder import LEVELS
from jaxllm.elastic.slo import PROMPT_RATIOS
from jaxllm.errors import ConfigError
from jaxllm.models.encoder.config import EncoderConfig
from jaxllm.tasks import find_task
from training.recipes.files import PACKAGED, check_keys, load_recipe
from training.settings import TrainSettings, require_float, require_int

_RECIPES = PACKAGED / "tiny_lm"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TinyLmRecipe:
    """One run: a tiny LM's score head, then its decision head.

    Attributes:
      score, decide: settings of each head's training; `row_tokens`, equal in both, is the length of a
        prompt's rows in service, too.
      encoder: the encoder to train from nothing, whose vocabulary is that of the model's tokenizer; None
        where the run starts from a MobileBERT folder.
      shared_layers: number of its layers that both heads share.
      levels: in percent, those that the decision chooses among.
      prompt_ratios: shares of a prompt that the decision chooses among.
      compressions: files of texts with shorter versions, under the folder of all data.
      instructions: system's turns that texts are put under; an empty one is none.
      tasks: names in `jaxllm.tasks.TASKS`, with options; their training splits are the questions.
      questions: most questions of each task that decisions are learnt from.
      used_questions: most questions of each task from which the score head learns the words that the elastic
        model uses (see `word_labels`); 0 for none.
      used_weight: weight of the loss on their tokens; that on tokens of shortened texts is 1.
      held_out_share: share of texts and of questions that picks the best checkpoints and is not trained on.
    """

    score: TrainSettings
    decide: TrainSettings
    encoder: EncoderConfig | None = None
    shared_layers: int
    levels: tuple[int, ...] = LEVELS
    prompt_ratios: tuple[float, ...] = PROMPT_RATIOS
    compressions: tuple[str, ...]
    instructions: tuple[str, ...] = ("",)
    tasks: tuple[str, ...]
    questions: int = 300
    used_questions: int = 0
    used_weight: float = 1.0
    held_out_share: float = 0.05

    def __post_init__(self) -> None:
        if self.score.row_tokens != self.decide.row_tokens:
            raise ConfigError(
                f"both heads read the same rows: row_tokens of score ({self.score.row_tokens}) and of decide "
                f"({self.decide.row_tokens}) must be equal"
            )
        require_int("shared_layers", self.shared_layers, 0)
        require_int("questions", self.questions, 2)
        require_int("used_questions", self.used_questions, 0)
        require_float("used_weight", self.used_weight, least=0, most=1000)
        require_float("held_out_share", self.held_out_share, above=0, below=1)
        for name, most in (("levels", WHOLE), ("prompt_ratios", 1)):
            values = getattr(self, name)
            numbers = isinstance(values, tuple) and all(isinstance(each, int | float) for each in values)
            rising = numbers and list(values) == sorted(set(values))
            if not rising or not values or values[0] <= 0 or values[-1] > most:
                raise ConfigError(f"{name} must be ascending numbers in (0, {most}], got {values!r:.80}")
        for name, least in (("compressions", 1), ("instructions", 0), ("tasks", 1)):
            values = getattr(self, name)
            if not all(isinstance(each, str) for each in values) or len(values) < least:
                raise ConfigError(f"{name} must be a list of at least {least} texts, got {values!r:.80}")
        for name in self.tasks:
            if find_task(name).score != "accuracy":
                raise ConfigError(f"the task {name} has no options to compare; leave it out")

    def to_json(self) -> dict[str, Any]:
        """A plain dict that `from_json` reads back."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "TinyLmRecipe":
        """Read what `to_json` wrote, or a parsed TOML file.

        Raises:
          ConfigError: a key is unknown or missing, or a value is out of its domain.
        """
        check_keys(cls, data)
        fields = dict(data)
        for name in ("score", "decide"):
            if not isinstance(fields[name], dict):
                raise ConfigError(f"the recipe's {name} must be a TOML table, got {fields[name]!r:.80}")
            check_keys(TrainSettings, fields[name])
            fields[name] = TrainSettings(**fields[name])
        if fields.get("encoder") is not None:
            fields["encoder"] = EncoderConfig.from_json(fields["encoder"])
        for name, value in fields.items():
            if isinstance(value, list):
                fields[name] = tuple(value)
        return cls(**fields)


@dataclasses.dataclass(frozen=True)
class TinyLmRun:
    """The training of a tiny LM beside that of an elastic model.

    Attributes:
      recipe: of the training; its levels are the elastic model's.
      encoder: a MobileBERT folder to start from; None starts from random parameters.
    """

    recipe: TinyLmRecipe
    encoder: Path | None = None


def tiny_lm_recipe_names() -> list[str]:
    """The recipes of tiny LMs that come with the package."""
    return sorted(path.stem for path in _RECIPES.glob("*.toml"))


def load_tiny_lm_recipe(name: str) -> TinyLmRecipe:
    """The tiny LM's recipe called `name`, or the one in the TOML file at path `name`.

    Raises:
      ConfigError: there is no such recipe, or it is malformed.
    """
    return load_recipe(name, TinyLmRecipe.from_json, _RECIPES, tiny_lm_recipe_names())
