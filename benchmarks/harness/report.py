"""Prints the rows of a benchmark, as a table or as one JSON object, and draws them: lines over a number of
their cases, groups of bars, and a bar for each.

Intervals of ratios are of runs measured in pairs (paired bootstrap), those of shares of the cluster
bootstrap. A trace asks the same question for several apps, whose answers depend on each other: so questions
are resampled, each with all of its requests (Davison and Hinkley, Bootstrap Methods and their Application,
section 3.8). Two systems are compared request by request, which cancels how hard the questions are.
"""

import dataclasses
import functools
import json
import platform
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import click
import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from jaxllm.serving.evaluation.intervals import bootstrap
from jaxllm.serving.host.machine import cpu_features, usable_cores
from jaxllm.version import __version__

# Our system's name in rows.
OURS = "jaxllm"
# Units of metrics whose names do not end in one, and of those by the ends of their names.
_UNITS = {
    "acceptance_length": "tokens", "bits_per_weight": "bits", "buckets": "buckets", "decision_us": "us",
    "context_bytes_share": "times", "goodput_per_s": "answers/s", "joules_per_call": "J", "level": "%",
    "loads_per_prompt": "loads", "read_bandwidth": "bytes/s", "recall": "nats/token",
    "recall_loss": "nats/token", "requests_per_s": "answers/s",
}  # fmt: skip
_SHARES = (
    "_share", "_rate", "accuracy", "agreement", "_met", "refused", "failed", "kept", "reused", "rouge_l",
    "rouge2", "mfu", "_loss",
)  # fmt: skip
_ENDS = {("_ms",): "ms", ("_bytes",): "bytes", ("_tokens_per_s",): "tokens/s", _SHARES: "share"}
# Units and metrics of which less is better.
_LESS = ("ms", "us", "bytes", "J", "bits", "buckets", "times", "loads", "perplexity", "recall_loss")
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


