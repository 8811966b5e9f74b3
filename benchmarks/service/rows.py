"""Makes rows of figures, with what repeated measurements say of their certainty: an interval for answers in
time, else the least and the greatest of the repetitions."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

from benchmarks.measuring.report import Row, compared, median
from benchmarks.service.intervals import lead, said
from benchmarks.service.outcomes import Window, figures
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
    "kept": ("share", None),
    "reused": ("share", None),
}
# Without objectives these say nothing.
_OF_OBJECTIVES = ("goodput_per_s", "slo_met")


@dataclasses.dataclass(frozen=True)
class Cell:
    """What one system did under one load.

    Attributes:
      case: the load.
      system: its name.
      windows: of each repetition.
    """

    case: str
    system: str
    windows: Sequence[Window]

    @functools.cached_property
    def figures(self) -> Mapping[str, float]:
        """Over all repetitions (see `outcomes.figures`)."""
        return figures(self.windows)

    @functools.cached_property
    def repeated(self) -> Sequence[Mapping[str, float]]:
        """Of each repetition."""
        return [figures([each]) for each in self.windows]


def load_rows(cells: Sequence[Cell], *, objectives: bool) -> list[Row]:
    """Rows of every case and metric.

    Args:
      cells: of all systems and loads.
      objectives: whether there were limits of time.
    """
    rows = []
    for case in dict.fromkeys(cell.case for cell in cells):
        own = [cell for cell in cells if cell.case == case]
        for name in dict.fromkeys(name for cell in own for name in cell.figures):
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
    own = {cell.system: cell for cell in cells if name in cell.figures}
    values = {system: cell.figures[name] for system, cell in own.items()}
    notes = {system: _note(cell, name, own.get(OURS)) for system, cell in own.items()}
    if lower is None or OURS not in values:
        return [
            Row(case=case, system=system, metric=metric, value=value, unit=unit, note=notes[system])
            for system, value in values.items()
        ]
    return compared(
        values, ours=OURS, case=case, metric=metric, unit=unit, notes=notes, lower_is_better=lower
    )


def _note(cell: Cell, name: str, ours: Cell | None) -> str | None:
    parts = []
    if name == "goodput_per_s":
        parts.append(said(cell.windows))
        if ours is not None and ours is not cell:
            parts.append(lead(ours.windows, cell.windows))
    values = [each[name] for each in cell.repeated if name in each]
    if len(values) > 1:
        parts.append(f"runs {min(values):.4g} to {max(values):.4g}")
    return "; ".join(filter(None, parts)) or None
