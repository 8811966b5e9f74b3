"""Records the peer of each connection, and closes connections that are slow to send a request, or that have
sent none when there are too many.

Over a Unix socket the kernel reports the process that connected (SO_PEERCRED); over TCP there is an
address. Both are read from the socket, never from headers, and passed in the ASGI scope.
"""

import dataclasses
import functools
import ipaddress
import os
import re
import socket
import struct
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from jaxllm.errors import ConfigError
from jaxllm.options import check_options, option
from jaxllm.serving.host.machine import most_connections

if TYPE_CHECKING:
    import asyncio

    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

# The key of a `Peer` in the ASGI scope's extensions.
EXTENSION = "jaxllm.peer"
_MOST_HEAD_BYTES = 1 << 16
_MOST_FRAMING = 9
_CREDENTIALS = struct.Struct("3i")
_RULE = re.compile(r"uid:(?P<uid>0|[1-9][0-9]{0,9})(?:,exe:(?P<exe>/.+))?|exe:(?P<own>/.+)", re.DOTALL)
_APP = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclasses.dataclass(frozen=True)
class Credentials:
    """A process's ids at the time of connecting, from the kernel."""

    pid: int
    uid: int
    gid: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peer:
    """The other end of a connection.

    Attributes:
      credentials: credentials of the process, over a Unix socket; None over TCP.
      address: TCP address without the port; empty over a Unix socket.
      app: app of the process by the rules, determined once per connection; empty over TCP.
    """

    credentials: Credentials | None = None
    address: str = ""
    app: str = ""

    @property
    def is_loopback(self) -> bool:
        """Whether its TCP address is of this machine's loopback."""
        return is_loopback(self.address)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PeerOptions:
    """Options of connections.

    Attributes:
      apps: rule -> app. Rules are "uid:1000,exe:/usr/bin/mail" (a program of a user), "exe:/usr/bin/mail"
        (a program of the user that the service runs as) and "uid:1000" (a user). Rules with a program have
        precedence. A process without a rule is the app "uid-1000", by its user. Rules with a program only
        separate programs that trust each other: programs of one user can always read each other's memory.
      head_timeout_s: maximum time in seconds from the connection, or from the end of the last request's
        answer, to the end of a request's headers.
      body_timeout_s: maximum time in seconds for a request's body.
      connections: maximum number of connections; a further one closes the one that has waited longest for
        its request. 0 for the process's limit of open files, less a reserve.
    """

    apps: Mapping[str, str] = dataclasses.field(default_factory=dict)
    head_timeout_s: float = option(20.0, above=0, below=1e6)
    body_timeout_s: float = option(60.0, above=0, below=1e6)
    connections: int = option(0, low=0)

    def __post_init__(self) -> None:
        for rule, app in self.apps.items():
            if not isinstance(rule, str) or _RULE.fullmatch(rule) is None:
                raise ConfigError(
                    f"a rule for apps is uid:NUMBER, exe:/PATH or uid:NUMBER,exe:/PATH, got {rule!r:.80}"
                )
            require_app(app)
        check_options(self)
        object.__setattr__(self, "apps", MappingProxyType(dict(self.apps)))


def require_app(app: object) -> str:
    """Validates an app's name: 1 to 64 letters, digits, `.`, `_` and `-`, the first a letter or digit.

    Raises:
      ConfigError: the name is invalid.
    """
    if not isinstance(app, str) or _APP.fullmatch(app) is None:
        raise ConfigError(
            "an app's name has 1 to 64 letters, digits, dots, underscores and dashes, and begins with a "
            f"letter or digit, got {app!a:.80}"
        )
    return app


def is_loopback(address: str) -> bool:
    """Whether an IP address is of this machine's loopback; names are not resolved."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = getattr(found, "ipv4_mapped", None)
    return (mapped or found).is_loopback


def credentials_of(connection: socket.socket) -> Credentials:
    """The process at the other end of a connected Unix socket.

    Raises:
      OSError: the system does not report it.
    """
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        raise OSError("this system has no SO_PEERCRED; serve HTTP with API keys instead")
    raw = connection.getsockopt(socket.SOL_SOCKET, option, _CREDENTIALS.size)
    return Credentials(*_CREDENTIALS.unpack(raw))


def app_of(credentials: Credentials, apps: Mapping[str, str]) -> str:
    """The app of a process by the rules of `PeerOptions.apps`."""
    for rule, app in apps.items():
        found = _RULE.fullmatch(rule)
        assert found is not None
        path = found["exe"] or found["own"]
        uid = os.geteuid() if found["uid"] is None else int(found["uid"])
        if path and uid == credentials.uid and _runs(credentials.pid, path):
            return app
    return apps.get(f"uid:{credentials.uid}", f"uid-{credentials.uid}")


def peer_of(scope: Mapping[str, Any]) -> Peer | None:
    """The peer of a request's connection; None if the server recorded none."""
    found = (scope.get("extensions") or {}).get(EXTENSION)
    return found if isinstance(found, Peer) else None


