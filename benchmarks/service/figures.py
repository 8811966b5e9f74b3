"""Draws answers in time over loads, tokens per second over clients, and the spread of times to the first
token."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measuring.report import Row, check_plot
from benchmarks.service.run import Measured

_LOAD = re.compile(r".*, load ([\d.e+-]+)$")
_CLIENTS = re.compile(r".*, (\d+) clients$")


def draw(rows: Sequence[Row], folder: Path, kept: Sequence[Measured] = ()) -> None:
    """Draws the figures that the rows and outcomes allow into a folder, a PNG each."""
    check_plot(folder)
    import matplotlib.pyplot as plt

    def saved(name: str, figure: Any) -> None:
        figure.savefig(folder / f"service_{name}.png", dpi=150)
        plt.close(figure)

    if lines := _lines(rows, "goodput_per_s", _LOAD):
        figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
        _bars(axes, lines)
        axes.set_xlabel("load (in what the idle whole model answers one after another)")
        axes.set_ylabel("answers in time per second")
        saved("goodput", figure)
    if lines := _lines(rows, "decode_tokens_per_s", _CLIENTS):
        figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
        _bars(axes, lines)
        axes.set_xlabel("clients")
        axes.set_ylabel("tokens per second")
        saved("clients", figure)
    cases = [each for each in dict.fromkeys(one.case for one in kept) if _LOAD.match(each)]
    if cases:
        figure, all_axes = plt.subplots(
            1, len(cases), figsize=(1 + 4 * len(cases), 4.5), layout="constrained", squeeze=False, sharey=True
        )
        for axes, case in zip(all_axes[0], cases, strict=True):
            _shares(axes, [each for each in kept if each.case == case])
            axes.set_title(case)
        all_axes[0][0].set_ylabel("share of requests")
        if any(one.answered for each in kept for one in each.window.counted):
            all_axes[0][0].legend(fontsize="small")
        saved("ttft", figure)


def _lines(rows: Sequence[Row], metric: str, cases: re.Pattern[str]) -> dict[str, dict[float, float]]:
    """Values of a metric by system and load."""
    found: dict[str, dict[float, float]] = {}
    for row in rows:
        match = cases.match(row.case) if row.metric == metric else None
        if match:
            found.setdefault(row.system, {})[float(match[1])] = row.value
    return found


def _bars(axes: Any, lines: dict[str, dict[float, float]]) -> None:
    """A group of bars for each load, in it one for each system."""
    loads = sorted({load for points in lines.values() for load in points})
    width = 0.9 / len(lines)
    for number, (system, points) in enumerate(lines.items()):
        at = [place + (number + 0.5) * width - 0.45 for place in range(len(loads))]
        axes.bar(at, [points.get(load, 0.0) for load in loads], width, label=system)
    axes.set_xticks(range(len(loads)), [f"{load:g}" for load in loads])
    axes.legend(fontsize="small")


def _shares(axes: Any, kept: Sequence[Measured]) -> None:
    """The share of all counted requests that had their first token within a time."""
    for system in dict.fromkeys(each.system for each in kept):
        counted = [one for each in kept if each.system == system for one in each.window.counted]
        times = sorted(one.ttft_ms for one in counted if one.answered)
        if times:
            # Those without an answer have none, so that the curve ends below 1.
            axes.step(times, np.arange(1, len(times) + 1) / len(counted), where="post", label=system)
    times = [one.ttft_ms for each in kept for one in each.window.counted if one.answered]
    if times:
        axes.set_xlim(min(times) / 1.1, max(times) * 1.1)
        axes.set_xscale("log")
    axes.set_ylim(0, 1)
    axes.set_xlabel("time to the first token (ms)")
