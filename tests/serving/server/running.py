"""Runs an app with uvicorn in a thread."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import uvicorn


@contextlib.contextmanager
def running(app: Any, sockets: Any = None, **config: Any) -> Iterator[uvicorn.Server]:
    """The server of an app, until the end of the block; `config` goes before what tests have."""
    own = {"lifespan": "off", "ws": "none", "log_level": "critical", "access_log": False}
    server = uvicorn.Server(uvicorn.Config(app, **{**own, **config}))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=sockets)))
    thread.start()
    try:
        while not server.started:
            thread.join(0.01)
            assert thread.is_alive()
        yield server
    finally:
        server.should_exit = True
        thread.join()
