"""Makes rows of figures: medians over repeated measurements, with their least and greatest values."""

import dataclasses
from collections.abc import Mapping, Sequence

from benchmarks.measuring.report import Row, compared, median
from benchmarks.service.systems import OURS

# Metric -> unit, and whether the smaller value is the better one; None for values of which none is better.
_METRICS: Mapping[str, tuple[str, bool | None]] = {
    "goodput_per_s": ("answers/s", False),
    "slo_met": ("share", False),
    "requests_per_s": ("answers/s", False),
    "decode_tokens_per_s": ("tokens/s", False),
    "ttft_ms": ("ms", True),
    "tpot_ms": ("ms", True),
    "refused": ("share", None),
    "failed": ("share", None),
    "level": ("%", None),
    "reused": ("share", None),
}
# Without objectives these say nothing.
_OF_OBJECTIVES = ("goodput_per_s", "slo_met")


@dataclasses.dataclass(frozen=True)
class Cell:
    """The figures of one system under one load, of each repetition.

    Attributes:
      case: the load.
      system: its name.
      figures: metric -> value (see `Window.figures`), one per repetition.
    """

    case: str
    system: str
    figures: Sequence[Mapping[str, float]]

    def values(self, metric: str) -> list[float]:
        """The metric's values; empty where there are none."""
        return [each[metric] for each in self.figures if metric in each]


def load_rows(cells: Sequence[Cell], *, objectives: bool) -> list[Row]:
    """Rows of every case and metric.

    Args:
      cells: of all systems and loads.
      objectives: whether there were limits of time.
    """
    rows = []
    for case in dict.fromkeys(cell.case for cell in cells):
        own = [cell for cell in cells if cell.case == case]
        names = dict.fromkeys(name for cell in own for each in cell.figures for name in each)
        for name in names:
            metric, place = _split(name)
            if objectives or metric not in _OF_OBJECTIVES:
                rows += _rows(own, name, metric, f"{case}, {place}" if place else case)
    return rows


def memory_rows(name: str, peaks: Mapping[str, Sequence[int]], shares: Mapping[str, int]) -> list[Row]:
    """Rows of peak memory.

    Args:
      name: of the model.
      peaks: bytes of each system's processes.
      shares: proportional share of memory (PSS) of each system's last process at its end.
    """
    if not peaks:
        return []
    notes = {each: f"proportional share at the end {bytes_ / 1e6:,.0f} MB" for each, bytes_ in shares.items()}
    return compared(
        {system: median(values) for system, values in peaks.items()},
        ours=OURS,
        case=f"{name}, server",
        metric="peak_memory_bytes",
        unit="bytes",
        notes=notes,
        lower_is_better=True,
    )


def _split(name: str) -> tuple[str, str]:
    """A figure's metric, and which part of the case it is of: an app or a percentile."""
    metric, _, app = name.partition(" of ")
    if app:
        return metric, f"app {app}"
    begin, _, percent = name.rpartition("_p")
    return (begin, f"percentile {percent}") if percent.isdecimal() else (name, "")


def _rows(cells: Sequence[Cell], name: str, metric: str, case: str) -> list[Row]:
    unit, lower = _METRICS[metric]
    values = {cell.system: cell.values(name) for cell in cells if cell.values(name)}
    notes = {system: _spread(each) for system, each in values.items()}
    medians = {system: median(each) for system, each in values.items()}
    if lower is None or OURS not in medians:
        return [
            Row(case=case, system=system, metric=metric, value=value, unit=unit, note=notes[system])
            for system, value in medians.items()
        ]
    return compared(
        medians, ours=OURS, case=case, metric=metric, unit=unit, notes=notes, lower_is_better=lower
    )


def _spread(values: Sequence[float]) -> str | None:
    return f"{min(values):.4g} to {max(values):.4g}" if len(values) > 1 else None
