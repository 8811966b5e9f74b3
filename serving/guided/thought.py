"""Follows an answer through its reasoning into its grammar.

Reasoning is free text, so its tokens need no masks and are decoded in blocks; the grammar's process is asked
only before it and after it.
"""

import collections
import socket
from collections.abc import Callable, Sequence

import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.serving.guided.compiler import GrammarCompiler
from jaxllm.serving.guided.grammar import Grammar, Thought
from jaxllm.serving.guided.matcher import Matcher
from jaxllm.text.tokenizer import Tokenizer

# Tokens whose text is searched for the closing: it may begin in the middle of one.
_SPARE_TOKENS = 8


def matcher_of(
    compiler: GrammarCompiler,
    tokenizer: Tokenizer,
    grammar: Grammar,
    stop_ids: np.ndarray,
    most_tokens: int,
    *,
    same: bool = False,
) -> "Matcher | ThoughtMatcher":
    """The matcher of one answer, with its thought if it has one (see `Matcher`).

    Raises:
      ConfigError, GrammarLate: see `GrammarCompiler.matcher`.
    """
    if grammar.thought is None:
        return compiler.matcher(grammar, stop_ids, most_tokens, same=same)
    compiled = compiler.prepare(grammar, stop_ids).result()

    def begun(taken: int) -> Matcher:
        assert compiled is not None
        return Matcher(compiled, most_tokens - taken, same=same)

    allowed = compiler.text_tokens(), stop_ids[stop_ids >= 0]
    return ThoughtMatcher(grammar.thought, tokenizer, allowed, begun if compiled is not None else None)


