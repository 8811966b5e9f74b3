"""Writes logs as JSON lines with the id of their request, and an access record of each request.

    app = AccessLogged(app)     outermost: refused requests have an id and a record, too

A line is one JSON object: `time`, `level`, `logger`, `message`, the request's `request_id` and `app` if
there is one, the fields of the record, and `error` with the traceback of an exception. Prompts and answers
are never written. A separate thread writes the lines (`LineWriter`), so that no answer waits for the reader
of the log.
"""

import contextlib
import contextvars
import datetime
import json
import logging
import os
import queue
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TextIO

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxllm.serving.server.api.errors import REPORTED, ApiError, api_error, code_of, error_response, shape_of
from jaxllm.serving.server.identity import identified_app
from jaxllm.serving.server.sockets import OPEN_PATHS

if TYPE_CHECKING:
    from jaxllm.serving.server.job import Job

_LOGGERS = ("jaxllm", "serving", "uvicorn", "py.warnings")
# Attributes of every record; others were passed as `extra`.
_OWN = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}
_MOST_MESSAGE, _MOST_ERROR = 4000, 16000
# Limit of unwritten lines.
_MOST_WAITING = 4000
_FLUSH_S, _RETRY_S = 2.0, 0.05


class Served:
    """A request that is being served, for its logs. For one event loop.

    Attributes:
      request_id: id of the request.
      calls: its accepted calls, in order.
      errors: errors that it was answered with, in order.
      ignored: names of its fields that have no effect, in order.
    """

    def __init__(self, request_id: str, scope: Mapping[str, Any]) -> None:
        self.request_id, self._scope = request_id, scope
        self.calls: list[Job] = []
        self.errors: list[ApiError] = []
        self.ignored: dict[str, None] = {}

    @property
    def app(self) -> str:
        """The app of the request; empty until identified."""
        return identified_app(self._scope)


# The request of logs in this context; each thread and task has its own.
CURRENT: contextvars.ContextVar[Served | None] = contextvars.ContextVar("request", default=None)


def named(jobs: "Iterable[Job]") -> dict[str, str]:
    """Fields of a record that belongs to several calls."""
    ids = {each.call.request_id: each.app for each in jobs}
    return {"request_id": " ".join(ids), "app": " ".join(dict.fromkeys(ids.values()))} if ids else {}


