"""Follows one answer through its grammar: which tokens may come next, and which must."""

import collections
import itertools
import socket
from collections.abc import Sequence

import numpy as np

from jaxllm.errors import ConfigError, one_line
from jaxllm.serving.guided.worker import parsed_state
from jaxllm.serving.guided.workers import CompiledGrammar, Follower, GrammarLate, WorkerEnded, WorkerLate


class Matcher:
    """The state of one answer in its grammar. Used by one thread at a time.

    Tokens that end the answer are allowed exactly where the text may end. If the grammar allows only one
    text, its tokens are *forced*: the tokenizer's encoding of it. Masks are computed in another process
    while the engine does other work: after `take`, `ready` tells whether they have arrived, and earlier
    uses wait.

    Attributes:
      completed: whether the end of the text was forced because the answer would have reached its length.
    """

    def __init__(
        self,
        compiled: CompiledGrammar,
        text_tokens: np.ndarray,
        stops: np.ndarray,
        most_tokens: int | None = None,
    ) -> None:
        """Begins an answer.

        Args:
          compiled: the grammar.
          text_tokens: `[V]` bool, tokens that a grammar may allow: all of the tokenizer but its end tokens.
          stops: tokens that end the answer.
          most_tokens: length of the answer at most. Before it is reached, the end of a text in JSON is
            forced (see `completed`); None for no limit.
        """
        self._compiled, self._text_tokens, self._stops = compiled, text_tokens, stops
        self._follower: Follower | None = None
        self._failure: WorkerEnded | None = None
        self._stop_set = frozenset(stops.tolist())
        self._taken, self._most_tokens = 0, most_tokens
        self.completed = False
        self._waits = False
        self._forced: collections.deque[int] = collections.deque()
        self._set(*parsed_state(compiled.first))

    @property
    def ready(self) -> bool:
        """Whether its other methods need not wait."""
        return not self._waits or self._follower is None or self._follower.ready

    @property
    def channel(self) -> socket.socket | None:
        """A socket to wait for until the matcher is ready; then it is readable."""
        return None if self._follower is None else self._follower.channel

    def wait(self) -> None:
        """Waits until it is ready.

        Raises:
          ConfigError: the grammar does not allow the tokens so far, has become too complex, or is a dead end.
          GrammarLate: the machine is too busy.
        """
        if not self._waits:
            return
        self._waits = False
        try:
            if self._follower is None:
                raise self._failure or WorkerEnded("its process has ended")
            self._set(*self._follower.state())
        except WorkerLate as error:
            raise GrammarLate(
                f"the grammar cannot be followed after {self._taken} tokens now: {error}; ask again"
            ) from error
        except (ValueError, WorkerEnded) as error:
            raise ConfigError(
                f"the grammar cannot be followed after {self._taken} tokens: {one_line(error)}; use a "
                "simpler one"
            ) from error

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
                # The follower is past them already.
                self._forced.popleft()
            else:
                self._send(token)

    def _send(self, token: int) -> None:
        """Requests the mask after a token; if that fails, `wait` raises the error."""
        self._waits = True
        if self._follower is None:
            try:
                self._follower = self._compiled.follow()
            except WorkerEnded as error:
                self._failure = error
        if self._follower is not None:
            left = None if self._most_tokens is None else max(0, self._most_tokens - self._taken)
            self._follower.take([token], left)

    def _set(self, may_end: bool, completed: bool, forced: list[int], mask: bytes) -> None:
        self.completed = completed
        self._forced.extend(forced)
        bits = np.frombuffer(mask, np.uint8)
        unpacked = np.unpackbits(bits, bitorder="little", count=len(self._text_tokens))
        self._mask, self._may_end = unpacked.view(np.bool_) & self._text_tokens, may_end
        self._mask[self._stops] = False