def machine() -> dict[str, Any]:
    """Describes the hardware and software that were measured, without naming the machine."""
    device = jax.devices()[0]
    cpus = [line.partition(":")[2].strip() for line in cpu_features() if line.startswith("model name")]
    return {
        "cpu": cpus[0] if cpus else platform.processor() or platform.machine(),
        "cores": usable_cores(),
        "device": device.device_kind,
        "backend": jax.default_backend(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxllm": __version__,
    }


def unit_of(metric: str) -> str:
    """The unit of a metric, by its name or by the end of its name."""
    if metric in _UNITS:
        return _UNITS[metric]
    if metric.startswith("contexts_within_"):
        return "contexts"
    return next((unit for ends, unit in _ENDS.items() if metric.endswith(ends)), "")


def row(case: str, metric: str, value: float, note: str | None = None, **more: Any) -> Row:
    """A row of ours, or of another `system`, with the metric's unit unless another one is given."""
    fields = {"system": OURS, "unit": unit_of(metric), **more}
    return Row(case=case, metric=metric, value=value, note=note, **fields)


def compared(
    case: str,
    metric: str,
    values: Mapping[str, float],
    notes: Mapping[str, str | None] | None = None,
    *,
    ours: str = OURS,
) -> list[Row]:
    """The rows of one case and metric: ours once per baseline with its ratio, then each baseline's.

    Args:
      metric: by the contract's name, which says the unit and whether less is better.
      values: by system, ours among them.
      notes: by system, how it ran.
    """
    notes = notes or {}

    def of(system: str, **against: Any) -> Row:
        return row(case, metric, values[system], notes.get(system), system=system, **against)

    others = [system for system in values if system != ours]
    if not others:
        return [of(ours)]
    rows = []
    for other in others:
        better, worse = (other, ours) if less_is_better(metric) else (ours, other)
        # There is no ratio to zero.
        ratio = values[better] / values[worse] if values[worse] else None
        rows.append(of(ours, baseline=other, ratio=ratio))
    return rows + [of(other) for other in others]


def less_is_better(metric: str) -> bool:
    """Whether the smaller of two values is the better one."""
    return metric in _LESS or unit_of(metric) in _LESS


def emit(
    bench: str,
    rows: Sequence[Row],
    draw: Draw | None = None,
    *,
    subject: str,
    as_json: bool,
    plot: Path | None = None,
) -> None:
    """Prints the rows of a benchmark of a subject, a model or shape, as a table or as JSON, and draws them
    into the folder `plot` if there is one, by `draw` or as bars."""
    about = machine()
    if as_json:
        result = {
            "bench": bench,
            "subject": subject,
            "machine": about,
            "rows": [dataclasses.asdict(r) for r in rows],
        }
        click.echo(json.dumps(result))
    else:
        console = Console()
        # A file or pipe has no width; the usual 80 columns would break the rows.
        console.width = console.width if console.is_terminal else 180
        table = Table(title=f"bench {bench}, {subject} ({about['cpu']}, {about['cores']} cores)")
        noted = any(row.note for row in rows)
        for heading in ("case", "system", "metric", "value", "against", "ratio", *["note"] * noted):
            table.add_column(heading, justify="right" if heading in ("value", "ratio") else "left")
        for row in rows:
            ratio = "" if row.ratio is None else f"{row.ratio:.2f}x"
            cells = [row.case, row.system, row.metric, _shown(row), row.baseline or "", ratio]
            table.add_row(*cells, *[row.note or ""] * noted)
        console.print(table)
    if plot is not None:
        (draw or functools.partial(draw_metrics, bench))(rows, plot)


def _shown(row: Row) -> str:
    """The value with its unit, in as many digits as its metric is read with."""
    if row.unit == "bytes":
        return f"{row.value / 1e6:,.1f} MB"
    if row.unit == "bytes/s":
        return f"{row.value / 1e9:,.1f} GB/s"
    if row.unit == "share":
        return f"{100 * row.value:,.0f} %"
    return f"{row.value:,.{_DIGITS.get(row.metric, 1)}f} {row.unit}".rstrip()


def median_ratio_interval(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """An interval of the ratio of medians, `theirs` to `ours`, of the same runs (paired bootstrap)."""

    def ratio(drawn: np.ndarray) -> np.ndarray:
        return np.median(np.asarray(theirs)[drawn], axis=1) / np.median(np.asarray(ours)[drawn], axis=1)

    return bootstrap(len(ours), ratio)


def interval(values: np.ndarray, questions: np.ndarray) -> tuple[float, float]:
    """A confidence interval of a mean, over questions that are drawn.

    With few questions it is too narrow, and with one it is a point.

    Args:
      values: `[M]` bool or float, of each request; for two systems the difference of theirs.
      questions: `[M]` int, which question each request asks.
    """
    _, clusters = np.unique(questions, return_inverse=True)
    sums, counts = np.bincount(clusters, np.asarray(values, np.float64)), np.bincount(clusters)
    return bootstrap(len(counts), lambda drawn: sums[drawn].sum(1) / counts[drawn].sum(1))


def said(values: np.ndarray, questions: np.ndarray) -> str:
    """An interval, for notes."""
    low, high = interval(values, questions)
    return f"95 % in [{low:.1%}, {high:.1%}]"


def lead(ours: np.ndarray, theirs: np.ndarray, questions: np.ndarray) -> str:
    """How far ours is ahead on the same requests, for notes."""
    ahead = np.asarray(ours, np.float64) - np.asarray(theirs, np.float64)
    low, high = (f"{100 * each:+.1f}" for each in interval(ahead, questions))
    return f"ours ahead by {100 * ahead.mean():+.1f} points, paired 95 % in [{low}, {high}]"


# Of one figure, in the order of the rows: where across, and of which line -> the value.
Points = dict[tuple[str, str], float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure of the rows of one metric.

    Attributes:
      case: matches their cases whole. Its groups are `x`, what is across, `line`, which is the system where
        there is none, and `of`, by which there are several figures.
      up: the name of the axis of values.
      across: the name of the other one.
      kind: lines over numbers, groups of bars, or a bar for each row.
      log: whether values are on a logarithmic scale.
    """

    name: str
    metric: str
    case: str
    up: str
    across: str = ""
    kind: Literal["lines", "groups", "bars"] = "lines"
    log: bool = False


def draw_figures(bench: str, figures: Iterable[Figure], rows: Sequence[Row], folder: Path) -> None:
    """Draws the figures that the rows allow into a folder, a PNG each."""
    import matplotlib.pyplot as plt

    for figure in figures:
        parts: dict[str, Points] = {}
        for row in rows:
            found = re.fullmatch(figure.case, row.case) if row.metric == figure.metric else None
            if found is not None:
                groups = found.groupdict()
                part = " ".join(each for name, each in groups.items() if name.startswith("of"))
                parts.setdefault(part, {})[groups["x"], groups.get("line") or row.system] = row.value
        for part, points in parts.items():
            size = (8, 1 + 0.4 * len(points)) if figure.kind == "bars" else (7, 4.5)
            size = (11, 4.5) if figure.kind == "groups" else size
            drawn, axes = plt.subplots(figsize=size, layout="constrained")
            if figure.across:
                axes.set_xlabel(figure.across)
            (axes.set_xlabel if figure.kind == "bars" else axes.set_ylabel)(figure.up)
            if figure.log:
                axes.set_yscale("log")
            _KINDS[figure.kind](axes, points)
            suffix = re.sub(r"[^a-z0-9]+", "_", part.lower())
            drawn.savefig(folder / f"{bench}_{figure.name}{suffix and f'_{suffix}'}.png", dpi=150)
            plt.close(drawn)


def draw_metrics(bench: str, rows: Sequence[Row], folder: Path) -> None:
    """A figure for each metric: a bar for each case and system."""
    units = {row.metric: row.unit for row in rows}
    draw_figures(
        bench,
        [
            Figure(name=metric, metric=metric, case="(?P<x>.*)", up=f"{metric} ({unit})", kind="bars")
            for metric, unit in units.items()
        ],
        rows,
        folder,
    )


def _lines(axes: Any, points: Points) -> None:
    for line in dict.fromkeys(line for _, line in points):
        own = sorted((float(x), value) for (x, of), value in points.items() if of == line)
        axes.plot(*zip(*own, strict=True), marker="o", label=line)
    axes.legend(fontsize="small")


def _groups(axes: Any, points: Points) -> None:
    """A group of bars for each place across, in it one for each line."""
    places, lines = (list(dict.fromkeys(each[part] for each in points)) for part in (0, 1))
    width = 0.9 / len(lines)
    for number, line in enumerate(lines):
        at = [x + (number + 0.5) * width - 0.45 for x in range(len(places))]
        axes.bar(at, [points.get((place, line), 0.0) for place in places], width, label=line)
    axes.set_xticks(range(len(places)), places)
    axes.legend(fontsize="small", ncols=2)


def _bars(axes: Any, points: Points) -> None:
    bars = axes.barh([f"{x}\n{line}" for x, line in points], list(points.values()))
    axes.invert_yaxis()
    axes.bar_label(bars, fmt="{:,.4g}", padding=3)
    # Room for the values behind them on both sides, for bars may point both ways.
    axes.margins(x=0.3)


_KINDS: Mapping[str, Callable[[Any, Points], None]] = {"lines": _lines, "groups": _groups, "bars": _bars}
