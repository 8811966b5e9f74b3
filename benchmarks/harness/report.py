"""Prints the rows of a benchmark, as a table or as one JSON object, and draws them.

Intervals of ratios are of runs measured in pairs (paired bootstrap), those of shares of the cluster
bootstrap. A trace asks the same question for several apps, whose answers depend on each other: so questions
are resampled, each with all of its requests (Davison and Hinkley, Bootstrap Methods and their Application,
section 3.8). Two systems are compared request by request, which cancels how hard the questions are.
"""

import dataclasses
import json
import os
import platform
import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from jaxllm.version import __version__

# Our system's name in rows.
OURS = "jaxllm"
# Between a bar and what is written behind it.
_LABEL_PADDING_POINTS = 3
# Digits after the point of metrics that are read with more than one.
_DIGITS = {"perplexity": 4, "bits_per_weight": 2, "goodput_per_s": 2, "context_bytes_share": 2}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One measured value.

    `ratio` says how many times better ours is than `baseline` (above 1 is better, whatever the
    metric's direction); rows of a baseline itself have neither. `note` says how the system ran.
    """

    case: str
    system: str
    metric: str
    value: float
    unit: str
    baseline: str | None = None
    ratio: float | None = None
    note: str | None = None


# A benchmark's own figures: draws its rows into a folder.
Draw = Callable[[Sequence[Row], Path], None]


def median(values: Iterable[float]) -> float:
    """Median of repeated measurements."""
    return statistics.median(values)


def machine() -> dict[str, Any]:
    """Describes the hardware and software that were measured, without naming the machine."""
    device = jax.devices()[0]
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "device": device.device_kind,
        "backend": jax.default_backend(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxllm": __version__,
    }


def check_plot(folder: Path | None) -> None:
    """Refuses a folder for figures that cannot be drawn into, before anything is measured.

    Raises:
      click.UsageError: matplotlib is missing, or the folder cannot be made or written.
    """
    if folder is None:
        return
    try:
        import matplotlib.pyplot  # noqa: F401
    except ImportError as error:
        raise click.UsageError("--plot needs matplotlib: pip install 'jaxllm[plot]'") from error
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise click.UsageError(
            f"--plot {folder}: cannot be written ({error.strerror}); name another"
        ) from error


def compared(
    rows_of: Mapping[str, float],
    *,
    ours: str,
    case: str,
    metric: str,
    unit: str,
    notes: Mapping[str, str | None] | None = None,
    lower_is_better: bool = False,
) -> list["Row"]:
    """The rows of one case and metric: ours once per baseline with its ratio, then each baseline's.

    Args:
      rows_of: value by system, ours among them.
      ours: our system's name.
      case: what was measured.
      metric: by the contract's name.
      unit: of the values.
      notes: by system, how it ran.
      lower_is_better: whether the smaller of two values is the better one.
    """
    notes = notes or {}

    def row(system: str, **against: Any) -> Row:
        value = rows_of[system]
        return Row(
            case=case, system=system, metric=metric, value=value, unit=unit, note=notes.get(system), **against
        )

    others = [system for system in rows_of if system != ours]
    if not others:
        return [row(ours)]
    rows = []
    for other in others:
        better, worse = (other, ours) if lower_is_better else (ours, other)
        # There is no ratio to zero.
        ratio = rows_of[better] / rows_of[worse] if rows_of[worse] else None
        rows.append(row(ours, baseline=other, ratio=ratio))
    return rows + [row(other) for other in others]


def emit(
    bench: str,
    rows: Sequence[Row],
    *,
    as_json: bool,
    plot: Path | None,
    draw: Draw | None = None,
) -> None:
    """Prints the result, and draws it into the folder `plot` when given: as bars, or by the benchmark's own
    `draw`."""
    if as_json:
        result = {"bench": bench, "machine": machine(), "rows": [dataclasses.asdict(r) for r in rows]}
        click.echo(json.dumps(result))
    else:
        console = Console()
        # A file or pipe has no width; the usual 80 columns would break the rows.
        console.width = console.width if console.is_terminal else 180
        console.print(_table(bench, rows))
    if plot is not None and draw is not None:
        draw(rows, plot)
    elif plot is not None:
        _draw(bench, rows, plot)


def label_bars(axes: Any, bars: Any, form: str) -> None:
    """Writes the value behind each of some horizontal bars, and leaves room for it.

    Args:
      axes: of matplotlib; all else in the figure is already there.
      bars: on them.
      form: of the numbers, as `str.format` takes it.
    """
    labels = axes.bar_label(bars, fmt=form, padding=_LABEL_PADDING_POINTS)
    # Sizes of labels are known only after the layout.
    axes.figure.draw_without_rendering()
    widest = max(label.get_window_extent().width for label in labels)
    taken = widest + 2 * _LABEL_PADDING_POINTS * axes.figure.dpi / 72
    # On both sides, for bars may point both ways; bars become at most half as long.
    axes.margins(x=taken / max(axes.get_window_extent().width - 2 * taken, taken))


def _table(bench: str, rows: Sequence[Row]) -> Table:
    table = Table(title=f"bench {bench} ({machine()['cpu']}, {machine()['cores']} cores)")
    noted = any(row.note for row in rows)
    for heading in ("case", "system", "metric", "value", "against", "ratio", *(["note"] if noted else [])):
        right = heading in ("value", "ratio")
        table.add_column(heading, justify="right" if right else "left")
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}x"
        cells = [row.case, row.system, row.metric, _shown(row), row.baseline or "", ratio]
        table.add_row(*cells, *([row.note or ""] if noted else []))
    return table


def _shown(row: Row) -> str:
    """The value with its unit, in as many digits as its metric is read with."""
    if row.unit == "bytes":
        return f"{row.value / 1e6:,.1f} MB"
    if row.unit == "bytes/s":
        return f"{row.value / 1e9:,.1f} GB/s"
    if row.unit == "share":
        return f"{100 * row.value:,.0f} %"
    return f"{row.value:,.{_DIGITS.get(row.metric, 1)}f} {row.unit}".rstrip()


def _draw(bench: str, rows: Sequence[Row], folder: Path) -> None:
    """One figure per metric: bars per case and system."""
    check_plot(folder)
    import matplotlib.pyplot as plt

    for metric in dict.fromkeys(row.metric for row in rows):
        chosen = {(r.case, r.system): r for r in rows if r.metric == metric}.values()
        figure, axes = plt.subplots(figsize=(7, 1 + 0.4 * len(chosen)), layout="constrained")
        bars = axes.barh([f"{r.case}\n{r.system}" for r in chosen], [r.value for r in chosen])
        axes.invert_yaxis()
        axes.set_xlabel(f"{metric} ({next(iter(chosen)).unit})")
        label_bars(axes, bars, "{:,.1f}")
        figure.savefig(folder / f"{bench}_{metric}.png", dpi=150)
        plt.close(figure)


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.lower().startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


_DRAWS = 2000


def median_ratio_interval(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """The middle 95 % of the ratio of medians, `theirs` to `ours`, over runs drawn with replacement, the same
    ones of both (paired bootstrap).

    Args:
      ours: a figure of each run.
      theirs: of the same runs.
    """
    drawn = np.random.default_rng(0).integers(0, len(ours), (_DRAWS, len(ours)))
    medians = [np.median(np.asarray(each)[drawn], axis=1) for each in (ours, theirs)]
    low, high = np.percentile(medians[1] / medians[0], (2.5, 97.5))
    return float(low), float(high)


def interval(
    values: np.ndarray, questions: np.ndarray, *, seed: int = 0, draws: int = 2000
) -> tuple[float, float]:
    """The middle 95 % of means over questions drawn with replacement: a confidence interval of the mean.

    With few questions it is too narrow, and with one it is a point.

    Args:
      values: `[M]` bool or float, of each request; for two systems the difference of theirs.
      questions: `[M]` int, which question each request asks.
      seed: of the draws.
      draws: how many.
    """
    _, clusters = np.unique(questions, return_inverse=True)
    sums = np.bincount(clusters, weights=np.asarray(values, np.float64))
    counts = np.bincount(clusters)
    drawn = np.random.default_rng(seed).integers(0, len(counts), (draws, len(counts)))
    low, high = np.percentile(sums[drawn].sum(1) / counts[drawn].sum(1), (2.5, 97.5))
    return float(low), float(high)


def said(values: np.ndarray, questions: np.ndarray) -> str:
    """An interval, for notes."""
    low, high = interval(values, questions)
    return f"95 % in [{low:.1%}, {high:.1%}]"


def lead(ours: np.ndarray, theirs: np.ndarray, questions: np.ndarray) -> str:
    """How far ours is ahead on the same requests, for notes."""
    ahead = np.asarray(ours, np.float64) - np.asarray(theirs, np.float64)
    low, high = (f"{100 * each:+.1f}" for each in interval(ahead, questions))
    return f"ours ahead by {100 * ahead.mean():+.1f} points, paired 95 % in [{low}, {high}]"
