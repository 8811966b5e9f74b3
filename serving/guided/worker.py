"""Compiles and follows grammars in separate processes (see `compiler.py`).

A grammar is a caller's program for a native compiler: it may overflow the stack, search for hours or
exhaust memory. The first process has the tokenizer and reads no grammar. It forks one for each grammar,
which compiles it, and that one forks one for each answer, which follows it. Each ends at its limits of
processor time and memory, or when the engine closes its socket, without affecting others.

Messages are bytes preceded by their lengths. The first process and one for a grammar receive a descriptor
with each request: the socket of the process to fork.
"""

import array
import contextlib
import functools
import gc
import itertools
import json
import operator
import os
import re
import resource
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxllm.errors import one_line

if TYPE_CHECKING:
    import llguidance

# At these limits a step takes some 15 ms, an answer some 100 MB, and the first lexer some 70 ms.
_LIMITS: Any = dict(
    max_items_in_row=2000,
    initial_lexer_fuel=150_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
)
# Processor time: ordinary grammars compile in milliseconds, the largest schemas of users in 0.1 seconds.
COMPILE_S, STEP_S = 1.0, 0.25
# Address space beyond the tokenizer's, and stack.
_MEMORY_BYTES, _STACK_BYTES = 1 << 29, 8 << 20
# Answers go first. Only to compile: the device may be waiting for a mask.
_NICE = 5
# Between the parts of JSON a space, or a line break with an indentation, is allowed: else models may write
# white space without end. Overlapping alternatives are checked afterwards.
_SPACE_KEYS = frozenset({"whitespace_pattern", "whitespace_flexible"})
_WHITE_SPACE = {"whitespace_pattern": r"( |\n[ ]{0,12})?"}
_JSON = {"coerce_one_of": True}
# Errors of the compiler that a simpler schema may not have.
_COMPLEX = (
    "nsatisfiable", "too large", "too big", "disjoint", "circular ref", "intersection", "maxProperties",
)  # fmt: skip
_WARM_UP = {"kind": "json", "text": "", "stop_ids": (), "end_ids": (), "text_tokens": 0, "completed": False}
_LENGTH = struct.Struct(">Q")
# Number of tokens that were taken, whether the text may end after the forced tokens, whether they complete
# it, whether the mask is nested, whether it allows tokens of the text, and the number of forced tokens
# (kernels/native/masks.cpp reads it, too).
_HEAD = struct.Struct(">I????I")
# Number of tokens that may follow, where any number may.
NO_LIMIT = (1 << 32) - 1
# Processor time to find the end of a text.
_ENDING_S = 0.1
# A comma, a key with its quotes, a colon, and the end of the object: rounded up, for tokens of one byte.
_KEY_TOKENS = 8
# Text without what may end a string or begin a marker.
_PLAIN = re.compile(rb"[^\x00-\x1f\"\\\\<>|\[\]{}`]+")
# What ends a text in JSON soonest: within a string, and elsewhere.
_STRING_ENDS, _JSON_ENDS = b'"a0 -:.@/', b']}",0123456789-ntf[{'


def send(channel: socket.socket, message: bytes) -> None:
    """Sends a message."""
    channel.sendall(_LENGTH.pack(len(message)) + message)


def receive(channel: socket.socket) -> bytes:
    """The next message; empty if the other side is gone."""
    size = _exactly(channel, _LENGTH.size)
    return _exactly(channel, _LENGTH.unpack(size)[0]) if size else b""


def serve(descriptor: int) -> None:
    """The first process: loads the tokenizer, reports the result, and forks a process for each grammar
    until the engine closes its socket."""
    import llguidance

    control = socket.socket(fileno=descriptor)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the processes
    for number in (signal.SIGINT, signal.SIGTERM):
        # Signals are for the engine, which may end its answers first: systemd sends them to all of a service.
        signal.signal(number, signal.SIG_IGN)
    # What ends a process at its bound of time, however the engine was started.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    _bound(resource.RLIMIT_CORE, 0)
    _bound(resource.RLIMIT_STACK, _STACK_BYTES)
    threading.stack_size(_STACK_BYTES)
    setup = json.loads(receive(control) or b"null")
    if setup is None:
        return
    try:
        tokenizer = llguidance.LLTokenizer(
            setup["tokenizer_json"], n_vocab=setup["vocab_size"], eos_token=setup["eos_ids"]
        )
        # What the library does once is then done for all: one of ours, which is not a caller's.
        _Following(tokenizer, _WARM_UP).follow()
        _, plain = _vocabulary(tokenizer)
    except BaseException as error:  # panics of the library are no `Exception`
        send(control, json.dumps({"error": one_line(error)}).encode())
        return
    send(control, json.dumps({"plain": plain.hex()}).encode())
    # Otherwise garbage collection would copy the pages that the processes share, and search the parts of a
    # large schema again and again: nothing here is in a circle.
    gc.freeze()
    gc.disable()
    own, _ = _forked(control)
    if own:
        with contextlib.suppress(OSError):
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            _bound(resource.RLIMIT_AS, pages * resource.getpagesize() + _MEMORY_BYTES)
        try:
            _serve_grammar(own, tokenizer)
        finally:
            # An orderly end frees what the processes share, which copies its pages: 30 ms of a processor.
            os._exit(0)


