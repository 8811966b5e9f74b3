"""Describes a run: its folder, whose `recipe.json` identifies it, its devices, and where it reports."""

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from rich.console import Console

from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.files.atomic import atomic_file
from jaxllm.files.input_files import read_text
from jaxllm.training.data.sources import require_bucket, require_local
from jaxllm.training.loop.parallel import ALL_DEVICES, MeshShape, mesh_for
from jaxllm.training.settings import Recipe, TrainSettings

RECIPE_FILE = "recipe.json"
CHECKPOINTS = "checkpoints"
# Where a run's checkpoints are, if not in its folder.
URL_FILE = "checkpoints.url"

# Settings that a resumed run may change: duration, ways to compute, and reports.
_MAY_CHANGE = ("steps", "accumulate", "remat", "checkpoint_steps", "log_steps")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """A run, or a stage of one.

    Attributes:
      folder: its folder, created if missing; the same job in the same folder resumes.
      data: folder of the recipe's sources.
      mesh_shape: devices.
      console: console of lines of progress; None for the terminal's error stream.
      tensorboard: whether TensorBoard's events are written into the folder, too.
      profile: folder for a trace of a few steps (see `StepTrace`); None for no trace.
    """

    folder: Path
    data: Path | None = None
    mesh_shape: MeshShape = ALL_DEVICES
    console: Console | None = None
    tensorboard: bool = False
    profile: Path | None = None

    @property
    def own_console(self) -> Console:
        """The console of this process; all but the first are silent."""
        if not is_first():
            return Console(quiet=True)
        return self.console or Console(stderr=True)

    def mesh(self, settings: TrainSettings) -> Mesh:
        """The run's devices, for steps of these settings; raises ConfigError, see `make_mesh`."""
        return mesh_for(self.mesh_shape, settings)

    def stage(self, *names: str, traced: bool = True) -> "Run":
        """A stage with its own folder inside the run's."""
        profile = self.profile if traced else None
        return dataclasses.replace(self, folder=self.folder.joinpath(*names), profile=profile)

    def say(self, text: str) -> None:
        """Prints a line of progress."""
        self.own_console.print(text, soft_wrap=True)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Writes the run's `summary.json`, in the first process, and prints it."""
        if is_first():
            write_json(self.folder / "summary.json", summary)
        self.own_console.print_json(data=summary)


def keep_checkpoints_at(run_dir: Path, url: str | None) -> None:
    """Records the URL of a run's checkpoints in its folder; None leaves the record unchanged, and checks
    that checkpoints can be written there.

    Args:
      run_dir: folder of the run, created if missing.
      url: `gs://bucket/path` or `s3://bucket/path`; stages of a run have folders of their own under it.

    Raises:
      ConfigError: the URL scheme is not supported, the package that writes it is not installed, or the run
        has its checkpoints elsewhere.
    """
    earlier = _url_of(require_local(run_dir, "a run's folder"))
    if url is None:
        if earlier is not None:
            require_bucket(earlier)
        return
    require_bucket(url)
    url = url.rstrip("/")
    if earlier is None and any(run_dir.glob(f"**/{CHECKPOINTS}")):
        earlier = str(run_dir)
    if earlier not in (None, url):
        raise ConfigError(
            f"the run's checkpoints are in {earlier}, not at {url}; leave --checkpoints out to resume, or "
            "give another --run"
        )
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        write_text(run_dir / URL_FILE, url + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write the run's folder {run_dir}: {error.strerror}") from error


def checkpoints_of(folder: Path) -> Path | str:
    """Returns the place of the checkpoints of a run, or of a stage in its folder: a path or a URL."""
    for run_dir in (folder, *folder.parents):
        if (url := _url_of(run_dir)) is not None:
            return "/".join((url, *folder.relative_to(run_dir).parts, CHECKPOINTS))
        if (run_dir / RECIPE_FILE).exists():
            break
    return folder / CHECKPOINTS


def _url_of(run_dir: Path) -> str | None:
    path = run_dir / URL_FILE
    return read_text(path).strip() if path.exists() else None


def is_first() -> bool:
    """Whether this process is the first of its group, which writes files."""
    return jax.process_index() == 0


def wait_for_first(name: str) -> None:
    """Waits until the first process has written files that the others read."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def write_text(path: Path, text: str) -> None:
    """Replaces a file by a text in UTF-8."""
    with atomic_file(path) as file:
        file.write(text.encode())


def write_json(path: Path, value: Any) -> None:
    """Replaces a file by a readable JSON value."""
    write_text(path, json.dumps(value, indent=2) + "\n")


@contextlib.contextmanager
def claimed(run_dir: Path, recipe: Recipe, **learns_from: str) -> Iterator[bool]:
    """Prepares a run's folder, created if missing, to start or resume a run.

    A new run claims the folder, by its `recipe.json`, when the block ends without an error. In a group the
    first process does so; the others may enter with it if all wait for each other within the block.

    Args:
      run_dir: the folder.
      recipe: recipe of the run. On resumption only duration, parts of a batch, rematerialization and
        logging may differ; an unset precision is that of this process's devices.
      learns_from: names or digests of the run's inputs.

    Yields:
      Whether the run resumes.

    Raises:
      ConfigError: the folder cannot be created, is a URL, or is another run's; the message names the
        differences.
      CheckpointError: its `recipe.json` cannot be read.
    """
    require_local(run_dir, "a run's folder")
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        resuming = (run_dir / RECIPE_FILE).exists()
    except OSError as error:
        raise ConfigError(f"cannot make the run's folder {run_dir}: {error.strerror}") from error
    if resuming:
        _check_identity(run_dir, recipe, learns_from)
    yield resuming
    if not resuming and is_first():
        write_json(run_dir / RECIPE_FILE, {"recipe": _as_computed(recipe), **learns_from})


def read_identity(run_dir: Path) -> dict[str, Any]:
    """Reads a run's `recipe.json`.

    Raises:
      CheckpointError: `run_dir` contains no run, or its file is damaged.
    """
    try:
        identity = json.loads(read_text(Path(run_dir) / RECIPE_FILE))
        return {**identity, "recipe": {**identity["recipe"]}}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{run_dir} is not the folder of a training run: {error}") from error


def _as_computed(recipe: Recipe) -> dict[str, Any]:
    data = recipe.to_json()
    for name, part in vars(recipe).items():
        if isinstance(part, TrainSettings):
            data[name] = {**data[name], "precision": part.computed_in}
    return {**data, "precision": recipe.computed_in} if isinstance(recipe, TrainSettings) else data


def _check_identity(run_dir: Path, recipe: Recipe, learns_from: Mapping[str, str]) -> None:
    earlier = read_identity(run_dir)
    # Read by the recipe's class, so that settings newer than the run have their defaults.
    before, now = (_as_computed(each) for each in (type(recipe).from_json(earlier.pop("recipe")), recipe))
    differing = [name for name in now if name not in _MAY_CHANGE and before[name] != now[name]]
    differing += [f"the {name}" for name in learns_from if earlier.get(name) != learns_from[name]]
    if differing:
        raise ConfigError(
            f"{run_dir} holds another run, it differs in {', '.join(differing)}; give another --run "
            "folder, or the same recipe and sources to resume"
        )
