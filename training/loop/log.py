"""Shows a run to people and programs: a progress bar and lines, `metrics.jsonl`, TensorBoard."""

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar

from jaxllm.errors import ConfigError
from jaxllm.training.loop.run_files import write_text
from jaxllm.training.loop.trainer import Progress


class Log:
    """Writes the loop's records; a context that shows the progress bar.

    Args:
      folder: folder of the run, for `metrics.jsonl` and `tensorboard/`; None writes no files.
      steps: number of steps of the whole run.
      console: console of the bar and lines.
      sources: names, by number.
      tensorboard: whether to write TensorBoard's events, too.
    """

    def __init__(
        self,
        folder: Path | None,
        steps: int,
        console: Console,
        sources: Sequence[str] = (),
        *,
        tensorboard: bool = False,
    ) -> None:
        self._path = None if folder is None else Path(folder) / "metrics.jsonl"
        self._console, self._sources = console, sources
        self._events = _event_writer(Path(folder) / "tensorboard") if tensorboard and folder else None
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
