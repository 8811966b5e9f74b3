"""Judges what came back: which answers were in time, percentiles of times, tokens per second.

Repeated loads are judged together: shares, rates and percentiles are of all of their calls.
"""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.service.load import NOT_ANSWERED
from benchmarks.service.systems import Limits
from benchmarks.service.workload import APPS, Request
from jaxllm.elastic.slo import SLOS

PERCENTILES = (50, 95, 99)
_BUSY = (429, 503)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of one request.

    Attributes:
      app: number of the app.
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
      reused_tokens: of the prompt, from a cache; None where the system does not tell.
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
    status = "answered" if error is None else "refused" if raw["status"] in _BUSY else "failed"
    facts = raw["jaxllm"] or {}
    whole = error is None
    # Percentiles without those that never came would be the better, the fewer answers there are.
    waited_s = raw["ended_s"] if error == NOT_ANSWERED and first is None else first
    timed = whole or error == NOT_ANSWERED
    return Outcome(
        app=request.app,
        due_s=raw["due_s"],
        late_s=raw["sent_s"] - raw["due_s"],
        status=status,
        error=error,
        prompt_tokens=len(request.prompt),
        tokens=raw["tokens"] if whole else 0,
        ttft_ms=1000 * (waited_s - raw["due_s"]) if timed else 0.0,
        tpot_ms=1000 * (last - first) / (raw["tokens"] - 1) if whole and raw["tokens"] > 1 else 0.0,
        end_s=last if whole else 0.0,
        limits_ms=limits_ms,
        level=facts.get("level"),
        kept_tokens=facts.get("kept_tokens"),
        reused_tokens=facts.get("reused_tokens", raw["cached_tokens"]),
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


def figures(windows: Sequence[Window]) -> dict[str, float]:
    """Metric -> value over all windows, without those that nothing was answered for; none where nothing was
    due."""
    counted = [each for window in windows for each in window.counted]
    if not counted:
        return {}
    seconds = sum(window.seconds for window in windows)
    answered = [each for each in counted if each.answered]
    found = {
        "decode_tokens_per_s": sum(window.tokens for window in windows) / seconds,
        "requests_per_s": len(answered) / seconds,
        "goodput_per_s": sum(each.met for each in counted) / seconds,
        "slo_met": statistics.fmean(each.met for each in counted),
        "refused": statistics.fmean(each.status == "refused" for each in counted),
        "failed": statistics.fmean(each.status == "failed" for each in counted),
    }
    for app in sorted({each.app for each in counted}):
        own = [each.met for each in counted if each.app == app]
        found[f"slo_met of {SLOS[app]}"] = statistics.fmean(own)
    times = {
        "ttft": [each.ttft_ms for each in counted if each.ttft_ms],
        "tpot": [each.tpot_ms for each in answered if each.tokens > 1],
    }
    for name, values in times.items():
        if values:
            for percent in PERCENTILES:
                found[f"{name}_ms_p{percent}"] = float(np.percentile(values, percent))
    levels = [each.level for each in answered if each.level is not None]
    if levels:
        found["level"] = statistics.fmean(levels)
    for name, of in {"kept": "kept_tokens", "reused": "reused_tokens"}.items():
        told = [(getattr(each, of), each.prompt_tokens) for each in answered]
        if shares := [tokens / prompt for tokens, prompt in told if tokens is not None]:
            found[name] = statistics.fmean(shares)
    return found
