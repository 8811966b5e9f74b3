"""Serves a device's service over HTTP or a Unix socket: the live service's wire formats, identity and guard.

Takes uvicorn and Starlette (`pip install 'jaxllm[serve]'`). There are neither quotas of apps nor a dashboard.
"""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import uvicorn

from serving.device.backend import DeviceBackend
from serving.server.api.app import make_app
from serving.server.guard import LOOPBACK_HOSTS, Guard, GuardOptions
from serving.server.identity import Identity, IdentityOptions
from serving.server.keys import KeyFile, default_keys_file
from serving.server.peer import protocol

_FLUSH_S = 5


class _Server(uvicorn.Server):
    """uvicorn's server without its handling of signals, which would end answers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(
    backend: DeviceBackend, listening: socket.socket, identity: Identity, hosts: tuple[str, ...]
) -> None:
    """Answers on a socket until SIGINT or SIGTERM, then closes the backend.

    Args:
      backend: of the service.
      listening: bound.
      identity: tells which app calls.
      hosts: names by which callers may reach the service, besides those of the loopback.
    """
    app = make_app(backend, identify=identity.identify, operates=identity.operates)
    guard = GuardOptions(hosts=tuple(dict.fromkeys((*LOOPBACK_HOSTS, *hosts))))
    config = uvicorn.Config(
        Guard(app, identity, guard),  # pyright: ignore[reportArgumentType]
        http=protocol(),
        ws="none",
        lifespan="off",
        proxy_headers=False,
        server_header=False,
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=_FLUSH_S,
    )
    server = _Server(config)

    async def until_told() -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, setattr, server, "should_exit", True)
        await server.serve(sockets=[listening])

    try:
        asyncio.run(until_told())
    finally:
        backend.close()


def own_identity(keys: Path | None = None) -> Identity:
    """Identity by the keys of a file; None for this user's."""
    return Identity(IdentityOptions(), KeyFile(keys or default_keys_file()))


@contextlib.contextmanager
def bound_to(address: str, port: int, identity: Identity) -> Iterator[socket.socket]:
    """A socket that listens at an address of this machine.

    Raises:
      ConfigError: other machines could reach it.
      OSError: it cannot be bound.
    """
    identity.require_address(address)
    with socket.create_server((address, port)) as found:
        yield found
