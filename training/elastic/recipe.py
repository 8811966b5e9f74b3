"""Describes how a model becomes elastic: one frozen value, read from TOML."""

import dataclasses
from typing import Literal

from jaxllm.elastic.ladder import LEVELS, Ladder
from jaxllm.errors import ConfigError
from training.elastic.importance import MEASURES, Measure
from training.lora.recipe import LoraRecipe
from training.recipes.files import PACKAGED, load_recipe
from training.settings import require_float, require_int

RecoveryKind = Literal["lora", "joint", "none"]
_RECIPES = PACKAGED / "elastic"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ElasticRecipe(LoraRecipe):
    """One run; `steps` are those of each level's adapter, or of all levels together.

    Attributes:
      levels: in percent, ascending, the last one 100.
      anchor_share: share of the layers, the most important ones, that stay whole as long as a level allows.
      calibration_tokens: tokens of the training split on which importance is measured.
      importance: of units: by the "gradient" of the loss, or by "fisher" information, row by row.
      units: how a level's units are chosen: an "equal" share of every layer but the anchors, as in the paper,
        or "global"ly, those of all layers that matter most per parameter.
      order: order of units: by "importance", or to compare with, by "magnitude" or at "random".
      shortened_share: share of the questions that lose words, as prompts do in service (see
        `training.data.shortened_prompts`).
      recovery: "lora" for an adapter per level over frozen weights, "joint" to train all levels' weights
        together, "none" for neither.
      whole_kl_nats: bound of a joint recovery on how far the whole model may go from the one before: the mean
        divergence of its distribution over the next token, in nats, on the held-out text. 0: no bound.
    """

    levels: tuple[int, ...] = LEVELS
    anchor_share: float = 0.2
    calibration_tokens: int = 1 << 16
    importance: Measure = "gradient"
    order: Literal["importance", "magnitude", "random"] = "importance"
    units: Literal["equal", "global"] = "equal"
    shortened_share: float = 0.0
    recovery: RecoveryKind = "lora"
    whole_kl_nats: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.levels, list | tuple):
            raise ConfigError(f"levels must be a list of percentages, got {self.levels!r:.80}")
        object.__setattr__(self, "levels", tuple(self.levels))
        Ladder(levels=self.levels)
        require_float("anchor_share", self.anchor_share, least=0, most=1)
        require_float("shortened_share", self.shortened_share, least=0, most=1)
        require_int("calibration_tokens", self.calibration_tokens, 1)
        if self.order not in ("importance", "magnitude", "random"):
            raise ConfigError(f"order must be importance, magnitude or random, got {self.order!r}")
        if self.units not in ("equal", "global"):
            raise ConfigError(f"units must be equal or global, got {self.units!r}")
        if self.units == "global" and self.order != "importance":
            raise ConfigError("units are chosen globally by their importance: take order = importance")
        if self.importance not in MEASURES:
            raise ConfigError(f"importance must be one of {', '.join(MEASURES)}, got {self.importance!r}")
        require_float("whole_kl_nats", self.whole_kl_nats, least=0)
        if self.whole_kl_nats and self.recovery != "joint":
            raise ConfigError(
                f"whole_kl_nats bounds a joint recovery; {self.recovery} leaves the whole model as it is, so "
                "leave it out"
            )
        if self.recovery not in ("lora", "joint", "none"):
            raise ConfigError(f"recovery must be lora, joint or none, got {self.recovery!r}")


def elastic_recipe_names() -> list[str]:
    """The recipes of elastic models that come with the package."""
    return sorted(path.stem for path in _RECIPES.glob("*.toml"))


def load_elastic_recipe(name: str) -> ElasticRecipe:
    """The recipe called `name`, or the one in the TOML file at path `name`.

    Raises:
      ConfigError: there is no such recipe, or it is malformed.
    """
    return load_recipe(name, ElasticRecipe.from_json, _RECIPES, elastic_recipe_names())
