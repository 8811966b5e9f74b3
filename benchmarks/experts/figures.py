"""Draws times per token by storage and technique, predictors, eviction policies, and what a task costs."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.measuring.report import Row, check_plot, label_bars

_LAYER = re.compile(r"predictor: layer (\d+)$")
_ROOM = re.compile(r"eviction: (\d+) experts$")
_BUFFER = re.compile(r"buffer of (\d+) experts: ")
_LOSS = re.compile(r"tolerable loss (\d+)%$")
_ENCODER = re.compile(r"encoder layer (\d+): ")
_DECODER = re.compile(r"decoder layer (\d+): ")
# Line figures: cases, metric, the axes' names.
_LINES = {
    "predictors": (_LAYER, "hit_rate", "sparse layer", "visits that were predicted (share)"),
    "evictions": (_ROOM, "hit_rate", "room (experts)", "visits to experts in memory (share)"),
    "buffers": (_BUFFER, "tpot_ms", "room (experts at 4 bits)", "time per token (ms)"),
    "losses": (_LOSS, "tpot_ms", "tolerable loss (%)", "time per token (ms)"),
    "rouge": (_LOSS, "rouge2", "tolerable loss (%)", "Rouge-2"),
    "encoder_hits": (_ENCODER, "hit_rate", "layer of the encoder", "visits to experts in memory (share)"),
    "decoder_hits": (_DECODER, "hit_rate", "layer of the decoder", "visits to experts in memory (share)"),
}


def draw(rows: Sequence[Row], folder: Path) -> None:
    """Draws the figures that the rows allow into a folder, a PNG each."""
    check_plot(folder)
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    def saved(name: str, figure: Any) -> None:
        figure.savefig(folder / f"experts_{name}.png", dpi=150)
        plt.close(figure)

    for name, (cases, metric, across, upwards) in _LINES.items():
        lines: dict[str, dict[int, float]] = {}
        for row in rows:
            found = cases.match(row.case)
            if found is not None and row.metric == metric:
                lines.setdefault(row.system, {})[int(found[1])] = row.value
        if not lines:
            continue
        figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
        for system, points in lines.items():
            axes.plot(*zip(*sorted(points.items()), strict=True), marker="o", label=system)
        axes.set_xlabel(across)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylabel(upwards)
        axes.legend()
        saved(name, figure)
    others = [row for row in rows if not any(cases.match(row.case) for cases, *_ in _LINES.values())]
    for name, chosen in (
        ("systems", [row for row in others if not row.case.startswith("ablation")]),
        ("ablations", [row for row in others if row.case.startswith("ablation")]),
    ):
        bars = {(row.case, row.system): row.value for row in chosen if row.metric == "tpot_ms"}
        if not bars:
            continue
        figure, axes = plt.subplots(figsize=(8, 1 + 0.35 * len(bars)), layout="constrained")
        labels = [f"{case}\n{system}" for case, system in bars]
        drawn = axes.barh(labels, list(bars.values()))
        axes.invert_yaxis()
        axes.set_xlabel("time per token (ms)")
        label_bars(axes, drawn, "{:,.3g}")
        saved(name, figure)