class ThoughtMatcher:
    """A `Matcher` of an answer that may begin with a thought.

    While an answer's tokens are those of the opening, both the thought and the grammar's text are possible.

    Attributes:
      completed: see `Matcher`.
      unbounded: whether any token may follow, but those that end the answer too early.
    """

    def __init__(
        self,
        thought: Thought,
        tokenizer: Tokenizer,
        allowed: tuple[np.ndarray, np.ndarray],
        begin: Callable[[int], Matcher] | None,
    ) -> None:
        """See the class.

        Args:
          thought: the thought.
          tokenizer: the model's.
          allowed: `[V]` bool, tokens of text; and the tokens that end the answer.
          begin: begins the grammar's text, given the number of tokens before it; None for any text.
        """
        self._thought, self._tokenizer, self._begin = thought, tokenizer, begin
        self._text_tokens, self._stops = allowed
        self._opening = _ids(tokenizer, thought.opening.strip())
        self._closing, self._closes = _ids(tokenizer, thought.closing), thought.closing.strip()
        # Tokens that were taken, those of the opening and of the thought among them, and its last ones.
        self._taken = self._opened = self._thinking = 0
        self._tail: collections.deque[int] = collections.deque(maxlen=len(self._closes) + _SPARE_TOKENS)
        # Tokens of the closing that are forced.
        self._forced: list[int] = []
        self._in_thought = thought.opened
        self._may_open = not thought.opened
        self._grammar = begin(0) if begin is not None and self._may_open else None
        self._force_closing()

    @property
    def unbounded(self) -> bool:
        """See the class."""
        return not self._may_open and not self._forced and (self._in_thought or self._begin is None)

    @property
    def most_unbounded(self) -> int | None:
        """Number of tokens until the closing is forced; None for no limit."""
        most = self._thought.most_tokens
        return None if most is None or not self._in_thought else max(1, most - self._thinking)

    @property
    def completed(self) -> bool:
        """See `Matcher`."""
        return self._grammar is not None and self._grammar.completed

    @property
    def channel(self) -> socket.socket | None:
        """See `Matcher`."""
        return None if self._grammar is None else self._grammar.channel

    @property
    def ready(self) -> bool:
        """See `Matcher`."""
        return self._grammar is None or self._grammar.ready

    @property
    def complete(self) -> bool:
        """See `Matcher`."""
        return self._grammar is not None and not self._opened and self._grammar.complete

    def soon(self) -> bool:
        """See `Matcher`."""
        return self._grammar is None or self._grammar.soon()

    def wait(self) -> None:
        """See `Matcher`."""
        if self._grammar is not None:
            self._grammar.wait()

    def forced(self, most: int) -> list[int]:
        """See `Matcher`."""
        if self._forced:
            return self._forced[:most]
        if not self._may_open:
            return [] if self._grammar is None else self._grammar.forced(most)
        # The grammar allows no token of the opening, which has begun.
        return (
            self._opening[self._opened :][:most] if self._grammar is None and self._begin is not None else []
        )

    def allowed(self) -> np.ndarray:
        """See `Matcher`."""
        found = np.zeros_like(self._text_tokens)
        if self._forced:
            found[self._forced[0]] = True
            return found
        if self._begin is None or self._in_thought:
            found = self._text_tokens.copy()
            if self._begin is None:
                found[self._stops] = True
        elif self._grammar is not None:
            found = self._grammar.allowed()
        if self._may_open:
            found = found.copy()
            found[self._opening[self._opened]] = True
        return found

    def take(self, tokens: Sequence[int]) -> None:
        """See `Matcher`."""
        for token in tokens:
            self._take(token)

    @property
    def wide(self) -> bool:
        """See `Matcher`."""
        return self._follows and self._grammar is not None and self._grammar.wide

    @property
    def plain(self) -> bytes:
        """See `Matcher`."""
        return b"" if self._grammar is None else self._grammar.plain

    @property
    def left(self) -> int | None:
        """See `Matcher`; None where masks do not come from its process alone."""
        return self._grammar.left if self._follows and self._grammar is not None else None

    @property
    def nested(self) -> bool:
        """See `Matcher`."""
        return self._follows and self._grammar is not None and self._grammar.nested

    @property
    def _follows(self) -> bool:
        """Whether only the grammar restricts the next tokens."""
        return not (self._may_open or self._forced or self.unbounded)

    def offer(
        self,
        tokens: Sequence[int],
        jumps: Callable[[int], bool],
        *,
        followed: int = 0,
        asked: bool = False,
    ) -> int:
        """See `Matcher`; in a thought, up to its end."""
        if self._follows and self._grammar is not None:
            taken = self._grammar.offer(tokens, jumps, followed=followed, asked=asked)
            self._taken += taken
            return taken
        for count, token in enumerate(tokens, 1):
            self._take(token)
            if not self.unbounded:
                return count
        return len(tokens)

    def _take(self, token: int) -> None:
        if self._in_thought:
            self._think(token)
        elif self._may_open and token == self._opening[self._opened]:
            self._open(token)
        else:
            self._may_open, self._opened = False, 0
            if self._grammar is not None:
                self._grammar.take([token])
        self._taken += 1

    def _open(self, token: int) -> None:
        self._opened += 1
        if self._opened == len(self._opening):
            self._may_open, self._opened, self._in_thought, self._grammar = False, 0, True, None
            self._force_closing()
        elif self._grammar is not None:
            # The text of the grammar may begin alike.
            if self._grammar.allowed()[token]:
                self._grammar.take([token])
            else:
                self._grammar = None

    def _think(self, token: int) -> None:
        self._thinking += 1
        self._tail.append(token)
        del self._forced[:1]
        text = self._tokenizer.decode(self._tail, skip_special_tokens=False)
        _, closing, rest = text.partition(self._closes)
        if not closing:
            self._force_closing()
            return
        self._in_thought, self._forced = False, []
        if self._begin is None:
            return
        self._grammar = self._begin(self._taken + 1)
        # A token may end the thought and begin the text; white space between them is free.
        for each in self._tokenizer.encode(rest.lstrip(), add_special_tokens=False, special=False):
            if not self._grammar.allowed()[each]:
                raise ConfigError(
                    f"the token that ends the thought ends in {rest!r:.40}, with which no text of the "
                    "grammar begins; use a grammar with such a text"
                )
            self._grammar.take([each])

    def _force_closing(self) -> None:
        most = self._thought.most_tokens
        if self._in_thought and not self._forced and most is not None and self._thinking >= most:
            self._forced = list(self._closing)


def _ids(tokenizer: Tokenizer, marker: str) -> list[int]:
    """The tokens of a marker, which may be a special one."""
    return tokenizer.encode(marker, add_special_tokens=False, special=True) if marker else []
