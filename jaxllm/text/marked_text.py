"""Text that records for each character whether it is the template's or content from users.

Special tokens control a model: whoever can write them can end a turn and impersonate another role. So the
template's characters may spell special tokens, and content may not (see `Tokenizer.encode`).

To find content in a template's output, `Marks` replaces its characters one for one by private ones before the
template runs, and restores them afterwards.
"""

import dataclasses
import functools

import numpy as np

# Placeholder in messages to find where a template writes them; no text contains it.
PLACE = "\ue000\ue001\ue000"

# The first character of each private-use plane; a plane has room for all characters of 16 bits.
_PLANES = (0xF0000, 0x100000)
_LAST = 0xFFFD
# Never replaced: templates look at these characters, or escape them (JSON).
_KEPT = '"\\'


@dataclasses.dataclass(frozen=True, eq=False)
class MarkedText:
    """A text, and which of its characters are content: `[len(text)]` bool."""

    text: str
    content: np.ndarray

    def __post_init__(self) -> None:
        assert self.content.shape == (len(self.text),)

    @classmethod
    def of_content(cls, text: str) -> "MarkedText":
        """A text that is content as a whole."""
        return cls(text, np.ones(len(text), np.bool_))

    @classmethod
    def of_template(cls, text: str) -> "MarkedText":
        """A text without content."""
        return cls(text, np.zeros(len(text), np.bool_))

    def __add__(self, other: "MarkedText") -> "MarkedText":
        return MarkedText(self.text + other.text, np.concatenate([self.content, other.content]))

    def part(self, start: int, end: int | None = None) -> "MarkedText":
        """Its characters from `start` up to `end`, both from 0 up."""
        return MarkedText(self.text[start:end], self.content[start:end])


class Marks:
    """Private substitutes for characters; `base` is the first of the 65,534 of a plane."""

    def __init__(self, base: int) -> None:
        self._base = base

    @classmethod
    def free_in(cls, *texts: str) -> "Marks | None":
        """Private characters of a plane that occurs in none of the texts; None if there is no such plane."""
        used = set().union(*(set((_codes(text) >> 16).tolist()) for text in texts))
        return next((cls(base) for base in _PLANES if base >> 16 not in used), None)

    def put(self, text: str, where: np.ndarray | None = None) -> str:
        """`text` with its characters marked, all or those of the mask `where`.

        White space, quotes and backslashes are not marked, because templates trim and escape them. Neither
        are the few characters without a private counterpart.
        """
        codes = _codes(text).copy()
        marked = _markable()[np.minimum(codes, _LAST + 1)]
        if where is not None:
            marked &= where
        codes[marked] += self._base
        return _text(codes)

    def take(self, text: str) -> MarkedText:
        """A text with marked characters restored, and these as content."""
        codes = _codes(text).copy()
        marked = codes >> 16 == self._base >> 16
        codes[marked] -= self._base
        return MarkedText(_text(codes), marked)


@functools.cache
def _markable() -> np.ndarray:
    """Whether a character has a private counterpart, by code point up to `_LAST`, and one entry for all
    others."""
    kept = [
        code < 0x20 or 0xD800 <= code < 0xE000 or chr(code).isspace() or chr(code) in _KEPT
        for code in range(_LAST + 1)
    ]
    return ~np.array([*kept, True])


def _codes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


def _text(codes: np.ndarray) -> str:
    return codes.tobytes().decode("utf-32-le", "surrogatepass")
