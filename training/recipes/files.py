"""Reads recipes: TOML files by their paths, packaged ones by their names."""

import dataclasses
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from jaxllm.errors import ConfigError
from jaxllm.files.input_files import read_text

PACKAGED = Path(__file__).parent


_MAX_RECIPE_BYTES = 1 << 20


Read = TypeVar("Read")


def load_recipe(
    name: str, read: Callable[[dict[str, Any]], Read], folder: Path, names: Sequence[str]
) -> Read:
    """Loads a recipe: one of `names` in `folder`, or a TOML file by its path.

    A recipe may name as its `base` another file beside it, whose keys are defaults for its own.

    Args:
      name: a name, or a path that ends in `.toml`.
      read: makes a recipe of a parsed file.
      folder: of the packaged recipes.
      names: of the packaged recipes.

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
        settings = _read_toml(place)
        if "base" in settings:
            base = _read_toml(place.parent / str(settings.pop("base")))
            if "base" in base:
                raise ConfigError("the base of a recipe stands on another itself")
            settings = {**base, **settings}
        return read(settings)
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


def _read_toml(path: Path) -> dict[str, Any]:
    return tomllib.loads(read_text(path, _MAX_RECIPE_BYTES))