def _serve_grammar(control: socket.socket, tokenizer: "llguidance.LLTokenizer") -> None:
    """The process of a grammar: reports its start, compiles it, sends the initial state of answers, and
    forks a process for each answer."""
    # The process is there: from here on only its grammar can end it.
    send(control, b"{}")
    request = json.loads(receive(control) or b"null")
    if request is None:
        return
    before, found = _resident_bytes(), list[Any]()

    def compile_it() -> None:
        try:
            # On Linux a thread has a priority of its own; a process that has lowered its own cannot raise it.
            if sys.platform == "linux":
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
            answer = _Following(tokenizer, request)
            # The length of a shortest text, if answers are completed before they reach their length.
            answer.shortest = len(answer.end() or ()) if request["completed"] else 0
            found.extend((answer, answer.follow()))
        except BaseException as error:
            found.append(error)

    with _processor_time(COMPILE_S):
        thread = threading.Thread(target=compile_it)
        thread.start()
        thread.join()
    if len(found) == 1:
        send(control, json.dumps({"error": one_line(found[0])}).encode())
        return
    answer, first = found
    send(control, json.dumps({"grew_bytes": _resident_bytes() - before}).encode())
    send(control, first)
    # The process of an answer receives tokens, and sends the state after them.
    channel, same = _forked(control)
    while channel and (message := receive(channel)):
        left, *tokens = array.array("I", message)
        try:
            with _processor_time(STEP_S):
                state = answer.follow(tokens, left, same=same)
        except BaseException as error:
            send(channel, b"\0" + one_line(error).encode())
            return
        send(channel, b"\1" + state)


