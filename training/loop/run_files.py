"""Describes a run: its folder, whose `recipe.json` identifies it, its devices, and where it reports; and
watches it: shows its progress, traces a few steps with JAX's profiler, and stops it before its process ends.

Progress is a bar and lines for people, and `metrics.jsonl` and TensorBoard's events for programs.
"""

import contextlib
import dataclasses
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import jax
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar

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
        earlier = read_identity(run_dir)
        # Read by the recipe's class, so that settings newer than the run have their defaults.
        before = _as_computed(type(recipe).from_json(earlier.pop("recipe")))
        now = _as_computed(recipe)
        differing = [name for name in now if name not in _MAY_CHANGE and before[name] != now[name]]
        differing += [f"the {name}" for name in learns_from if earlier.get(name) != learns_from[name]]
        if differing:
            raise ConfigError(
                f"{run_dir} holds another run, it differs in {', '.join(differing)}; give another --run "
                "folder, or the same recipe and sources to resume"
            )
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


_NOTE = b"\nstopping after this step, which is saved; Ctrl-C again ends at once\n"


class Preemption:
    """Context in which SIGTERM or Ctrl-C requests a stop after the current step instead of ending the
    process; a second Ctrl-C ends it.

    Several processes agree on the step through JAX's own service, which detects SIGTERM in each of them.

    Attributes:
      reason: signal that requested the stop, for messages.
    """

    def __init__(self) -> None:
        self.reason = ""
        self._before: dict[int, Any] = {}
        # Only the main thread can set handlers; a run in another thread ends at a signal as usual.
        self._handles = jax.process_count() == 1 and threading.current_thread() is threading.main_thread()

    def __enter__(self) -> "Preemption":
        if self._handles:
            for number in (signal.SIGTERM, signal.SIGINT):
                # Ignored, as shells have it in the background, or a host program's in C: it stays so.
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def asked(self, step: int) -> bool:
        """Whether the run shall stop after step `step`, in all processes alike."""
        if jax.process_count() > 1:
            self.reason = "SIGTERM"
            return bool(multihost_utils.reached_preemption_sync_point(step))
        return bool(self.reason)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, self._before[signal.SIGINT])
            # A step may be long. Not through a stream, which may be in use.
            os.write(2, _NOTE)
        self.reason = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"


# The first steps compile and fill caches.
SKIPPED_STEPS = 2
TRACED_STEPS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """Metrics after `step` steps; losses in nats per token, weighted as in training.

    `loss` is the mean over the steps with a weight since the last record, 0 if there are none; `penalty`
    likewise; `gradient_norm` is the last step's before clipping. `tokens_per_s` is over the same steps,
    without compilation; `utilization` the share of the devices' peak that model operations used, if both
    are known; `peak_memory_bytes` the maximum so far of a device. `held_out_loss` is set if a checkpoint
    was written, with `held_out_by_source` (by the source's number; with weights of that source only).
    """

    step: int
    loss: float
    penalty: float
    gradient_norm: float
    learning_rate: float
    tokens_per_s: float
    utilization: float | None = None
    peak_memory_bytes: int = 0
    compile_s: float = 0.0
    held_out_loss: float | None = None
    held_out_by_source: Mapping[int, float] = dataclasses.field(default_factory=dict)


