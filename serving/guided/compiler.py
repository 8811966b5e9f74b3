"""Compiles grammars for a model's tokenizer and follows answers through them, in processes of their own.

    compiler = GrammarCompiler(tokenizer, vocab_size)
    matcher = compiler.matcher(Grammar(kind="regex", text="[a-c]{5}"), stop_ids)
    matcher.allowed()        [V] bool
    matcher.take([token])

Each grammar and each answer has a process of its own (see `worker.py`).
"""

import array
import collections
import contextlib
import dataclasses
import hashlib
import importlib.util
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
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from jaxllm.errors import ConfigError, JaxllmError, one_line
from jaxllm.serving.guided.grammar import Grammar
from jaxllm.serving.guided.worker import COMPILE_S, NO_LIMIT, STEP_S, parsed_state, receive, send
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.text.tokenizer_bounds import is_ordinary

# Number and bytes of grammars that stay compiled after their answers, each in a process.
_KEPT, _KEPT_BYTES = 8, 32 << 20
# Number of concurrent compilations; a busy compiler uses a processor.
_AT_ONCE = 2
# The first process starts in 0.3 seconds, with a large vocabulary in a second; longer on a busy machine.
_START_S = 60.0
# Waiting for a mask costs less than computing meanwhile if it takes at most so long.
_SOON_S = 0.0015
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
      counts: see `GrammarCompiler`.
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


class PreparedGrammar(Future[CompiledGrammar | None]):
    """A grammar that is or was compiled in the background: a future; its result is None for any text."""

    @property
    def stale(self) -> bool:
        """Whether it is useless: its process has ended, or something other than the grammar failed."""
        if not self.done():
            return False
        if (error := self.exception()) is not None:
            return not isinstance(error, ConfigError)
        found = self.result()
        # A process that runs sends nothing any more.
        return found is not None and _readable(found.control)


