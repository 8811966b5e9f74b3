"""Judges what came back: which answers were in time, percentiles of times, tokens per second.

Repeated loads are judged together: shares, rates and percentiles are of all of their calls. Rows have an
interval for answers in time, else the least and the greatest of the repetitions.

Calls that come soon after each other wait for each other, so that the bootstrap resamples blocks of
consecutive ones (Davison and Hinkley, Bootstrap Methods and their Application, section 8.2.3). Two systems
were sent the same calls: they are compared block by block, which cancels how many calls come at once.
"""

import dataclasses
import functools
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.report import OURS, Figure, Row, bootstrap, compared, draw_figures, row
from benchmarks.service.load import NOT_ANSWERED
from benchmarks.service.systems import APPS, Limits, Request
from jaxllm.elastic.slo import SLOS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of one request.

    Attributes:
      due_s: when it was due, in seconds from the beginning of the load.
      late_s: how much later it was sent; large values are the load generator's fault.
      status: "answered", "refused" (too many calls) or "failed".
      error: why there is no answer; None where there is one.
      prompt_tokens, tokens: of the prompt and of the answer.
      ttft_ms: from when it was due to the first text; of what was given up before, how long it was waited
        for; else 0 without an answer.
      tpot_ms: per further token; 0 for answers of one token.
      end_s: when the last text came; 0 without an answer.
      limits_ms: most TTFT and TPOT.
      level: that answered, in percent; None for systems without levels.
      kept_tokens: of the prompt, by the plan; None for systems without plans.
      reused_tokens: of the prompt, from a cache; None where the system does not report it.
      overhead_ms: per further token, above the time in the engine; None where the system does not report it.
      health_ms: times of the server's answers to GET /health until the next request was sent.
    """

    app: int
    due_s: float
    late_s: float
    status: str
    error: str | None
    prompt_tokens: int
    tokens: int
    ttft_ms: float
    tpot_ms: float
    end_s: float
    limits_ms: Limits
    level: int | None
    kept_tokens: int | None
    reused_tokens: int | None
    overhead_ms: float | None = None
    health_ms: Sequence[float] = ()

    @property
    def answered(self) -> bool:
        """Whether there is a whole answer."""
        return self.status == "answered"

    @property
    def met(self) -> bool:
        """Whether it was answered within its objective."""
        return (
            self.answered
            and self.ttft_ms <= self.limits_ms[0]
            and (self.tokens < 2 or self.tpot_ms <= self.limits_ms[1])
        )

    def to_json(self) -> dict[str, Any]:
        """A plain dict for a line of JSON; no limit is None."""
        limits = [each if np.isfinite(each) else None for each in self.limits_ms]
        named = {"app": APPS[self.app], "slo": str(SLOS[self.app]), "met": self.met, "limits_ms": limits}
        return dataclasses.asdict(self) | named


def judged(raw: dict[str, Any], request: Request, limits_ms: Limits) -> Outcome:
    """The outcome of a request, from what the load generator saw (see `load.send`)."""
    error, first, last = raw["error"], raw["first_s"], raw["last_s"]
    if error is None and first is None:
        error = "an answer without text"
    facts, whole = raw["jaxllm"] or {}, error is None
    status = "answered" if whole else "refused" if raw["status"] in (429, 503) else "failed"
    # Percentiles without those that never came would be the better, the fewer answers there are.
    waited_s = raw["ended_s"] if error == NOT_ANSWERED and first is None else first
    timed = whole or error == NOT_ANSWERED
    tpot_ms = 1000 * (last - first) / (raw["tokens"] - 1) if whole and raw["tokens"] > 1 else 0.0
    in_engine_ms = facts.get("engine_tpot_ms")
    return Outcome(
        app=request.app,
        due_s=raw["due_s"],
        late_s=raw["sent_s"] - raw["due_s"],
        status=status,
        error=error,
        prompt_tokens=len(request.prompt),
        tokens=raw["tokens"] if whole else 0,
        ttft_ms=1000 * (waited_s - raw["due_s"]) if timed else 0.0,
        tpot_ms=tpot_ms,
        end_s=last if whole else 0.0,
        limits_ms=limits_ms,
        level=facts.get("level"),
        kept_tokens=facts.get("kept_tokens"),
        reused_tokens=facts.get("reused_tokens", raw["cached_tokens"]),
        overhead_ms=tpot_ms - in_engine_ms if in_engine_ms and tpot_ms else None,
        health_ms=raw["health_ms"],
    )


@dataclasses.dataclass(frozen=True)
class Window:
    """The measured part of a load.

    Attributes:
      from_s, to_s: in seconds from the beginning of the load.
      outcomes: of all of its requests, also those before and after.
    """

    from_s: float
    to_s: float
    outcomes: Sequence[Outcome]

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.to_s - self.from_s

    @property
    def counted(self) -> list[Outcome]:
        """The requests that were due in it."""
        return [each for each in self.outcomes if self.from_s <= each.due_s < self.to_s]

    @property
    def tokens(self) -> float:
        """Of answers that came in it. An answer's tokens count as spread evenly from its first text to its
        last."""
        total = 0.0
        for each in self.outcomes:
            if each.answered:
                first_s = each.due_s + each.ttft_ms / 1000
                overlap = min(each.end_s, self.to_s) - max(first_s, self.from_s)
                length = each.end_s - first_s
                inside = self.from_s <= first_s < self.to_s
                total += each.tokens * max(0.0, overlap) / length if length > 0 else each.tokens * inside
        return total


# By metric, and what part of a case it is of; "" for all of it.
Figures = dict[tuple[str, str], float]


def figures(windows: Sequence[Window]) -> Figures:
    """Values over all windows, without those that nothing was answered for; none where nothing was due."""
    counted = [each for window in windows for each in window.counted]
    if not counted:
        return {}
    seconds = sum(window.seconds for window in windows)
    answered = [each for each in counted if each.answered]
    found: Figures = {
        ("decode_tokens_per_s", ""): sum(window.tokens for window in windows) / seconds,
        ("requests_per_s", ""): len(answered) / seconds,
        ("goodput_per_s", ""): sum(each.met for each in counted) / seconds,
    }
    shares: dict[tuple[str, str], list[float]] = {
        ("slo_met", ""): [each.met for each in counted],
        ("refused", ""): [each.status == "refused" for each in counted],
        ("failed", ""): [each.status == "failed" for each in counted],
    }
    for app in sorted({each.app for each in counted}):
        shares["slo_met", f"app {SLOS[app]}"] = [each.met for each in counted if each.app == app]
    shares["level", ""] = [each.level for each in answered if each.level is not None]
    for name, of in {"kept": "kept_tokens", "reused": "reused_tokens"}.items():
        counts = [(getattr(each, of), each.prompt_tokens) for each in answered]
        shares[name, ""] = [tokens / prompt for tokens, prompt in counts if tokens is not None]
    times = {
        "ttft_ms": [each.ttft_ms for each in counted if each.ttft_ms],
        "tpot_ms": [each.tpot_ms for each in answered if each.tokens > 1],
        "overhead_ms": [each.overhead_ms for each in answered if each.overhead_ms is not None],
        "health_ms": [took for each in counted for took in each.health_ms],
    }
    percentiles = {
        (name, f"percentile {percent}"): float(np.percentile(values, percent))
        for name, values in times.items()
        for percent in (50, 95, 99)
        if values
    }
    means = {key: statistics.fmean(values) for key, values in shares.items() if values}
    return found | means | percentiles


BLOCK_CALLS = 5
# With fewer blocks intervals are too narrow to be said.
LEAST_BLOCKS = 10
_DRAWS = 4000


def said(windows: Sequence[Window]) -> str | None:
    """The middle 95 % of the answers in time per second of one system, for notes; None for too few calls."""
    sums, seconds = _blocks(windows), sum(each.seconds for each in windows)
    if len(sums) < LEAST_BLOCKS:
        return None
    low, high = bootstrap(len(sums), lambda drawn: sums[drawn].sum(1) / seconds, draws=_DRAWS)
    calls = sum(len(each.counted) for each in windows)
    return f"95 % in [{low:.3g}, {high:.3g}] of {calls} calls"


def lead(ours: Sequence[Window], theirs: Sequence[Window]) -> str | None:
    """How many times as many answers in time ours gives to the same calls, for notes; None for too few."""
    mine, other = _blocks(ours), _blocks(theirs)
    if len(mine) < LEAST_BLOCKS or len(mine) != len(other):
        return None
    # A draw may have no answer in time.
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.nan_to_num(_resampled(mine) / _resampled(other), nan=1.0, posinf=np.inf)
    low, high = np.percentile(ratios, (2.5, 97.5), method="nearest")
    return f"ours paired 95 % in [{low:.2f}x, {high:.2f}x]"


def _blocks(windows: Sequence[Window]) -> np.ndarray:
    """`[blocks]` answers in time of each block of consecutive calls; no block is of two windows."""
    sums = []
    for window in windows:
        met = [each.met for each in sorted(window.counted, key=lambda each: each.due_s)]
        sums += [sum(met[place : place + BLOCK_CALLS]) for place in range(0, len(met), BLOCK_CALLS)]
    return np.array(sums, np.float64)


def _resampled(sums: np.ndarray) -> np.ndarray:
    """`[draws]` sums over blocks drawn with replacement, the same ones for as many blocks."""
    drawn = np.random.default_rng(0).integers(0, len(sums), (_DRAWS, len(sums)))
    return sums[drawn].sum(1)


@dataclasses.dataclass(frozen=True)
class Cell:
    """What one system did under one load."""

    case: str
    system: str
    windows: list[Window]

    @property
    def counted(self) -> list[Outcome]:
        """The requests that were due in the windows."""
        return [each for window in self.windows for each in window.counted]

    @functools.cached_property
    def figures(self) -> Figures:
        """Over all repetitions (see `outcomes.figures`)."""
        return figures(self.windows)

    @functools.cached_property
    def repeated(self) -> Sequence[Figures]:
        """Of each repetition."""
        return [figures([each]) for each in self.windows]


def load_rows(cells: Sequence[Cell], *, objectives: bool) -> list[Row]:
    """Rows of every case and metric."""
    rows = []
    for case in dict.fromkeys(cell.case for cell in cells):
        own = [cell for cell in cells if cell.case == case]
        for key in dict.fromkeys(key for cell in own for key in cell.figures):
            if objectives or key[0] not in ("goodput_per_s", "slo_met"):
                rows += _rows(own, key, f"{case}, {key[1]}" if key[1] else case)
    return rows


def memory_rows(name: str, peaks: Mapping[str, Sequence[int]], shares: Mapping[str, int]) -> list[Row]:
    """Rows of peak memory.

    Args:
      shares: proportional share of memory (PSS) of each system's last process at its end.
    """
    if not peaks:
        return []
    notes = {each: f"proportional share at the end {bytes_ / 1e6:,.0f} MB" for each, bytes_ in shares.items()}
    medians = {system: statistics.median(values) for system, values in peaks.items()}
    return compared(f"{name}, server", "peak_memory_bytes", medians, notes)


def _rows(cells: Sequence[Cell], key: tuple[str, str], case: str) -> list[Row]:
    own, metric = {cell.system: cell for cell in cells if key in cell.figures}, key[0]
    values = {system: cell.figures[key] for system, cell in own.items()}
    notes = {system: _note(cell, key, own.get(OURS)) for system, cell in own.items()}
    # Of the first no value is the better one.
    if metric in ("refused", "failed", "level", "kept", "reused") or OURS not in values:
        return [row(case, metric, values[each], notes[each], system=each) for each in values]
    return compared(case, metric, values, notes)


def _note(cell: Cell, key: tuple[str, str], ours: Cell | None) -> str | None:
    parts = []
    if key[0] == "goodput_per_s":
        parts.append(said(cell.windows))
        if ours is not None and ours is not cell:
            parts.append(lead(ours.windows, cell.windows))
    values = [each[key] for each in cell.repeated if key in each]
    if len(values) > 1:
        parts.append(f"runs {min(values):.4g} to {max(values):.4g}")
    return "; ".join(filter(None, parts)) or None


_LOAD = r".*, load (?P<x>[\d.e+-]+)"
FIGURES = (
    Figure(
        name="goodput", metric="goodput_per_s", case=_LOAD, kind="groups", up="answers in time per second",
        across="load (in what the idle whole model answers one after another)",
    ),
    Figure(
        name="clients", metric="decode_tokens_per_s", case=r".*, (?P<x>\d+) clients", kind="groups",
        up="tokens per second", across="clients",
    ),
)  # fmt: skip


def draw(rows: Sequence[Row], folder: Path, kept: Sequence[Cell] = ()) -> None:
    """Draws the figures that the rows allow, and the spread of times to the first token, a PNG each."""
    draw_figures("service", FIGURES, rows, folder)
    import matplotlib.pyplot as plt

    cases = [each for each in dict.fromkeys(one.case for one in kept) if re.fullmatch(_LOAD, each)]
    if not cases:
        return
    how = {"figsize": (1 + 4 * len(cases), 4.5), "layout": "constrained", "squeeze": False, "sharey": True}
    figure, all_axes = plt.subplots(1, len(cases), **how)
    for axes, case in zip(all_axes[0], cases, strict=True):
        _shares(axes, [each for each in kept if each.case == case])
        axes.set_title(case)
    all_axes[0][0].set_ylabel("share of requests")
    if any(one.answered for each in kept for one in each.counted):
        all_axes[0][0].legend(fontsize="small")
    figure.savefig(folder / "service_ttft.png", dpi=150)
    plt.close(figure)


def _shares(axes: Any, kept: Sequence[Cell]) -> None:
    """The share of all counted requests that had their first token within a time."""
    for cell in kept:
        times = sorted(one.ttft_ms for one in cell.counted if one.answered)
        if times:
            # Those without an answer have none, so that the curve ends below 1.
            shares = np.arange(1, len(times) + 1) / len(cell.counted)
            axes.step(times, shares, where="post", label=cell.system)
    times = [one.ttft_ms for each in kept for one in each.counted if one.answered]
    if times:
        axes.set_xlim(min(times) / 1.1, max(times) * 1.1)
        axes.set_xscale("log")
    axes.set_ylim(0, 1)
    axes.set_xlabel("time to the first token (ms)")
