"""What a pretraining run is: one frozen value, read from TOML.

The recipes that come with the package are the files in `training/recipes`; any other is named by its
path. A recipe names no text: the same one trains on whatever files it is given.
"""

import dataclasses
import importlib.resources
import tomllib
from pathlib import Path
from typing import Any

from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """One pretraining run. All fields are required but the ones with a default.

    Attributes:
      model: what is trained.
      steps: optimizer steps of the whole run.
      batch: B, windows per step.
      window_tokens: T, tokens the model sees at once in training, at most the model's window.
      seed: of the initial parameters and the order of the windows.
      held_out_share: of the documents, kept out of training to pick the best checkpoint.
      peak_learning_rate: reached after `warmup_steps` and left on a cosine.
      final_learning_rate_share: of the peak, reached at the last step.
      warmup_steps: of linear warm-up from zero.
      weight_decay: AdamW's, on matrices only.
      beta1, beta2: AdamW's.
      clip_norm: the gradient's global norm is cut to this.
      checkpoint_steps: steps between two checkpoints, each with its held-out loss.
      log_steps: steps between two lines of metrics.
      chat_template: Jinja, how messages become the prompt; written into the tokenizer's config.
    """

    model: ModelConfig
    steps: int
    batch: int
    window_tokens: int
    peak_learning_rate: float
    chat_template: str
    seed: int = 0
    held_out_share: float = 0.02
    final_learning_rate_share: float = 0.1
    warmup_steps: int = 100
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    clip_norm: float = 1.0
    checkpoint_steps: int = 100
    log_steps: int = 10

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "window_tokens", "checkpoint_steps", "log_steps"):
            _require_int(name, getattr(self, name), 1)
        for name in ("seed", "warmup_steps"):
            _require_int(name, getattr(self, name), 0)
        if self.window_tokens > self.model.window_tokens:
            raise ConfigError(
                f"window_tokens ({self.window_tokens}) must be at most the model's window "
                f"({self.model.window_tokens})"
            )
        _require_float("held_out_share", self.held_out_share, above=0, below=1)
        _require_float("peak_learning_rate", self.peak_learning_rate, above=0, below=1)
        _require_float("clip_norm", self.clip_norm, above=0)
        for name in ("beta1", "beta2"):
            _require_float(name, getattr(self, name), least=0, below=1)
        _require_float("weight_decay", self.weight_decay, least=0)
        _require_float("final_learning_rate_share", self.final_learning_rate_share, least=0, most=1)
        if not isinstance(self.chat_template, str):
            raise ConfigError(f"chat_template must be text, got {self.chat_template!r}")

    def to_json(self) -> dict[str, Any]:
        """A plain dict that `from_json` reads back."""
        return {**dataclasses.asdict(self), "model": self.model.to_json()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Recipe":
        """Read what `to_json` wrote, or a parsed TOML file.

        Raises:
          ConfigError: a key is unknown or missing, or a value is out of its domain.
        """
        fields = {field.name: field for field in dataclasses.fields(cls)}
        unknown = sorted(set(data) - set(fields))
        if unknown:
            raise ConfigError(
                f"unknown recipe key {', '.join(unknown)}; the keys are {', '.join(sorted(fields))}"
            )
        missing = sorted(
            name
            for name, field in fields.items()
            if field.default is dataclasses.MISSING and name not in data
        )
        if missing:
            raise ConfigError(f"the recipe lacks {', '.join(missing)}")
        if not isinstance(data["model"], dict):
            raise ConfigError(f"the recipe's model must be a table, got {data['model']!r}")
        return cls(**{**data, "model": ModelConfig.from_json(data["model"])})


def recipe_names() -> list[str]:
    """The recipes that come with the package."""
    files = importlib.resources.files("training") / "recipes"
    return sorted(Path(file.name).stem for file in files.iterdir() if file.name.endswith(".toml"))


def load_recipe(name: str) -> Recipe:
    """The recipe called `name`, or the one in the TOML file at path `name` (ending in `.toml`).

    Raises:
      ConfigError: there is no such recipe, or it is malformed.
    """
    if not name.endswith(".toml") and name not in recipe_names():
        raise ConfigError(
            f"there is no recipe {name!r}; the recipes are {', '.join(recipe_names())}, or give the "
            "path of a .toml file"
        )
    try:
        if name.endswith(".toml"):
            text = Path(name).read_text(encoding="utf-8")
        else:
            source = importlib.resources.files("training") / "recipes" / f"{name}.toml"
            text = source.read_text(encoding="utf-8")
        return Recipe.from_json(tomllib.loads(text))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read the recipe {name}: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"recipe {name}: {error}") from error


def _require_int(name: str, value: Any, low: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ConfigError(f"{name} must be a whole number of at least {low}, got {value!r}")


def _require_float(
    name: str,
    value: Any,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
) -> None:
    bounds = {
        "at least": (least, lambda bound: value >= bound),
        "above": (above, lambda bound: value > bound),
        "at most": (most, lambda bound: value <= bound),
        "below": (below, lambda bound: value < bound),
    }
    asked = {word: test for word, test in bounds.items() if test[0] is not None}
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not all(test(bound) for bound, test in asked.values()):
        wanted = " and ".join(f"{word} {bound}" for word, (bound, _) in asked.items())
        raise ConfigError(f"{name} must be a number {wanted}, got {value!r}")