class Matcher:
    """The state of one answer in its grammar. Used by one thread at a time.

    Tokens that end the answer are allowed exactly where the text may end. If the grammar allows only one
    text, its tokens are *forced*: the tokenizer's encoding of it. Masks are computed in another process
    while the engine does other work: after `take`, `ready` reports whether they have arrived, and earlier
    uses wait.

    Attributes:
      unbounded, most_unbounded: whether any tokens may follow, and how many; never here.
      channel: socket of its process, readable when the matcher is ready; None if it has none.
      nested: whether no token may follow the last ones that could not have come instead of the first of them,
        and none is forced: tokens may then be sampled together (see `offer`).
      completed: whether the end of the text was forced because the answer would have reached its length.
    """

    unbounded, most_unbounded = False, None

    def __init__(
        self, compiled: CompiledGrammar, most_tokens: int | None = None, *, same: bool = False
    ) -> None:
        """Begins an answer.

        Args:
          compiled: the grammar.
          most_tokens: maximum length of the answer. Before it is reached, the end of a text in JSON is forced
            (see `completed`); None for no limit.
          same: whether only tokens with equal masks are sampled together (see `_Following.follow`).
        """
        self.completed, self.nested, self._most_tokens, self._same = False, False, most_tokens, same
        self.channel: socket.socket | None = None
        self._compiled, self._text_tokens, self._stops = compiled, compiled.text_tokens, compiled.stops
        self._failure: WorkerEnded | None = None
        self._stop_set = frozenset(compiled.stops.tolist())
        self._taken = 0
        # When the state that has not been read yet was requested.
        self._asked_s: float | None = None
        # The time that its last masks took to come, where something waited for them.
        self._takes_s = 0.0
        self._forced: collections.deque[int] = collections.deque()
        self._set(*parsed_state(compiled.first))
        try:
            # Its process starts while the prompt is read.
            self.channel = _handed(compiled.control)
            weakref.finalize(self, self.channel.close)
        except WorkerEnded as error:
            self._failure = error

    @property
    def ready(self) -> bool:
        """Whether its other methods need not wait."""
        if self._asked_s is None or self.channel is None or time.monotonic() > self._asked_s + REPLY_S:
            return True
        return _readable(self.channel)

    def soon(self) -> bool:
        """Whether it is ready, after waiting less time than a token takes."""
        if not self.ready and self.channel is not None and self._takes_s < _SOON_S:
            _readable(self.channel, _SOON_S)
        return self.ready

    def wait(self) -> None:
        """Waits until it is ready.

        Raises:
          ConfigError: the grammar does not allow the tokens so far, has become too complex, or is a dead end.
          GrammarLate: the machine is too busy.
        """
        if self._asked_s is None:
            return
        there = self.ready
        asked_s, self._asked_s = self._asked_s, None
        waited_s = time.monotonic() - asked_s
        try:
            if self.channel is None:
                raise self._failure or WorkerEnded("its process has ended")
            try:
                reply = _reply(self.channel, STEP_S, "a token was taken", waited_s)
            except WorkerEnded:
                self._compiled.counts["ended"] += 1
                raise
            took_s = 0.0 if there else time.monotonic() - asked_s
            self._takes_s += 0.1 * (min(took_s, 4 * _SOON_S) - self._takes_s)
            if not reply[0]:
                raise ValueError(reply[1:].decode())
            self._set(*parsed_state(reply[1:]))
        except WorkerLate as error:
            raise GrammarLate(
                f"the grammar cannot be followed after {self._taken} tokens now: {error}; ask again"
            ) from error
        except (ValueError, WorkerEnded) as error:
            raise ConfigError(
                f"the grammar cannot be followed after {self._taken} tokens: {one_line(error)}; use a "
                "simpler one"
            ) from error

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
            if self._forced:
                # The process is past them already.
                self._forced.popleft()
                self._taken += 1
            else:
                self._send([token])

    def offer(self, tokens: Sequence[int], jumps: Callable[[int], bool]) -> int:
        """Advances by tokens that were sampled under one mask, up to the first that might be another under
        its own, or that is fed in another way: returns their number, at least 1, after waiting for the mask
        of the next one.

        Args:
          tokens: tokens to take, the first of which is allowed.
          jumps: whether a number of forced tokens are fed as a chunk.
        """
        self.wait()
        before, text = self._taken, list(itertools.takewhile(self._is_text, tokens))
        if text:
            self._send(text)
            self.wait()
        while (rest := text[self._taken - before :]) and self._forced and not jumps(len(self._forced)):
            if rest[0] != self._forced[0]:
                break
            self.take(rest[:1])
        taken = self._taken - before
        # A token that ends the answer changes no state.
        ends = taken == len(text) < len(tokens) and tokens[taken] in self._stop_set
        return taken + (ends and (taken == 0 or self.nested) and self._may_end)

    @property
    def wide(self) -> bool:
        """Whether most tokens are allowed, such as within a string."""
        self.wait()
        return not self._forced and bool(2 * np.count_nonzero(self._mask) > len(self._mask))

    def _is_text(self, token: int) -> bool:
        return token >= 0 and token not in self._stop_set and bool(self._text_tokens[token])

    def _send(self, tokens: Sequence[int]) -> None:
        """Requests the mask after tokens; if that fails, `wait` raises the error."""
        self._asked_s = time.monotonic()
        if self.channel is not None:
            # A process that has ended is found by `wait`.
            left = NO_LIMIT if self._most_tokens is None else max(0, self._most_tokens - self._taken)
            with contextlib.suppress(OSError):
                send(self.channel, array.array("I", [left, self._same, *tokens]).tobytes())

    def _set(
        self, taken: int, may_end: bool, completed: bool, nested: bool, forced: list[int], mask: bytes
    ) -> None:
        self._taken += taken
        self.completed, self.nested = completed, nested
        self._forced.extend(forced)
        bits = np.frombuffer(mask, np.uint8)
        unpacked = np.unpackbits(bits, bitorder="little", count=len(self._text_tokens))
        self._mask, self._may_end = unpacked.view(np.bool_) & self._text_tokens, may_end
        self._mask[self._stops] = False


