"""Runs chat templates, tokenizers and expressions of unknown cost in a child process with limits of time and
memory.

All are programs: a template can loop forever, regular expressions can take years, and libraries abort the
process when memory is short. A child is started with the first request and reused for the next ones; it
answers one at a time (`serve`). Requests and answers are JSON, preceded by their lengths. A request names an
operation of `OPERATIONS`; an exception becomes the answer, unless it ends the process. The child ends at its
limits, and with its parent: while it waits its input ends, while it computes it runs out of processor time.

If a system cannot limit a process's memory (Windows; macOS ignores it), only time is limited, and a warning
reports this once.
"""

import contextlib
import datetime
import functools
import json
import logging
import os
import re
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxllm import errors
from jaxllm.errors import ConfigError, JaxllmError, TemplateError, one_line

_BOOT = (
    "import json, sys; sys.path[:0] = json.loads(sys.argv[1]); "
    "from jaxllm.text.child_process import serve; serve(json.loads(sys.argv[2]))"
)
_LENGTH = struct.Struct(">Q")
# One thread per pool: each thread uses address space, and with many cores the pools would exceed the child's
# limit.
_ONE_THREAD = {f"{each}_NUM_THREADS": "1" for each in ("OPENBLAS", "OMP", "MKL", "RAYON")} | {
    "TOKENIZERS_PARALLELISM": "false"
}
# Far above any answer; the worker has a much lower bound of its own.
_MOST_REPLY_BYTES = 1 << 30


class ChildFailed(Exception):
    """A request ended its child process; the message is for users."""


class TextProcess:
    """A child process that answers requests one at a time. Threads may share it, and wait for each other."""

    def __init__(self, *, memory_bytes: int, setup: Mapping[str, Any] | None = None, setup_s: float = 0.0):
        """Starts no process yet.

        Args:
          memory_bytes: limit of the child's address space.
          setup: a request that every child gets before all others; its answer is dropped.
          setup_s: time limit of `setup`, in seconds.
        """
        self._memory_bytes, self._setup, self._setup_s = memory_bytes, setup, setup_s
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._finalizer: weakref.finalize[..., Any] | None = None

    def ask(self, request: Mapping[str, Any], *, limit_s: float) -> Any:
        """The answer to a request.

        Args:
          request: plain JSON values, see `OPERATIONS`.

        Raises:
          JaxllmError: the worker raised it.
          ChildFailed: the request exceeded its time or memory, or ended the process.
        """
        with self._lock:
            child = self._running()
            try:
                return self._exchange(child, request, limit_s)
            except errors.JaxllmError:
                raise
            except BaseException:
                # The child may still write the answer of this request, so it cannot be reused.
                self._child = None
                _end(child)
                raise

    def _running(self) -> "subprocess.Popen[bytes]":
        child = self._child
        # A forked process must not use the child of its parent: they would share its pipes.
        if child is not None and self._owner == os.getpid() and child.poll() is None:
            return child
        child = _start(self._memory_bytes)
        if self._setup is not None:
            try:
                self._exchange(child, self._setup, self._setup_s)
            except BaseException:
                _end(child)
                raise
        self._child, self._owner = child, os.getpid()
        # The finalizer also runs at the interpreter's exit and when this object is collected.
        if self._finalizer is not None:
            self._finalizer.detach()
        self._finalizer = weakref.finalize(self, _end, child, self._owner)
        return child

    def _exchange(self, child: "subprocess.Popen[bytes]", request: Mapping[str, Any], limit_s: float) -> Any:
        late = threading.Event()

        def stop() -> None:
            late.set()
            child.kill()

        timer = threading.Timer(limit_s, stop)
        timer.daemon = True
        timer.start()
        try:
            assert child.stdin is not None
            assert child.stdout is not None
            raw = json.dumps({**request, "limit_s": limit_s}).encode()
            try:
                child.stdin.write(_LENGTH.pack(len(raw)) + raw)
                child.stdin.flush()
                head = child.stdout.read(_LENGTH.size)
                size = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else _MOST_REPLY_BYTES + 1
                body = child.stdout.read(size) if size <= _MOST_REPLY_BYTES else b""
            except OSError:
                body = b""
        finally:
            timer.cancel()
        if not body:
            if late.is_set():
                raise ChildFailed(f"it takes longer than {limit_s:g} seconds")
            child.kill()
            code = child.wait()
            raise ChildFailed(
                f"it ended its process (exit {code}), for which it may take {self._memory_bytes >> 20} MiB"
            )
        reply = json.loads(body)
        if "failed" in reply:
            raise ChildFailed(reply["failed"])
        if "error" in reply:
            raise getattr(errors, reply["error"])(reply["message"])
        return reply["answer"]


