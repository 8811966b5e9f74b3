"""Counts and times calls in a Prometheus registry; serves `/metrics` and a dashboard page that reads it.

The backend and the HTTP layer report by the methods of `Metrics`, from any thread; gauges are read from the
backend's figures on each scrape. Names of apps become labels, so their number is bounded. The page contains
no data, so anyone may load it; metrics name all apps and their times, and are for operators.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route
from starlette.types import Scope

from jaxllm.errors import ConfigError
from jaxllm.serving.server.api.errors import ApiError, error_response, openai_body
from jaxllm.serving.server.calls import Ended, Started
from jaxllm.serving.server.job import Dispatch

CONTENT_TYPE = CONTENT_TYPE_LATEST
MOST_APPS = 32
OTHER = "other"
_MOST_KINDS = 16
_MS_PER_S = 1000.0
_TTFT_S = (0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6)
_TPOT_S = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.4, 0.8)
_DISPATCH_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
_ROWS = (1, 2, 3, 4, 6, 8, 12, 16)
Snapshot = Callable[[], Mapping[str, Any]]


class Names:
    """Bounds the number of a label's values: later ones are "other". Thread-safe.

    Args:
      most: number of names to use as labels.
    """

    def __init__(self, most: int) -> None:
        if most < 1:
            raise ConfigError(f"a label needs at least one value, got most={most!r:.80}")
        self._most, self._known, self._lock = most, set[str](), threading.Lock()

    def __call__(self, name: str) -> str:
        """The label for a name."""
        with self._lock:
            if name not in self._known and len(self._known) < self._most:
                self._known.add(name)
            return name if name in self._known else OTHER


class Metrics:
    """Metrics of one service. Thread-safe.

    Args:
      snapshot: `Backend.snapshot`, for gauges.
      most_apps: maximum number of apps with their own labels.
    """

    def __init__(self, snapshot: Snapshot, *, most_apps: int = MOST_APPS) -> None:
        self._names, self._kinds = Names(most_apps), Names(_MOST_KINDS)
        self._registry = own = CollectorRegistry(auto_describe=False)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"jaxllm_{name}", text, labels, registry=own)

        def histogram(name: str, text: str, buckets: tuple[float, ...], label: str) -> Histogram:
            return Histogram(f"jaxllm_{name}", text, (label,), registry=own, buckets=buckets)

        self._accepted = counter("calls_accepted", "Calls that were accepted.", "app")
        self._refused = counter("calls_refused", "Calls that were refused, by reason.", "app", "reason")
        self._failed = counter("calls_failed", "Calls that ended with an error, by kind.", "app", "kind")
        self._cancelled = counter("calls_cancelled", "Calls whose client left.", "app")
        self._ended = counter("calls_ended", "Answers that ended, by reason.", "app", "finish_reason")
        self._met = counter("objectives", "Answers with an objective, by whether it was met.", "app", "met")
        self._plans = counter("plans", "Plans by level (percent) and source.", "level", "source")
        self._prompt = counter("prompt_tokens", "Tokens of prompts.", "app")
        self._kept = counter("kept_tokens", "Tokens of prompts that plans kept.", "app")
        self._reused = counter("reused_tokens", "Tokens of prompts that a cache had.", "app")
        self._answer = counter("answer_tokens", "Tokens of answers that ended.", "app")
        self._drafted = counter("drafted_tokens", "Tokens of answers that were drafted.", "app")
        self._decoded = counter("dispatched_tokens", "Tokens that dispatches gave, by kind.", "kind")
        self._ttft = histogram("ttft_seconds", "Time to the first token, waiting included.", _TTFT_S, "app")
        self._tpot = histogram("tpot_seconds", "Time per further token, waiting included.", _TPOT_S, "app")
        self._own_ttft = histogram("engine_ttft_seconds", "TTFT without waiting.", _TTFT_S, "app")
        self._own_tpot = histogram("engine_tpot_seconds", "TPOT without waiting.", _TPOT_S, "app")
        self._wait = histogram("queue_wait_seconds", "From the call to its first step.", _TTFT_S, "app")
        self._rows = histogram("batch_rows", "Answers in a dispatch, by its kind.", _ROWS, "kind")
        self._busy = histogram("dispatch_seconds", "Time of a dispatch, by its kind.", _DISPATCH_S, "kind")
        self._chunks = counter(
            "prefill_chunks", "Chunks of prompts that were fed, by length and arithmetic.", "tokens", "mode"
        )
        own.register(_Gauges(snapshot, self._names))

    def accepted(self, app: str) -> None:
        """A call was accepted."""
        self._accepted.labels(self._names(app)).inc()

    def refused(self, app: str, reason: str) -> None:
        """A call was refused; `reason` as in `Refused`, or "rate", "key" and the like."""
        app = self._names(app)
        self._refused.labels(app, self._kinds(reason)).inc()

    def started(self, app: str, started: Started) -> None:
        """The first token of a call is about to be sent."""
        app = self._names(app)
        self._plans.labels(str(started.level), self._kinds(started.source)).inc()
        self._prompt.labels(app).inc(started.prompt_tokens)
        self._kept.labels(app).inc(started.kept_tokens)
        self._reused.labels(app).inc(started.reused_tokens)
        self._wait.labels(app).observe(started.queued_ms / _MS_PER_S)

    def ended(self, app: str, ended: Ended) -> None:
        """An answer of an app has ended."""
        app = self._names(app)
        self._ended.labels(app, ended.finish_reason).inc()
        self._answer.labels(app).inc(ended.tokens)
        self._drafted.labels(app).inc(max(0.0, round(ended.tokens * ended.drafted)))
        self._ttft.labels(app).observe(ended.ttft_ms / _MS_PER_S)
        self._own_ttft.labels(app).observe(ended.engine_ttft_ms / _MS_PER_S)
        if ended.tokens > 1:
            self._tpot.labels(app).observe(ended.tpot_ms / _MS_PER_S)
            self._own_tpot.labels(app).observe(ended.engine_tpot_ms / _MS_PER_S)
        if ended.met is not None:
            self._met.labels(app, "true" if ended.met else "false").inc()

    def failed(self, app: str, kind: str) -> None:
        """An accepted call ended with an error; `kind` is the error's class name."""
        app = self._names(app)
        self._failed.labels(app, self._kinds(kind)).inc()

    def cancelled(self, app: str) -> None:
        """A call was cancelled before its answer ended."""
        app = self._names(app)
        self._cancelled.labels(app).inc()

    def dispatched(self, dispatch: Dispatch) -> None:
        """A dispatch has ended; called in the engine's thread, so it must be fast."""
        kind = dispatch.kind
        self._rows.labels(kind).observe(dispatch.rows)
        self._busy.labels(kind).observe(dispatch.took_ms / _MS_PER_S)
        self._decoded.labels(kind).inc(dispatch.tokens)
        if dispatch.chunk_tokens:
            self._chunks.labels(str(dispatch.chunk_tokens), dispatch.mode).inc()

    def text(self) -> bytes:
        """All metrics in Prometheus's text format; its type is `CONTENT_TYPE`."""
        return generate_latest(self._registry)


