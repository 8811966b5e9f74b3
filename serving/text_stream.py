"""Text that arrives token by token: detokenizing, and stopping at strings.

`Detokenizer` turns ids into text without ever showing half a character, `StopMatcher` withholds text
that may turn out to be a stop string, and `TextStream` is the two in a row. All three are host-side
state of one answer and cost the same for its last token as for its first.

The detokenizer follows the prefix and read offsets of Hugging Face's text-generation-inference: it
decodes a few already shown tokens together with the new ones and shows what the new ones added.
"""

from collections.abc import Sequence
from typing import Protocol

from jaxllm.errors import ConfigError

MAX_STOPS = 16
# Tokens that may end an answer, which graphs take as one row.
MAX_STOP_IDS = 16
MAX_STOP_CHARACTERS = 256

# What decoders put in place of bytes that are not UTF-8, hence also of a character's first bytes.
_REPLACEMENT = "\ufffd"

# The first bytes of a character that is still to come are at most 3, hence in at most so many tokens.
_MAX_OPEN = 3

# A window is cut to the second size when it reaches the first: it does so only in long runs without
# a character boundary between any two tokens. What is kept must cover the tokens that are held back.
_WINDOW_TOKENS = 16
_KEPT_TOKENS = 8


class Decoder(Protocol):
    """The part of `jaxllm.text.tokenizer.Tokenizer` that streaming needs."""

    def decode(self, ids: Sequence[int], /) -> str:
        """The text of `ids` without special tokens."""
        ...


class Detokenizer:
    """Turns the ids of one answer into pieces of text.

    The pieces and the final `flush` together equal `tokenizer.decode` of all the ids, however these
    were grouped, whenever that text is valid. A piece ends between two characters. Ids whose bytes
    are no valid text come out as U+FFFD; at most three of them are held back.
    """

    def __init__(self, tokenizer: Decoder) -> None:
        self._tokenizer = tokenizer
        self._reset()

    def push(self, ids: Sequence[int]) -> str:
        """The text that `ids` add, less a character that is not yet whole."""
        return "".join([self._push_one(token) for token in ids])

    def flush(self) -> str:
        """What is still held back, at the end of the answer; the next push begins another one."""
        text = self._tokenizer.decode(self._window)[self._shown :]
        self._reset()
        return text

    def _reset(self) -> None:
        self._window: list[int] = []  # Ids already shown, as context, then ids not yet shown in full.
        self._context = 0  # How many of the window's ids are context.
        self._shown = 0  # How many characters of the window's text were shown.
        self._length = 0  # Characters of the window's text, shown or not.

    def _push_one(self, token: int) -> str:
        text = self._tokenizer.decode([*self._window, token])
        if len(text) == self._length and self._tokenizer.decode([token, token]) == "":
            # A special token: it must not become context, because decoders drop the space that
            # begins a text. Two copies, so as to tell it from that space.
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
        """Show a text that ends between two characters, and start a window after it."""
        piece = text[self._shown :]
        self._window = self._window[self._context :]
        self._context = len(self._window)
        self._shown = self._length = len(self._tokenizer.decode(self._window))
        return piece

    def _cut_window(self, held: str) -> str:
        """Drop the window's oldest ids, keeping `held` back; returns it where that is impossible."""
        self._window = self._window[-_KEPT_TOKENS:]
        self._context = 0
        text = self._tokenizer.decode(self._window)
        self._length = len(text)
        if text.endswith(held):
            self._shown = len(text) - len(held)
            return ""
        # The dropped bytes were what made the others invalid. These now count as shown.
        self._shown = len(text)
        return held


class StopMatcher:
    """Ends a text at the first of several stop strings, which is not shown.

    The first string to be complete stops the text; of several that become complete with the same
    character, the one that began first. So the result does not depend on how the text was cut into
    pieces. Text that may be the beginning of a stop string is held back.

    Raises:
      ConfigError: there are more than 16 strings, or one is empty or longer than 256 characters.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str):
            raise ConfigError(f"stop strings must be a list, got the text {stops!r:.80}; write [text]")
        if len(stops) > MAX_STOPS:
            raise ConfigError(f"at most {MAX_STOPS} stop strings are allowed, got {len(stops)}")
        for stop in stops:
            if not isinstance(stop, str) or not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
                raise ConfigError(
                    f"a stop string must have 1 to {MAX_STOP_CHARACTERS} characters, got {stop!r:.80}"
                )
        self._stops = tuple(dict.fromkeys(stops))
        self._held = ""
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop string that was found, or None."""
        return self._matched

    def push(self, text: str) -> tuple[str, bool]:
        """What can be shown now, and whether a stop string was found (then nothing more comes)."""
        if self._matched is not None:
            return "", True
        text = self._held + text
        # The held text has no whole stop string, so the first found of each is its first at all.
        found = [(text.find(stop), stop) for stop in self._stops]
        ends = [(start + len(stop), start, stop) for start, stop in found if start >= 0]
        if ends:
            _, start, self._matched = min(ends)
            self._held = ""
            return text[:start], True
        shown = len(text) - self._open_length(text)
        self._held = text[shown:]
        return text[:shown], False

    def flush(self) -> str:
        """What is held back, at the end of the answer: no stop string will complete it."""
        held, self._held = self._held, ""
        return held

    def _open_length(self, text: str) -> int:
        """Characters at the end of `text` that may begin a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest


class TextStream:
    """The text of one answer, from token ids to what may be shown, ended by stop strings.

    Raises:
      ConfigError: as `StopMatcher`.
    """

    def __init__(self, tokenizer: Decoder, stops: Sequence[str] = ()) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._matcher = StopMatcher(stops)
        self._consumed_tokens = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._matcher.matched is not None

    @property
    def matched(self) -> str | None:
        """The stop string that was found, or None."""
        return self._matcher.matched

    @property
    def consumed_tokens(self) -> int:
        """Ids taken since the beginning, up to and with the one that completed a stop string.

        Ids pushed after that one are not part of the answer.
        """
        return self._consumed_tokens

    def push(self, ids: Sequence[int]) -> str:
        """The text that `ids` add, less what is held back; "" once stopped."""
        pieces = []
        for token in ids:
            if self.stopped:
                break
            self._consumed_tokens += 1
            piece, _ = self._matcher.push(self._detokenizer.push((token,)))
            pieces.append(piece)
        return "".join(pieces)

    def flush(self) -> str:
        """What is still held back, at the end of the answer."""
        if self.stopped:
            return ""
        piece, stopped = self._matcher.push(self._detokenizer.flush())
        return piece if stopped else piece + self._matcher.flush()
