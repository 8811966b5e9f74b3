"""Compiles grammars for a model's tokenizer, apart from the engine's process and threads."""

import hashlib
import importlib.util
import json
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future

import numpy as np

from jaxllm.errors import ConfigError, one_line
from jaxllm.serving.guided.grammar import Grammar, bounded_space
from jaxllm.serving.guided.workers import (
    CompiledGrammar,
    GrammarLate,
    GrammarWorkers,
    Matcher,
    WorkerEnded,
    WorkerLate,
)
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.text.tokenizer_bounds import is_ordinary

# Number and bytes of grammars that stay compiled after their answers, each in a process.
_KEPT, _KEPT_BYTES = 8, 32 << 20
# Number of concurrent compilations; a busy compiler uses a processor.
_AT_ONCE = 2


class PreparedGrammar(Future[CompiledGrammar]):
    """A grammar that is or was compiled in the background: a future."""

    @property
    def stale(self) -> bool:
        """Whether it is useless: its process has ended, or something other than the grammar failed."""
        if not self.done():
            return False
        error = self.exception()
        return not self.result().alive if error is None else not isinstance(error, ConfigError)


class GrammarCompiler:
    """Compiles grammars for one tokenizer, each in its own process. Threads may share it.

    Processes start with the first grammar. The last grammars stay compiled or refused, by their digests; one
    that waits to be compiled stays as long as its `PreparedGrammar` is referenced.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """Compiles nothing yet; `vocab_size` is the model's, which may have rows beyond the tokenizer's."""
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._lock = threading.Lock()
        self._turns = threading.BoundedSemaphore(_AT_ONCE)
        self._workers: GrammarWorkers | None = None
        self._known: weakref.WeakValueDictionary[bytes, PreparedGrammar] = weakref.WeakValueDictionary()
        self._kept: OrderedDict[bytes, PreparedGrammar] = OrderedDict()

    @property
    def counts(self) -> Mapping[str, int]:
        """See `GrammarWorkers`."""
        return Counter() if self._workers is None else self._workers.counts

    def prepare(self, grammar: Grammar, stop_ids: np.ndarray) -> PreparedGrammar:
        """Compiles a grammar in the background unless it is cached; does not wait.

        Args:
          grammar: grammar to compile.
          stop_ids: tokens that end the answer, padded with -1.
        """
        key = hashlib.sha256(
            b"\0".join(
                (repr((grammar.kind, grammar.completed)).encode(), stop_ids.tobytes(), grammar.text.encode())
            )
        ).digest()
        with self._lock:
            found = self._known.get(key)
            new = found is None or found.stale
            if found is None or new:
                found = self._known[key] = PreparedGrammar()
            elif found.done():
                self._keep(key, found)
        if new:
            wanted = weakref.ref(found)
            thread = threading.Thread(
                target=self._compile, args=(wanted, key, grammar, stop_ids), name="grammar", daemon=True
            )
            thread.start()
        return found

    def matcher(self, grammar: Grammar, stop_ids: np.ndarray, most_tokens: int | None = None) -> Matcher:
        """Makes the matcher of one answer; waits until the grammar is compiled, usually some milliseconds, at
        most some seconds.

        Args:
          grammar, stop_ids: see `prepare`.
          most_tokens: see `Matcher`.

        Raises:
          ConfigError: the grammar is malformed, matches no text, has an unsupported feature or is too
            complex; the tokenizer cannot be used; or llguidance is not installed.
          GrammarLate: it was not compiled in time, on a busy machine.
        """
        return self.prepare(grammar, stop_ids).result().matcher(most_tokens)

    def _keep(self, key: bytes, prepared: PreparedGrammar) -> None:
        """Caches a grammar, and drops the oldest beyond the limits."""
        self._kept[key] = prepared
        self._kept.move_to_end(key)
        for each, other in list(self._kept.items()):
            there = other.done() and other.exception() is None
            large = there and other.result().grew_bytes > _KEPT_BYTES
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
                prepared.set_result(self._compiled(grammar, stop_ids))
            except WorkerLate as error:
                text = f"the grammar could not be compiled now: {error}; ask again"
                prepared.set_exception(GrammarLate(text))
            except BaseException as error:
                prepared.set_exception(error)
            with self._lock:
                self._keep(key, prepared)

    def _compiled(self, grammar: Grammar, stop_ids: np.ndarray) -> CompiledGrammar:
        text = bounded_space(grammar.text) if grammar.kind == "lark" else grammar.text
        request = {
            "kind": grammar.kind,
            "text": text,
            "text_tokens": self._tokenizer.vocab_size,
            "completed": grammar.completed,
        }
        workers = self._started()
        try:
            compiled = workers.compile(request, stop_ids[stop_ids >= 0])
        except WorkerLate:
            raise
        except ValueError as error:
            reason = one_line(error)
            if reason.startswith("NoExtension"):
                reason = "it matches no text"
            raise ConfigError(f"the grammar ({grammar.kind}) cannot be used: {reason}") from error
        except WorkerEnded as error:
            raise ConfigError(
                f"the grammar ({grammar.kind}) is too complex: {error}; use a smaller one, with fewer "
                "definitions, repetitions and alternatives"
            ) from error
        compiled.matcher().require_text()
        return compiled

    def _started(self) -> GrammarWorkers:
        with self._lock:
            if self._workers is None:
                self._workers = self._new_workers()
            return self._workers

    def _new_workers(self) -> GrammarWorkers:
        """Workers for the tokenizer.

        Raises:
          ConfigError: see `matcher`.
        """
        if importlib.util.find_spec("llguidance") is None:
            raise ConfigError(
                "grammars need the package llguidance; install it with: pip install 'jaxllm[serve]'"
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
        return GrammarWorkers(json.dumps(data), self._vocab_size, tuple(files.eos_ids))
