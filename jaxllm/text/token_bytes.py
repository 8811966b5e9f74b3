"""The bytes of single tokens' text, even if they are a part of a character."""

import functools
import re
from collections.abc import Sequence

from jaxllm.text.tokenizer import Tokenizer

# Decoders' substitute for bytes that are not UTF-8.
_REPLACEMENT = "\ufffd"
# The name of a byte in SentencePiece's models.
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """The bytes of a tokenizer's tokens. Those of an answer's tokens in a row are its text in UTF-8."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def of(self, ids: Sequence[int], *, begins: bool = False) -> list[bytes]:
        """The bytes of each of some tokens; none for special tokens.

        Args:
          ids: ids of the tokens, each decoded separately.
          begins: whether it begins a text: some decoders drop the leading space of such a token.

        Raises:
          ConfigError: the tokenizer fails on them.
        """
        return [self._of(token, begins) for token in ids]

    def _of(self, token: int, begins: bool) -> bytes:
        before, shown = ([], "") if begins else self._before
        text = self._tokenizer.decode([*before, token])[len(shown) :]
        if _REPLACEMENT not in text:
            return text.encode()
        found = _raw(self._names.get(token, ""))
        # For a genuine U+FFFD, or a token of another kind, use the text.
        return text.encode() if found is None or found.decode(errors="replace") != text else found

    @functools.cached_property
    def _before(self) -> tuple[list[int], str]:
        """A token that another one can follow in a text, and its text."""
        ids = self._tokenizer.encode("a", add_special_tokens=False)[-1:]
        return ids, self._tokenizer.decode(ids)

    @functools.cached_property
    def _names(self) -> dict[int, str]:
        return {token: name for name, token in self._tokenizer.vocabulary().items()}


def _raw(name: str) -> bytes | None:
    """The bytes of a token's name in byte-level BPE, or of a fallback byte."""
    if found := _BYTE.fullmatch(name):
        return bytes([int(found[1], 16)])
    letters = _letters()
    if not all(letter in letters for letter in name):
        return None
    return bytes(letters[letter] for letter in name)


@functools.cache
def _letters() -> dict[str, int]:
    """The byte of each letter of byte-level BPE: printable ones represent themselves, the others are
    letters from 256 up (Radford et al., Language models are unsupervised multitask learners, 2019)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + at): byte for at, byte in enumerate(others)}
