"""Follows answers through their grammars, each in a process of its own (see `worker.py`)."""

import array
import collections
import contextlib
import dataclasses
import itertools
import select
import socket
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from jaxllm.errors import ConfigError, JaxllmError, one_line
from jaxllm.serving.guided.worker import NO_LIMIT, STEP_S, parsed_state, receive, send

# Waiting for a mask costs less than doing something else if it takes at most so long.
_SOON_S = 0.0015
# Far above the limits of processor time, which a busy machine stretches.
REPLY_S = 10.0


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
      plain: see `Matcher`.
      grew_bytes: memory needed to compile it.
    """

    control: socket.socket
    counts: Counter[str]
    first: bytes
    text_tokens: np.ndarray
    stops: np.ndarray
    plain: bytes
    grew_bytes: int

    def __post_init__(self) -> None:
        weakref.finalize(self, self.control.close)


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
      plain: bits of the tokens of plain text, after which a mask that allows most tokens is likely to stay;
        empty where masks must be equal, which change with the length that a text may still have.
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
        self.completed, self.nested, self._most_tokens = False, False, most_tokens
        self.channel: socket.socket | None = None
        self._compiled, self._text_tokens = compiled, compiled.text_tokens
        self._failure: WorkerEnded | None = None
        self.plain = b"" if same else compiled.plain
        self._stop_set = frozenset(compiled.stops.tolist())
        self._taken = 0
        # When the state that has not been read yet was requested.
        self._asked_s: float | None = None
        # The time that its last masks took to come, where something waited for them.
        self._takes_s = 0.0
        self._forced: collections.deque[int] = collections.deque()
        self._set(compiled.first)
        try:
            # Its process starts while the prompt is read.
            self.channel = handed(compiled.control, same=same)
            weakref.finalize(self, self.channel.close)
        except WorkerEnded as error:
            self._failure = error

    @property
    def ready(self) -> bool:
        """Whether its other methods need not wait."""
        if self._asked_s is None or self.channel is None or time.monotonic() > self._asked_s + REPLY_S:
            return True
        return readable(self.channel)

    def soon(self) -> bool:
        """Whether it is ready, after waiting less time than a token takes."""
        if not self.ready and self.channel is not None and self._takes_s < _SOON_S:
            readable(self.channel, _SOON_S)
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
                reply = reply_of(self.channel, STEP_S, "a token was taken", waited_s)
            except WorkerEnded:
                self._compiled.counts["ended"] += 1
                raise
            took_s = 0.0 if there else time.monotonic() - asked_s
            self._takes_s += 0.1 * (min(took_s, 4 * _SOON_S) - self._takes_s)
            if not reply[0]:
                raise ValueError(reply[1:].decode())
            self._set(reply[1:])
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
        return not self._forced and not self._goes_on and self._may_end

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
        if not self._may_end and not self._goes_on:
            raise ConfigError(
                f"after {self._taken} tokens no token of the model can go on with the grammar, and the "
                "text may not end there; use another grammar"
            )
        return self._mask

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

    @property
    def left(self) -> int:
        """Number of tokens that may follow; -1 for any number."""
        return -1 if self._most_tokens is None else max(0, self._most_tokens - self._taken)

    def offer(
        self,
        tokens: Sequence[int],
        jumps: Callable[[int], bool],
        *,
        followed: int = 0,
        asked: bool = False,
    ) -> int:
        """Advances by tokens that were sampled under one mask, up to the first that might be another under
        its own, or that is fed in another way: returns their number, after waiting for the mask of the next
        one, unless one was offered.

        Args:
          tokens: tokens to take, the first of which is allowed.
          jumps: whether a number of forced tokens are fed as a chunk.
          followed: number of tokens before them, none of them forced, whose masks came over `channel` without
            this object.
          asked: whether the mask after them was requested over `channel`, too.
        """
        self.wait()
        self._taken += followed
        before, offered = self._taken, tokens[followed:]
        if asked:
            self._asked_s = time.monotonic()
        elif len(offered) == 1:
            self.take(offered)
            return len(tokens)
        text = list(itertools.takewhile(self._is_text, offered))
        if text and not asked:
            self._send(text)
        self.wait()
        while (rest := text[self._taken - before :]) and self._forced and not jumps(len(self._forced)):
            if rest[0] != self._forced[0]:
                break
            self.take(rest[:1])
        taken = self._taken - before
        # A token that ends the answer changes no state.
        ends = taken == len(text) < len(offered) and offered[taken] in self._stop_set
        return followed + taken + (ends and (taken == 0 or (self.nested and self._may_end)))

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
            with contextlib.suppress(OSError):
                send(self.channel, array.array("I", [self.left & NO_LIMIT, *tokens]).tobytes())

    def _set(self, state: bytes) -> None:
        taken, self._may_end, self.completed, self.nested, self._goes_on, forced, mask = parsed_state(state)
        self._taken += taken
        self._forced.extend(forced)
        bits = np.frombuffer(mask, np.uint8)
        unpacked = np.unpackbits(bits, bitorder="little", count=len(self._text_tokens))
        self._mask = unpacked.view(np.bool_)


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets; WorkerLate if this process has no file descriptor left."""
    try:
        return socket.socketpair()
    except OSError as error:
        raise WorkerLate(f"the process for grammars cannot be reached ({error.strerror})") from error


def handed(control: socket.socket, *, same: bool = False) -> socket.socket:
    """Lets a process fork another, and returns that one's socket; WorkerEnded if it is gone.

    Args:
      control: the socket of the process.
      same: whether the new one follows an answer with equal masks (see `Matcher`).
    """
    ours, theirs = socket_pair()
    with theirs:
        try:
            socket.send_fds(control, [bytes([same])], [theirs.fileno()])
        except OSError as error:
            ours.close()
            raise WorkerEnded(f"its process has ended ({error})") from error
    # A process that no longer reads must not block others.
    ours.settimeout(REPLY_S)
    return ours


def reply_of(channel: socket.socket, seconds: float, when: str, waited_s: float = 0.0) -> bytes:
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


def readable(channel: socket.socket, within_s: float = 0.0) -> bool:
    """Whether there is something to read within a time."""
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    return bool(poll.poll(1000 * within_s))