def protocol(options: PeerOptions | None = None) -> "type[HttpToolsProtocol]":
    """uvicorn's HTTP protocol (its `http=` option) with peers in the scope and time limits of requests.

    Run uvicorn with `proxy_headers=False`: callers are never identified by a header.
    """
    options = options or PeerOptions()
    most = options.connections or most_connections()
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    # Connections whose request has not arrived, longest waiting first.
    waiting: dict[HttpToolsProtocol, None] = {}

    class PeerProtocol(HttpToolsProtocol):
        _peer: Peer
        _deadline: "asyncio.TimerHandle | None" = None
        # Bytes of the message so far, and of its body.
        _received = _body = 0

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            try:
                self._peer = _peer(transport, options.apps)
            except OSError as error:
                self.logger.error("a connection was closed: its peer cannot be known (%s)", error)
                # Matches no rule, if a request is parsed before the connection is closed.
                self._peer = Peer()
                transport.abort()
                return
            if len(self.connections) > most:
                self._make_room()
            self._await(options.head_timeout_s)
            waiting[self] = None

        def data_received(self, data: bytes) -> None:
            self._received += len(data)
            super().data_received(data)
            # The parser limits neither headers nor trailers. A chunk of one byte has five more of framing.
            if (
                self._received > _MOST_HEAD_BYTES + _MOST_FRAMING * self._body
                and not self.transport.is_closing()
            ):
                self.send_400_response("The request's headers are too large.")

        def on_body(self, body: bytes) -> None:
            self._body += len(body)
            super().on_body(body)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            scope: dict[str, Any] = self.scope  # pyright: ignore[reportAssignmentType]
            scope.setdefault("extensions", {})[EXTENSION] = self._peer

        def on_headers_complete(self) -> None:
            self._await(options.body_timeout_s)
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            self._received = self._body = 0
            waiting.pop(self, None)
            self._await(None)
            super().on_message_complete()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            # The next request of the connection may have begun, or even be complete.
            if self._deadline is None and self.cycle is not None and self.cycle.response_complete:
                self._await(options.head_timeout_s)
                waiting[self] = None

        def connection_lost(self, exc: Exception | None) -> None:
            waiting.pop(self, None)
            self._await(None)
            super().connection_lost(exc)

        def _make_room(self) -> None:
            """Closes the connection that has waited longest for its request, or this one if all have one."""
            oldest = next(iter(waiting), self)
            waiting.pop(oldest, None)
            self.logger.warning("more than %d connections: one whose request has not arrived is closed", most)
            oldest.transport.abort()

        def _await(self, seconds: float | None) -> None:
            """Closes the connection in `seconds`, replacing an earlier deadline; None for never."""
            if self._deadline is not None:
                self._deadline.cancel()
            late = functools.partial(self.transport.abort)
            self._deadline = None if seconds is None else self.loop.call_later(seconds, late)

    return PeerProtocol


def _peer(transport: Any, apps: Mapping[str, str]) -> Peer:
    connection = transport.get_extra_info("socket")
    if connection is None:
        raise OSError("the event loop gives no socket")
    if connection.family == socket.AF_UNIX:
        credentials = credentials_of(connection)
        return Peer(credentials=credentials, app=app_of(credentials, apps))
    # Link-local IPv6 addresses have the interface's name: fe80::1%eth0.
    return Peer(address=str(connection.getpeername()[0]).partition("%")[0])


def _runs(pid: int, path: str) -> bool:
    """Whether a process runs the program at a path, compared by the file: a process can choose names by
    mounting, and links have several."""
    try:
        return os.path.samestat(os.stat(f"/proc/{pid}/exe"), os.stat(path))
    except OSError:
        return False
