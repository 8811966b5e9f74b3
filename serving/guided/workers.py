"""Runs the processes that compile and follow grammars (see `worker.py`), and reports how they end.

`GrammarWorkers` compiles a grammar, and a `Matcher` follows one answer through it: which tokens may come
next, and which must.
"""

import array
import collections
import contextlib
import dataclasses
import itertools
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.errors import ConfigError, JaxllmError, one_line
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


@dataclasses.dataclass(eq=False)
class CompiledGrammar:
    """A compiled grammar, whose process waits for answers.

    Attributes:
      control: socket of its process.
      counts: see `GrammarWorkers`.
      first: initial state of an answer.
      text_tokens: `[V]` bool, tokens that a grammar may allow: all of the tokenizer but its end tokens.
      stops: tokens that end the answer.
      grew_bytes: memory needed to compile it.
    """

    control: socket.socket
    counts: Counter[str]
    first: bytes
    text_tokens: np.ndarray
    stops: np.ndarray
    grew_bytes: int

    def __post_init__(self) -> None:
        weakref.finalize(self, self.control.close)

    @property
    def alive(self) -> bool:
        """Whether its process runs: it sends nothing any more."""
        return not _readable(self.control, 0.0)

    def matcher(self, most_tokens: int | None = None) -> "Matcher":
        """Begins an answer (see `Matcher`)."""
        return Matcher(self, most_tokens)

    def fork(self) -> socket.socket:
        """The socket of a new process that follows one answer; readable when a state has arrived.

        Raises:
          WorkerEnded: the grammar's process is gone.
          WorkerLate: this process has no file left.
        """
        try:
            return _handed(self.control)
        except OSError as error:
            raise WorkerEnded(f"its process has ended ({error})") from error


