"""Compiles grammars for a model's tokenizer, in processes of their own.

    compiler = GrammarCompiler(tokenizer, vocab_size)
    matcher = compiler.matcher(Grammar(kind="regex", text="[a-c]{5}"), stop_ids)
    matcher.allowed()        [V] bool
    matcher.take([token])

Each grammar and each answer has a process of its own (see `worker.py`).
"""

import contextlib
import hashlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections import Counter, OrderedDict
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from jaxllm.errors import ConfigError, one_line
from jaxllm.serving.guided.grammar import Grammar
from jaxllm.serving.guided.matcher import (
    CompiledGrammar,
    GrammarLate,
    Matcher,
    WorkerEnded,
    WorkerLate,
    handed,
    readable,
    reply_of,
    socket_pair,
)
from jaxllm.serving.guided.worker import COMPILE_S, send
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.text.tokenizer_bounds import is_ordinary

# Number and bytes of grammars that stay compiled after their answers, each in a process.
_KEPT, _KEPT_BYTES = 8, 32 << 20
# Number of concurrent compilations; a busy compiler uses a processor.
_AT_ONCE = 2
# The first process starts in 0.3 seconds, with a large vocabulary in a second; longer on a busy machine.
_START_S = 60.0
_BOOT = (
    "import json, sys; sys.path[:0] = json.loads(sys.argv[1]); "
    "from jaxllm.serving.guided.worker import serve; serve(int(sys.argv[2]))"
)
# One thread per pool: a process with more of them must not be forked.
_ONE_THREAD = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


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
        return found is not None and readable(found.control)


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
        self._plain = b""
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
                "end_ids": list(self._tokenizer.files.eos_ids),
                "completed": grammar.completed,
                "stop_ids": stops.tolist(),
            }
            with contextlib.suppress(OSError):  # A process that has ended is found by `_reply`.
                send(control, json.dumps(request).encode())
            reply = json.loads(reply_of(control, COMPILE_S, "it was compiled"))
            if "error" in reply:
                raise ValueError(reply["error"])
            first = reply_of(control, COMPILE_S, "it was compiled")
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
            control, self.counts, first, self.text_tokens(), stops, self._plain, reply["grew_bytes"]
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
                    control = handed(self._control)
                    reply_of(control, 0.0, "it was forked")
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
        ours, theirs = socket_pair()
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
            reply = json.loads(reply_of(ours, _START_S, "it was started"))
        except (WorkerEnded, OSError) as error:
            self._finalizer()
            raise WorkerLate(f"the process for grammars cannot be started: {error}") from error
        if "error" in reply:
            self._finalizer()
            raise ConfigError(
                f"grammars cannot follow the model's tokenizer: {reply['error']}; they need one whose "
                "tokens are bytes or fall back to bytes"
            )
        self._plain = bytes.fromhex(reply["plain"])
        return ours


def _end(child: "subprocess.Popen[bytes]", control: socket.socket, owner: int) -> None:
    control.close()
    if owner == os.getpid():
        child.kill()
        child.wait()
