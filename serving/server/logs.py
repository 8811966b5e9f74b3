"""Writes logs as JSON lines, with the request that they belong to.

A line is one JSON object: `time`, `level`, `logger`, `message`, the request's `request_id` and `app` where
there is one, the fields of the record, and `error` with the traceback of an exception. Each request has an
access record of its own (`serving.server.access`). Prompts and answers are never written.
"""

import contextlib
import contextvars
import dataclasses
import datetime
import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TextIO

from serving.server.calls import Call, Ended, Started
from serving.server.identity import identified_app

_LOGGERS = ("jaxllm", "serving", "uvicorn")
# The attributes that every record has; others were passed as `extra`.
_OWN = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}
_MOST_MESSAGE, _MOST_ERROR = 4000, 16000


@dataclasses.dataclass
class CallRecord:
    """A call of a request, as far as it has come.

    Attributes:
      started, ended: None until then.
      tokens: of the answer so far.
      outcome: "ended", "cancelled", or the name of the class of the error that ended it.
    """

    started: Started | None = None
    ended: Ended | None = None
    tokens: int = 0
    outcome: str = "cancelled"


class Served:
    """A request that is being served, as logs tell of it. For one event loop.

    Attributes:
      request_id: names it.
      calls: of it, in the order in which they were taken.
    """

    def __init__(self, request_id: str, scope: Mapping[str, Any]) -> None:
        self.request_id, self._scope = request_id, scope
        self.calls: list[CallRecord] = []

    @property
    def app(self) -> str:
        """That asks; empty until it is known."""
        return identified_app(self._scope)


_request: contextvars.ContextVar[Served | None] = contextvars.ContextVar("request", default=None)


@contextlib.contextmanager
def request(served: Served) -> Iterator[None]:
    """Sets the request that logs in this context belong to; a thread and a task have each their own."""
    token = _request.set(served)
    try:
        yield
    finally:
        _request.reset(token)


def current_request() -> Served | None:
    """The request of this context."""
    return _request.get()


def named(calls: Iterable[Call]) -> dict[str, str]:
    """Fields for a record that belongs to calls, from a thread that serves many."""
    own = list(calls)
    ids, apps = ([getattr(each, name) for each in own] for name in ("request_id", "app"))
    return {"request_id": " ".join(ids), "app": " ".join(dict.fromkeys(apps))} if own else {}


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
        served = _request.get()
        own = {} if served is None else {"request_id": served.request_id, "app": served.app}
        line = {**own, **fields, **line}
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
