"""Starts a server in a process of its own, on a port and on cores of its own, and ends it."""

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.peers.process import PeerFailed, environment_of, last_words, pinned
from jaxllm.errors import JaxllmError

if TYPE_CHECKING:
    import httpx

# A first start compiles, and measures the device.
_START_S = 1800.0
_OK = 200
_STOP_S = 15.0
_LOOK_S = 0.1
_SHOWN_BYTES = 4000


def free_port() -> int:
    """A port of the loopback that nothing listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


class Server:
    """A running server. A context manager; leaving it ends the process.

    Attributes:
      name: of the system, in messages.
      url: of its HTTP.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        port: int,
        ready: str,
        threads: int,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Starts the process and waits until it answers.

        Args:
          name: of the system.
          command: to run.
          port: that it is told to listen on.
          ready: a path that answers 200 once it can be called.
          threads: that it computes with, on as many cores.
          environment: variables besides those of all systems.

        Raises:
          PeerFailed: it ends, or is not ready in half an hour.
        """
        self.name, self.url = name, f"http://127.0.0.1:{port}"
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
        with pinned(threads):
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env=environment_of(threads) | dict(environment or {}),
                # Ctrl-C is for the parent alone, which then ends its servers.
                start_new_session=True,
            )
        try:
            self.wait_until(ready, lambda answer: answer.status_code == _OK)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def require_alive(self) -> None:
        """Raises PeerFailed where the process has ended."""
        code = self._process.poll()
        if code is not None:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
            self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - _SHOWN_BYTES))
            said = last_words(self._log.read().decode(errors="replace"))
            raise PeerFailed(f"the server of {self.name} {how}; it said last: {said}")

    def peak_bytes(self) -> int | None:
        """Peak of its resident memory so far, mapped files included; None where the system does not tell."""
        return _kibibytes(Path(f"/proc/{self.pid}/status"), "VmHWM:")

    def share_bytes(self) -> int | None:
        """Its proportional share of memory now (PSS); None where the system does not tell."""
        return _kibibytes(Path(f"/proc/{self.pid}/smaps_rollup"), "Pss:")

    def close(self) -> None:
        """Ends the process, by force if it must be."""
        if self._log.closed:
            return
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._log.close()

    def wait_until(self, path: str, there: "Callable[[httpx.Response], bool]") -> None:
        """Asks for a path until the answer is as it should be.

        Raises:
          PeerFailed: the process ends, or the answer is not so in half an hour.
        """
        import httpx

        late_s = time.monotonic() + _START_S
        with httpx.Client(base_url=self.url, timeout=5.0) as client:
            while time.monotonic() < late_s:
                self.require_alive()
                with contextlib.suppress(httpx.HTTPError):
                    if there(client.get(path)):
                        return
                time.sleep(_LOOK_S)
        raise PeerFailed(f"the server of {self.name} was not ready within {_START_S:.0f} s ({path})")


def require_httpx() -> None:
    """Raises JaxllmError where httpx is not installed, which sends the load."""
    try:
        import httpx  # noqa: F401
    except ImportError as error:
        raise JaxllmError(
            "bench service needs the package httpx; run `pip install 'jaxllm[client]'`"
        ) from error


def _kibibytes(path: Path, name: str) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), None)
