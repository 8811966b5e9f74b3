"""Detokenizes token streams, and stops them at strings.

`Detokenizer` turns ids into text of whole characters, and `TextStream` withholds of it what may begin a stop
string. Both are host-side state of one answer, at constant cost per token.

The detokenizer follows the prefix and read offsets of Hugging Face's text-generation-inference: it decodes a
few already shown tokens together with the new ones, and shows the text that the new ones added.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxllm.errors import ConfigError

if TYPE_CHECKING:
    from jaxllm.text.tokenizer import Tokenizer

MAX_STOPS = 16
# Maximum number of tokens that end an answer; buckets accept one row of them.
MAX_STOP_IDS = 16
MAX_STOP_CHARACTERS = 256

# Decoders' substitute for bytes that are not UTF-8, hence also for a character's first bytes.
_REPLACEMENT = "\ufffd"

# An incomplete character has at most 3 bytes, hence at most 3 tokens.
_MAX_OPEN = 3

# A window is cut to the second size when it reaches the first, which happens only in long runs without a
# character boundary between any two tokens. The second size must cover the withheld tokens.
_WINDOW_TOKENS = 16
_KEPT_TOKENS = 8


class Detokenizer:
    """Turns the ids of one answer into pieces of text.

    The pieces and the final `flush` concatenate to `tokenizer.decode` of all ids, in whatever groups they
    were pushed, if that text is valid. A piece ends between two characters. Ids whose bytes are not valid
    text become U+FFFD; at most three of them are withheld.
    """

    def __init__(self, tokenizer: "Tokenizer", markers: Sequence[str] = ()) -> None:
        """Begins an answer; `markers` are special tokens whose text is shown."""
        self._tokenizer = tokenizer
        known = tokenizer.special_tokens if markers else ()
        self._markers = {number: text for text, number in known if text in markers}
        self._reset()

    def push(self, ids: Sequence[int]) -> str:
        """The text that `ids` add, without an incomplete character."""
        return "".join([self._push_one(token) for token in ids])

    def flush(self) -> str:
        """Returns the withheld text at the end of the answer; the next push begins another answer."""
        text = self._tokenizer.decode(self._window)[self._shown :]
        self._reset()
        return text

    def _reset(self) -> None:
        self._window: list[int] = []  # Ids already shown, as context, then ids not yet shown in full.
        self._context = 0  # Number of the window's ids that are context.
        self._shown = 0  # Number of shown characters of the window's text.
        self._length = 0  # Number of characters of the window's text.

    def _push_one(self, token: int) -> str:
        if token in self._markers:
            return self._show_all(self._tokenizer.decode(self._window)) + self._markers[token]
        text = self._tokenizer.decode([*self._window, token])
        if len(text) == self._length and self._tokenizer.decode([token, token]) == "":
            # A special token: it must not become context, because decoders drop a text's leading
            # space. Decode two copies, to distinguish it from that space.
            return ""
        # Byte-fallback decoders show every byte of an open character, so the text shrinks when it
        # closes, even when the character is a genuine U+FFFD.
        closed = not text.endswith(_REPLACEMENT) or len(text) < self._length
        self._window.append(token)
        self._length = len(text)
        if closed:
            return self._show_all(text)
        end = len(text.rstrip(_REPLACEMENT))
        if len(self._window) - self._context > _MAX_OPEN:
            end = max(end, len(self._tokenizer.decode(self._window[:-_MAX_OPEN])))
        piece = text[self._shown : end]
        self._shown = max(self._shown, end)
        if len(self._window) >= _WINDOW_TOKENS:
            piece += self._cut_window(text[self._shown :])
        return piece

    def _show_all(self, text: str) -> str:
        """Shows a text that ends between two characters, and starts a window after it."""
        piece = text[self._shown :]
        self._window = self._window[self._context :]
        self._context = len(self._window)
        self._shown = self._length = len(self._tokenizer.decode(self._window))
        return piece

    def _cut_window(self, withheld: str) -> str:
        """Drops the window's oldest ids; returns `withheld` if that changes it, else an empty text."""
        self._window = self._window[-_KEPT_TOKENS:]
        self._context = 0
        text = self._tokenizer.decode(self._window)
        self._length = len(text)
        if text.endswith(withheld):
            self._shown = len(text) - len(withheld)
            return ""
        # The dropped bytes made the others invalid. These now count as shown.
        self._shown = len(text)
        return withheld


class TextStream:
    """Turns the token ids of one answer into text, up to the first of some stop strings, which is not shown.

    The first string to be complete stops the text; of several that become complete with the same character,
    the one that began first. So the result does not depend on how the text was split. Text that may begin a
    stop string is withheld.

    Attributes:
      matched: the stop string that was found, or None.
      consumed_tokens: number of consumed ids, up to and including the one that completed a stop string; ids
        pushed after that one are not part of the answer.
      ends: number of characters that were shown with each consumed id and those before.

    Raises:
      ConfigError: there are more than 16 strings, or one is empty or longer than 256 characters.
    """

    def __init__(
        self, tokenizer: "Tokenizer", stops: Sequence[str] = (), markers: Sequence[str] = ()
    ) -> None:
        if isinstance(stops, str):
            raise ConfigError(f"stop strings must be a list, got the text {stops!r:.80}; write [text]")
        if len(stops) > MAX_STOPS:
            raise ConfigError(f"at most {MAX_STOPS} stop strings are allowed, got {len(stops)}")
        for stop in stops:
            if not isinstance(stop, str) or not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
                raise ConfigError(
                    f"a stop string must have 1 to {MAX_STOP_CHARACTERS} characters, got {stop!r:.80}"
                )
        self._detokenizer, self._stops = Detokenizer(tokenizer, markers), tuple(dict.fromkeys(stops))
        self._withheld = ""
        self.matched: str | None = None
        self.consumed_tokens = 0
        self.ends: list[int] = []

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self.matched is not None

    def push(self, ids: Sequence[int]) -> str:
        """The text that `ids` add, without withheld text; "" once stopped."""
        pieces = []
        for token in ids:
            if self.stopped:
                break
            self.consumed_tokens += 1
            pieces.append(self.push_text(self._detokenizer.push((token,))))
            self.ends.append((self.ends[-1] if self.ends else 0) + len(pieces[-1]))
        return "".join(pieces)

    def push_text(self, text: str) -> str:
        """The part of `text`, and of the text withheld before it, that can be shown now."""
        if self.stopped:
            return ""
        text = self._withheld + text
        # The withheld text has no complete stop string, so each first match is the first of the answer.
        found = [(text.find(stop), stop) for stop in self._stops]
        ends = [(start + len(stop), start, stop) for start, stop in found if start >= 0]
        if ends:
            _, start, self.matched = min(ends)
            self._withheld = ""
            return text[:start]
        lengths = (
            length
            for stop in self._stops
            for length in range(1, min(len(stop), len(text) + 1))
            if text.endswith(stop[:length])
        )
        shown = len(text) - max(lengths, default=0)
        self._withheld = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """Returns the withheld text at the end of the answer."""
        shown = self.push_text(self._detokenizer.flush())
        withheld, self._withheld = self._withheld, ""
        return shown + withheld
