"""Runs a tokenizer of the `tokenizers` library in this process."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from jaxllm.errors import CheckpointError, ConfigError, one_line
from jaxllm.text.control_tokens import ControlTokens, Encoded
from jaxllm.text.marked_text import MarkedText

if TYPE_CHECKING:
    import tokenizers

# Token ids are int32 in compiled steps.
MAX_TOKEN_ID = (1 << 31) - 1


class LibraryTokenizer:
    """Encodes text as token ids, and decodes them. Stateless between calls; threads may share it.

    Attributes:
      vocab_size: one more than the highest id.
      spelled: special tokens as text.

    Raises:
      CheckpointError: `tokenizer_json` is not a tokenizer.
    """

    def __init__(self, tokenizer_json: str, eos_ids: Sequence[int], special: Mapping[str, str]) -> None:
        self._tokenizer = parse_tokenizer_json(tokenizer_json)
        self._control = ControlTokens(self._tokenizer, tokenizer_json, eos_ids, special)
        self.spelled = self._control.spelled
        added = self._tokenizer.get_added_tokens_decoder()
        self.vocab_size = max(
            self._tokenizer.get_vocab_size(with_added_tokens=False), 1 + max(added, default=-1)
        )

    def encode_marked(self, text: MarkedText, *, add_special_tokens: bool) -> Encoded:
        """See `ControlTokens`.

        Raises:
          ConfigError: the tokenizer fails on this text.
        """
        try:
            return self._control.encode_marked(text, add_special_tokens=add_special_tokens)
        except BaseException as error:
            raise _failed(error, "cannot read this text") from error

    def encode_many(self, texts: Sequence[MarkedText], *, add_special_tokens: bool) -> list[list[int]]:
        """The ids of several texts, see `ControlTokens.encode_many`.

        Raises:
          ConfigError: the tokenizer fails on a text.
        """
        try:
            return self._control.encode_many(texts, add_special_tokens=add_special_tokens)
        except BaseException as error:
            raise _failed(error, "cannot read these texts") from error

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of ids in [0, 2**32).

        Raises:
          ConfigError: the tokenizer fails on these ids.
        """
        try:
            return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        except BaseException as error:
            raise _failed(error, "cannot write these tokens") from error

    def token_id(self, token: str) -> int | None:
        """The id of a token as text, if there is one."""
        try:
            return self._tokenizer.token_to_id(token)
        except UnicodeEncodeError:  # No token has a lone surrogate in its name.
            return None

    def vocabulary(self) -> dict[str, int]:
        """The id of every token."""
        return self._tokenizer.get_vocab()


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


def _failed(error: BaseException, what: str) -> BaseException:
    if not is_library_error(error) or isinstance(error, MemoryError):
        return error
    return ConfigError(f"the model's tokenizer {what}: {one_line(error)}; prepare the model with another one")