class _Gauges(Collector):
    """Reads gauges from a backend's figures. Missing parts have no gauge."""

    def __init__(self, snapshot: Snapshot, names: Names) -> None:
        self._snapshot, self._names = snapshot, names

    def collect(self) -> Iterator[Metric]:
        figures = self._snapshot()
        yield from self._load(figures)
        yield from self._contexts(figures.get("contexts", {}))
        memory = figures.get("memory", {})
        yield _gauge("memory_bytes", "Resident memory of the process.", memory.get("process_bytes"))
        yield _gauge("memory_limit_bytes", "Budget of the process; 0 for none.", memory.get("limit_bytes"))
        yield _gauge("memory_pressure", "Share of time that tasks wait for memory.", memory.get("pressure"))
        for field, text in (
            ("size_bytes", "Memory by what takes it."),
            ("limit_bytes", "Most memory that each may take now."),
        ):
            family = GaugeMetricFamily(f"jaxllm_holding_{field}", text, labels=["holding"])
            for name, holding in memory.get("holdings", {}).items():
                if field in holding:
                    family.add_metric([name], holding[field])
            yield family
        adapters = GaugeMetricFamily(
            "jaxllm_adapter_bytes", "Memory of each adapter that is loaded.", labels=["adapter"]
        )
        for name, size in figures.get("adapters", {}).items():
            adapters.add_metric([name], size)
        yield adapters
        experts = figures.get("experts", {})
        for name, text in (
            ("visits", "Experts that layers asked for."),
            ("hits", "Visits of resident experts."),
            ("foreseen", "Hits of experts that were prefetched."),
        ):
            yield _counter(f"expert_{name}", text, experts.get(name))
        share = experts["hits"] / experts["visits"] if experts.get("visits") else None
        yield _gauge("expert_hit_rate", "Share of visits that hit, since the start.", share)
        read = CounterMetricFamily("jaxllm_read_bytes", "From storage, by what was read.", labels=["what"])
        for name, value in figures.get("read_bytes", {}).items():
            read.add_metric([name], value)
        yield read
        grammars = CounterMetricFamily(
            "jaxllm_grammars",
            "Compiled, refused, or ended at the bounds of their processes.",
            labels=["outcome"],
        )
        for outcome, count in figures.get("grammars", {}).items():
            grammars.add_metric([outcome], count)
        yield grammars

    def _load(self, figures: Mapping[str, Any]) -> Iterator[Metric]:
        queue = figures.get("queue", {})
        yield _gauge("queue_calls", "Calls that wait.", queue.get("waiting"))
        yield _gauge("queue_limit_calls", "Most calls that may wait.", queue.get("limit"))
        oldest = queue.get("oldest_ms")
        age_s = None if oldest is None else oldest / _MS_PER_S
        yield _gauge("queue_oldest_seconds", "For which the oldest call has waited.", age_s)
        running = GaugeMetricFamily("jaxllm_running_calls", "Answers that run.", labels=["app", "level"])
        counts: dict[tuple[str, str], int] = {}
        for each in figures.get("running", ()):
            key = self._names(each["app"]), str(each["level"])
            counts[key] = counts.get(key, 0) + each["count"]
        for key, count in counts.items():
            running.add_metric(key, count)
        yield running

    def _contexts(self, apps: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
        sums: dict[str, dict[tuple[str, ...], int]] = {"contexts": {}, "stored_bytes": {}, "chunks": {}}
        for name, own in apps.items():
            app = self._names(name)
            for field in ("contexts", "stored_bytes"):
                sums[field][app,] = sums[field].get((app,), 0) + own.get(field, 0)
            for width, count in own.get("chunks", {}).items():
                sums["chunks"][app, width] = sums["chunks"].get((app, width), 0) + count
        for field, text in (
            ("contexts", "Contexts of an app."),
            ("stored_bytes", "Bytes of an app's contexts on storage."),
            ("chunks", "Resident chunks of an app's contexts by width."),
        ):
            labels = ["app", "bits"] if field == "chunks" else ["app"]
            name = field if field == "contexts" else f"context_{field}"
            family = GaugeMetricFamily(f"jaxllm_{name}", text, labels=labels)
            for key, value in sums[field].items():
                family.add_metric(key, value)
            yield family


def _gauge(name: str, text: str, value: float | None) -> Metric:
    """A gauge without labels; without a value if that is None."""
    family = GaugeMetricFamily(f"jaxllm_{name}", text, labels=[])
    if value is not None:
        family.add_metric([], value)
    return family


def _counter(name: str, text: str, value: float | None) -> Metric:
    family = CounterMetricFamily(f"jaxllm_{name}", text, labels=[])
    if value is not None:
        family.add_metric([], value)
    return family


_FOLDER = Path(__file__).parent / "dashboard"
# Path -> file and its media type.
_FILES = {
    "/": ("index.html", "text/html"),
    "/dashboard/style.css": ("style.css", "text/css"),
    "/dashboard/page.js": ("page.js", "text/javascript"),
    "/dashboard/icon.svg": ("icon.svg", "image/svg+xml"),
}
# Paths of the dashboard page, which contains no data.
PAGES = frozenset(_FILES)
# Scripts, styles and requests of this origin only; nothing inline, no frames, no form submission.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
_NOT_OPERATOR = (
    "metrics name all apps, and are for operators: send a key made with `jaxllm keys add NAME --operator`, "
    "or call over the Unix socket as root or as the service's user"
)


def metric_routes(metrics: Metrics, *, operates: Callable[[Scope], bool] = lambda scope: True) -> list[Route]:
    """The routes of `/metrics` and the page at `/`.

    Args:
      metrics: metrics of the service.
      operates: whether a connection is an operator's, who may read metrics
        (`jaxllm.serving.server.identity.Identity.operates`).
    """

    def page(name: str, kind: str) -> Callable[[Request], Response]:
        def answer(request: Request) -> Response:
            del request
            return FileResponse(_FOLDER / name, media_type=kind, headers=_HEADERS)

        return answer

    # In the event loop, as backends require, not in a thread.
    async def read(request: Request) -> Response:
        if operates(request.scope):
            return Response(metrics.text(), media_type=CONTENT_TYPE, headers={"Cache-Control": "no-store"})
        refusal = error_response(ApiError(_NOT_OPERATOR, status=403, code="not_operator"), openai_body)
        refusal.headers["Cache-Control"] = "no-store"
        return refusal

    return [
        *(Route(path, page(*file), methods=["GET"]) for path, file in _FILES.items()),
        Route("/metrics", read, methods=["GET"]),
    ]
