"""Names every request, sends its name back, and writes one access record when its last byte is sent.

    app = AccessLogged(app)

It goes around everything else, so that requests that are refused have a name and a record, too.
"""

import dataclasses
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from serving.server import logs
from serving.server.logs import Served

ACCESS = "jaxllm.access"
_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]
_App = Callable[[MutableMapping[str, Any], _Receive, _Send], Awaitable[None]]
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_MOST_PATH = 200
_PROBES = ("/health", "/ready")
# Statuses of HTTP: the first ones of refusals and of failures, refusals among those, and a client that left.
_REFUSED, _FAILED, _REFUSALS, _LEFT = 400, 500, (503, 507), 499


def request_id_of(scope: Mapping[str, Any]) -> str:
    """The request's name: that of its header `x-request-id` where it is one of 1 to 64 letters, digits, `.`,
    `_` and `-`, else a new one."""
    given = [value for name, value in scope["headers"] if name == b"x-request-id"]
    asked = given[0].decode("latin-1") if len(given) == 1 else ""
    return asked if _REQUEST_ID.fullmatch(asked) else uuid.uuid4().hex


@dataclasses.dataclass(frozen=True, kw_only=True)
class Access:
    """A request from its first to its last byte.

    Attributes:
      served: who asked, and its calls.
      method: of HTTP.
      path: without a query, with names in place of what they stand for.
      status: of HTTP; 0 where nothing was answered.
      total_ms: until the last byte.
      error: name of the class of an error that nobody answered; empty for none.
    """

    served: Served
    method: str
    path: str
    status: int
    total_ms: float
    error: str = ""

    @property
    def outcome(self) -> str:
        """ "ended", "cancelled", "refused", "failed", or the name of the class of the error that ended a
        call."""
        outcomes = [each.outcome for each in self.served.calls]
        errors = [self.error, *(each for each in outcomes if each not in ("ended", "cancelled"))]
        if any(errors):
            return next(filter(None, errors))
        if self.status >= _FAILED and self.status not in _REFUSALS:
            return "failed"
        if self.status >= _REFUSED and self.status != _LEFT:
            # Perhaps after others of its calls had been taken.
            return "refused"
        return "cancelled" if self.status in (0, _LEFT) or "cancelled" in outcomes else "ended"


class AccessLog:
    """Writes records to the logger `jaxllm.access`, at the level "info", those of probes at "debug". No text
    of prompts and answers, no keys and no queries."""

    def __init__(self) -> None:
        self._log = logging.getLogger(ACCESS)

    def write(self, access: Access) -> None:
        """Writes a record. Plan and times are those of the request's first call, tokens of all; fields of
        what a request did not come to are left out."""
        served = access.served
        fields: dict[str, Any] = {
            "request_id": served.request_id,
            "app": served.app,
            "method": access.method,
            "path": access.path,
            "status": access.status,
            "outcome": access.outcome,
            "total_ms": round(access.total_ms, 1),
        }
        if served.calls:
            fields |= _of_calls(served)
        # Probes come every few seconds for as long as the service runs.
        self._log.log(logging.DEBUG if access.path in _PROBES else logging.INFO, "request", extra=fields)


def _of_calls(served: Served) -> dict[str, Any]:
    fields: dict[str, Any] = {"tokens": sum(each.tokens for each in served.calls)}
    if len(served.calls) > 1:
        fields["calls"] = len(served.calls)
    first = served.calls[0]
    if (started := first.started) is not None:
        fields |= {
            "level_percent": started.level,
            "plan": started.source,
            "prompt_tokens": started.prompt_tokens,
            "kept_tokens": started.kept_tokens,
            "reused_tokens": started.reused_tokens,
            "queued_ms": round(started.queued_ms, 1),
        }
    if (ended := first.ended) is not None:
        fields |= {
            "finish_reason": ended.finish_reason,
            "ttft_ms": round(ended.ttft_ms, 1),
            "tpot_ms": round(ended.tpot_ms, 2),
            "met": ended.met,
        }
    return fields


class AccessLogged:
    """An ASGI app around another: names requests and writes their records."""

    def __init__(self, app: _App, log: AccessLog | None = None) -> None:
        self._app, self._log = app, log or AccessLog()

    async def __call__(self, scope: MutableMapping[str, Any], receive: _Receive, send: _Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        served, began, status, error = Served(request_id_of(scope), scope), time.perf_counter(), 0, ""
        # Where Starlette keeps what belongs to a request.
        scope.setdefault("state", {})["request_id"] = served.request_id

        async def sending(message: _Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                name = (b"x-request-id", served.request_id.encode())
                message["headers"] = [*message.get("headers", ()), name]
            await send(message)

        with logs.request(served):
            try:
                await self._app(scope, receive, sending)
            except Exception as raised:
                error = type(raised).__name__
                raise
            finally:
                self._log.write(
                    Access(
                        served=served, method=scope["method"], path=_route(scope), status=status,
                        total_ms=1000 * (time.perf_counter() - began), error=error,
                    )
                )  # fmt: skip


def _route(scope: Mapping[str, Any]) -> str:
    """The path with the names of its parameters in place of their values, which are the clients' own."""
    path: str = scope["path"]
    parts = path.split("/")
    for name, value in (scope.get("path_params") or {}).items():
        parts = [f"{{{name}}}" if part == str(value) else part for part in parts]
    return "/".join(parts)[:_MOST_PATH]
