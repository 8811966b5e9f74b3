"""Starts the processes that compile and follow grammars (see `worker.py`), and reports how they end."""

import array
import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

from jaxllm.errors import ConfigError, JaxllmError
from jaxllm.serving.guided.worker import COMPILE_S, NO_LIMIT, STEP_S, parsed_state, receive, send

# The first process starts in 0.3 seconds, with a large vocabulary in a second; longer on a busy machine.
_START_S = 60.0
# Far above the limits of processor time, which a busy machine stretches.
REPLY_S = 10.0
_BOOT = (
    "import json, sys; sys.path[:0] = json.loads(sys.argv[1]); "
    "from jaxllm.serving.guided.worker import serve; serve(int(sys.argv[2]))"
)
# One thread per pool: a process with more of them must not be forked.
_ONE_THREAD = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


class WorkerEnded(Exception):
    """A process ended at its limits; the message explains this to users."""


class WorkerLate(WorkerEnded):
    """A process could not be started, or did not answer in time, which may be the machine's fault."""


class GrammarLate(JaxllmError):
    """The machine has no time, processes or files for a grammar now; it may have them later."""


class GrammarWorkers:
    """The processes of one tokenizer; none runs before the first grammar. Threads may share it.

    Attributes:
      counts: grammars so far: "compiled", "refused" by the compiler, and "ended" at the limits of the
        process, while compiled or followed.
      pid: id of the first process, whose group includes the others; 0 before it was started.
    """

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        """Starts nothing yet."""
        self._setup = {"tokenizer_json": tokenizer_json, "vocab_size": vocab_size, "eos_ids": eos_ids}
        self.counts: Counter[str] = Counter(compiled=0, refused=0, ended=0)
        self.pid = 0
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._finalizer: weakref.finalize[..., GrammarWorkers] | None = None
        self._owner = 0

    def compile(self, request: dict[str, Any]) -> "CompiledGrammar":
        """Compiles a grammar in a separate process.

        Args:
          request: its `kind` and `text`, `stop_ids`, the number of `text_tokens`, whose ids come first, and
            whether answers are `completed` before they reach their length.

        Raises:
          ValueError: the compiler refuses it.
          WorkerEnded: it needs too much time, memory or stack.
          WorkerLate: no process can be started, or the machine is too busy.
          ConfigError: the model's tokenizer cannot be used.
        """
        try:
            control = self._forked()
            try:
                with contextlib.suppress(OSError):  # A process that has ended is found by `_reply`.
                    send(control, json.dumps(request).encode())
                reply = json.loads(_reply(control, COMPILE_S, "it was compiled"))
                if "error" in reply:
                    raise ValueError(reply["error"])
                first = _reply(control, COMPILE_S, "it was compiled")
            except BaseException:
                control.close()
                raise
        except ValueError:
            self.counts["refused"] += 1
            raise
        except WorkerEnded:
            self.counts["ended"] += 1
            raise
        self.counts["compiled"] += 1
        return CompiledGrammar(control, first, self.counts, grew_bytes=reply["grew_bytes"])

    def _forked(self) -> socket.socket:
        """The socket of a new process for a grammar; starts the first process if necessary."""
        with self._lock:
            for _ in range(2):
                if self._control is None or self._owner != os.getpid():
                    self._control, self._owner = self._started(), os.getpid()
                try:
                    control = _handed(self._control)
                except OSError:
                    self._stop()
                    continue
                try:
                    _reply(control, 0.0, "it was forked")
                except WorkerEnded as error:
                    control.close()
                    if isinstance(error, WorkerLate):
                        raise
                    self._stop()
                    continue
                return control
        raise WorkerLate("the process for grammars ends as soon as it is started, or can fork no other")

    def _stop(self) -> None:
        """Ends the first process, if it runs."""
        self._control = None
        if self._finalizer is not None:
            self._finalizer()

    def _started(self) -> socket.socket:
        if not sys.executable:
            raise ConfigError(
                "grammars run in child processes, and this program has no Python to start one with"
            )
        package = str(Path(__file__).absolute().parents[3])
        path = [package, *(os.path.abspath(each) for each in sys.path if each and os.path.exists(each))]
        ours, theirs = _pair()
        with theirs:
            try:
                child = subprocess.Popen(
                    [sys.executable, "-I", "-c", _BOOT, json.dumps(path), str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env={**os.environ, **_ONE_THREAD},
                    # Outside of the terminal's process group, and of the service's when it is stopped.
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                raise WorkerLate(f"the process for grammars cannot be started ({error.strerror})") from error
        self.pid = child.pid
        self._finalizer = weakref.finalize(self, _end, child, ours, os.getpid())
        try:
            send(ours, json.dumps(self._setup).encode())
            reply = json.loads(_reply(ours, _START_S, "it was started"))
        except (WorkerEnded, OSError) as error:
            self._finalizer()
            raise WorkerLate(f"the process for grammars cannot be started: {error}") from error
        if "error" in reply:
            self._finalizer()
            raise ConfigError(
                f"grammars cannot follow the model's tokenizer: {reply['error']}; they need one whose "
                "tokens are bytes or fall back to bytes"
            )
        return ours


class CompiledGrammar:
    """A compiled grammar, whose process waits for answers.

    Attributes:
      first: initial state of an answer.
      grew_bytes: memory needed to compile it.
    """

    def __init__(
        self, control: socket.socket, first: bytes, counts: Counter[str], *, grew_bytes: int
    ) -> None:
        self.first, self.grew_bytes = first, grew_bytes
        self._control, self._counts = control, counts
        weakref.finalize(self, control.close)

    @property
    def alive(self) -> bool:
        """Whether its process runs: it sends nothing any more."""
        return not _readable(self._control, 0.0)

    def follow(self) -> "Follower":
        """Forks the process of one answer.

        Raises:
          WorkerEnded: the grammar's process is gone.
          WorkerLate: this process has no file left.
        """
        try:
            return Follower(_handed(self._control), self._counts)
        except OSError as error:
            raise WorkerEnded(f"its process has ended ({error})") from error


class Follower:
    """The process that follows one answer. Used by one thread at a time.

    Attributes:
      channel: socket, readable when a state has arrived.
    """

    def __init__(self, channel: socket.socket, counts: Counter[str]) -> None:
        self.channel, self._counts = channel, counts
        self._asked_s: float | None = None
        weakref.finalize(self, channel.close)

    @property
    def ready(self) -> bool:
        """Whether `state` need not wait."""
        if self._asked_s is None or time.monotonic() > self._asked_s + REPLY_S:
            return True
        return bool(_readable(self.channel, 0.0))

    def take(self, tokens: list[int], left: int | None = None) -> None:
        """Sends tokens of the answer and how many may follow them (None for any number), and does not wait
        for the state after them."""
        self._asked_s = time.monotonic()
        # A process that has ended is found by `state`.
        with contextlib.suppress(OSError):
            send(self.channel, array.array("I", [NO_LIMIT if left is None else left, *tokens]).tobytes())

    def state(self) -> tuple[bool, bool, list[int], bytes]:
        """The state after the sent tokens (see `parsed_state`); waits for it.

        Raises:
          ValueError: the grammar does not allow them, or has become too complex.
          WorkerEnded: it needs too much time, memory or stack.
          WorkerLate: it did not arrive in time.
        """
        waited_s = 0.0 if self._asked_s is None else time.monotonic() - self._asked_s
        try:
            reply = _reply(self.channel, STEP_S, "a token was taken", waited_s)
        except WorkerEnded:
            self._counts["ended"] += 1
            raise
        self._asked_s = None
        if not reply[0]:
            raise ValueError(reply[1:].decode())
        return parsed_state(reply[1:])


def _handed(control: socket.socket) -> socket.socket:
    """Lets a process fork another, and returns that one's socket.

    Raises:
      OSError: that process is gone.
      WorkerLate: this process has no file descriptor left.
    """
    ours, theirs = _pair()
    try:
        socket.send_fds(control, [b"\0"], [theirs.fileno()])
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    # A process that no longer reads must not block others.
    ours.settimeout(REPLY_S)
    return ours


def _pair() -> tuple[socket.socket, socket.socket]:
    try:
        return socket.socketpair()
    except OSError as error:
        raise WorkerLate(f"the process for grammars cannot be reached ({error.strerror})") from error


def _reply(channel: socket.socket, seconds: float, when: str, waited_s: float = 0.0) -> bytes:
    """Receives a message; `waited_s` of its timeout have passed."""
    most_s = max(REPLY_S, seconds)
    channel.settimeout(max(0.001, most_s - waited_s))
    try:
        reply = receive(channel)
    except TimeoutError:
        raise WorkerLate(f"no answer came within {most_s:g} seconds when {when}") from None
    except OSError:
        reply = b""
    if not reply:
        raise WorkerEnded(
            f"it took more than {seconds:g} seconds of the processor, or more memory or stack than it may "
            f"have, when {when}"
        )
    return reply


def _readable(channel: socket.socket, timeout_s: float) -> list[Any]:
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    return poll.poll(1000 * timeout_s)


def _end(child: "subprocess.Popen[bytes]", control: socket.socket, owner: int) -> None:
    control.close()
    if owner == os.getpid():
        child.kill()
        child.wait()
