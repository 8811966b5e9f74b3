"""Text of which each character is known to be the template's own or content, which users wrote.

Special tokens steer a model: whoever can write them can end a turn and speak as somebody else. So the
template's characters may spell them, and content may not (see `Tokenizer.encode`).

To find content again in what a template made of it, `Marks` replaces its characters by private ones, one
for one, before the template sees them, and changes them back behind it.
"""

import dataclasses
import functools

import numpy as np

# The first private character of each plane that has nothing else; a plane takes one of 16 bits each.
_PLANES = (0xF0000, 0x100000)
_LAST = 0xFFFD
# Templates look at these, or write them in another way (JSON).
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
        """A text of which nothing is content."""
        return cls(text, np.zeros(len(text), np.bool_))

    def __add__(self, other: "MarkedText") -> "MarkedText":
        return MarkedText(self.text + other.text, np.concatenate([self.content, other.content]))

    def part(self, start: int, end: int | None = None) -> "MarkedText":
        """Its characters from `start` up to `end`, both from 0 up."""
        return MarkedText(self.text[start:end], self.content[start:end])


class Marks:
    """Private characters that stand for others. `base` is the first of 65,534 that nobody else uses."""

    def __init__(self, base: int) -> None:
        self._base = base

    @classmethod
    def free_in(cls, *texts: str) -> "Marks | None":
        """Characters that occur in none of the texts, or None where there are none left."""
        used = set().union(*(set((_codes(text) >> 16).tolist()) for text in texts))
        return next((cls(base) for base in _PLANES if base >> 16 not in used), None)

    def put(self, text: str, where: np.ndarray | None = None) -> str:
        """`text` with its characters marked, all or those of the mask `where`.

        White space, quotes and backslashes stay, because templates trim and escape them, and so do the few
        characters for which there is no private one.
        """
        codes = _codes(text).copy()
        marked = _markable()[np.minimum(codes, _LAST + 1)]
        if where is not None:
            marked &= where
        codes[marked] += self._base
        return _text(codes)

    def take(self, text: str) -> MarkedText:
        """What was marked in a text, as content, with its own characters."""
        codes = _codes(text).copy()
        marked = codes >> 16 == self._base >> 16
        codes[marked] -= self._base
        return MarkedText(_text(codes), marked)


@functools.cache
def _markable() -> np.ndarray:
    """By code point up to `_LAST`, and one for all others: whether it has a private character."""
    kept = [
        code < 0x20 or 0xD800 <= code < 0xE000 or chr(code).isspace() or chr(code) in _KEPT
        for code in range(_LAST + 1)
    ]
    return ~np.array([*kept, True])


def _codes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


def _text(codes: np.ndarray) -> str:
    return codes.tobytes().decode("utf-32-le", "surrogatepass")
