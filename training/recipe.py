"""What a pretraining run is: one frozen value, read from TOML.

The recipes that come with the package are the files in `training/recipes`; any other is named by its
path. A recipe may name its sources, by paths under the folder of all data that the command line gives; one
that names none trains on whatever texts it is given.
"""

import dataclasses
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.input_files import read_text
from jaxllm.tasks import find_task
from training.settings import TrainSettings, require_float
from training.tokenizer import ROLE_TEMPLATE

PACKAGED = Path(__file__).parent / "recipes"
_MAX_RECIPE_BYTES = 1 << 20
Read = TypeVar("Read")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """Where documents come from: one of a text file, the same as stories to be told, or a task.

    Attributes:
      text: path of a text file, each document to be learnt whole.
      stories: path of a text file, each document as the request to tell it from its first sentence.
      task: a name in `jaxllm.tasks.TASKS`; its training split, as questions with answers.
      repeats: how often an epoch takes each document; below 1, a new draw of so many every epoch.
      prompt_weight: of the loss on a prompt's tokens.
      answer_weight: of the loss on all other tokens.
    """

    text: str = ""
    stories: str = ""
    task: str = ""
    repeats: float = 1.0
    prompt_weight: float = 1.0
    answer_weight: float = 1.0

    def __post_init__(self) -> None:
        named = [value for value in (self.text, self.stories, self.task) if value]
        if len(named) != 1 or not isinstance(named[0], str):
            raise ConfigError(f"a source is one of text, stories and task, each a name; got {named}")
        if self.task:
            find_task(self.task)
        require_float("repeats", self.repeats, least=0, most=1000)
        require_float("prompt_weight", self.prompt_weight, least=0, most=1000)
        require_float("answer_weight", self.answer_weight, least=0, most=1000)

    @property
    def name(self) -> str:
        """What it is called in metrics."""
        if self.task:
            return self.task
        return Path(self.text).stem if self.text else f"{Path(self.stories).stem}-told"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe(TrainSettings):
    """One pretraining run.

    Attributes:
      model: what is trained.
      sources: what it is trained on; empty for texts that the command line names.
      held_out_share: of the documents, kept out of training to pick the best checkpoint.
      teacher_share: of the loss that is taken from a teacher's distribution; 0 trains without one.
      balance_weight: of the load-balancing loss of models with experts.
      router_z_weight: of their routers' z-loss.
      chat_template: Jinja, how messages become the prompt; written into the tokenizer's config.
    """

    model: ModelConfig
    sources: tuple[Source, ...] = ()
    held_out_share: float = 0.02
    teacher_share: float = 0.0
    balance_weight: float = 0.01
    router_z_weight: float = 0.001
    chat_template: str = ROLE_TEMPLATE

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_window(self.model.window_tokens)
        require_float("held_out_share", self.held_out_share, above=0, below=1)
        require_float("teacher_share", self.teacher_share, least=0, most=1)
        require_float("balance_weight", self.balance_weight, least=0)
        require_float("router_z_weight", self.router_z_weight, least=0)
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
        check_keys(cls, data)
        if not isinstance(data["model"], dict):
            raise ConfigError(f"the recipe's model must be a table, got {data['model']!r}")
        parts = {
            "model": ModelConfig.from_json(data["model"]),
            "sources": read_sources(data.get("sources", [])),
        }
        return cls(**{**data, **parts})


def recipe_names() -> list[str]:
    """The recipes that come with the package (a `.base.toml` is not one, but what others stand on)."""
    return sorted(path.stem for path in PACKAGED.glob("*.toml") if "." not in path.stem)


def load_recipe(name: str) -> Recipe:
    """The recipe called `name`, or the one in the TOML file at path `name` (ending in `.toml`).

    Raises:
      ConfigError: there is no such recipe, or it is malformed.
    """
    return load(name, Recipe.from_json, PACKAGED, recipe_names())


def load(name: str, read: Callable[[dict[str, Any]], Read], folder: Path, names: Sequence[str]) -> Read:
    """What `read` makes of a recipe: the one of `names` in `folder`, or a TOML file by its path.

    A recipe may name as its `base` another file beside it, whose keys hold where it has none of its own.

    Raises:
      ConfigError: there is no such recipe, or it is malformed.
    """
    if not name.endswith(".toml") and name not in names:
        raise ConfigError(
            f"there is no recipe {name!r}; the recipes are {', '.join(names)}, or give the path of a .toml "
            "file"
        )
    place = Path(name) if name.endswith(".toml") else folder / f"{name}.toml"
    try:
        table = _read_toml(place)
        if "base" in table:
            base = _read_toml(place.parent / str(table.pop("base")))
            if "base" in base:
                raise ConfigError("the base of a recipe stands on another itself")
            table = {**base, **table}
        return read(table)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read the recipe {name}: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"recipe {name}: {error}") from error


def check_keys(recipe: type, data: dict[str, Any]) -> None:
    """Raises ConfigError unless `data` has the fields of a dataclass, and all that have no default."""
    fields = {field.name: field for field in dataclasses.fields(recipe)}
    if unknown := sorted(set(data) - set(fields)):
        raise ConfigError(
            f"unknown recipe key {', '.join(unknown)}; the keys are {', '.join(sorted(fields))}"
        )
    missing = sorted(
        name
        for name, field in fields.items()
        if field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
        and name not in data
    )
    if missing:
        raise ConfigError(f"the recipe lacks {', '.join(missing)}")


def read_sources(tables: Any) -> tuple[Source, ...]:
    """Sources from tables of their fields.

    Raises:
      ConfigError: a table is malformed.
    """
    try:
        return tuple(Source(**table) for table in tables)
    except TypeError as error:
        raise ConfigError(f"malformed sources: {error}") from error


def _read_toml(path: Path) -> dict[str, Any]:
    return tomllib.loads(read_text(path, _MAX_RECIPE_BYTES))
