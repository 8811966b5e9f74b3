"""Draws switching over the number of contexts, ablations, sizes of chunks, and quality."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.measuring.report import Row, check_plot, label_bars

_CELL = re.compile(r"(?P<pattern>\w+), (?P<contexts>\d+) contexts in (?P<budget>[\d.]+ MB), (?P<device>.+)$")
_BARS = {
    "ablation": "mean switch (ms)",
    "chunk size": "mean switch (ms)",
    "perplexity": "perplexity",
    "accuracy": "right answers (share)",
    "recall": "likelihood that a stored chunk adds to its rest (nats per token)",
}


def draw(rows: Sequence[Row], folder: Path) -> None:
    """Draws the figures that the rows allow into a folder, a PNG each."""
    check_plot(folder)
    import matplotlib.pyplot as plt

    def saved(name: str, figure: Any) -> None:
        figure.savefig(folder / f"contexts_{name}.png", dpi=150)
        plt.close(figure)

    for (pattern, device), lines in _lines(rows).items():
        figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
        for system, points in lines.items():
            axes.plot(*zip(*sorted(points.items()), strict=True), marker="o", label=system)
        axes.set_xlabel("active contexts")
        axes.set_ylabel("mean switch (ms)")
        axes.set_yscale("log")
        axes.set_title(f"{pattern}, {device}")
        axes.legend()
        saved(f"switch_{pattern}_{re.sub(r'[^a-z0-9]+', '_', device.lower())}", figure)
    for name, label in _BARS.items():
        chosen = {(row.case, row.system): row.value for row in rows if _drawn_in(row) == name}
        if not chosen:
            continue
        figure, axes = plt.subplots(figsize=(8, 1 + 0.35 * len(chosen)), layout="constrained")
        names = [f"{case.removeprefix(f'{name}: ')}\n{system}" for case, system in chosen]
        bars = axes.barh(names, list(chosen.values()))
        axes.invert_yaxis()
        axes.set_xlabel(label)
        label_bars(axes, bars, "{:,.3g}")
        saved(name.replace(" ", "_"), figure)


def _lines(rows: Sequence[Row]) -> dict[tuple[str, str], dict[str, dict[int, float]]]:
    """Mean switches by pattern and device, system, and number of contexts."""
    found: dict[tuple[str, str], dict[str, dict[int, float]]] = {}
    for row in rows:
        cell = _CELL.match(row.case)
        if row.metric == "switch_ms" and cell is not None:
            lines = found.setdefault((cell["pattern"], cell["device"]), {})
            lines.setdefault(row.system, {})[int(cell["contexts"])] = row.value
    return found


def _drawn_in(row: Row) -> str:
    """The bar figure that a row belongs to; empty for none."""
    begin = row.case.partition(":")[0]
    if begin == "density":
        # Differences are in notes, far smaller than what bars show.
        return ""
    return begin if begin in _BARS else row.metric if row.metric in _BARS else ""
