"""Runs a tokenizer of the `tokenizers` library.

Only the template's characters become special tokens. The library makes a special token wherever its letters
occur: if no content spells one, `encode_marked` gives exactly the library's tokens. Else it splits the text
at the special tokens that the template wrote, and encodes the parts between them without special tokens.
"""

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from jaxllm.errors import CheckpointError, ConfigError, one_line
from jaxllm.text.marked_text import MarkedText

if TYPE_CHECKING:
    import tokenizers

# Token ids are int32 in compiled steps.
MAX_TOKEN_ID = (1 << 31) - 1

# How a part begins: with the text, after a special token, or at another split.
_Begins = Literal["text", "section", "rest"]


@dataclasses.dataclass(frozen=True)
class Encoded:
    """Token ids, and the first and last + 1 character of each."""

    ids: list[int]
    offsets: list[tuple[int, int]]


class LibraryTokenizer:
    """Encodes text as token ids, and decodes them. Stateless between calls; threads may share it.

    Content must not spell its control tokens: those that the tokenizer marks as special, and other added
    tokens that a model's files name as the beginning or end of a text. Other added tokens (`<think>`, runs of
    spaces) are ordinary text.

    Attributes:
      vocab_size: one more than the highest token id.
      spelled: the control tokens as text.

    Raises:
      CheckpointError: `tokenizer_json` is not a tokenizer.
    """

    def __init__(self, tokenizer_json: str, eos_ids: Sequence[int], special: Mapping[str, str]) -> None:
        self._tokenizer, self._json = parse_tokenizer_json(tokenizer_json), tokenizer_json
        self._plain: dict[_Begins, tokenizers.Tokenizer] = {}
        named, added = set(special.values()), self._tokenizer.get_added_tokens_decoder()
        self._tokens = {
            number: token
            for number, token in added.items()
            if token.content and (token.special or number in eos_ids or token.content in named)
        }
        # The unknown token represents any unknown word, so it is not a control token.
        unknown = {special.get("unk_token"), getattr(self._tokenizer.model, "unk_token", None)}
        self._unknown = {number for number, token in self._tokens.items() if token.content in unknown}
        self.spelled = tuple(token.content for token in self._tokens.values())
        self.vocab_size = max(
            self._tokenizer.get_vocab_size(with_added_tokens=False), 1 + max(added, default=-1)
        )

    def encode_marked(self, text: MarkedText, *, add_special_tokens: bool) -> Encoded:
        """The tokens of a text; its content never becomes a special token.

        Raises:
          ConfigError: the tokenizer fails on this text.
        """
        with _failures("cannot read this text"):
            return self._encoded(text, add_special_tokens)

    def encode_many(self, texts: Sequence[MarkedText], *, add_special_tokens: bool) -> list[list[int]]:
        """The ids of several texts, in threads of the library: those of `encode_marked`.

        Raises:
          ConfigError: the tokenizer fails on a text.
        """
        with _failures("cannot read these texts"):
            batch = [each.text for each in texts]
            encodings = self._tokenizer.encode_batch_fast(batch, add_special_tokens=add_special_tokens)
            before, after = self._around() if add_special_tokens else ([], [])
            found = []
            for text, ids in zip(texts, (each.ids for each in encodings), strict=True):
                end = len(ids) - len(after)
                known = ids[: len(before)] == before and ids[end:] == after
                plain = known and self._tokens.keys().isdisjoint(ids[len(before) : end])
                found.append(ids if plain else self._encoded(text, add_special_tokens).ids)
            return found

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of ids in [0, 2**32).

        Raises:
          ConfigError: the tokenizer fails on these ids.
        """
        with _failures("cannot write these tokens"):
            return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_id(self, token: str) -> int | None:
        """The id of a token as text, if there is one."""
        try:
            return self._tokenizer.token_to_id(token)
        except UnicodeEncodeError:  # No token has a lone surrogate in its name.
            return None

    def vocabulary(self) -> dict[str, int]:
        """The id of every token."""
        return self._tokenizer.get_vocab()

    def _encoded(self, text: MarkedText, add_special_tokens: bool) -> Encoded:
        encoding = self._tokenizer.encode(text.text, add_special_tokens=add_special_tokens)
        whole = Encoded(encoding.ids, encoding.offsets)
        if not text.content.any() or not any(
            text.content[start:end].any() for _, start, end in self._written(text.text, whole)
        ):
            return whole
        # Split at the special tokens that its template wrote.
        parts, end = [], 0
        for number, start, stop in self._own(text):
            start = max(start, end)
            parts += self._between(text.text, end, start, "section" if end else "text")
            parts.append(Encoded([number], [(start, stop)]))
            end = stop
        parts += self._between(text.text, end, len(text.text), "section" if end else "text")
        ids = [number for each in parts for number in each.ids]
        offsets = [place for each in parts for place in each.offsets]
        before, after = self._around() if add_special_tokens else ([], [])
        return Encoded(
            [*before, *ids, *after], [*((0, 0) for _ in before), *offsets, *((0, 0) for _ in after)]
        )

    def _written(self, text: str, encoded: Encoded) -> Iterator[tuple[int, int, int]]:
        """Special tokens spelled in a text: id, first and last + 1 character, without the white space that
        they absorb."""
        if self._tokens.keys().isdisjoint(encoded.ids):
            return
        for number, (start, end) in zip(encoded.ids, encoded.offsets, strict=True):
            token = self._tokens.get(number)
            if token is None or start == end:
                continue
            at = text.find(token.content, start, end)
            if at >= 0:
                yield number, at, at + len(token.content)
            elif number not in self._unknown:
                # A normalizer turned other letters into the token.
                inner = text[start:end]
                start += len(inner) - len(inner.lstrip())
                yield number, start, max(start + 1, start + len(inner.strip()))

    def _own(self, text: MarkedText) -> Iterator[tuple[int, int, int]]:
        """Special tokens written entirely by the template: id, first and last + 1 character, with the white
        space that they absorb."""
        edges = np.flatnonzero(np.diff(text.content, prepend=True, append=True))
        for start, end in edges.reshape(-1, 2).tolist():
            run = text.text[start:end]
            encoding = self._tokenizer.encode(run, add_special_tokens=False)
            for number, first, last in self._written(run, Encoded(encoding.ids, encoding.offsets)):
                first, last = first + start, last + start
                while self._tokens[number].lstrip and first and text.text[first - 1].isspace():
                    first -= 1
                while self._tokens[number].rstrip and text.text[last : last + 1].isspace():
                    last += 1
                yield number, first, last

    def _between(self, text: str, start: int, end: int, begins: _Begins) -> Iterator[Encoded]:
        """The tokens of `text[start:end]`, none of them special; `begins` is how that part begins."""
        section = text[start:end]
        if not section:
            return
        encoding = self._without_control(begins).encode(section, add_special_tokens=False)
        encoded = Encoded(encoding.ids, [(first + start, last + start) for first, last in encoding.offsets])
        normalizer = self._tokenizer.normalizer

        def spelled(written: str) -> tuple[str, ...]:
            return (written,) if normalizer is None else (written, normalizer.normalize_str(written))

        # Some vocabularies have special tokens as ordinary pieces, too: split in two, such a text gives other
        # tokens.
        cuts = [
            first + 1
            for number, first, last in self._written(text, encoded)
            if last - first > 1 and self._tokens[number].content in spelled(text[first:last])
        ]
        if not cuts:
            yield encoded
            return
        for first, last in itertools.pairwise([start, *cuts, end]):
            yield from self._between(text, first, last, begins if first == start else "rest")

    def _without_control(self, begins: _Begins) -> "tokenizers.Tokenizer":
        """A copy of the tokenizer that makes no special tokens, for texts that begin in this way.

        It is made when content first spells a special token, because it needs the memory of another
        tokenizer.
        """
        if begins in self._plain:
            return self._plain[begins]
        data = json.loads(self._json)
        for token in data["added_tokens"]:
            token["special"] = token["special"] or token["id"] in self._tokens
        for part in ("normalizer", "pre_tokenizer"):
            _prepend_less(data.get(part), begins)
        tokenizer = type(self._tokenizer).from_str(json.dumps(data))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
        self._plain[begins] = tokenizer
        return tokenizer

    def _around(self) -> tuple[list[int], list[int]]:
        """The special tokens that the tokenizer adds before and after a text."""
        encoding = self._tokenizer.encode("a", add_special_tokens=True)
        inner = np.flatnonzero(np.array(encoding.special_tokens_mask, np.int64) == 0)
        first, last = (inner[0], inner[-1] + 1) if inner.size else (len(encoding.ids),) * 2
        return encoding.ids[:first], encoding.ids[last:]


def _prepend_less(part: Any, begins: _Begins) -> None:
    """Removes the settings that prepend a space, for parts that do not begin a text."""
    if not isinstance(part, dict) or begins == "text":
        return
    if part.get("prepend_scheme") == "first" or (begins == "rest" and "prepend_scheme" in part):
        part["prepend_scheme"] = "never"
    if begins == "rest":
        if part.get("type") == "Prepend":
            part["prepend"] = ""
        if "add_prefix_space" in part:
            part["add_prefix_space"] = False
    for each in (*part.get("normalizers", ()), *part.get("pretokenizers", ())):
        _prepend_less(each, begins)


def parse_tokenizer_json(text: str) -> "tokenizers.Tokenizer":
    """A tokenizer of the `tokenizers` library that neither truncates nor pads.

    Raises:
      CheckpointError: `text` is not a `tokenizer.json`.
    """
    # Here, because a start reads compiled buckets while this library is imported.
    import tokenizers

    try:
        tokenizer = tokenizers.Tokenizer.from_str(text)
        # A tokenizer.json may have these settings from training; they would silently shorten prompts.
        tokenizer.no_truncation()
        tokenizer.no_padding()
    except BaseException as error:
        if not is_library_error(error):
            raise
        raise CheckpointError(
            f"malformed tokenizer.json: {one_line(error)}; save it again with the tokenizers library"
        ) from error
    return tokenizer


def is_library_error(error: BaseException) -> bool:
    """Whether an error comes from the library: it raises bare `Exception`s, and panics, which are no
    `Exception`."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


@contextlib.contextmanager
def _failures(what: str) -> Iterator[None]:
    """Errors of the library as ConfigErrors, except of memory."""
    try:
        yield
    except BaseException as error:
        if not is_library_error(error) or isinstance(error, MemoryError):
            raise
        raise ConfigError(
            f"the model's tokenizer {what}: {one_line(error)}; prepare the model with another one"
        ) from error
