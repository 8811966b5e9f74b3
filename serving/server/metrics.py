"""Counts and times calls in a Prometheus registry; serves `/metrics`, `/requests` and the dashboard, which
reads both.

Each metric is declared once: its labels, and what changes it. Gauges are read from the backend's
current values on each scrape. Names of apps become labels, so their number is bounded. The page contains
no data, so anyone may load it; metrics name all apps and their times, and are for operators.
"""

import asyncio
import collections
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from jaxllm.serving.server.api.errors import ApiError, error_response, openai_body
from jaxllm.serving.server.calls import Ended, Scored, Started
from jaxllm.serving.server.identity import is_operator
from jaxllm.serving.server.job import Dispatch
from jaxllm.serving.server.pages import FILES, FOLDER, PAGE_HEADERS

_MOST_APPS, _MOST_KINDS, _MOST_REFUSALS = 32, 16, 128
# Number of requests that are listed.
_MOST_LISTED = 200
_MS_PER_S = 1000.0
_TTFT_S = (0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6)
_TPOT_S = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.4, 0.8)
_DISPATCH_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
_ROWS = (1, 2, 3, 4, 6, 8, 12, 16)


class _Names:
    """Bounds the number of a label's values: later ones are "other". Thread-safe."""

    def __init__(self, most: int) -> None:
        self._most, self._known, self._lock = most, set[str](), threading.Lock()

    def __call__(self, name: str) -> str:
        with self._lock:
            if len(self._known) < self._most:
                self._known.add(name)
            return name if name in self._known else "other"


def _per_token_s(field: str) -> Callable[[Ended], float | None]:
    """The time per token after the first, of answers that have one."""
    return lambda end: getattr(end, field) / _MS_PER_S if end.tokens > 1 else None


