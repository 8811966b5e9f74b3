"""Guards an ASGI app from web pages and unknown callers: checks Host and Origin, answers CORS, identifies
callers.

A browser on this machine can reach a loopback port from any page. `Host` reveals a page whose name resolves
to this machine (DNS rebinding), `Origin` a page of another site. Neither can reach a Unix socket.
"""

import asyncio
import contextlib
import dataclasses
import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Protocol

from jaxllm.errors import ConfigError
from jaxllm.serving.server.api.errors import ApiError, error_response, shape_of
from jaxllm.serving.server.identity import Unauthorized
from jaxllm.serving.server.peer import peer_of

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "[::1]")
_HOST = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::(?P<port>\d{1,5}))?")
_ORIGIN = re.compile(r"https?://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:\d{1,5})?")
_METHODS = b"GET, POST, DELETE, OPTIONS"
_HEADERS = b"authorization, content-type, x-api-key, x-request-id, x-slo"
_EXPOSED = b"retry-after, x-request-id"
_PREFLIGHT_S = b"600"
# Maximum bytes that are read of a refused request's body, and time for them.
_MOST_DROPPED_BYTES = 8 << 20
_DROP_S = 10.0


class Identifies(Protocol):
    """Identifies callers (see `jaxllm.serving.server.identity.Identity`)."""

    def identify(self, scope: Mapping[str, Any]) -> str:
        """The app of a request; raises Unauthorized."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class GuardOptions:
    """Options of the guard.

    Attributes:
      hosts: host names of the service, without the port, in lower case.
      origins: origins of other sites' pages that may call, such as "https://app.example"; none by default.
      open_paths: paths without identification.
    """

    hosts: tuple[str, ...] = LOOPBACK_HOSTS
    origins: tuple[str, ...] = ()
    open_paths: frozenset[str] = frozenset({"/health", "/ready"})

    def __post_init__(self) -> None:
        for host in self.hosts:
            found = _HOST.fullmatch(host) if isinstance(host, str) else None
            if found is None or found["port"] is not None:
                raise ConfigError(
                    f"a host is a name or address in lower case, without a port, got {host!r:.80}"
                )
        for origin in self.origins:
            if not isinstance(origin, str) or _ORIGIN.fullmatch(origin) is None:
                raise ConfigError(
                    "an origin is http:// or https://, a name in lower case and perhaps a port; `*` and "
                    f"`null` would let every page in; got {origin!r:.80}"
                )


class Guard:
    """ASGI middleware that admits authorized callers and refuses others with the reason."""

    def __init__(self, app: App, identity: Identifies, options: GuardOptions | None = None) -> None:
        self._app, self._identity, self._options = app, identity, options or GuardOptions()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            else:
                await self._app(scope, receive, send)
            return
        origin, problem = self._checked(scope)
        if problem is not None:
            await _refuse(scope, receive, send, 403, problem, code="forbidden")
            return
        if origin:
            send = _with_cors(send, origin)
            if scope["method"] == "OPTIONS" and _header(scope, b"access-control-request-method"):
                # Browsers send preflights without a key.
                await _preflight(scope, send)
                return
        if scope["path"] not in self._options.open_paths:
            try:
                self._identity.identify(scope)
            except Unauthorized as error:
                await _refuse(scope, receive, send, 401, str(error), code=error.code)
                return
        await self._app(scope, receive, send)

    def _checked(self, scope: Scope) -> tuple[str, str | None]:
        """The origin of an allowed page of another site, or empty; and the reason of a refusal."""
        peer = peer_of(scope)
        over_socket = peer is not None and peer.credentials is not None
        hosts = _header(scope, b"host")
        found = _HOST.fullmatch(hosts[0].lower()) if len(hosts) == 1 else None
        if not over_socket and (found is None or found["name"] not in self._options.hosts):
            return "", "the Host header does not name this service; allow the name in the service's options"
        origins = _header(scope, b"origin")
        if not origins:
            return "", None
        origin = origins[0].lower()
        if len(origins) == 1 and origin in self._options.origins:
            return origin, None
        # Our own pages; there are none if the host was not checked.
        if len(origins) == 1 and not over_socket and origin == f"{scope.get('scheme')}://{hosts[0].lower()}":
            return "", None
        return "", "pages of this Origin may not call; allow it in the service's options"


async def _refuse(
    scope: Scope, receive: Receive, send: Send, status: int, message: str, *, code: str
) -> None:
    """Answers in the path's own format."""
    await _drop_body(scope, receive)
    response = error_response(ApiError(message, status=status, code=code), shape_of(scope["path"]))
    # The rest of the request's body must not be parsed as the next request.
    response.headers["connection"] = "close"
    await response(scope, receive, send)


async def _drop_body(scope: Scope, receive: Receive) -> None:
    """Reads and discards a request's body, within limits: with unread bytes the system resets the connection
    on close, and a client that still sends sees no answer."""
    if any(each.lower() == "100-continue" for each in _header(scope, b"expect")):
        # Such a client sends nothing until told to.
        return
    left = _MOST_DROPPED_BYTES
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DROP_S):
            while left > 0:
                message = await receive()
                left -= len(message.get("body", b""))
                if not message.get("more_body", False):
                    return


async def _preflight(scope: Scope, send: Send) -> None:
    headers = [
        (b"access-control-allow-methods", _METHODS),
        (b"access-control-allow-headers", _HEADERS),
        (b"access-control-max-age", _PREFLIGHT_S),
    ]
    if _header(scope, b"access-control-request-private-network"):
        headers.append((b"access-control-allow-private-network", b"true"))
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


def _with_cors(send: Send, origin: str) -> Send:
    """Wraps `send` so that a page of an origin may read the answer."""
    added = [
        (b"access-control-allow-origin", origin.encode()),
        (b"access-control-expose-headers", _EXPOSED),
        (b"vary", b"Origin"),
    ]

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *added]
        await send(message)

    return sending


def _header(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1").strip() for key, value in scope["headers"] if key == name]
