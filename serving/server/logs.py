"""Writes logs as JSON lines, with the request that they belong to, and an access record for each call.

A line is one JSON object: `time`, `level`, `logger`, `message`, the request's `request_id` and `app` where
there is one, the fields of the record, and `error` with the traceback of an exception. Prompts and answers
are never written, unless `AccessLog` is asked to.
"""

import contextlib
import contextvars
import dataclasses
import datetime
import json
import logging
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

from serving.server.calls import Ended, Started

ACCESS = "jaxllm.access"
_LOGGERS = ("jaxllm", "serving", "uvicorn")
# The attributes that every record has; others were passed as `extra`.
_OWN = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}
_MOST_MESSAGE, _MOST_ERROR = 4000, 16000
_request: contextvars.ContextVar[Mapping[str, str] | None] = contextvars.ContextVar("request", default=None)


@contextlib.contextmanager
def request(request_id: str, app: str) -> Iterator[None]:
    """Names the request that logs in this context belong to; a thread and a task have each their own."""
    token = _request.set({"request_id": request_id, "app": app})
    try:
        yield
    finally:
        _request.reset(token)


class JsonLines(logging.Formatter):
    """Formats a record as one line of JSON in ASCII: no text from outside can forge or hide a line."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, Any] = {
            "time": time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage()[:_MOST_MESSAGE],
        }
        fields = {name: value for name, value in vars(record).items() if name not in _OWN}
        line = {**(_request.get() or {}), **fields, **line}
        if record.exc_info:
            # The end of a traceback says most.
            line["error"] = self.formatException(record.exc_info)[-_MOST_ERROR:]
        return json.dumps(line, default=str)


def write_logs(stream: TextIO, level: int = logging.INFO) -> logging.Handler:
    """Has the service's loggers write JSON lines to a stream.

    Args:
      stream: of text, such as `sys.stderr`.
      level: least level that is written.

    Returns:
      The handler; `stop_logs` takes it away again.
    """
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.setLevel(level)
        logger.propagate = False
    return handler


def stop_logs(handler: logging.Handler) -> None:
    """Undoes `write_logs`."""
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
        logger.propagate = True
    handler.close()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Access:
    """A call from its first to its last byte.

    Attributes:
      request_id, app: of the call; `app` is empty where it could not be identified.
      path: of the route, without a query.
      status: HTTP status.
      total_ms: until the last byte.
      started, ended: of the answer; None where it did not come so far.
      outcome: "ended", "cancelled", or the name of an error's class.
      prompt, answer: texts; written only where the log is asked to.
    """

    request_id: str
    app: str
    path: str
    status: int
    total_ms: float
    started: Started | None = None
    ended: Ended | None = None
    outcome: str = "ended"
    prompt: str | None = None
    answer: str | None = None


class AccessLog:
    """Writes a record for each call, to the logger `jaxllm.access`.

    Args:
      texts: whether prompts and answers are written, too.
    """

    def __init__(self, *, texts: bool = False) -> None:
        self._texts, self._log = texts, logging.getLogger(ACCESS)

    def write(self, access: Access) -> None:
        """Writes a record. Fields of what a call did not come to are left out."""
        fields: dict[str, Any] = {
            "request_id": access.request_id,
            "app": access.app,
            "path": access.path,
            "status": access.status,
            "outcome": access.outcome,
            "total_ms": round(access.total_ms, 1),
        }
        if (started := access.started) is not None:
            fields |= {
                "level_percent": started.level,
                "plan": started.source,
                "prompt_tokens": started.prompt_tokens,
                "kept_tokens": started.kept_tokens,
                "reused_tokens": started.reused_tokens,
                "queued_ms": round(started.queued_ms, 1),
            }
        if (ended := access.ended) is not None:
            fields |= {
                "finish_reason": ended.finish_reason,
                "tokens": ended.tokens,
                "ttft_ms": round(ended.ttft_ms, 1),
                "tpot_ms": round(ended.tpot_ms, 2),
                "met": ended.met,
            }
        if self._texts:
            texts = {"prompt": access.prompt, "answer": access.answer}
            fields |= {name: text for name, text in texts.items() if text is not None}
        self._log.info("call", extra=fields)
