"""Binds the service's listening sockets, or uses those that systemd has bound; records the peer of each
connection, and closes connections that are slow to send a request, or that have sent none when there are too
many.

Over a Unix socket the kernel reports the process that connected (SO_PEERCRED); over TCP there is an
address. Both are read from the socket, never from headers, and passed in the ASGI scope.
"""

import contextlib
import dataclasses
import errno
import ipaddress
import os
import re
import socket
import stat
import struct
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxllm.errors import ConfigError
from jaxllm.serving.host.machine import most_connections

if TYPE_CHECKING:
    import asyncio

    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_BACKLOG = 512
_FIRST_PASSED = 3
_MOST_PASSED = 64
_ANSWER_S = 2.0
# Paths without identification: probes.
OPEN_PATHS = frozenset({"/health", "/ready"})
LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "[::1]")
HOST = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::(?P<port>\d{1,5}))?")
_ORIGIN = re.compile(r"https?://(?P<host>\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:\d{1,5})?")
# Short keys can be guessed.
_KEY = re.compile(r"[!-~]{8,256}")
# The key of a `Peer` in the ASGI scope's extensions.
EXTENSION = "jaxllm.peer"
_MOST_HEAD_BYTES = 1 << 16
# Maximum time of a request's headers, from the connection or the last answer's end on, and of its body.
_HEAD_S, _BODY_S = 20.0, 60.0
_MOST_FRAMING = 9
_CREDENTIALS = struct.Struct("3i")
_RULE = re.compile(r"uid:(?P<uid>0|[1-9][0-9]{0,9})(?:,exe:(?P<exe>/.+))?|exe:(?P<own>/.+)", re.DOTALL)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class GuardOptions:
    """Options of the guard.

    Attributes:
      hosts: host names of the service, without the port, in lower case.
      origins: origins of other sites' pages that may call, such as "https://app.example"; none by default.
      localhost_pages: whether pages of any port of the loopback may call.
      open_paths: paths without identification.
    """

    hosts: tuple[str, ...] = LOOPBACK_HOSTS
    origins: tuple[str, ...] = ()
    localhost_pages: bool = False
    open_paths: frozenset[str] = OPEN_PATHS

    def __post_init__(self) -> None:
        for host in self.hosts:
            found = HOST.fullmatch(host) if isinstance(host, str) else None
            if found is None or found["port"] is not None:
                raise ConfigError(f"a host is a name or address in lower case without port, got {host!r:.80}")
        for origin in self.origins:
            if not isinstance(origin, str) or _ORIGIN.fullmatch(origin) is None:
                raise ConfigError(
                    "an origin is http:// or https://, a name in lower case and perhaps a port; `*` and "
                    f"`null` would let every page in; got {origin!r:.80}"
                )

    def allows(self, origin: str) -> bool:
        """Whether pages of another origin, in lower case, may call."""
        if origin in self.origins:
            return True
        found = _ORIGIN.fullmatch(origin) if self.localhost_pages else None
        return found is not None and found["host"] in LOOPBACK_HOSTS


def require_key(key: object) -> None:
    """Validates an API key of one's own; empty for none. Raises ConfigError if it is too short or long, or
    has characters that a header cannot have."""
    if not isinstance(key, str) or (key and _KEY.fullmatch(key) is None):
        raise ConfigError("an API key has 8 to 256 letters, digits and signs of ASCII, without spaces")


def require_name(name: object, what: str = "an app") -> str:
    """Validates a name: 1 to 64 letters, digits, `.`, `_` and `-`, the first a letter or digit. Raises
    ConfigError if the name is invalid."""
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise ConfigError(
            f"{what}'s name has 1 to 64 letters, digits, dots, underscores and dashes, and begins with a "
            f"letter or digit, got {name!a:.80}"
        )
    return name


def require_rules(apps: Mapping[str, str]) -> None:
    """Validates rules for apps (see `ServerOptions.apps`). Raises ConfigError if a rule or an app's name is
    malformed."""
    for rule, app in apps.items():
        if not isinstance(rule, str) or _RULE.fullmatch(rule) is None:
            known = "uid:NUMBER, exe:/PATH or uid:NUMBER,exe:/PATH"
            raise ConfigError(f"a rule for apps is {known}, got {rule!r:.80}")
        require_name(app)