@contextlib.contextmanager
def progress_bar(console: Console, name: str) -> Iterator[Callable[[int, int], None]]:
    """Shows a bar during the block; yields a callback for (done, total)."""
    with ProgressBar(console=console, transient=True) as bar:
        task = bar.add_task(name, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


class StepTrace:
    """Traces steps 3 to 5 of a process for xprof and TensorBoard.

    Args:
      folder: folder of the trace; None traces nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._last = SKIPPED_STEPS + TRACED_STEPS
        self._done, self._tracing = 0, False

    def expect(self, steps: int) -> None:
        """Sets the number of steps that are left to run.

        Raises:
          ConfigError: there are too few to trace any.
        """
        if self._folder is not None and steps <= SKIPPED_STEPS:
            raise ConfigError(
                f"--profile traces steps after the first {SKIPPED_STEPS}, and {max(steps, 0)} are left: "
                "train more steps (--steps), or leave it out"
            )
        self._last = min(steps, self._last)

    def __enter__(self) -> "StepTrace":
        return self

    def __exit__(self, *_: object) -> None:
        if self._tracing:
            jax.profiler.stop_trace()

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Surrounds a step; its results are passed to `finish`."""
        if self._folder is not None and self._done == SKIPPED_STEPS:
            jax.profiler.start_trace(str(self._folder))
            self._tracing = True
        if not self._tracing:
            yield
            return
        with jax.profiler.StepTraceAnnotation("step", step_num=number):
            yield

    def finish(self, results: Any) -> None:
        """Counts a step; ends the trace when the last step's results are ready."""
        self._done += 1
        if self._tracing and self._done == self._last:
            jax.block_until_ready(results)
            jax.profiler.stop_trace()
            self._tracing = False


class Log:
    """Writes the loop's records into `metrics.jsonl` and `tensorboard/`, in the first process; a context that
    shows the progress bar."""

    def __init__(self, run: Run, steps: int, sources: Sequence[str] = ()) -> None:
        self._path = run.folder / "metrics.jsonl" if is_first() else None
        self._console, self._sources = (console := run.own_console), sources
        self._events: Any = None
        if run.tensorboard and is_first():
            try:
                from tensorboardX import SummaryWriter
            except ImportError as error:
                raise ConfigError("TensorBoard's events need `pip install 'jaxllm[tensorboard]'`") from error
            self._events = SummaryWriter(str(run.folder / "tensorboard"))
        self._bar = ProgressBar(
            TextColumn("step"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task("", total=steps)
        self._last: int | None = None

    def __enter__(self) -> "Log":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
        if self._events is not None:
            self._events.close()

    def __call__(self, progress: Progress) -> None:
        """Takes one record."""
        if self._last is None and self._path is not None:
            forget_metrics_from(self._path, progress.step)
        self._last = progress.step
        by_source = {self._name(source): loss for source, loss in progress.held_out_by_source.items()}
        record = {**dataclasses.asdict(progress), "held_out_by_source": by_source}
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"unix_time_s": round(time.time(), 1), **record}) + "\n")
        if self._events is not None:
            for name, value in {**record, **by_source}.items():
                if name != "step" and isinstance(value, int | float):
                    self._events.add_scalar(name, value, progress.step)
            self._events.flush()
        self._show(progress)

    def _show(self, progress: Progress) -> None:
        line = (
            f"step {progress.step}  loss {progress.loss:.4f}  lr {progress.learning_rate:.2e}  "
            f"grad {progress.gradient_norm:.3f}  {progress.tokens_per_s:,.0f} tokens/s"
        )
        if progress.utilization is not None:
            line += f"  MFU {100 * progress.utilization:.1f} %"
        line += f"  peak {progress.peak_memory_bytes / 2**30:.2f} GiB"
        if progress.compile_s:
            line += f"  compiled in {progress.compile_s:.1f} s"
        if progress.penalty:
            line += f"  penalty {progress.penalty:.4f}"
        self._bar.update(self._task, completed=progress.step, description=f"loss {progress.loss:.3f}")
        if progress.held_out_loss is not None:
            line += f"  held-out {progress.held_out_loss:.4f}"
            if len(progress.held_out_by_source) > 1:
                each = (f"{self._name(n)} {loss:.3f}" for n, loss in progress.held_out_by_source.items())
                line += f" ({', '.join(each)})"
        if progress.held_out_loss is not None or not self._console.is_terminal:
            self._console.print(line, highlight=False, soft_wrap=True)

    def _name(self, source: int) -> str:
        return self._sources[source] if source < len(self._sources) else str(source)


def forget_metrics_from(path: Path, step: int) -> None:
    """Drops the lines of steps that a killed run had done after its last checkpoint."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        # A killed run may have left half a line.
        try:
            earlier = json.loads(line)["step"] < step
        except (ValueError, KeyError, TypeError):
            continue
        if earlier:
            kept.append(line + "\n")
    write_text(path, "".join(kept))