# Name, help, and labels of each metric; type of the events that change it, or None if it is counted by name;
# what an event adds: the value of a field, in seconds for times, or of a function, None for nothing; and
# the bounds of a histogram. Labels other than the app are fields of the event, as `label=field` if their
# names differ.
METRICS: tuple[tuple[str, str, str, type | None, Any, Sequence[float]], ...] = (
    ("calls_accepted", "Calls that were accepted.", "app", None, None, ()),
    ("calls_refused", "Calls that were refused, by reason.", "app reason", None, None, ()),
    (
        "requests_refused", "Requests that were answered with an error, by status, code and field.",
        "app status code field", None, None, (),
    ),
    ("calls_failed", "Calls that ended with an error, by kind.", "app kind", None, None, ()),
    ("calls_cancelled", "Calls whose client left.", "app", None, None, ()),
    ("calls_ended", "Answers that ended, by reason.", "app finish_reason", Ended, lambda end: 1, ()),
    (
        "objectives", "Answers with an objective, by whether it was met.", "app met", Ended,
        lambda end: None if end.met is None else 1, (),
    ),
    ("plans", "Plans by level (percent) and source.", "level source", Started, lambda start: 1, ()),
    ("prompt_tokens", "Tokens of prompts.", "app", Started, "prompt_tokens", ()),
    ("kept_tokens", "Tokens of prompts that plans kept.", "app", Started, "kept_tokens", ()),
    ("reused_tokens", "Tokens of prompts that a cache had.", "app", Started, "reused_tokens", ()),
    ("answer_tokens", "Tokens of answers that ended.", "app", Ended, "tokens", ()),
    (
        "drafted_tokens", "Tokens of answers that were drafted.", "app", Ended,
        lambda end: max(0.0, round(end.tokens * end.drafted)), (),
    ),
    ("scored_tokens", "Tokens of given texts that were scored.", "app", Scored, "tokens", ()),
    ("dispatched_tokens", "Tokens that dispatches gave, by kind.", "kind", Dispatch, "tokens", ()),
    ("ttft_seconds", "Time to the first token, waiting included.", "app", Ended, "ttft_ms", _TTFT_S),
    (
        "tpot_seconds", "Time per further token, waiting included.", "app", Ended, _per_token_s("tpot_ms"),
        _TPOT_S,
    ),
    ("engine_ttft_seconds", "TTFT without waiting.", "app", Ended, "engine_ttft_ms", _TTFT_S),
    ("engine_tpot_seconds", "TPOT without waiting.", "app", Ended, _per_token_s("engine_tpot_ms"), _TPOT_S),
    ("queue_wait_seconds", "From the call to its first step.", "app", Started, "queued_ms", _TTFT_S),
    ("batch_rows", "Answers in a dispatch, by its kind.", "kind", Dispatch, "rows", _ROWS),
    ("dispatch_seconds", "Time of a dispatch, by its kind.", "kind", Dispatch, "took_ms", _DISPATCH_S),
    (
        "prefill_chunks", "Chunks of prompts that were fed, by length and arithmetic.",
        "tokens=chunk_tokens mode", Dispatch, lambda dispatch: 1 if dispatch.chunk_tokens else None, (),
    ),
)  # fmt: skip
# Name, help and labels of each gauge of current values, and its place in `Backend.snapshot`, `*` for each
# name.
GAUGES = (
    ("queue_calls", "Calls that wait.", "", "queue.waiting"),
    ("queue_limit_calls", "Most calls that may wait.", "", "queue.limit"),
    ("queue_oldest_seconds", "For which the oldest call has waited.", "", "queue.oldest_ms"),
    ("running_calls", "Answers that run.", "app level", "running.*.*"),
    ("contexts", "Contexts of an app.", "app", "contexts.*.contexts"),
    ("context_stored_bytes", "Bytes of an app's contexts on storage.", "app", "contexts.*.stored_bytes"),
    ("context_chunks", "Resident chunks of an app's contexts by width.", "app bits", "contexts.*.chunks.*"),
    ("memory_bytes", "Resident memory of the process.", "", "memory.process_bytes"),
    ("memory_part_bytes", "Resident memory by what takes it, all of it together.", "part", "memory.parts.*"),
    ("memory_pages_bytes", "Resident memory by kind of page, all of it together.", "kind", "memory.pages.*"),
    ("memory_children_bytes", "Proportional memory of child processes.", "", "memory.children_bytes"),
    ("memory_limit_bytes", "Budget of the process; 0 for none.", "", "memory.limit_bytes"),
    ("memory_pressure", "Share of time that tasks wait for memory.", "", "memory.pressure"),
    ("holding_size_bytes", "Memory by what takes it.", "holding", "memory.holdings.*.size_bytes"),
    ("holding_limit_bytes", "Most memory that each may take.", "holding", "memory.holdings.*.limit_bytes"),
    ("adapter_bytes", "Memory of each adapter that is loaded.", "adapter", "adapters.*"),
    ("device_thermal", "Heat of the device: 0 none to 5 emergency.", "", "device.thermal"),
    ("device_trim", "Memory that the device wants back: 0 none, 1 some, 2 all.", "", "device.trim"),
    ("device_work_share", "Most of the whole model's work that a call may take.", "", "device.work_share"),
    ("expert_hit_rate", "Share of visits that hit, since the start.", "", "experts.hit_rate"),
)  # fmt: skip
# The same for counts since the start.
COUNTS = (
    ("expert_visits", "Experts that layers asked for.", "", "experts.visits"),
    ("expert_hits", "Visits of resident experts.", "", "experts.hits"),
    ("expert_foreseen", "Hits of experts that were prefetched.", "", "experts.foreseen"),
    ("read_bytes", "From storage, by what was read.", "what", "read_bytes.*"),
    ("grammars", "Compiled, refused, or ended at the bounds of their processes.", "outcome", "grammars.*"),
)