def is_loopback(address: str) -> bool:
    """Whether an IP address is of this machine's loopback; names are not resolved."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = getattr(found, "ipv4_mapped", None)
    return (mapped or found).is_loopback


def credentials_of(connection: socket.socket) -> Credentials:
    """The process at the other end of a connected Unix socket. Raises OSError if the system does not report
    it."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        raise OSError("this system has no SO_PEERCRED; serve HTTP with API keys instead")
    raw = connection.getsockopt(socket.SOL_SOCKET, option, _CREDENTIALS.size)
    return Credentials(*_CREDENTIALS.unpack(raw))


def app_of(credentials: Credentials, apps: Mapping[str, str]) -> str:
    """The app of a process by the rules of `ServerOptions.apps`."""
    for rule, app in apps.items():
        found = _RULE.fullmatch(rule)
        assert found is not None
        path = found["exe"] or found["own"]
        uid = os.geteuid() if found["uid"] is None else int(found["uid"])
        # Compared by the file: a process can choose names by mounting, and links have several.
        with contextlib.suppress(OSError):
            exe = f"/proc/{credentials.pid}/exe"
            if path and uid == credentials.uid and os.path.samestat(os.stat(exe), os.stat(path)):
                return app
    return apps.get(f"uid:{credentials.uid}", f"uid-{credentials.uid}")


def peer_of(scope: Mapping[str, Any]) -> Peer | None:
    """The peer of a request's connection; None if the server recorded none."""
    found = (scope.get("extensions") or {}).get(EXTENSION)
    return found if isinstance(found, Peer) else None


def protocol(apps: Mapping[str, str]) -> "type[HttpToolsProtocol]":
    """uvicorn's HTTP protocol (its `http=` option) with peers in the scope, whose apps follow the rules of
    `ServerOptions.apps`, and time limits of requests. A connection beyond the maximum closes the one that
    has waited longest for its request.

    Run uvicorn with `proxy_headers=False`: callers are never identified by a header.
    """
    most = most_connections()
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
                self._peer = _peer(transport, apps)
            except OSError as error:
                self.logger.error("a connection was closed: its peer cannot be known (%s)", error)
                # Matches no rule, if a request is parsed before the connection is closed.
                self._peer = Peer()
                transport.abort()
                return
            if len(self.connections) > most:
                # Closes the one that has waited longest for its request, or this one if all have one.
                oldest = next(iter(waiting), self)
                waiting.pop(oldest, None)
                self.logger.warning("more than %d connections: one that sent no request is closed", most)
                oldest.transport.abort()
            self._await(_HEAD_S)
            waiting[self] = None

        def data_received(self, data: bytes) -> None:
            self._received += len(data)
            super().data_received(data)
            # The parser limits neither headers nor trailers. A chunk of one byte has five more of framing.
            most_bytes = _MOST_HEAD_BYTES + _MOST_FRAMING * self._body
            if self._received > most_bytes and not self.transport.is_closing():
                self.send_400_response("The request's headers are too large.")

        def on_body(self, body: bytes) -> None:
            self._body += len(body)
            super().on_body(body)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            scope: dict[str, Any] = self.scope  # pyright: ignore[reportAssignmentType]
            scope.setdefault("extensions", {})[EXTENSION] = self._peer

        def on_headers_complete(self) -> None:
            self._await(_BODY_S)
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
                self._await(_HEAD_S)
                waiting[self] = None

        def connection_lost(self, exc: Exception | None) -> None:
            waiting.pop(self, None)
            self._await(None)
            super().connection_lost(exc)

        def _await(self, seconds: float | None) -> None:
            """Closes the connection in `seconds`, replacing an earlier deadline; None for never."""
            if self._deadline is not None:
                self._deadline.cancel()
            late = self.transport.abort
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


