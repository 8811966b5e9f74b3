"""Binds the service's listening sockets, or uses those that systemd has bound."""

import contextlib
import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator, MutableMapping
from pathlib import Path

from jaxllm.errors import ConfigError
from jaxllm.serving.server.identity import Identity
from jaxllm.serving.server.service_options import ServerOptions

_BACKLOG = 512
_FIRST_PASSED = 3
_MOST_PASSED = 64
_ANSWER_S = 2.0


@contextlib.contextmanager
def bound(options: ServerOptions, identity: Identity) -> Iterator[list[socket.socket]]:
    """Yields listening sockets: clients can connect from here on, and wait to be answered.

    Sockets of systemd have precedence over those of the options.

    Raises:
      ConfigError: another service uses the address, other machines could reach it without `remote`, or it
        cannot be bound.
    """
    with contextlib.ExitStack() as stack:
        sockets = passed(os.environ)
        for each in sockets:
            stack.enter_context(each)
            if each.family != socket.AF_UNIX:
                identity.require_address(each.getsockname()[0])
        if not sockets:
            if options.address is not None:
                sockets.append(stack.enter_context(_tcp(*options.address, identity)))
            if options.socket is not None:
                sockets.append(stack.enter_context(_unix(options.socket, options.socket_mode)))
        yield sockets


def passed(environment: MutableMapping[str, str]) -> list[socket.socket]:
    """The sockets that systemd has passed to this process; removes the environment variables, so that child
    processes do not use them.

    Raises:
      ConfigError: one of them is not a listening stream socket.
    """
    pid, count = environment.pop("LISTEN_PID", ""), environment.pop("LISTEN_FDS", "")
    environment.pop("LISTEN_FDNAMES", None)
    if pid != str(os.getpid()):
        return []
    if not count.isdecimal() or not 1 <= int(count) <= _MOST_PASSED:
        raise ConfigError(f"LISTEN_FDS must be from 1 to {_MOST_PASSED}, got {count!r:.80}")
    return [_taken(number) for number in range(_FIRST_PASSED, _FIRST_PASSED + int(count))]


def described(listening: socket.socket) -> str:
    """The address for clients: a URL, or `unix:PATH`."""
    name = listening.getsockname()
    if listening.family == socket.AF_UNIX:
        return f"unix:{os.fsdecode(name)}"
    host = f"[{name[0]}]" if ":" in name[0] else name[0]
    return f"http://{host}:{name[1]}"


def _taken(number: int) -> socket.socket:
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
    return taken


def _tcp(host: str, port: int, identity: Identity) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        identity.require_address(str(address[0]))
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
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except FileNotFoundError:
            return
        except OSError as error:
            raise _taken_by_another(path) from error
    raise _taken_by_another(path)


def _taken_by_another(path: Path) -> ConfigError:
    return ConfigError(f"another service listens on {path}; stop it, or choose another path with --socket")