class _Following:
    """An answer that follows a grammar."""

    def __init__(self, tokenizer: "llguidance.LLTokenizer", request: Mapping[str, Any]) -> None:
        """Compiles the grammar; a fault of it is a ValueError."""
        import llguidance

        self._tokenizer, self._completed = tokenizer, request["completed"]
        # Of the text so far (see `_tail`).
        self._text = b""
        self.shortest, self._checked = 0, NO_LIMIT
        self._last_end = list[int]()
        # The last mask as bits, whether it allows tokens of the text, and whether the text may end there.
        self._mask, self._goes_on, self._may_end = 0, False, False
        # Tokens of texts, and those that end the answer, as bits.
        size = tokenizer.vocab_size
        self._stops, ends = (_bits(request[name], size) for name in ("stop_ids", "end_ids"))
        self._text_tokens = ((1 << request["text_tokens"]) - 1) & ~(self._stops | ends)
        limits = llguidance.LLParserLimits(**_LIMITS, verbose_errors=False)
        kind, text = request["kind"], request["text"]
        self._matcher = llguidance.LLMatcher(tokenizer, _source(kind, text), log_level=0, limits=limits)
        error = self._matcher.get_error()
        if kind != "regex" and any(word in error for word in _COMPLEX):
            source = _source(kind, text, simple=True)
            self._matcher = llguidance.LLMatcher(tokenizer, source, log_level=0, limits=limits)
        if self._matcher.is_error():
            raise ValueError(error)

    def follow(self, tokens: Sequence[int] = (), left: int = NO_LIMIT, *, same: bool = False) -> bytes:
        """Advances by tokens that were sampled under the last mask, up to one that its own does not allow or
        whose own is not nested, or after which others are forced, and by these: the new state.

        A mask is nested if it allows nothing that the first one, before all tokens, did not: then a token
        that is the best under the first one and allowed by its own is the best under its own, too.

        Args:
          tokens: tokens, the first of which is allowed.
          left: number of tokens that may follow before them; `NO_LIMIT` for any number.
          same: whether only equal masks count as nested.

        Returns:
          Number of tokens taken, whether the text may end after the forced tokens that follow, whether these
          complete a text that would otherwise be cut, whether the mask is nested, whether it allows tokens of
          the text, they, and the mask of the tokens after them, with those that end the answer.
        """
        before, may_end = self._mask, self._may_end
        taken, nested, (forced, ended) = 0, True, ([], False) if tokens else self._forced_by(left)
        for token in tokens:
            if forced or ended or not nested or (taken and not self._mask >> token & 1):
                break
            self._take([token])
            taken += 1
            forced, ended = self._forced_by(left if left == NO_LIMIT else left - taken)
            self._compute_mask()
            nested = self._is_nested(before, may_end, same=same)
        if not tokens:
            self._compute_mask()
        mask, goes_on = (0, False) if ended else (self._mask, self._goes_on)
        nested = nested and not forced and not ended
        head = _HEAD.pack(taken, self._may_end, ended, nested, goes_on, len(forced))
        return head + array.array("I", forced).tobytes() + mask.to_bytes(self._mask_bytes, "little")

    def _compute_mask(self) -> None:
        found, self._may_end = self._matcher.compute_bitmask(), self._matcher.is_accepting()
        self._require_sound()
        text = int.from_bytes(found, "little") & self._text_tokens
        self._goes_on, self._mask_bytes = bool(text), len(found)
        self._mask = text | self._stops if self._may_end else text

    def _is_nested(self, before: int, may_end: bool, *, same: bool) -> bool:
        """Whether the mask is nested in another one (see `follow`)."""
        if same:
            return (self._mask, self._may_end) == (before, may_end)
        return not self._mask & ~before and self._may_end <= may_end

    def _take(self, tokens: list[int]) -> None:
        for token in tokens:
            self._matcher.consume_token(token)
            self._require_sound()
        if self._completed:
            self._text = _tail(self._text + self._tokenizer.decode_bytes(tokens))

    def _forced_by(self, left: int) -> tuple[list[int], bool]:
        """Advances by the forced tokens: they, and whether they complete a text of which only `left` more
        tokens are allowed."""
        forced = self._forced(self._matcher)
        self._require_sound()
        self._take(forced)
        end = self._due_end(left - len(forced)) if left != NO_LIMIT and self.shortest else None
        self._take(end or [])
        return [*forced, *(end or [])], end is not None

    def _due_end(self, left: int) -> list[int] | None:
        """The end of the text if it must begin now; None as long as there is room for another token.

        A token makes the end at most as much longer as a shortest text and its key are, because it begins at
        most one more value. It follows how many tokens may pass until the end is sought again.
        """
        if left > self._checked:
            return None
        end, more = self._kept_end(), self.shortest + _KEY_TOKENS
        if end is None or left - len(end) <= more:
            end = self.end()
        if end is None or len(end) > left:
            # Nor will an end fit later, unless this was not the shortest one.
            self._checked = left // 2
            return None
        self._last_end, spare = end, left - len(end) - more
        self._checked = left - spare // (more + 1) - 1
        return end if spare <= 0 else None

    def _kept_end(self) -> list[int] | None:
        """The last end that was found, or its rest, if the text can go on with it, as within a string."""
        for first in range(len(self._last_end)):
            rest = self._last_end[first:]
            if self._matcher.validate_tokens(rest) == len(rest):
                matcher = self._matcher.deep_copy()
                if matcher.consume_tokens(rest) is not False and matcher.is_accepting():
                    return rest
        return None

    def end(self) -> list[int] | None:
        """Tokens that end the text soon, if they are found in time."""
        until_s = time.process_time() + _ENDING_S
        matcher, text, found = self._matcher.deep_copy(), self._text, list[int]()
        while not matcher.is_accepting():
            tokens = self._forced(matcher) or self._soonest(matcher.compute_bitmask(), text)
            if not tokens or time.process_time() > until_s or matcher.consume_tokens(tokens) is False:
                return None
            found += tokens
            text = _tail(text + self._tokenizer.decode_bytes(tokens))
        return found

    def _forced(self, matcher: "llguidance.LLMatcher") -> list[int]:
        """The text tokens that must come next."""
        forced = matcher.compute_ff_tokens()
        return list(itertools.takewhile(self._is_text, forced))

    def _soonest(self, mask: bytes, text: bytes) -> list[int]:
        """The token of a mask that ends a text soonest, else the lowest one, as a list; empty if there is
        none. `text` is the tail of the text so far."""
        ends = _STRING_ENDS if text.startswith(b'"') else _JSON_ENDS
        found = next(
            (each for each in map(_vocabulary(self._tokenizer)[0].get, ends) if _has(mask, each)), None
        )
        if found is None:
            allowed = (each for each in range(8 * len(mask)) if _has(mask, each))
            found = next(filter(self._is_text, allowed), None)
        return [] if found is None else [found]

    def _is_text(self, token: int) -> bool:
        return bool(self._text_tokens >> token & 1)

    def _require_sound(self) -> None:
        if self._matcher.is_error():
            raise ValueError(self._matcher.get_error())