class GrammarCompiler:
    """Compiles grammars for one tokenizer, each in its own process. Threads may share it.

    Processes start with the first grammar. The last grammars stay compiled or refused, by their digests; one
    that waits to be compiled stays as long as its `PreparedGrammar` is referenced.

    Attributes:
      counts: grammars so far: "compiled", "refused" by the compiler, and "ended" at the limits of the
        process, while compiled or followed.
      pid: id of the first process, whose group includes the others; 0 before it was started.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """Compiles nothing yet; `vocab_size` is the model's, which may have rows beyond the tokenizer's."""
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self.counts, self.pid = Counter(compiled=0, refused=0, ended=0), 0
        self._lock = threading.Lock()
        self._turns = threading.BoundedSemaphore(_AT_ONCE)
        self._known: weakref.WeakValueDictionary[bytes, PreparedGrammar] = weakref.WeakValueDictionary()
        self._kept: OrderedDict[bytes, PreparedGrammar] = OrderedDict()
        # The first process, its socket, and the process that started it.
        self._starting = threading.Lock()
        self._control: socket.socket | None = None
        self._finalizer: weakref.finalize[..., GrammarCompiler] | None = None
        self._owner = 0

    def prepare(self, grammar: Grammar, stop_ids: np.ndarray) -> PreparedGrammar:
        """Compiles a grammar in the background unless it is cached; does not wait.

        Args:
          grammar: grammar to compile.
          stop_ids: tokens that end the answer, padded with -1.
        """
        if grammar.kind == "free":
            free = PreparedGrammar()
            free.set_result(None)
            return free
        facts = repr((grammar.kind, grammar.completed)).encode(), stop_ids.tobytes(), grammar.text.encode()
        key = hashlib.sha256(b"\0".join(facts)).digest()
        with self._lock:
            found = self._known.get(key)
            new = found is None or found.stale
            if found is None or new:
                found = self._known[key] = PreparedGrammar()
            elif found.done():
                self._keep(key, found)
        if new:
            arguments = weakref.ref(found), key, grammar, stop_ids
            threading.Thread(target=self._compile, args=arguments, name="grammar", daemon=True).start()
        return found

    def matcher(
        self,
        grammar: Grammar,
        stop_ids: np.ndarray,
        most_tokens: int | None = None,
        *,
        same: bool = False,
    ) -> Matcher:
        """Makes the matcher of one answer without a thought; waits until the grammar is compiled, usually
        some milliseconds, at most some seconds.

        Args:
          grammar, stop_ids: see `prepare`.
          most_tokens, same: see `Matcher`.

        Raises:
          ConfigError: the grammar is malformed, matches no text, has an unsupported feature or is too
            complex; the tokenizer cannot be used; or llguidance is not installed.
          GrammarLate: it was not compiled in time, on a busy machine.
        """
        compiled = self.prepare(grammar, stop_ids).result()
        assert compiled is not None, "only a thought needs a free text"
        return Matcher(compiled, most_tokens, same=same)

    def text_tokens(self) -> np.ndarray:
        """`[V]` bool, all tokens of the tokenizer but its end tokens."""
        found = np.zeros(self._vocab_size, np.bool_)
        found[: self._tokenizer.vocab_size] = True
        found[list(self._tokenizer.files.eos_ids)] = False
        return found

    def _keep(self, key: bytes, prepared: PreparedGrammar) -> None:
        """Caches a grammar, and drops the oldest beyond the limits."""
        self._kept[key] = prepared
        self._kept.move_to_end(key)
        for each, other in list(self._kept.items()):
            found = other.result() if other.done() and other.exception() is None else None
            large = found is not None and found.grew_bytes > _KEPT_BYTES
            if large or (len(self._kept) > _KEPT and each != key):
                del self._kept[each]

    def _compile(
        self, wanted: "weakref.ref[PreparedGrammar]", key: bytes, grammar: Grammar, stop_ids: np.ndarray
    ) -> None:
        """Compiles a grammar when its turn comes, unless it is not referenced any more: calls may be
        cancelled faster than grammars are compiled."""
        with self._turns:
            prepared = wanted()
            if prepared is None:
                return
            try:
                prepared.set_result(self._compiled(grammar, stop_ids[stop_ids >= 0]))
            except WorkerLate as error:
                text = f"the grammar could not be compiled now: {error}; ask again"
                prepared.set_exception(GrammarLate(text))
            except BaseException as error:
                prepared.set_exception(error)
            with self._lock:
                self._keep(key, prepared)

    def _compiled(self, grammar: Grammar, stops: np.ndarray) -> CompiledGrammar:
        """See `matcher`."""
        control, text_tokens = self._forked(), self._tokenizer.vocab_size
        try:
            request = {
                "kind": grammar.kind,
                "text": grammar.text,
                "text_tokens": text_tokens,
                "completed": grammar.completed,
                "stop_ids": stops.tolist(),
            }
            with contextlib.suppress(OSError):  # A process that has ended is found by `_reply`.
                send(control, json.dumps(request).encode())
            reply = json.loads(_reply(control, COMPILE_S, "it was compiled"))
            if "error" in reply:
                raise ValueError(reply["error"])
            first = _reply(control, COMPILE_S, "it was compiled")
        except BaseException as error:
            control.close()
            ended = isinstance(error, WorkerEnded)
            self.counts["ended" if ended else "refused"] += 1
            if isinstance(error, WorkerLate):
                raise
            if ended:
                raise ConfigError(
                    f"the grammar ({grammar.kind}) is too complex: {error}; use a smaller one, with fewer "
                    "definitions, repetitions and alternatives"
                ) from error
            reason = one_line(error)
            reason = "it matches no text" if reason.startswith("NoExtension") else reason
            raise ConfigError(f"the grammar ({grammar.kind}) cannot be used: {reason}") from error
        self.counts["compiled"] += 1
        compiled = CompiledGrammar(
            control, self.counts, first, self.text_tokens(), stops, reply["grew_bytes"]
        )
        matcher = Matcher(compiled)
        if matcher.complete:
            raise ConfigError("the grammar matches the empty text alone; ask for no grammar, or another one")
        # Raises ConfigError if the model has no tokens for its texts.
        matcher.allowed()
        return compiled

    def _forked(self) -> socket.socket:
        """The socket of a new process for a grammar; starts the first process if necessary."""
        with self._starting:
            for _ in range(2):
                if self._control is None or self._owner != os.getpid():
                    self._control, self._owner = self._started(), os.getpid()
                control = None
                try:
                    control = _handed(self._control)
                    _reply(control, 0.0, "it was forked")
                    return control
                except WorkerEnded as error:
                    if control is not None:
                        control.close()
                    if isinstance(error, WorkerLate):
                        raise
                    # The first process has ended, or cannot fork.
                    self._control = None
                    if self._finalizer is not None:
                        self._finalizer()
        raise WorkerLate("the process for grammars ends as soon as it is started, or can fork no other")

    def _started(self) -> socket.socket:
        """The socket of a new first process."""
        for package in ("llguidance", "jsonschema"):
            if importlib.util.find_spec(package) is None:
                raise ConfigError(
                    f"grammars need the package {package}; install it with: pip install {package}"
                )
        files = self._tokenizer.files
        if not is_ordinary(files.tokenizer_json):
            raise ConfigError(
                "the model's tokenizer has parts of unknown cost, which run in a child process alone; "
                "grammars need a tokenizer of the usual parts: prepare the model with one"
            )
        if not files.eos_ids:
            raise ConfigError(
                "the model has no end token, which grammars need; name it in the folder's config.json "
                "(eos_token_id), and prepare the folder again"
            )
        data = json.loads(files.tokenizer_json)
        # They would shorten or lengthen the texts that a grammar forces.
        data["truncation"] = data["padding"] = None
        setup = {"tokenizer_json": json.dumps(data), "vocab_size": self._vocab_size, "eos_ids": files.eos_ids}
        if not sys.executable:
            raise ConfigError(
                "grammars run in child processes, and this program has no Python to start one with"
            )
        package = str(Path(__file__).absolute().parents[3])
        path = [package, *(os.path.abspath(each) for each in sys.path if each and os.path.exists(each))]
        ours, theirs = _socket_pair()
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
            send(ours, json.dumps(setup).encode())
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


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets; WorkerLate if this process has no file descriptor left."""
    try:
        return socket.socketpair()
    except OSError as error:
        raise WorkerLate(f"the process for grammars cannot be reached ({error.strerror})") from error


def _handed(control: socket.socket) -> socket.socket:
    """Lets a process fork another, and returns that one's socket; WorkerEnded if it is gone."""
    ours, theirs = _socket_pair()
    with theirs:
        try:
            socket.send_fds(control, [b"\0"], [theirs.fileno()])
        except OSError as error:
            ours.close()
            raise WorkerEnded(f"its process has ended ({error})") from error
    # A process that no longer reads must not block others.
    ours.settimeout(REPLY_S)
    return ours


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


def _readable(channel: socket.socket, within_s: float = 0.0) -> bool:
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    return bool(poll.poll(1000 * within_s))


def _end(child: "subprocess.Popen[bytes]", control: socket.socket, owner: int) -> None:
    control.close()
    if owner == os.getpid():
        child.kill()
        child.wait()
