"""Text of an answer as it comes, for parsers that are generators: they yield where they need more of it.

All look-ahead is bounded, so that parsing takes linear time however the text is cut.
"""

import re
from collections.abc import Generator, Sequence
from typing import TypeVar

_T = TypeVar("_T")
Parsing = Generator[None, None, _T]

# White space within markers that is read at most.
MOST_SPACES = 64
_SPACE = re.compile(rf"[ \t\r\n]{{0,{MOST_SPACES}}}")


class Failed(Exception):
    """The text does not match."""


class Input:
    """The text that has not been read."""

    def __init__(self) -> None:
        self.text, self.at, self.ended = "", 0, False
        self._mark: int | None = None

    def add(self, text: str) -> None:
        """Appends text."""
        begin = self.at if self._mark is None else self._mark
        if begin:
            self.text, self.at = self.text[begin:], self.at - begin
            self._mark = None if self._mark is None else 0
        self.text += text

    def mark(self) -> None:
        """Remembers this place for `back`, until `release`."""
        self._mark = self.at

    def back(self) -> None:
        """Goes back to the mark."""
        assert self._mark is not None
        self.at = self._mark

    def release(self) -> str:
        """Forgets the mark; returns the text since then."""
        assert self._mark is not None
        found, self._mark = self.text[self._mark : self.at], None
        return found

    @property
    def empty(self) -> bool:
        """Whether all text was read."""
        return self.at >= len(self.text)

    def char(self) -> Parsing[str]:
        """The next character, which stays; empty at the end."""
        while self.at >= len(self.text) and not self.ended:
            yield
        return self.text[self.at : self.at + 1]

    def literal(self, text: str) -> Parsing[bool]:
        """Whether a text comes next, which is then read."""
        while True:
            there = self.text[self.at : self.at + len(text)]
            if there == text:
                self.at += len(text)
                return True
            if self.ended or not text.startswith(there):
                return False
            yield

    def one_of(self, texts: Sequence[str]) -> Parsing[str]:
        """Reads the first of some texts that comes next; empty if none does."""
        for text in texts:
            if text and (yield from self.literal(text)):
                return text
        return ""

    def spaces(self) -> Parsing[str]:
        """Reads white space, of a bounded length."""
        while True:
            found = _SPACE.match(self.text, self.at)
            assert found is not None
            if found.end() < len(self.text) or len(found[0]) == MOST_SPACES or self.ended:
                self.at = found.end()
                return found[0]
            yield

    def run(self, pattern: re.Pattern[str], most: int) -> Parsing[str]:
        """Reads the longest run of characters that `pattern` matches (a repeated class)."""
        while True:
            found = pattern.match(self.text, self.at, self.at + most)
            end = self.at if found is None else found.end()
            if end < len(self.text) or end - self.at == most or self.ended:
                begin, self.at = self.at, end
                return self.text[begin:end]
            yield

    def until(self, stop: str) -> Parsing[tuple[str, bool]]:
        """Reads what certainly comes before `stop`, some of it at least.

        Returns:
          The text, and whether `stop` comes then (and was read). Neither: the text has ended.
        """
        while True:
            found = self.text.find(stop, self.at)
            if found >= 0:
                part, self.at = self.text[self.at : found], found + len(stop)
                return part, True
            end = len(self.text) - partial(self.text, stop, self.at)
            if self.ended or end > self.at:
                end = len(self.text) if self.ended else end
                part, self.at = self.text[self.at : end], end
                return part, False
            yield


def partial(text: str, stop: str, begin: int = 0) -> int:
    """Number of the last characters that may begin `stop`."""
    most = min(len(stop) - 1, len(text) - begin)
    return next((size for size in range(most, 0, -1) if text.endswith(stop[:size])), 0)