@contextlib.contextmanager
def bound(
    address: tuple[str, int] | None,
    path: Path | None,
    mode: int,
    require_address: Callable[[str], None],
) -> Iterator[list[socket.socket]]:
    """Yields listening sockets: clients can connect from here on, and wait to be answered. Raises ConfigError
    if another service uses the address, other machines could reach it without `remote`, or it cannot be
    bound. Sockets of systemd have precedence over `address` and `path`, whose permissions are `mode`;
    `require_address` raises ConfigError for a host that must not be listened on."""
    with contextlib.ExitStack() as stack:
        sockets = passed(os.environ)
        for each in sockets:
            stack.enter_context(each)
            if each.family != socket.AF_UNIX:
                require_address(each.getsockname()[0])
        if not sockets:
            if address is not None:
                sockets.append(stack.enter_context(_tcp(*address, require_address)))
            if path is not None:
                sockets.append(stack.enter_context(_unix(path, mode)))
        yield sockets


def passed(environment: MutableMapping[str, str]) -> list[socket.socket]:
    """The sockets that systemd has passed to this process; removes the environment variables, so that child
    processes do not use them. Raises ConfigError if one of them is not a listening stream socket."""
    pid, count = environment.pop("LISTEN_PID", ""), environment.pop("LISTEN_FDS", "")
    environment.pop("LISTEN_FDNAMES", None)
    if pid != str(os.getpid()):
        return []
    if not count.isdecimal() or not 1 <= int(count) <= _MOST_PASSED:
        raise ConfigError(f"LISTEN_FDS must be from 1 to {_MOST_PASSED}, got {count!r:.80}")
    sockets = []
    for number in range(_FIRST_PASSED, _FIRST_PASSED + int(count)):
        try:
            taken = socket.socket(fileno=number)
            listens = taken.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        except OSError as error:
            raise ConfigError(f"file {number} from systemd is no socket ({error.strerror})") from error
        families = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6)
        if taken.family not in families or taken.type != socket.SOCK_STREAM or not listens:
            raise ConfigError(
                f"socket {number} from systemd does not listen for streams; use ListenStream= and Accept=no"
            )
        taken.set_inheritable(False)
        sockets.append(taken)
    return sockets


def described(listening: socket.socket) -> str:
    """The address for clients: a URL, or `unix:PATH`."""
    name = listening.getsockname()
    if listening.family == socket.AF_UNIX:
        return f"unix:{os.fsdecode(name)}"
    host = f"[{name[0]}]" if ":" in name[0] else name[0]
    return f"http://{host}:{name[1]}"


def _tcp(host: str, port: int, require_address: Callable[[str], None]) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        require_address(str(address[0]))
        return socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"another service listens on {host}:{port}; stop it, or choose another port with --http"
            ) from error
        raise ConfigError(f"{host}:{port} cannot be listened on ({error.strerror})") from error


@contextlib.contextmanager
def _unix(path: Path, mode: int) -> Iterator[socket.socket]:
    """A Unix socket at a path, removed at the end.

    A lock file ensures that only one of two services that start together gets the path. An existing socket is
    replaced if it belongs to this user and nobody answers on it.
    """
    # Not on all systems, where the other parts of this module are of use.
    import fcntl

    try:
        lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise ConfigError(f"{path}: no socket can be made there ({error.strerror})") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise _taken_by_another(path) from error
        _remove_stale(path)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with listening:
            # Prevents connections by others before the mode is set; no other thread makes files yet.
            mask = os.umask(0o777 & ~mode)
            try:
                listening.bind(str(path))
            except OSError as error:
                raise ConfigError(f"{path}: the socket cannot be made ({error.strerror or error})") from error
            finally:
                os.umask(mask)
            own = os.stat(path)
            listening.listen(_BACKLOG)
            try:
                yield listening
            finally:
                with contextlib.suppress(OSError):
                    if os.path.samestat(own, os.lstat(path)):
                        path.unlink()
    finally:
        os.close(lock)


def _remove_stale(path: Path) -> None:
    try:
        facts = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(facts.st_mode) or facts.st_uid != os.geteuid():
        raise ConfigError(f"{path} is not a socket of this user; choose another path, or remove it")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_ANSWER_S)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
        except OSError as error:
            raise _taken_by_another(path) from error
    raise _taken_by_another(path)


def _taken_by_another(path: Path) -> ConfigError:
    return ConfigError(f"another service listens on {path}; stop it, or choose another path with --socket")
