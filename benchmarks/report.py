"""What every benchmark prints: rows of one shape, as a table or as one JSON object."""

import dataclasses
import json
import os
import platform
import resource
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click
import jax
from rich.console import Console
from rich.table import Table

import jaxllm


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One measured value.

    `ratio` says how many times better ours is than `baseline` (above 1 is better, whatever the
    metric's direction); rows of a baseline itself have neither.
    """

    case: str
    system: str
    metric: str
    value: float
    unit: str
    baseline: str | None = None
    ratio: float | None = None


def median(values: Iterable[float]) -> float:
    """Median of repeated measurements."""
    return statistics.median(values)


def machine() -> dict[str, Any]:
    """What the figures were measured on, without naming the machine."""
    device = jax.devices()[0]
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "device": device.device_kind,
        "backend": jax.default_backend(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxllm": jaxllm.__version__,
    }


def peak_memory_bytes() -> int:
    """Most memory the process held resident, since it began or since `reset_peak_memory`; memory of an
    accelerator is added."""
    stats = jax.devices()[0].memory_stats() if jax.default_backend() != "cpu" else None
    return _peak_resident_bytes() + (stats or {}).get("peak_bytes_in_use", 0)


def reset_peak_memory() -> bool:
    """Starts the peak of resident memory anew, where the system allows it (Linux)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _peak_resident_bytes() -> int:
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    # Kibibytes, but bytes on macOS.
    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def emit(bench: str, rows: Sequence[Row], *, as_json: bool, plot: Path | None) -> None:
    """Prints the result, and draws it into the folder `plot` when given."""
    if as_json:
        result = {"bench": bench, "machine": machine(), "rows": [dataclasses.asdict(r) for r in rows]}
        click.echo(json.dumps(result))
    else:
        console = Console()
        # A file or pipe has no width; the usual 80 columns would break the rows.
        console.width = console.width if console.is_terminal else 140
        console.print(_table(bench, rows))
    if plot is not None:
        _draw(bench, rows, plot)


def _table(bench: str, rows: Sequence[Row]) -> Table:
    table = Table(title=f"bench {bench} ({machine()['cpu']}, {machine()['cores']} cores)")
    for heading in ("case", "system", "metric", "value", "against", "ratio"):
        right = heading in ("value", "ratio")
        table.add_column(heading, justify="right" if right else "left")
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}x"
        value = f"{row.value / 1e6:,.1f} MB" if row.unit == "bytes" else f"{row.value:,.1f} {row.unit}"
        table.add_row(row.case, row.system, row.metric, value, row.baseline or "", ratio)
    return table


def _draw(bench: str, rows: Sequence[Row], folder: Path) -> None:
    """One figure per metric: bars per case and system."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise click.UsageError("--plot needs matplotlib: pip install 'jaxllm[plot]'") from error
    folder.mkdir(parents=True, exist_ok=True)
    for metric in dict.fromkeys(row.metric for row in rows):
        chosen = {(r.case, r.system): r for r in rows if r.metric == metric}.values()
        figure, axes = plt.subplots(figsize=(7, 1 + 0.4 * len(chosen)), layout="constrained")
        bars = axes.barh([f"{r.case}\n{r.system}" for r in chosen], [r.value for r in chosen])
        axes.bar_label(bars, fmt="{:,.1f}", padding=3)
        axes.invert_yaxis()
        axes.set_xlabel(f"{metric} ({next(iter(chosen)).unit})")
        figure.savefig(folder / f"{bench}_{metric}.png", dpi=150)
        plt.close(figure)


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.lower().startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
