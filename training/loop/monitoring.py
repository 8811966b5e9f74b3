"""Watches a run: shows its progress, traces a few steps with JAX's profiler, and stops it before its process
is ended.

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
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar

from jaxllm.errors import ConfigError
from jaxllm.training.loop.run_files import Run, is_first, write_text

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
    shows the progress bar.

    Args:
      run: the run.
      steps: number of steps of the whole run.
      sources: names, by number.
    """

    def __init__(self, run: Run, steps: int, sources: Sequence[str] = ()) -> None:
        self._path = run.folder / "metrics.jsonl" if is_first() else None
        self._console, self._sources = (console := run.own_console), sources
        self._events = _event_writer(run.folder / "tensorboard") if run.tensorboard and is_first() else None
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


def _event_writer(folder: Path) -> Any:
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise ConfigError("TensorBoard's events need `pip install 'jaxllm[tensorboard]'`") from error
    return SummaryWriter(str(folder))
