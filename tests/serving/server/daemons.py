"""Starts services in processes of their own, for tests."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[3]
WAIT_S = 120.0
MAIN = "from jaxllm.cli.entry import main; main()"
# Takes the sockets of these numbers as systemd passes them.
_ACTIVATED = "exec 3<&{0} 4<&{1}; export LISTEN_PID=$$ LISTEN_FDS=2; exec"


class Process:
    """A service.

    Attributes:
      process: of it.
      log: file of its stderr.
    """

    def __init__(
        self,
        folder: Path,
        *arguments: object,
        script: str = MAIN,
        passed: Sequence[Any] = (),
        environment: dict[str, str] | None = None,
    ) -> None:
        self.log = folder / "log"
        command = [sys.executable, "-c", script, "serve", *map(str, arguments)]
        if passed:
            take = _ACTIVATED.format(*(each.fileno() for each in passed))
            command = ["bash", "-c", f'{take} "$@"', "bash", *command]
        own = {"JAXLLM_KEYS": str(folder / "keys.json"), **(environment or {})}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdout=log, stderr=log, env=os.environ | own,
                pass_fds=[each.fileno() for each in passed],
            )  # fmt: skip

    def text(self) -> str:
        """What it has written so far."""
        return self.log.read_text()

    def until(self, there: Callable[[], Any]) -> Any:
        """Waits for something true, and fails when the service ends before."""
        late_s = time.monotonic() + WAIT_S
        while not (found := there()):
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < late_s, self.text()
            time.sleep(0.02)
        return found

    def listens(self) -> str:
        """Waits until it listens over TCP: its URL."""
        return self.until(lambda: re.search(r"listening on (http://[^\s\"]+)", self.text()))[1]

    def ready(self) -> str:
        """Waits until it answers over HTTP: its URL."""
        url = self.listens()
        self.until(lambda: httpx.get(url + "/ready", timeout=60).status_code == 200)
        return url

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal."""
        self.process.send_signal(number)

    def ended(self) -> int:
        """Waits for its end: the exit code."""
        return self.process.wait(WAIT_S)

    def kill(self) -> None:
        """Ends it, whatever it does."""
        self.process.kill()
        self.process.wait(WAIT_S)


def raw_request(call: dict[str, Any], headers: dict[str, str]) -> bytes:
    """The bytes of a call over HTTP."""
    body, own = json.dumps(call), {"Host": "localhost", "Connection": "close", **headers}
    lines = [f"{name}: {value}\r\n" for name, value in {**own, "Content-Length": len(body)}.items()]
    return f"POST /v1/completions HTTP/1.1\r\n{''.join(lines)}\r\n{body}".encode()
