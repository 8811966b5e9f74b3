"""Remembers the last minutes of calls: recent answers one by one, and their sums in spans of time."""

import collections
import dataclasses
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from serving.server.calls import Ended, Started
from serving.server.dispatches import Dispatch

SPAN_S, SPANS = 10, 60
_RECENT, _OF_AN_APP = 200, 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class EndedCall:
    """An answer that has ended, as the dashboard shows it. No text of prompt or answer.

    Attributes:
      number: counts ended calls from 1.
      time_s: when it ended, in seconds since 1970.
      app: that asked.
      level: that answered, in percent; None where it is not known, like all of the plan.
      source: of the plan.
      prompt_tokens, kept_tokens, reused_tokens, queued_ms: see `Started`.
      tokens, ttft_ms, ttft_limit_ms, tpot_limit_ms, met, drafted: see `Ended`.
      tpot_ms: the same; None for an answer of one token.
    """

    number: int
    time_s: float
    app: str
    level: int | None
    source: str | None
    prompt_tokens: int | None
    kept_tokens: int | None
    reused_tokens: int | None
    queued_ms: float | None
    tokens: int
    ttft_ms: float
    tpot_ms: float | None
    ttft_limit_ms: float | None
    tpot_limit_ms: float | None
    met: bool | None
    drafted: float


@dataclasses.dataclass
class _Span:
    """Sums over `SPAN_S` seconds."""

    number: int
    met: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    missed: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    tokens: int = 0
    rows: int = 0
    dispatches: int = 0
    busy_ms: float = 0.0


@dataclasses.dataclass
class _App:
    """Sums of one app since the start."""

    counts: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    ttft_ms: collections.deque[float] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=_OF_AN_APP)
    )
    tpot_ms: collections.deque[float] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=_OF_AN_APP)
    )


class History:
    """What the dashboard shows of the past. Bounded for a bounded number of apps; thread-safe.

    Args:
      clock: seconds since 1970.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._recent: collections.deque[EndedCall] = collections.deque(maxlen=_RECENT)
        self._spans: collections.deque[_Span] = collections.deque(maxlen=SPANS)
        self._apps: dict[str, _App] = {}
        self._plans: collections.Counter[tuple[int, str]] = collections.Counter()
        self._chunks: collections.Counter[tuple[int, str]] = collections.Counter()
        self._ended = 0

    def counted(self, app: str, kind: str) -> None:
        """Counts a call of an app: "taken", "refused", "failed" or "cancelled"."""
        with self._lock:
            self._app(app).counts[kind] += 1

    def planned(self, level: int, source: str) -> None:
        """Counts a plan."""
        with self._lock:
            self._plans[level, source] += 1

    def ended(self, app: str, ended: Ended, started: Started | None) -> None:
        """Adds an answer that has ended."""
        with self._lock:
            self._ended += 1
            own, span = self._app(app), self._span()
            own.counts["ended"] += 1
            own.ttft_ms.append(ended.ttft_ms)
            if ended.tokens > 1:
                own.tpot_ms.append(ended.tpot_ms)
            if ended.met is not None:
                own.counts["met" if ended.met else "missed"] += 1
                (span.met if ended.met else span.missed)[app] += 1
            self._recent.append(
                EndedCall(
                    number=self._ended, time_s=self._clock(), app=app,
                    level=started and started.level, source=started and started.source,
                    prompt_tokens=started and started.prompt_tokens,
                    kept_tokens=started and started.kept_tokens,
                    reused_tokens=started and started.reused_tokens,
                    queued_ms=started and started.queued_ms,
                    tokens=ended.tokens, ttft_ms=ended.ttft_ms,
                    tpot_ms=ended.tpot_ms if ended.tokens > 1 else None,
                    ttft_limit_ms=ended.ttft_limit_ms, tpot_limit_ms=ended.tpot_limit_ms,
                    met=ended.met, drafted=ended.drafted,
                )
            )  # fmt: skip

    def dispatched(self, dispatch: Dispatch) -> None:
        """Adds a dispatch; only those that decode are batches."""
        with self._lock:
            span = self._span()
            span.busy_ms += dispatch.took_ms
            span.tokens += dispatch.tokens
            if dispatch.kind in ("decode", "verify"):
                span.rows += dispatch.rows
                span.dispatches += 1
            if dispatch.chunk_tokens:
                self._chunks[dispatch.chunk_tokens, dispatch.mode] += 1

    def calls_after(self, number: int) -> list[dict[str, Any]]:
        """Ended calls with a larger number, oldest first, as far as they are remembered."""
        with self._lock:
            return [dataclasses.asdict(each) for each in self._recent if each.number > number]

    def summary(self) -> dict[str, Any]:
        """Sums by app, plans, chunks of prompts, and the course of the last `SPANS` spans, the oldest first.

        The rows of a span without a dispatch are None.
        """
        with self._lock:
            now = self._number()
            by_number = {each.number: each for each in self._spans}
            spans = [by_number.get(number, _Span(number)) for number in range(now - SPANS + 1, now + 1)]
            return {
                "span_s": SPAN_S,
                "apps": {name: _of_app(name, app, spans) for name, app in self._apps.items()},
                "plans": [
                    {"level": level, "source": source, "count": count}
                    for (level, source), count in sorted(self._plans.items())
                ],
                "chunks": [
                    {"tokens": tokens, "mode": mode, "count": count}
                    for (tokens, mode), count in sorted(self._chunks.items())
                ],
                "course": {
                    "met": [each.met.total() for each in spans],
                    "missed": [each.missed.total() for each in spans],
                    "tokens_per_s": [round(each.tokens / SPAN_S, 1) for each in spans],
                    "rows": [
                        round(each.rows / each.dispatches, 2) if each.dispatches else None for each in spans
                    ],
                    "busy": [round(min(1.0, each.busy_ms / (1000 * SPAN_S)), 3) for each in spans],
                },
            }

    def _app(self, name: str) -> _App:
        return self._apps.setdefault(name, _App())

    def _number(self) -> int:
        return int(self._clock() // SPAN_S)

    def _span(self) -> _Span:
        number = self._number()
        # A clock that was set back adds to the newest span.
        if not self._spans or self._spans[-1].number < number:
            self._spans.append(_Span(number))
        return self._spans[-1]


def _of_app(name: str, app: _App, spans: Sequence[_Span]) -> dict[str, Any]:
    kinds = ("taken", "ended", "met", "missed", "refused", "failed", "cancelled")
    return {
        **{kind: app.counts[kind] for kind in kinds},
        "ttft_ms": _median(app.ttft_ms),
        "tpot_ms": _median(app.tpot_ms),
        "course": {
            "met": [each.met[name] for each in spans],
            "missed": [each.missed[name] for each in spans],
        },
    }


def _median(values: Sequence[float]) -> float | None:
    return round(statistics.median(values), 2) if values else None
