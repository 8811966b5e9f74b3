"""Describes the training of an encoder-decoder: one frozen value, read from TOML.

The packaged recipes are the files in `training/recipes/seq2seq`; any other is named by its path.
"""

import dataclasses
import functools
from typing import Any

from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.models.architectures import architecture
from training.recipes.files import PACKAGED, check_keys, load_recipe
from training.settings import TrainSettings, require_float, require_int

_RECIPES = PACKAGED / "seq2seq"
# Their layers are those of `training.seq2seq.forward`.
FAMILIES = ("t5", "mt5", "switch_transformers")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairSource:
    """A source of pairs: two text files, whose lines with the same number are a pair, or JSON lines.

    Attributes:
      name: in metrics, and of the task in the model's folder.
      prefix: what tells the model the task, in front of each source; one token of the tokenizer.
      source: path of a UTF-8 file, a source in each line.
      target: path of a UTF-8 file with the target of each line; empty for JSON lines.
      fields: of JSON lines, the names of the source and of its target; each of a list of targets is a pair.
    """

    name: str
    prefix: str
    source: str
    target: str = ""
    fields: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "fields", tuple(self.fields))
        texts = {"name": self.name, "prefix": self.prefix, "source": self.source}
        if self.target or not self.fields:
            texts["target"] = self.target
        for key, value in (*texts.items(), *(("field", each) for each in self.fields)):
            if not isinstance(value, str) or not value or value != value.strip():
                raise ConfigError(
                    f"the {key} of a source of pairs must be text without spaces around it, got {value!r:.80}"
                )
        if self.fields and (self.target or len(self.fields) != 2):
            raise ConfigError(
                f"the source of pairs {self.name} needs a target file, or two fields of JSON lines: give one "
                f"of both, got target {self.target!r:.80} and fields {list(self.fields)!r:.80}"
            )

    @property
    def files(self) -> tuple[str, ...]:
        """The paths of what is read."""
        return (self.source, self.target) if self.target else (self.source,)

    def to_json(self) -> dict[str, Any]:
        """A plain dict of what is given."""
        data = {**dataclasses.asdict(self), "fields": list(self.fields)}
        return {key: value for key, value in data.items() if value}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seq2SeqRecipe(TrainSettings):
    """The training of one encoder-decoder.

    A step has `batch` times `row_tokens` tokens on each side, in rows of one of the `lengths`.

    Attributes:
      model: config of the model in Hugging Face's keys, of T5, mT5 or Switch Transformers.
      sources: of the pairs; the first one's task is the model's default.
      lengths: of rows in tokens, ascending; the last one is `row_tokens`.
      held_out_share: share of the pairs that picks the best checkpoint and is not trained on.
      dropout: share of activations that training drops.
      label_smoothing: share of the wanted distribution that all tokens have alike.
      teacher_share: share of the loss that comes from a teacher's distribution; 0 trains without one.
      balance_weight: weight of the load-balancing loss of models with experts.
      router_z_weight: weight of their routers' z-loss.
    """

    model: dict[str, Any]
    sources: tuple[PairSource, ...]
    lengths: tuple[int, ...]
    held_out_share: float = 0.01
    dropout: float = 0.1
    label_smoothing: float = 0.1
    teacher_share: float = 0.0
    balance_weight: float = 0.01
    router_z_weight: float = 0.001

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.model, dict) or self.model.get("model_type") not in FAMILIES:
            raise ConfigError(f"the recipe's model needs a model_type of {', '.join(FAMILIES)}")
        self.require_window(self.cfg.window_tokens)
        for length in self.lengths:
            require_int("each of lengths", length, 1)
        if not self.lengths or list(self.lengths) != sorted(set(self.lengths)):
            raise ConfigError(f"lengths must be ascending numbers, got {self.lengths}")
        if self.lengths[-1] != self.row_tokens:
            raise ConfigError(
                f"the last of lengths must be row_tokens, {self.row_tokens}; got {self.lengths}"
            )
        capacity = max(self.cfg.expert_capacity, self.cfg.encoder.expert_capacity if self.cfg.encoder else 0)
        if 0 < capacity < self.row_tokens:
            raise ConfigError(
                f"experts take at most {capacity} tokens of a row (expert_capacity), but rows have up to "
                f"{self.row_tokens}: training lets no token pass by; raise expert_capacity"
            )
        if not self.sources:
            raise ConfigError("the recipe names no sources of pairs; give at least one")
        require_float("held_out_share", self.held_out_share, above=0, below=1)
        for name in ("dropout", "label_smoothing"):
            require_float(name, getattr(self, name), least=0, most=0.9)
        require_float("teacher_share", self.teacher_share, least=0, most=1)
        for name in ("balance_weight", "router_z_weight"):
            require_float(name, getattr(self, name), least=0)

    @functools.cached_property
    def cfg(self) -> ModelConfig:
        """The model."""
        return architecture(self.model["model_type"]).config_from_hf(self.model)

    def to_json(self) -> dict[str, Any]:
        """A plain dict that `from_json` reads back."""
        sources = [each.to_json() for each in self.sources]
        return {**dataclasses.asdict(self), "lengths": list(self.lengths), "sources": sources}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Seq2SeqRecipe":
        """Read what `to_json` wrote, or a parsed TOML file.

        Raises:
          ConfigError: a key is unknown or missing, or a value is out of its domain.
        """
        check_keys(cls, data)
        try:
            sources = tuple(PairSource(**each) for each in data["sources"])
            lengths = tuple(data["lengths"])
        except TypeError as error:
            raise ConfigError(f"malformed sources or lengths: {error}") from error
        return cls(**{**data, "sources": sources, "lengths": lengths})


def seq2seq_recipe_names() -> list[str]:
    """Names of the packaged recipes; a `.base.toml` is none, but the base of others."""
    return sorted(path.stem for path in _RECIPES.glob("*.toml") if "." not in path.stem)


def load_seq2seq_recipe(name: str) -> Seq2SeqRecipe:
    """The recipe called `name`, or the one in the TOML file at path `name` (ending in `.toml`).

    Raises:
      ConfigError: there is no such recipe, or it is malformed.
    """
    return load_recipe(name, Seq2SeqRecipe.from_json, _RECIPES, seq2seq_recipe_names())
