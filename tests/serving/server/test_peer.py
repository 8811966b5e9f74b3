"""Peers over real connections: who is at the other end, and what happens to slow and endless requests."""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from jaxllm.serving.server import sockets
from jaxllm.serving.server.sockets import EXTENSION, protocol
from tests.serving.server.services import running

GET, SLOW = (f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode() for path in ("/", "/slow"))
CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
# A slow request has arrived, and may be answered.
ARRIVED, ANSWERED = threading.Semaphore(0), threading.Event()


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Tells the peer, after the request's body."""
    while (await receive()).get("more_body"):
        pass
    if scope["path"] == "/slow":
        ARRIVED.release()
        while not ANSWERED.is_set():
            await asyncio.sleep(0.01)
    peer = scope["extensions"][EXTENSION]
    facts = {"app": peer.app, "address": peer.address, "pid": peer.credentials and peer.credentials.pid}
    body = json.dumps(facts).encode()
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def serving(**where: Any) -> AbstractContextManager[uvicorn.Server]:
    apps = {f"uid:{os.geteuid()}": "tests"}
    return running(app, http=protocol(apps), proxy_headers=False, **where)


@pytest.fixture(scope="module", autouse=True)
def soon() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sockets, "_HEAD_S", 0.4)
        patch.setattr(sockets, "_BODY_S", 0.4)
        yield


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = str(tmp_path_factory.mktemp("s") / "s")
    with serving(uds=path):
        yield path


def connected(path: str) -> socket.socket:
    found = socket.socket(socket.AF_UNIX)
    found.settimeout(20)
    found.connect(path)
    return found


def answer(connection: socket.socket) -> bytes:
    """One answer, which may come in parts."""
    found = b""
    while not found.endswith(b"}"):
        part = connection.recv(1 << 16)
        assert part, "it was closed"
        found += part
    return found


def received(connection: socket.socket) -> bytes:
    """Everything until the other end closes."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(1 << 16):
            found += part
    return found


def test_the_socket_tells_who_calls_and_headers_say_nothing(path: str) -> None:
    with httpx.Client(transport=httpx.HTTPTransport(uds=path)) as client:
        facts = client.post("http://any", json=[1] * 1000).json()
    assert facts == {"app": "tests", "address": "", "pid": os.getpid()}
    with serving(host="127.0.0.1", port=0) as server, httpx.Client(trust_env=False) as client:
        port = server.servers[0].sockets[0].getsockname()[1]
        headers = {"X-Forwarded-For": "10.0.0.9", "X-Real-IP": "10.0.0.9", "Forwarded": "for=10.0.0.9"}
        facts = client.get(f"http://127.0.0.1:{port}", headers=headers).json()
    assert facts == {"app": "", "address": "127.0.0.1", "pid": None}


def test_a_slow_request_and_one_that_trickles_are_cut_off(path: str) -> None:
    post = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n1"
    begins = {b"": 0, b"GET / HTTP/1.1\r\nHost: x\r\n": 0, post: 0, GET + b"GET / HT": 1}
    with contextlib.ExitStack() as stack:
        slow = {begin: stack.enter_context(connected(path)) for begin in begins}
        for begin, connection in slow.items():
            connection.sendall(begin)
        for begin, connection in slow.items():
            assert received(connection).count(b"200 OK") == begins[begin], begin
    with connected(path) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n")
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(1000):
                connection.sendall(b"X: y\r\n")
                time.sleep(0.01)
            pytest.fail("it was never cut off")


def test_endless_headers_are_refused(path: str) -> None:
    value, fields = b"x" * 4096, b"X: y\r\n" * 1000
    for head, endless in (
        (b"GET / HTTP/1.1\r\nX: ", value), (b"GET /", value), (b"GET / HTTP/1.1\r\n", fields),
        (CHUNKED + b"1\r\na\r\n0\r\n", fields), (CHUNKED + b"1;", value),
    ):  # fmt: skip
        with connected(path) as connection:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(head)
                for _ in range(200):
                    connection.sendall(endless)
            assert b"200 OK" not in received(connection), head


def test_a_body_in_tiny_chunks_is_taken_and_a_connection_used_again(path: str) -> None:
    with connected(path) as connection:
        connection.sendall(CHUNKED + b"1\r\na\r\n" * 30_000 + b"0\r\n\r\n")
        assert answer(connection).startswith(b"HTTP/1.1 200 OK")
        for _ in range(5):
            connection.sendall(GET)
            assert answer(connection).startswith(b"HTTP/1.1 200 OK")
            time.sleep(0.15)


def test_idle_connections_give_way_to_new_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "_HEAD_S", 20.0)
    monkeypatch.setattr(sockets, "most_connections", lambda: 4)
    path = str(tmp_path / "s")
    with serving(uds=path), contextlib.ExitStack() as stack:
        idle = [stack.enter_context(connected(path)) for _ in range(3)]
        # One has sent a part of its request.
        idle[1].sendall(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\nab")
        busy = stack.enter_context(connected(path))
        ANSWERED.clear()
        stack.callback(ANSWERED.set)
        busy.sendall(SLOW)
        assert ARRIVED.acquire(timeout=60)
        for number in range(8):
            later = stack.enter_context(connected(path))
            later.sendall(GET)
            assert later.recv(1 << 16).startswith(b"HTTP/1.1 200"), number
        # Those that have waited longest are gone; one with a request goes on.
        assert [received(each) for each in idle] == [b""] * 3
        ANSWERED.set()
        assert answer(busy).startswith(b"HTTP/1.1 200")
        # Where all have requests a further connection is closed.
        all_busy = [stack.enter_context(connected(path)) for _ in range(4)]
        ANSWERED.clear()
        for each in all_busy:
            each.sendall(SLOW)
            assert ARRIVED.acquire(timeout=60)
        assert received(stack.enter_context(connected(path))) == b""
        ANSWERED.set()
        for each in all_busy:
            assert answer(each).startswith(b"HTTP/1.1 200")


def test_files_are_left_for_more_than_connections() -> None:
    code = """
import resource
from jaxllm.serving.host.machine import most_connections, raise_open_files
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 900))
print(most_connections())
raise_open_files()
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], most_connections())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["16", "900", "644"]