class Metrics:
    """The metrics of one service. Thread-safe. `snapshot` is `Backend.snapshot`, for gauges; `measure`
    measures memory for it, slowly, in a thread before each scrape."""

    def __init__(
        self, snapshot: Callable[[], Mapping[str, Any]], measure: Callable[[], None] = lambda: None
    ) -> None:
        self.measure = measure
        self._names, self._kinds = _Names(_MOST_APPS), _Names(_MOST_KINDS)
        self._refusals = _Names(_MOST_REFUSALS)
        self._listed: collections.deque[Mapping[str, Any]] = collections.deque(maxlen=_MOST_LISTED)
        self._snapshot, self._registry = snapshot, CollectorRegistry(auto_describe=False)
        self._metrics: dict[str, Counter | Histogram] = {}
        for name, text, labels, _, _, buckets in METRICS:
            names = [each.partition("=")[0] for each in labels.split()]
            own: dict[str, Any] = {"registry": self._registry} | ({"buckets": buckets} if buckets else {})
            kind = Histogram if buckets else Counter
            self._metrics[name] = kind(f"jaxllm_{name}", text, names, **own)
        self._registry.register(self)

    def count(self, name: str, app: str, kind: str = "") -> None:
        """Counts what became of a call of an app, with a reason or kind for the metrics that have one."""
        self._add(name, [self._names(app), *([self._kinds(kind)] if kind else ())], 1)

    def add_request(self, record: Mapping[str, Any]) -> None:
        """Lists a request by its record (see `jaxllm.serving.server.logs.access_record`), and counts it if it
        was answered with an error. Fields are named by clients, so the number of kinds is bounded."""
        self._listed.append({"time_s": round(time.time(), 3), **record})
        if "code" in record:
            kind = (
                self._names(record["app"]), str(record["status"]), record["code"], record.get("param", ""),
            )  # fmt: skip
            known = self._refusals("\0".join(kind)) != "other"
            self._add("requests_refused", kind if known else (*kind[:2], "other", "other"), 1)

    def requests(self) -> list[Mapping[str, Any]]:
        """The records of the last requests, newest first."""
        return list(self._listed)[::-1]

    def report(self, event: Started | Ended | Scored | Dispatch, app: str = "") -> None:
        """Adds an event of a call of an app, or a dispatch: in the engine's thread, so it must be fast."""
        for name, _, labels, kind, value, _ in METRICS:
            if kind is type(event):
                if isinstance(value, str):
                    value = getattr(event, value) / (_MS_PER_S if value.endswith("_ms") else 1)
                else:
                    value = value(event)
                if value is not None:
                    self._add(name, [self._label(each, event, app) for each in labels.split()], value)

    def _label(self, label: str, event: Any, app: str) -> str:
        if label == "app":
            return self._names(app)
        value = getattr(event, label.rpartition("=")[2])
        if label == "source":
            return self._kinds(value)
        return str(value).lower() if isinstance(value, bool) else str(value)

    def _add(self, name: str, labels: Sequence[str], value: float) -> None:
        metric = self._metrics[name].labels(*labels)
        if isinstance(metric, Histogram):
            metric.observe(value)
        else:
            metric.inc(value)

    def text(self) -> bytes:
        """All metrics in Prometheus's text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """The current values of the backend, for the registry; missing ones have no sample."""
        figures = self._snapshot()
        for kind, declared in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTS)):
            for name, text, labels, place in declared:
                family = kind(f"jaxllm_{name}", text, labels=labels.split())
                sums: dict[tuple[str, ...], float] = {}
                for key, value in _found(figures, place.split(".")):
                    key = (self._names(key[0]), *key[1:]) if labels.startswith("app") else key
                    sums[key] = sums.get(key, 0) + value / (_MS_PER_S if place.endswith("_ms") else 1)
                for key, value in sums.items():
                    family.add_metric(key, value)
                yield family


def _found(value: Any, place: Sequence[str]) -> Iterator[tuple[tuple[str, ...], float]]:
    """The values at a place, with the names that stand for its `*`."""
    if not place:
        yield (), value
        return
    name, rest = place[0], place[1:]
    if name != "*":
        if name in value:
            yield from _found(value[name], rest)
        return
    for key, inner in value.items():
        for more, found in _found(inner, rest):
            yield (str(key), *more), found


_REQUESTS = "/requests"
_NOT_STORED = {"Cache-Control": "no-store"}
_NOT_OPERATOR = (
    "metrics and requests name all apps, and are for operators: send a key made with `jaxllm keys add NAME "
    "--operator`, or call over the Unix socket as root or as the service's user"
)


def metric_routes(metrics: Metrics) -> list[Route]:
    """The routes of `/metrics` and `/requests`, for operators, and of the page at `/`."""

    def page(name: str, kind: str) -> Callable[[Request], Response]:
        return lambda request: FileResponse(FOLDER / name, media_type=kind, headers=PAGE_HEADERS)

    # Values are read in the event loop, as backends require, not in a thread.
    async def read(request: Request) -> Response:
        if is_operator(request.scope):
            if request.url.path == _REQUESTS:
                body = json.dumps({"object": "list", "data": metrics.requests()})
                return Response(body, media_type="application/json", headers=_NOT_STORED)
            await asyncio.to_thread(metrics.measure)
            return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST, headers=_NOT_STORED)
        refusal = error_response(ApiError(_NOT_OPERATOR, status=403, code="not_operator"), openai_body)
        refusal.headers.update(_NOT_STORED)
        return refusal

    return [
        *(Route(path, page(*file), methods=["GET"]) for path, file in FILES.items()),
        *(Route(path, read, methods=["GET"]) for path in ("/metrics", _REQUESTS)),
    ]
