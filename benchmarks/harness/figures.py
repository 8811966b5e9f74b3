"""Draws rows: lines over a number of their cases, groups of bars, and a bar for each."""

import dataclasses
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import click

from benchmarks.harness.report import Row

# Between a bar and what is written behind it.
_LABEL_PADDING_POINTS = 3
# Of one figure, in the order of the rows: where across, and of which line -> the value.
Points = dict[tuple[str, str], float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure of the rows of one metric.

    Attributes:
      name: of its file.
      metric: of the rows.
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


def draw_figures(bench: str, figures: Iterable[Figure], rows: Sequence[Row], folder: Path) -> None:
    """Draws the figures that the rows allow into a folder, a PNG each."""
    check_plot(folder)
    import matplotlib.pyplot as plt

    for figure in figures:
        for part, points in _parts(figure, rows).items():
            drawn, axes = plt.subplots(figsize=_size(figure, points), layout="constrained")
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


def label_bars(axes: Any, bars: Any, form: str) -> None:
    """Writes the value behind each of some horizontal bars, and leaves room for it.

    Args:
      axes: of matplotlib; all else in the figure is already there.
      form: of the numbers, as `str.format` takes it.
    """
    labels = axes.bar_label(bars, fmt=form, padding=_LABEL_PADDING_POINTS)
    # Sizes of labels are known only after the layout.
    axes.figure.draw_without_rendering()
    widest = max(label.get_window_extent().width for label in labels)
    taken = widest + 2 * _LABEL_PADDING_POINTS * axes.figure.dpi / 72
    # On both sides, for bars may point both ways; bars become at most half as long.
    axes.margins(x=taken / max(axes.get_window_extent().width - 2 * taken, taken))


def _parts(figure: Figure, rows: Sequence[Row]) -> dict[str, Points]:
    parts: dict[str, Points] = {}
    for row in rows:
        found = re.fullmatch(figure.case, row.case) if row.metric == figure.metric else None
        if found is not None:
            groups = found.groupdict()
            line = groups.get("line") or row.system
            part = " ".join(each for name, each in groups.items() if name.startswith("of"))
            parts.setdefault(part, {})[groups["x"], line] = row.value
    return parts


def _size(figure: Figure, points: Points) -> tuple[float, float]:
    if figure.kind == "bars":
        return 8, 1 + 0.4 * len(points)
    return 11 if figure.kind == "groups" else 7, 4.5


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
    label_bars(axes, bars, "{:,.4g}")


_KINDS: Mapping[str, Callable[[Any, Points], None]] = {"lines": _lines, "groups": _groups, "bars": _bars}
