"""Starts one child process per system, and sends it commands.

Every system, ours included, runs in a process of its own, pinned to the same cores. Systems share neither
allocator nor thread pools, and only one computes at a time: before each timed command the parent waits until
the others sleep (OpenMP workers spin for a while after their work).
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measuring.quiet import Disturbance, wait_until_asleep
from benchmarks.peers.peer import Opening, Progress
from jaxllm.errors import ConfigError, JaxllmError, one_line

_COMMAND = (sys.executable, "-m", "benchmarks.peers.child")
_CLOSE_TIMEOUT_S = 5.0
_SHOWN_STDERR_BYTES = 2000


class PeerFailed(JaxllmError):
    """A system under test could not be started, refused a command, or died."""


class Child:
    """A system with an open model in a process of its own. A context manager; closing it ends the process.

    Attributes:
      label: its name in messages.
      facts: of its session (see `Session.facts`).
      settings: of its session (see `Session`).
      open_peak_bytes: peak of resident memory while it opened the model.
      peak_bytes: peak since then, where the operating system can reset it.
      disturbed: whether other processes took noticeable processor time during the last command; None where
        that is not known.
    """

    def __init__(
        self,
        label: str,
        opening: Opening,
        progress: Progress | None = None,
        *,
        command: Sequence[str] = _COMMAND,
    ) -> None:
        """Starts the process and opens the model.

        Args:
          label: its name in messages.
          opening: the model to open.
          progress: called as the child reports it.
          command: a program that speaks the protocol of `child.py`.

        Raises:
          PeerFailed: it did not start, or could not open the model.
        """
        self.label = label
        self.peak_bytes = 0
        self.disturbed: bool | None = None
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
        self._process: subprocess.Popen[bytes] | None = _start(command, opening.threads, self._stderr)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._commands, self._answers = self._process.stdin, self._process.stdout
        try:
            opened = self._ask({"do": "open", "opening": opening.to_json()}, progress)
        except BaseException:
            self.close()
            raise
        self.open_peak_bytes, self.peak_bytes = self.peak_bytes, 0
        self.facts: dict[str, Any] = opened["facts"]
        self.settings: list[str] = opened["settings"]

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def answer(self, prompt: Sequence[int], tokens: int, setting: str, *, repeats: int = 1) -> dict[str, Any]:
        """Feeds a prompt, then decodes greedily, `repeats` times: the median `prefill_ms` and `decode_ms`,
        and the `ids`, the first of them from the prefill."""
        command = {"do": "answer", "prompt": list(prompt), "tokens": tokens, "setting": setting}
        return self._ask(command | {"repeats": repeats})

    def score(self, tokens: Sequence[int], targets: Sequence[int]) -> float:
        """Negative log-likelihood (nats) of the targets, each after its token and all before it."""
        return self._ask({"do": "score", "tokens": list(tokens), "targets": list(targets)})["loss"]

    def close(self) -> None:
        """Ends the process, by force if it must be."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(OSError):
            self._commands.close()
        try:
            process.wait(_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._answers.close()
        self._stderr.close()

    def wait_until_asleep(self) -> None:
        """Returns once the process computes nothing, or after a second."""
        if self._process is not None:
            wait_until_asleep(self._process.pid)

    def _ask(self, command: dict[str, Any], progress: Progress | None = None) -> dict[str, Any]:
        if self._process is None:
            raise PeerFailed(f"{self.label} is closed; start it again")
        disturbance = Disturbance()
        try:
            self._commands.write(json.dumps(command).encode() + b"\n")
            self._commands.flush()
            answer = self._read(progress)
        except BrokenPipeError:
            answer = None
        if answer is None:
            raise PeerFailed(f"{self.label} {self._death(self._process)}")
        self.disturbed = disturbance.ended(own_s=answer["cpu_s"])
        self.peak_bytes = max(self.peak_bytes, answer["peak_bytes"])
        if "error" in answer:
            raise PeerFailed(f"{self.label} cannot {command['do']}: {answer['error']}")
        return answer

    def _read(self, progress: Progress | None) -> dict[str, Any] | None:
        """The answer to a command, None if the process ends instead."""
        for line in self._answers:
            try:
                message = json.loads(line)
            except ValueError as error:
                shown = line[:80].decode(errors="replace")
                raise PeerFailed(f"{self.label} broke the protocol: {shown!r} is not JSON") from error
            if "progress" not in message:
                return message
            if progress is not None:
                progress(*message["progress"])
        return None

    def _death(self, process: "subprocess.Popen[bytes]") -> str:
        """How the process ended, with the last line of its standard error."""
        code = process.wait()
        how = f"exited with {code}"
        if code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
            if -code == signal.SIGKILL:
                how += " (most often for want of memory)"
        self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, self._stderr.tell() - _SHOWN_STDERR_BYTES))
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return f"{how}; it said last: {one_line(lines[-1])}" if lines else how


def last_words(stderr: str) -> str:
    """The last line of a failed process's standard error."""
    lines = stderr.strip().splitlines()
    return one_line(lines[-1]) if lines else "it said nothing"


def threads_of(wanted: int) -> int:
    """The threads that a system computes with: so many, or for 0 all cores of this process.

    Raises:
      ConfigError: there are fewer cores.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not 0 <= wanted <= cores:
        raise ConfigError(f"--threads must be in [1, {cores}], the cores of this process; got {wanted}")
    return wanted or cores


def environment_of(threads: int) -> dict[str, str]:
    """The environment of a system that computes with so many threads."""
    root = str(Path(__file__).parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": str(threads),
        "JAXLLM_THREADS": str(threads),
        # No library may look for a newer model.
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


@contextlib.contextmanager
def pinned(threads: int) -> Iterator[None]:
    """Pins this thread, hence a process that it starts, to the first `threads` of its cores."""
    if not hasattr(os, "sched_getaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(cores)[:threads])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def _start(command: Sequence[str], threads: int, stderr: Any) -> "subprocess.Popen[bytes]":
    with pinned(threads):
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=environment_of(threads),
            # Ctrl-C is for the parent alone, which then closes its children.
            start_new_session=True,
        )


def rest(children: Sequence[Child]) -> None:
    """Returns once none of the children computes any more."""
    for child in children:
        child.wait_until_asleep()