class Matcher:
    """The state of one answer in its grammar. Used by one thread at a time.

    Tokens that end the answer are allowed exactly where the text may end. If the grammar allows only one
    text, its tokens are *forced*: the tokenizer's encoding of it. Masks are computed in another process
    while the engine does other work: after `take`, `ready` tells whether they have arrived, and earlier
    uses wait.

    Attributes:
      channel: socket of its process, readable when the matcher is ready; None before it has one.
      completed: whether the end of the text was forced because the answer would have reached its length.
    """

    def __init__(self, compiled: CompiledGrammar, most_tokens: int | None = None) -> None:
        """Begins an answer.

        Args:
          compiled: the grammar.
          most_tokens: maximum length of the answer. Before it is reached, the end of a text in JSON is forced
            (see `completed`); None for no limit.
        """
        self.completed, self._most_tokens = False, most_tokens
        self.channel: socket.socket | None = None
        self._compiled, self._text_tokens, self._stops = compiled, compiled.text_tokens, compiled.stops
        self._failure: WorkerEnded | None = None
        self._stop_set = frozenset(compiled.stops.tolist())
        self._taken = 0
        # When the state that has not been read yet was requested.
        self._asked_s: float | None = None
        self._forced: collections.deque[int] = collections.deque()
        self._set(*parsed_state(compiled.first))

    @property
    def ready(self) -> bool:
        """Whether its other methods need not wait."""
        if self._asked_s is None or self.channel is None or time.monotonic() > self._asked_s + REPLY_S:
            return True
        return bool(_readable(self.channel, 0.0))

    def wait(self) -> None:
        """Waits until it is ready.

        Raises:
          ConfigError: the grammar does not allow the tokens so far, has become too complex, or is a dead end.
          GrammarLate: the machine is too busy.
        """
        if self._asked_s is None:
            return
        waited_s, self._asked_s = time.monotonic() - self._asked_s, None
        try:
            self._set(*self._state(waited_s))
        except WorkerLate as error:
            raise GrammarLate(
                f"the grammar cannot be followed after {self._taken} tokens now: {error}; ask again"
            ) from error
        except (ValueError, WorkerEnded) as error:
            raise ConfigError(
                f"the grammar cannot be followed after {self._taken} tokens: {one_line(error)}; use a "
                "simpler one"
            ) from error

    def _state(self, waited_s: float) -> tuple[bool, bool, list[int], bytes]:
        """The state after the sent tokens (see `parsed_state`), after waiting for it for `waited_s`."""
        if self.channel is None:
            raise self._failure or WorkerEnded("its process has ended")
        try:
            reply = _reply(self.channel, STEP_S, "a token was taken", waited_s)
        except WorkerEnded:
            self._compiled.counts["ended"] += 1
            raise
        if not reply[0]:
            raise ValueError(reply[1:].decode())
        return parsed_state(reply[1:])

    def require_text(self) -> None:
        """Checks at the start of an answer that the grammar matches a text.

        Raises:
          ConfigError: it matches only the empty text, or none that the model has tokens for.
        """
        if self.complete:
            raise ConfigError("the grammar matches the empty text alone; ask for no grammar, or another one")
        self.allowed()

    @property
    def complete(self) -> bool:
        """Whether the text matches the grammar and nothing may follow."""
        self.wait()
        return not self._forced and not self._mask.any() and self._may_end

    def forced(self, most: int) -> list[int]:
        """The next forced tokens, at most `most`."""
        self.wait()
        return list(itertools.islice(self._forced, most))

    def allowed(self) -> np.ndarray:
        """`[V]` bool, the allowed next tokens, including those that end the answer.

        Raises:
          ConfigError: the grammar has become too complex, or no token can continue it.
        """
        self.wait()
        if self._forced:
            allowed = np.zeros_like(self._text_tokens)
            allowed[self._forced[0]] = True
            return allowed
        if not self._may_end and not self._mask.any():
            raise ConfigError(
                f"after {self._taken} tokens no token of the model can go on with the grammar, and the "
                "text may not end there; use another grammar"
            )
        allowed = self._mask.copy()
        if self._may_end:
            allowed[self._stops] = True
        return allowed

    def take(self, tokens: Sequence[int]) -> None:
        """Advances by allowed tokens of the answer."""
        for token in tokens:
            if token in self._stop_set:
                return
            self.wait()
            self._taken += 1
            if self._forced:
                # The process is past them already.
                self._forced.popleft()
            else:
                self._send(token)

    def _send(self, token: int) -> None:
        """Requests the mask after a token; if that fails, `wait` raises the error."""
        if self.channel is None:
            try:
                self.channel = self._compiled.fork()
                weakref.finalize(self, self.channel.close)
            except WorkerEnded as error:
                self._failure = error
        self._asked_s = time.monotonic()
        if self.channel is not None:
            # A process that has ended is found by `wait`.
            left = NO_LIMIT if self._most_tokens is None else max(0, self._most_tokens - self._taken)
            with contextlib.suppress(OSError):
                send(self.channel, array.array("I", [left, token]).tobytes())

    def _set(self, may_end: bool, completed: bool, forced: list[int], mask: bytes) -> None:
        self.completed = completed
        self._forced.extend(forced)
        bits = np.frombuffer(mask, np.uint8)
        unpacked = np.unpackbits(bits, bitorder="little", count=len(self._text_tokens))
        self._mask, self._may_end = unpacked.view(np.bool_) & self._text_tokens, may_end
        self._mask[self._stops] = False


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

    def compile(self, request: dict[str, Any], stops: np.ndarray) -> CompiledGrammar:
        """Compiles a grammar in a separate process.

        Args:
          request: its `kind` and `text`, and the number of `text_tokens`, whose ids come first.
          stops: tokens that end the answer.

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
                    send(control, json.dumps({**request, "stop_ids": stops.tolist()}).encode())
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
        allowed = np.zeros(self._setup["vocab_size"], np.bool_)
        allowed[: request["text_tokens"]] = True
        allowed[list(self._setup["eos_ids"])] = False
        return CompiledGrammar(control, self.counts, first, allowed, stops, reply["grew_bytes"])

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
