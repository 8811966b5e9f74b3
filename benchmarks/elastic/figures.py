"""Draws the paper's figures: accuracy and times over levels, and accuracy in time of every system."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.elastic.rows import ALL, LIMITED, METRICS
from benchmarks.measuring.report import Row, check_plot

_SHORT = {ALL: "all", LIMITED: "limited"}
_LEVEL = re.compile(r"level (\d+)(?:, prompt (\d+))?$")


def draw(rows: Sequence[Row], folder: Path) -> None:
    """Draws the figures that the rows allow into a folder, a PNG each: levels' accuracy, times, the trace."""
    check_plot(folder)
    import matplotlib.pyplot as plt

    def saved(name: str, figure: Any) -> None:
        figure.savefig(folder / f"elastic_{name}.png", dpi=150)
        plt.close(figure)

    if curves := _curves(rows, "level_accuracy"):
        figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
        _lines(axes, curves, "accuracy (share of right answers)")
        saved("level_accuracy", figure)
    for metric, label in (("ttft_ms", "time to the first token (ms)"), ("tpot_ms", "time per token (ms)")):
        if curves := _curves(rows, metric):
            figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
            _lines(axes, curves, label)
            axes.set_yscale("log")
            saved(metric, figure)
    labels = ("accuracy (share of right answers)", "share of answers right and in time")
    for metric, label in zip(METRICS, labels, strict=True):
        trace = {
            (row.case.removeprefix("trace "), row.system): row.value
            for row in rows
            if row.metric == metric and row.case.startswith("trace ")
        }
        if not trace:
            continue
        cases, systems = (list(dict.fromkeys(each[part] for each in trace)) for part in (0, 1))
        figure, axes = plt.subplots(figsize=(11, 4.5), layout="constrained")
        width = 0.9 / len(systems)
        for number, system in enumerate(systems):
            at = [x + (number + 0.5) * width - 0.45 for x in range(len(cases))]
            axes.bar(at, [trace[case, system] for case in cases], width, label=system)
        axes.set_xticks(range(len(cases)), [_SHORT.get(case, case) for case in cases])
        axes.set_ylabel(label)
        axes.legend(fontsize="small", ncols=2)
        saved(f"trace_{metric}", figure)


def _curves(rows: Sequence[Row], metric: str) -> dict[str, dict[int, float]]:
    """Values by level, of each system or prompt length."""
    curves: dict[str, dict[int, float]] = {}
    for row in rows:
        found = _LEVEL.match(row.case) if row.metric == metric else None
        if found:
            name = f"{found[2]} tokens" if found[2] else row.system
            curves.setdefault(name, {})[int(found[1])] = row.value
    return curves


def _lines(axes: Any, curves: dict[str, dict[int, float]], label: str) -> None:
    for name, values in curves.items():
        axes.plot(list(values), list(values.values()), marker="o", label=name)
    axes.set_xlabel("level (% of the layers' parameters)")
    axes.set_ylabel(label)
    axes.legend(fontsize="small")
