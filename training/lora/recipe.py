"""Describes a run of low-rank adaptation: one frozen value, read from TOML."""

import dataclasses
import json
from typing import Any, Self

from jaxllm.errors import ConfigError
from jaxllm.models.lora import LoraConfig
from training.data.packing import LOADERS, Loader
from training.data.sources import Source, read_sources
from training.recipes.files import PACKAGED, check_keys, load_recipe
from training.settings import TrainSettings, require_float

_RECIPES = PACKAGED / "lora"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraRecipe(TrainSettings):
    """One run of low-rank adaptation.

    Attributes:
      lora: rank, alpha and targets.
      sources: of the training documents.
      held_out_share: share of the documents that picks the best checkpoint and is not trained on.
      loader: how training rows are made: "packed" documents, or for large corpora windows by "grain" (see
        `training.data.windows`).
    """

    lora: LoraConfig = dataclasses.field(default_factory=LoraConfig)
    sources: tuple[Source, ...]
    held_out_share: float = 0.02
    loader: Loader = "packed"
    # An adapter is small and starts at zero.
    weight_decay: float = 0.0
    warmup_steps: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        require_float("held_out_share", self.held_out_share, above=0, below=1)
        if self.loader not in LOADERS:
            raise ConfigError(f"loader must be one of {', '.join(LOADERS)}, got {self.loader!r}")
        if not self.sources:
            raise ConfigError("an adapter needs something to learn: give at least one source")

    def to_json(self) -> dict[str, Any]:
        """A plain dict that `from_json` reads back."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Read what `to_json` wrote, or a parsed TOML file.

        Raises:
          ConfigError: a key is unknown or missing, or a value is out of its domain.
        """
        check_keys(cls, data)
        section = data.get("lora", {})
        try:
            lora = LoraConfig(**{**section, "targets": tuple(section.get("targets", LoraConfig.targets))})
        except (TypeError, AttributeError) as error:
            raise ConfigError(f"malformed lora: {error}") from error
        return cls(**{**data, "lora": lora, "sources": read_sources(data["sources"])})


def lora_recipe_names() -> list[str]:
    """The recipes of adapters that come with the package."""
    return sorted(path.stem for path in _RECIPES.glob("*.toml"))


def load_lora_recipe(name: str) -> LoraRecipe:
    """The adapter's recipe called `name`, or the one in the TOML file at path `name`.

    Raises:
      ConfigError: there is no such recipe, or it is malformed.
    """
    return load_recipe(name, LoraRecipe.from_json, _RECIPES, lora_recipe_names())
