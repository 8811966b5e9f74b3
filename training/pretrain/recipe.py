"""Describes a pretraining run: one frozen value, read from TOML.

The packaged recipes are the files in `training/recipes/pretrain`; any other is named by its path. A recipe
may name its sources, by paths under the folder of all data that the command line gives; one that names none
trains on any texts that it is given.
"""

import dataclasses
from typing import Any

from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from training.data.packing import LOADERS, Loader
from training.data.sources import Source, read_sources
from training.data.tokenizer import ROLE_TEMPLATE
from training.recipes.files import PACKAGED, check_keys, load_recipe
from training.settings import TrainSettings, require_float

_RECIPES = PACKAGED / "pretrain"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretrainRecipe(TrainSettings):
    """One pretraining run.

    Attributes:
      model: config of the model.
      sources: of the training documents; empty for texts that the command line names.
      held_out_share: share of the documents that picks the best checkpoint and is not trained on.
      loader: how training rows are made: "packed" documents, or for large corpora windows by "grain" (see
        `training.data.windows`).
      teacher_share: share of the loss that comes from a teacher's distribution; 0 trains without one.
      balance_weight: weight of the load-balancing loss of models with experts.
      router_z_weight: weight of their routers' z-loss.
      chat_template: Jinja template that makes messages a prompt; written into the tokenizer's config.
    """

    model: ModelConfig
    sources: tuple[Source, ...] = ()
    held_out_share: float = 0.02
    loader: Loader = "packed"
    teacher_share: float = 0.0
    balance_weight: float = 0.01
    router_z_weight: float = 0.001
    chat_template: str = ROLE_TEMPLATE

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_window(self.model.window_tokens)
        require_float("held_out_share", self.held_out_share, above=0, below=1)
        if self.loader not in LOADERS:
            raise ConfigError(f"loader must be one of {', '.join(LOADERS)}, got {self.loader!r}")
        require_float("teacher_share", self.teacher_share, least=0, most=1)
        require_float("balance_weight", self.balance_weight, least=0)
        require_float("router_z_weight", self.router_z_weight, least=0)
        if not isinstance(self.chat_template, str):
            raise ConfigError(f"chat_template must be text, got {self.chat_template!r}")

    def to_json(self) -> dict[str, Any]:
        """A plain dict that `from_json` reads back."""
        return {**dataclasses.asdict(self), "model": self.model.to_json()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "PretrainRecipe":
        """Read what `to_json` wrote, or a parsed TOML file.

        Raises:
          ConfigError: a key is unknown or missing, or a value is out of its domain.
        """
        check_keys(cls, data)
        if not isinstance(data["model"], dict):
            raise ConfigError(f"the recipe's model must be a TOML table, got {data['model']!r}")
        parts = {
            "model": ModelConfig.from_json(data["model"]),
            "sources": read_sources(data.get("sources", [])),
        }
        return cls(**{**data, **parts})


def pretrain_recipe_names() -> list[str]:
    """Names of the packaged recipes; a `.base.toml` is none, but the base of others."""
    return sorted(path.stem for path in _RECIPES.glob("*.toml") if "." not in path.stem)


def load_pretrain_recipe(name: str) -> PretrainRecipe:
    """The recipe called `name`, or the one in the TOML file at path `name` (ending in `.toml`).

    Raises:
      ConfigError: there is no such recipe, or it is malformed.
    """
    return load_recipe(name, PretrainRecipe.from_json, _RECIPES, pretrain_recipe_names())
