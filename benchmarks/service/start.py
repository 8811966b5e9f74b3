"""Measures how long after its start a service gives the first token, with compiled buckets and the device's
profile on disk.

A client tries from the first moment on, as one does that has just started the service: until there is a
socket, and then until calls are no longer refused with "loading".
"""

import contextlib
import json
import socket
import statistics
import subprocess
import time
from collections.abc import Sequence

from benchmarks.measuring.report import Row
from benchmarks.peers.process import PeerFailed, environment_of, pinned
from benchmarks.service.server import free_port
from benchmarks.service.systems import OURS, Conditions, OurService
from serving.host.progress import Progress

_AGAIN_S = 0.005
_LATE_S = 120.0
_STOP_S = 60.0
_BODY = json.dumps({"prompt": [1, 2, 3, 4], "max_tokens": 8, "stream": True}).encode()


def start_rows(name: str, given: Conditions, starts: int, progress: Progress) -> list[Row]:
    """Times starts of our service, whose buckets an earlier one has left on disk.

    Args:
      name: of the model.
      given: the conditions.
      starts: how many.
      progress: called with ("start", starts done, starts in all).

    Raises:
      PeerFailed: the service ends, or gives no token in two minutes.
    """
    times = []
    for number in range(starts):
        times.append(1000 * _first_token_s(given))
        progress("start", number + 1, starts)
    note = f"{min(times):.4g} to {max(times):.4g} of {starts}"
    return [
        Row(
            case=f"{name}, start to the first token", system=OURS, metric="load_ms",
            value=statistics.median(times), unit="ms", note=note,
        )
    ]  # fmt: skip


def _first_token_s(given: Conditions) -> float:
    port = free_port()
    command, environment = OurService().command(given, port)
    environment = environment_of(given.threads) | dict(environment)
    began = time.perf_counter()
    with pinned(given.threads):
        process = _started(command, environment)
    try:
        while not _has_token(port, given.keys[0]):
            if process.poll() is not None:
                raise PeerFailed(f"the service exited with {process.returncode} before its first token")
            if time.perf_counter() - began > _LATE_S:
                raise PeerFailed(f"the service gave no token within {_LATE_S:.0f} s")
            time.sleep(_AGAIN_S)
        return time.perf_counter() - began
    finally:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _started(command: Sequence[str], environment: dict[str, str]) -> "subprocess.Popen[bytes]":
    nothing = subprocess.DEVNULL
    return subprocess.Popen(
        command, stdin=nothing, stdout=nothing, stderr=nothing, env=environment, start_new_session=True
    )


def _has_token(port: int, key: str) -> bool:
    """Asks once for an answer: whether its first piece has come."""
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Authorization: Bearer {key}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(_BODY)}\r\n\r\n"
    )
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), _LATE_S) as connection:
        connection.sendall(head.encode() + _BODY)
        got = b""
        while part := connection.recv(1 << 16):
            got += part
            if got.startswith(b"HTTP/1.1 200") and b"data: {" in got:
                return True
    return False
