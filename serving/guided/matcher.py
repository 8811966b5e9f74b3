"""Follows one answer through its grammar: which tokens may come next, and which must."""

import collections
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxllm.errors import ConfigError, one_line

if TYPE_CHECKING:
    import llguidance


class Matcher:
    """The state of one answer in its grammar. Used by one thread at a time.

    Tokens that end the answer are allowed exactly where the text may end. Where the grammar leaves one text
    alone, its tokens are *forced*: the ones that the tokenizer makes of it.
    """

    def __init__(self, state: "llguidance.LLMatcher", text_tokens: np.ndarray, stop_ids: np.ndarray) -> None:
        """Begins an answer.

        Args:
          state: of the grammar, at its beginning.
          text_tokens: `[V]` bool, the tokens that a grammar may allow: those of the tokenizer but its end
            tokens.
          stop_ids: tokens that end the answer, padded with -1.

        Raises:
          ConfigError: the grammar matches no text but the empty one, or is too complex.
        """
        self._state, self._text_tokens = state, text_tokens
        self._stops = stop_ids[stop_ids >= 0]
        self._stop_set = frozenset(self._stops.tolist())
        self._taken = 0
        self._forced: collections.deque[int] = collections.deque()
        self._allowed: np.ndarray | None = None
        self._may_end = False
        self._force()
        if self.complete:
            raise ConfigError("the grammar matches the empty text alone; ask for no grammar, or another one")

    @property
    def complete(self) -> bool:
        """Whether the text matches the grammar and nothing may follow."""
        if self._forced:
            return False
        return not self._mask().any() and self._may_end

    def forced(self, most: int) -> list[int]:
        """The next tokens where the grammar leaves one text alone, at most so many."""
        return list(itertools.islice(self._forced, most))

    def allowed(self) -> np.ndarray:
        """`[V]` bool, the tokens that may come next, those that end the answer among them.

        Raises:
          ConfigError: the grammar has become too complex, or no token can go on with it.
        """
        if self._forced:
            allowed = np.zeros_like(self._text_tokens)
            allowed[self._forced[0]] = True
            return allowed
        allowed = self._mask().copy()
        if self._may_end:
            allowed[self._stops] = True
        return allowed

    def take(self, tokens: Sequence[int]) -> None:
        """Goes on by tokens of the answer.

        Raises:
          ConfigError: the grammar does not allow them, or has become too complex.
        """
        for token in tokens:
            if token in self._stop_set:
                return
            self._state.consume_token(token)
            self._require_sound()
            self._taken += 1
            self._allowed = None
            if self._forced and self._forced[0] == token:
                self._forced.popleft()
            else:
                self._forced.clear()
        if not self._forced:
            self._force()

    def _force(self) -> None:
        """Finds forced tokens: all of a run at once, because finding them takes as long as the run is."""
        found = self._state.compute_ff_tokens()
        self._require_sound()
        usable = itertools.takewhile(
            lambda token: token not in self._stop_set and self._text_tokens[token], found
        )
        self._forced.extend(usable)

    def _mask(self) -> np.ndarray:
        """The allowed tokens besides those that end the answer."""
        if self._allowed is None:
            bits = np.frombuffer(self._state.compute_bitmask(), np.uint8)
            self._require_sound()
            unpacked = np.unpackbits(bits, bitorder="little", count=len(self._text_tokens))
            allowed = unpacked.view(np.bool_) & self._text_tokens
            allowed[self._stops] = False
            self._may_end = self._state.is_accepting()
            if not self._may_end and not allowed.any():
                raise ConfigError(
                    f"after {self._taken} tokens no token of the model can go on with the grammar, and the "
                    "text may not end there; use another grammar"
                )
            self._allowed = allowed
        return self._allowed

    def _require_sound(self) -> None:
        if self._state.is_error():
            raise ConfigError(
                f"the grammar cannot be followed after {self._taken} tokens: "
                f"{one_line(self._state.get_error())}; use a simpler one"
            )