def parsed_state(state: bytes) -> tuple[int, bool, bool, bool, bool, list[int], bytes]:
    """Parses a state (see `_Following.follow`)."""
    *head, count = _HEAD.unpack_from(state)
    end = _HEAD.size + 4 * count
    return *head, array.array("I", state[_HEAD.size : end]).tolist(), state[end:]


@functools.cache
def _vocabulary(tokenizer: "llguidance.LLTokenizer") -> tuple[dict[int, int], bytes]:
    """The ids of tokens of one byte, by the byte; and bits of the tokens of plain text."""
    ids, plain = dict[int, int](), bytearray(-(-tokenizer.vocab_size // 8))
    for token in range(tokenizer.vocab_size):
        text = tokenizer.decode_bytes([token])
        plain[token // 8] |= bool(_PLAIN.fullmatch(text)) << token % 8
        if len(text) == 1:
            ids.setdefault(text[0], token)
    return ids, bytes(plain)


def _bits(tokens: Sequence[int], size: int) -> int:
    return functools.reduce(operator.or_, (1 << each for each in tokens if each < size), 0)


def _has(mask: bytes, token: int | None) -> bool:
    return token is not None and bool(mask[token // 8] >> token % 8 & 1)


def _tail(text: bytes) -> bytes:
    """A text in JSON, shortened to a quote if it ends within a string, and a backslash if it ends within an
    escape."""
    plain = re.sub(rb"\\.", b"", text, flags=re.DOTALL)
    return b'"' * (plain.count(b'"') % 2) + b"\\" * plain.endswith(b"\\")


def _source(kind: str, text: str, *, simple: bool = False) -> str:
    """The compiler's grammar for a caller's."""
    from llguidance import LLMatcher

    from jaxllm.serving.guided.grammar import with_schemas

    change = functools.partial(_readable_schema, simple=simple)
    match kind:
        case "regex":
            return LLMatcher.grammar_from_regex(text)
        case "lark":
            return LLMatcher.grammar_from_lark(with_schemas(text, change))
    return LLMatcher.grammar_from_json_schema(change(json.loads(text or '{"type": "object"}')))


def _readable_schema(schema: Any, *, simple: bool) -> dict[str, Any]:
    """A schema as the compiler reads it (see `jaxllm.serving.guided.schema`)."""
    from jaxllm.serving.guided.schema import prepared

    found = prepared(schema, _is_supported, simple=simple)
    if found is False:
        raise ValueError("it matches no text")
    found = {} if found is True else found
    own = schema.get("x-guidance", {}) if isinstance(schema, dict) else {}
    if not isinstance(own, dict):
        raise ValueError("x-guidance must be an object")
    space = {} if _SPACE_KEYS & own.keys() else _WHITE_SPACE
    return found | {"x-guidance": _JSON | space | own}


@functools.cache
def _is_supported(pattern: str) -> bool:
    """Whether the compiler reads a regular expression of a schema."""
    from llguidance import LLMatcher

    source = LLMatcher.grammar_from_json_schema({"type": "string", "pattern": pattern})
    return not LLMatcher.validate_grammar(source)


def _forked(control: socket.socket) -> tuple[socket.socket | None, bool]:
    """Forks a process for each received descriptor: returns its socket in that process, and None in this one
    when no more will come; and whether its masks must be equal (see `matcher.handed`)."""
    while True:
        message, descriptors, *_ = socket.recv_fds(control, 1, 1)
        if not message:
            return None, False
        channel = socket.socket(fileno=descriptors[0])
        # If the system has no process left, the engine finds the socket closed.
        with contextlib.suppress(OSError):
            if os.fork() == 0:
                # Else the engine would not see the end of the process that forked.
                control.close()
                return channel, message != b"\0"
        channel.close()


@contextlib.contextmanager
def _processor_time(seconds: float) -> Any:
    """Ends this process when it has computed for so long: native code heeds no exception."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)


def _resident_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _bound(limit: int, value: int) -> None:
    """Sets a limit, or leaves an existing lower one."""
    with contextlib.suppress(ValueError, OSError):
        hard = resource.getrlimit(limit)[1]
        resource.setrlimit(limit, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _exactly(channel: socket.socket, size: int) -> bytes:
    """Reads `size` bytes; empty if the other side is gone."""
    found = bytearray()
    while len(found) < size:
        part = channel.recv(min(size - len(found), 1 << 20))
        if not part:
            return b""
        found += part
    return bytes(found)