class JsonLines(logging.Formatter):
    """Formats a record as one line of JSON in ASCII: no text from outside can forge or hide a line."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        at = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, Any] = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage()[:_MOST_MESSAGE],
        }
        fields = {name: value for name, value in vars(record).items() if name not in _OWN}
        served = CURRENT.get()
        own = {} if served is None else {"request_id": served.request_id, "app": served.app}
        line = {**own, **fields, **line}
        if record.exc_info:
            # The end of a traceback is most informative.
            line["error"] = self.formatException(record.exc_info)[-_MOST_ERROR:]
        return json.dumps(line, default=str)


class LineWriter(logging.Handler):
    """Writes lines in a separate thread. If its stream is not read, lines wait in memory up to a limit;
    further ones are dropped, and a later line reports their number.

    Attributes:
      dropped: number of lines that were dropped so far.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        # Bypass Python's buffer: its lock, owned by a waiting thread, would block the process's exit.
        self._number, self._closed, self.dropped = stream.fileno(), False, 0
        self._lines: queue.Queue[str] = queue.Queue(_MOST_WAITING)
        threading.Thread(target=self._run, name="logs", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queues a record without waiting."""
        try:
            self._lines.put_nowait(self.format(record) + "\n")
        except queue.Full:
            self.dropped += 1
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        """Waits until all lines are written, for a bounded time; returns at once after `close`."""
        # `Queue.join` has no time limit.
        lines = self._lines
        with lines.all_tasks_done:
            lines.all_tasks_done.wait_for(lambda: not lines.unfinished_tasks or self._closed, _FLUSH_S)

    def close(self) -> None:
        """Writes the waiting lines, for a bounded time, and ends the thread."""
        self.flush()
        self._closed = True
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait("")
        super().close()

    def _run(self) -> None:
        reported = 0
        while (line := self._lines.get()) and not self._closed:
            if not self._write(line):
                # Others count, too.
                self.acquire()
                self.dropped += 1
                self.release()
            elif lost := self.dropped - reported:
                reported += lost
                text = f"{lost} lines of this log were dropped: it was not read fast enough"
                facts = {"name": __name__, "levelno": logging.WARNING, "levelname": "WARNING", "msg": text}
                self._write(self.format(logging.makeLogRecord({**facts, "dropped": lost})) + "\n")
            self._lines.task_done()

    def _write(self, line: str) -> bool:
        """Writes a line; returns False if the stream has no reader any more."""
        try:
            data = line.encode("ascii", "backslashreplace")
            while data:
                try:
                    data = data[os.write(self._number, data) :]
                except BlockingIOError:
                    time.sleep(_RETRY_S)
        except (OSError, ValueError):
            return False
        return True


@contextlib.contextmanager
def writing_logs(stream: TextIO, level: int = logging.INFO) -> Iterator[LineWriter]:
    """Makes the service's loggers, and Python's warnings, write JSON lines to a stream, from a minimum
    `level` on."""
    handler, loggers = LineWriter(stream), [logging.getLogger(name) for name in _LOGGERS]
    handler.setFormatter(JsonLines())
    logging.captureWarnings(True)
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(level)
        logger.propagate = False
    try:
        yield handler
    finally:
        logging.captureWarnings(False)
        for logger in loggers:
            logger.removeHandler(handler)
            logger.setLevel(logging.NOTSET)
            logger.propagate = True
        handler.close()


_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_MOST_PATH, _MOST_REASON = 200, 300
# Texts in quotation marks, which may have an apostrophe inside of a word.
_QUOTED = re.compile(r"""'.*?'(?!\w)|".*?"|`.*?`""", re.DOTALL)
# Paths that the dashboard reads every few seconds.
_WATCHING = {"/metrics", "/requests"}
# HTTP statuses: the first of refusals and of failures, refusals among those, and a client that left.
_REFUSED, _FAILED, _REFUSALS, _LEFT = 400, 500, (503, 507), 499


def request_id_of(scope: Mapping[str, Any]) -> str:
    """The request's id: its header `x-request-id` if that has 1 to 64 letters, digits, `.`, `_` and `-`, else
    a new one."""
    given = [value for name, value in scope["headers"] if name == b"x-request-id"]
    asked = given[0].decode("latin-1") if len(given) == 1 else ""
    return asked if _REQUEST_ID.fullmatch(asked) else uuid.uuid4().hex


def access_record(
    served: Served, *, method: str, path: str, status: int, total_ms: float, error: str = ""
) -> dict[str, Any]:
    """The fields of a request's record: the plan and times of its first call, the tokens of all; fields that
    do not apply are left out. Without text of prompts and answers, keys and queries. The `path` has names of
    parameters in place of values, and no query; a `status` of 0 is no answer; `error` is the class name of an
    unhandled error."""
    calls, outcomes = served.calls, [each.outcome for each in served.calls]
    errors = [error, *(each for each in outcomes if each not in ("ended", "cancelled"))]
    if any(errors):
        outcome = next(filter(None, errors))
    elif status >= _FAILED and status not in _REFUSALS:
        outcome = "failed"
    elif status >= _REFUSED and status != _LEFT:
        # Other calls of the request may have been accepted before.
        outcome = "refused"
    else:
        outcome = "cancelled" if status in (0, _LEFT) or "cancelled" in outcomes else "ended"
    fields: dict[str, Any] = {
        "request_id": served.request_id, "app": served.app, "method": method, "path": path, "status": status,
        "outcome": outcome, "total_ms": round(total_ms, 1),
    }  # fmt: skip
    if served.errors:
        refusal = served.errors[0]
        fields |= {"code": code_of(refusal), "reason": _reason(refusal)}
        fields |= {"param": refusal.param} if refusal.param else {}
    if served.ignored:
        fields["ignored"] = [*served.ignored]
    if not calls:
        return fields
    fields["tokens"] = sum(each.read_tokens for each in calls)
    if len(calls) > 1:
        fields["calls"] = len(calls)
    if (started := calls[0].started) is not None:
        fields |= {"level_percent": started.level, "plan": started.source}
        fields |= {name: getattr(started, name) for name in ("prompt_tokens", "kept_tokens", "reused_tokens")}
        fields["queued_ms"] = round(started.queued_ms, 1)
    if (ended := calls[0].ended) is not None:
        fields |= {"finish_reason": ended.finish_reason, "ttft_ms": round(ended.ttft_ms, 1)}
        fields |= {"tpot_ms": round(ended.tpot_ms, 2), "met": ended.met}
    return fields


def _reason(error: ApiError) -> str:
    """The text of an error without the values that it quotes, which may be of prompts; the field's name
    stays."""
    kept = {repr(error.param), f'"{error.param}"'}
    return _QUOTED.sub(lambda found: found[0] if found[0] in kept else "...", str(error))[:_MOST_REASON]


class AccessLogged:
    """ASGI middleware that assigns each request an id, the client's or a new one, returns it in a header,
    answers unhandled errors, and writes a record of each request to the logger `jaxllm.access`: at level
    "info", or "debug" for probes and pages that watch, which repeat every few seconds. `on_request` is called
    with each record, but those of probes and pages."""

    def __init__(
        self, app: ASGIApp, on_request: Callable[[Mapping[str, Any]], None] = lambda record: None
    ) -> None:
        self._app, self._log = app, logging.getLogger("jaxllm.access")
        self._on_request = on_request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        served, began, status, error = Served(request_id_of(scope), scope), time.perf_counter(), 0, ""
        # Starlette's place for data of a request.
        scope.setdefault("state", {})["request_id"] = served.request_id

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                # By OpenAI's name and Anthropic's.
                own = served.request_id
                added = {
                    "x-request-id": own,
                    "request-id": own,
                    "x-jaxllm-ignored": ", ".join(served.ignored),
                }
                named = [(name.encode(), value.encode()) for name, value in added.items() if value]
                message["headers"] = [*message.get("headers", ()), *named]
            await send(message)

        token, reported = CURRENT.set(served), REPORTED.set(served.errors)
        try:
            await self._app(scope, receive, sending)
        except ClientDisconnect:
            pass
        except Exception as raised:
            if status:
                error = type(raised).__name__
                raise
            await error_response(api_error(raised), shape_of(scope["path"]))(scope, receive, sending)
        finally:
            # Without what clients chose: with the names of parameters.
            path, total_ms = scope["path"], 1000 * (time.perf_counter() - began)
            for name, value in (scope.get("path_params") or {}).items():
                path = "/".join(f"{{{name}}}" if part == value else part for part in path.split("/"))
            path = path[:_MOST_PATH]
            fields = access_record(
                served, method=scope["method"], path=path, status=status, total_ms=total_ms, error=error
            )
            quiet = path in OPEN_PATHS or (path in _WATCHING and status < _REFUSED)
            self._log.log(logging.DEBUG if quiet else logging.INFO, "request", extra=fields)
            if not quiet:
                self._on_request(fields)
            CURRENT.reset(token)
            REPORTED.reset(reported)
