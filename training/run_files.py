"""Small files of a run's folder, each whole or absent; `recipe.json` says whose the folder is."""

import json
from pathlib import Path
from typing import Any, Protocol, Self

from jaxllm.atomic import atomic_file
from jaxllm.errors import CheckpointError, ConfigError

RECIPE_FILE = "recipe.json"
CHECKPOINTS = "checkpoints"

# What a resumed run may change: how long it trains, how it computes, and what it reports.
_MAY_CHANGE = ("steps", "accumulate", "remat", "checkpoint_steps", "log_steps")


class RunRecipe(Protocol):
    """A recipe as JSON."""

    def to_json(self) -> dict[str, Any]:
        """A plain dict that `from_json` reads back."""
        ...

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Read what `to_json` wrote."""
        ...


def write_text(path: Path, text: str) -> None:
    """Replaces a file by a text in UTF-8."""
    with atomic_file(path) as file:
        file.write(text.encode())


def write_json(path: Path, value: Any) -> None:
    """Replaces a file by a JSON value, for people to read too."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def make_run_folder(run_dir: Path) -> bool:
    """Makes a run's folder.

    Returns:
      Whether it holds a run already.

    Raises:
      ConfigError: it cannot be made.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        return (run_dir / RECIPE_FILE).exists()
    except OSError as error:
        raise ConfigError(f"cannot make the run's folder {run_dir}: {error.strerror}") from error


def write_identity(run_dir: Path, recipe: RunRecipe, **learns_from: str) -> None:
    """Claims a folder for a run: its recipe, and names or digests of what it learns from."""
    write_json(run_dir / RECIPE_FILE, {"recipe": recipe.to_json(), **learns_from})


def check_identity(run_dir: Path, recipe: RunRecipe, **learns_from: str) -> None:
    """Checks that a folder's run is this one, so that it can be resumed.

    Raises:
      ConfigError: it is another; the message names what differs.
      CheckpointError: its file cannot be read.
    """
    earlier = read_identity(run_dir)
    # Read by the recipe's class, so that settings younger than the run have their defaults.
    before, now = type(recipe).from_json(earlier.pop("recipe")).to_json(), recipe.to_json()
    differing = [name for name in now if name not in _MAY_CHANGE and before[name] != now[name]]
    differing += [f"the {name}" for name in learns_from if earlier.get(name) != learns_from[name]]
    if differing:
        raise ConfigError(
            f"{run_dir} holds another run, it differs in {', '.join(differing)}; give another --run "
            "folder, or the same recipe and sources to resume"
        )


def read_identity(run_dir: Path) -> dict[str, Any]:
    """What `write_identity` wrote.

    Raises:
      CheckpointError: `run_dir` holds no run, or its file is damaged.
    """
    try:
        identity = json.loads((Path(run_dir) / RECIPE_FILE).read_text(encoding="utf-8"))
        return {**identity, "recipe": {**identity["recipe"]}}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{run_dir} is not the folder of a training run: {error}") from error