def _start(memory_bytes: int) -> "subprocess.Popen[bytes]":
    if sys.platform in ("win32", "darwin"):
        _say_once("this system does not bound a child process's memory; templates are bounded in time alone")
    if not sys.executable:
        raise ConfigError(
            "chat templates and tokenizers of unknown cost run in a child process, and this program has no "
            "Python to start one with; use a packaged model, or token ids as prompts"
        )
    package = str(Path(__file__).resolve().parents[2])
    path = [package, *(os.path.abspath(each) for each in sys.path if each and os.path.exists(each))]
    return subprocess.Popen(
        [sys.executable, "-I", "-c", _BOOT, json.dumps(path), json.dumps(memory_bytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **_ONE_THREAD},
        # Outside of the terminal's process group: an interrupt goes to the parent, which then ends the child.
        start_new_session=True,
    )


def _end(child: "subprocess.Popen[bytes]", owner: int | None = None) -> None:
    """Ends a child; one of an `owner` only in that process."""
    if owner not in (None, os.getpid()):
        return
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # Unflushed data has no reader any more.
                pipe.close()


@functools.cache
def _say_once(message: str) -> None:
    logging.getLogger("jaxllm").warning(message)


# A few characters of a regular expression can compute for years, and Python cannot interrupt a match. Literal
# text is matched in this process.
_LITERAL = re.compile(r"(?:[\w.-]|\\[.-])*", re.ASCII)
_LIMIT_S, _MEMORY_BYTES = 10.0, 1 << 30
_MAX_CHARACTERS = 1 << 20


def first_matches(
    patterns: Sequence[str], names: Sequence[str], *, before: str = "", after: str = "", full: bool = False
) -> list[tuple[int, list[str | None]] | None]:
    """For each name, the first expression that matches from its beginning.

    Args:
      patterns: regular expressions.
      names: names to match.
      before: expression before each of `patterns`.
      after: expression after each of them.
      full: whether the whole name must match.

    Returns:
      The number of the first match, and its groups; None for names without a match.

    Raises:
      ConfigError: an expression is malformed, or its match exceeds the time limit.
    """
    expressions = [f"{before}{each}{after}" for each in patterns]
    if not expressions or not names:
        return [None] * len(names)
    if sum(map(len, expressions)) > _MAX_CHARACTERS:
        raise ConfigError(f"regular expressions of more than {_MAX_CHARACTERS} characters are not matched")
    if all(_LITERAL.fullmatch(each) for each in patterns):
        return match_here(expressions, names, full=full)
    process = TextProcess(memory_bytes=_MEMORY_BYTES)
    request = {"operation": "match", "expressions": expressions, "names": list(names), "full": full}
    try:
        return process.ask(request, limit_s=_LIMIT_S)
    except ChildFailed as error:
        shown = ", ".join(patterns)
        raise ConfigError(f"the regular expressions {shown:.200} cannot be matched: {error}") from error


def match_here(
    expressions: Sequence[str], names: Sequence[str], *, full: bool = False
) -> list[tuple[int, list[str | None]] | None]:
    """`first_matches` in this process, without bounds.

    Raises:
      ConfigError: an expression is malformed.
    """
    compiled = []
    for expression in expressions:
        try:
            compiled.append(re.compile(expression))
        except (re.error, OverflowError, RecursionError) as error:
            raise ConfigError(f"{expression!r:.200} is no regular expression: {error}") from error

    def first(name: str) -> tuple[int, list[str | None]] | None:
        matches = (each.fullmatch(name) if full else each.match(name) for each in compiled)
        return next(((at, list(match.groups())) for at, match in enumerate(matches) if match), None)

    return list(map(first, names))


# Maximum number of characters of a template's output: far above any model's window.
MAX_OUTPUT_CHARACTERS = 1 << 26


def serve(memory_bytes: int) -> None:
    """Answers requests until the input ends."""
    _bound_memory(memory_bytes)
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    # stdout is only for answers: prints of libraries go to stderr.
    sys.stdout = sys.stderr
    while len(head := source.read(_LENGTH.size)) == _LENGTH.size:
        request = json.loads(source.read(_LENGTH.unpack(head)[0]))
        _bound_time(request["limit_s"])
        reply = _answer(request)
        raw = json.dumps(reply).encode()
        sink.write(_LENGTH.pack(len(raw)) + raw)
        sink.flush()
        if "failed" in reply:
            return


def _answer(request: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return {"answer": OPERATIONS[request["operation"]](request)}
    except JaxllmError as error:
        return {"error": type(error).__name__, "message": str(error)}
    except MemoryError:
        return {"failed": "it takes more memory than it may have"}
    except BaseException as error:  # Panics of the tokenizers library are no `Exception`.
        return {"failed": one_line(f"{type(error).__name__}: {error}")}


def _render(request: Mapping[str, Any]) -> str:
    now = request["now"]
    text = _template(request["source"]).run(
        request["variables"], None if now is None else datetime.datetime.fromisoformat(now)
    )
    most = request.get("characters", MAX_OUTPUT_CHARACTERS)
    if len(text) > most:
        raise TemplateError(
            f"the model's chat template writes {len(text)} characters; at most {most} are read"
        )
    return text


@functools.lru_cache(maxsize=8)
def _template(source: str) -> Any:
    from jaxllm.text.template_program import TemplateProgram

    return TemplateProgram(source)


def _load(request: Mapping[str, Any]) -> None:
    # Imported here, because templates do not need it.
    from jaxllm.text.library_tokenizer import LibraryTokenizer

    _state["tokenizer"] = LibraryTokenizer(request["tokenizer_json"], request["eos_ids"], request["special"])


def _encode(request: Mapping[str, Any]) -> list[Any]:
    import numpy as np

    from jaxllm.text.marked_text import MarkedText

    content = np.zeros(len(request["text"]), np.bool_)
    for start, end in request["content"]:
        content[start:end] = True
    encoded = _state["tokenizer"].encode_marked(
        MarkedText(request["text"], content), add_special_tokens=request["add_special_tokens"]
    )
    return [encoded.ids, encoded.offsets]


_state: dict[str, Any] = {}

OPERATIONS: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "render": _render,
    "load": _load,
    "facts": lambda _: {each: getattr(_state["tokenizer"], each) for each in ("vocab_size", "spelled")},
    "encode": _encode,
    "call": lambda request: getattr(_state["tokenizer"], request["method"])(**request["arguments"]),
    "match": lambda request: match_here(request["expressions"], request["names"], full=request["full"]),
}


def _bound_memory(memory_bytes: int) -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))


def _bound_time(limit_s: float) -> None:
    """Limits processor time from now on; this ends a child whose parent is gone."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        used = resource.getrusage(resource.RUSAGE_SELF)
        until = int(used.ru_utime + used.ru_stime + limit_s) + 2
        resource.setrlimit(resource.RLIMIT_CPU, (until, resource.getrlimit(resource.RLIMIT_CPU)[1]))
