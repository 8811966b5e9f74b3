"""Text to token ids and back.

`TokenizerFiles` is all that a tokenizer needs, as plain strings, so that it lives inside a bundle;
`Tokenizer` is made from it. Reading a Hugging Face folder is `jaxllm/checkpoints/tokenizer_folder`,
conversations are `jaxllm/chat_template`, text that arrives token by token is `serving/text`.
"""

import copy
import dataclasses
import datetime
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxllm.confined_tokenizer import ConfinedTokenizer
from jaxllm.control_tokens import Encoded
from jaxllm.errors import CheckpointError, ConfigError, ContextOverflow, one_line
from jaxllm.library_tokenizer import MAX_TOKEN_ID, LibraryTokenizer
from jaxllm.marked_text import MarkedText
from jaxllm.ordinary_tokenizers import is_ordinary

if TYPE_CHECKING:
    from jaxllm.chat_template import ChatTemplate

# What a limited tokenizer reads at most. Text has some four characters per token; the longest tokens of
# published vocabularies are runs of 128 spaces.
MAX_CHARACTERS_PER_TOKEN = 64
_USUAL_CHARACTERS = 8
_LEAST_PART = 4096
# Those of a word that is cut in its middle.
_OPEN_TOKENS = 256

AnyTokenizer = LibraryTokenizer | ConfinedTokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizerFiles:
    """A tokenizer as plain data: what a bundle stores.

    Fields:
      tokenizer_json: the text of a `tokenizer.json` of the `tokenizers` library.
      chat_template: the Jinja source that turns messages into a prompt, or None.
      special: names that the chat template may use (`bos_token`, `eos_token`, `pad_token`, ...) and
        the token each stands for.
      eos_ids: every token that ends an answer, the main one first; empty when none does.
      bos_id: the token that begins a text, or None.

    Raises:
      CheckpointError: a field is of the wrong type.
    """

    tokenizer_json: str
    chat_template: str | None = None
    special: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None

    def __post_init__(self) -> None:
        template, special, ids = self.chat_template, self.special, self.eos_ids
        _require("tokenizer_json", isinstance(self.tokenizer_json, str), "text", self.tokenizer_json)
        _require("chat_template", template is None or isinstance(template, str), "text or null", template)
        named = isinstance(special, Mapping) and all(
            isinstance(text, str) for item in special.items() for text in item
        )
        _require("special", named, "a map from names to tokens", special)
        valid = isinstance(ids, tuple) and all(map(_is_token_id, ids))
        _require("eos_ids", valid, f"token ids in [0, {MAX_TOKEN_ID}]", ids)
        valid = self.bos_id is None or _is_token_id(self.bos_id)
        _require("bos_id", valid, f"null or a token id in [0, {MAX_TOKEN_ID}]", self.bos_id)

    def to_json(self) -> dict[str, Any]:
        """A plain dict that `from_json` reads back."""
        return {
            "tokenizer_json": self.tokenizer_json,
            "chat_template": self.chat_template,
            "special": dict(self.special),
            "eos_ids": list(self.eos_ids),
            "bos_id": self.bos_id,
        }

    @classmethod
    def from_json(cls, data: Any) -> "TokenizerFiles":
        """Read what `to_json` wrote.

        Raises:
          CheckpointError: a key is unknown or missing, or a value is of the wrong type.
        """
        _require("the tokenizer", isinstance(data, dict), "a JSON object", data)
        fields = dict(data)
        if isinstance(fields.get("eos_ids"), list):
            fields["eos_ids"] = tuple(fields["eos_ids"])
        try:
            return cls(**fields)
        except TypeError as error:
            raise CheckpointError(
                f"malformed tokenizer: {one_line(error)}; prepare the bundle again"
            ) from error


class Tokenizer:
    """A model's tokenizer. It holds no state between calls and may be shared by threads.

    Raises:
      CheckpointError: `files.tokenizer_json` is not a tokenizer.
    """

    def __init__(self, files: TokenizerFiles) -> None:
        self._files = files
        self._tokenizer = open_tokenizer(files.tokenizer_json, files.eos_ids, files.special)
        self._most_tokens: int | None = None
        self._unlimited = self

    def limited(self, most_tokens: int) -> "Tokenizer":
        """This tokenizer, as one that refuses texts of more tokens without reading them to their end.

        What it encodes still may have some tokens more than `most_tokens`: where a text ends within a
        word, nobody knows its tokens. It costs nothing, and shares all with this one.
        """
        limited = copy.copy(self)
        limited._most_tokens = most_tokens
        return limited

    @property
    def files(self) -> TokenizerFiles:
        """The plain data that this tokenizer was made from."""
        return self._files

    @property
    def vocab_size(self) -> int:
        """One more than the highest token id. A model may have more rows than this, never fewer."""
        return self._tokenizer.vocab_size

    def same_tokens(self, other: "Tokenizer") -> bool:
        """Whether both have the same tokens with the same ids, so that one reads what the other writes."""
        return self._tokenizer.vocabulary() == other._tokenizer.vocabulary()

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Every token that ends an answer."""
        return self._files.eos_ids

    @property
    def bos_id(self) -> int | None:
        """The token that begins a text, if the model has one."""
        return self._files.bos_id

    @property
    def has_chat_template(self) -> bool:
        """Whether `render_chat` and `encode_chat` can be used."""
        return self._files.chat_template is not None

    def encode(
        self, text: str | MarkedText, *, add_special_tokens: bool = True, special: bool = True
    ) -> list[int]:
        """Token ids of `text`.

        Args:
          text: where it is marked, its content spells no special token; the template's characters do.
          add_special_tokens: with the model's begin and end tokens where it wants them.
          special: whether a special token spelled out in a plain text becomes that token, as in Hugging
            Face's tokenizers. Pass False for whatever somebody else wrote.

        Raises:
          ConfigError: `text` is no text, or has a lone surrogate and so no UTF-8 form.
          ContextOverflow: it has more tokens than this tokenizer is limited to.
        """
        return self._encode(text, add_special_tokens, special).ids

    def encode_with_offsets(
        self, text: str | MarkedText, *, add_special_tokens: bool = True, special: bool = True
    ) -> tuple[list[int], np.ndarray]:
        """`encode`, and which characters of `text` each token stands for.

        Returns:
          The ids; `[T, 2]` int64, first and last + 1. Tokens that the model wants around a text stand for
          none; those that share a character's bytes all stand for it.

        Raises:
          ConfigError, ContextOverflow: as `encode`.
        """
        encoded = self._encode(text, add_special_tokens, special)
        return encoded.ids, np.array(encoded.offsets, np.int64).reshape(-1, 2)

    def _encode(self, text: str | MarkedText, add_special_tokens: bool, special: bool) -> Encoded:
        plain = text.text if isinstance(text, MarkedText) else text
        if not isinstance(plain, str):
            raise ConfigError(f"a prompt must be text, got {type(plain).__name__}")
        self._require_short(len(plain))
        try:
            plain.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"the text has a lone surrogate {plain[error.start]!r} at character {error.start}; "
                "send valid Unicode"
            ) from error
        if not isinstance(text, MarkedText):
            text = MarkedText.of_template(text) if special else MarkedText.of_content(text)
        self._require_fitting(text)
        return self._tokenizer.encode_marked(text, add_special_tokens=add_special_tokens)

    def _require_short(self, characters: int) -> None:
        most = self._most_tokens
        if most is not None and characters > most * MAX_CHARACTERS_PER_TOKEN:
            raise ContextOverflow(
                f"the prompt has {characters} characters; at most {most * MAX_CHARACTERS_PER_TOKEN} are read "
                f"where {most} tokens fit; shorten it"
            )

    def _require_fitting(self, text: MarkedText) -> None:
        """Reads longer and longer beginnings of a text that may be too long: twice of what fits at most."""
        most, length = self._most_tokens, len(text.text)
        if most is None:
            return
        part = max(_LEAST_PART, most * _USUAL_CHARACTERS)
        while part < length:
            beginning = self._tokenizer.encode_marked(text.part(0, part), add_special_tokens=False)
            if len(beginning.ids) > most + _OPEN_TOKENS:
                raise ContextOverflow(
                    f"the prompt has {length} characters, of which the first {part} are more than the {most} "
                    "tokens that fit; shorten it"
                )
            part *= 2

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`. Bytes that are not UTF-8 become U+FFFD.

        Ids past the vocabulary (the padding rows of a model) stand for no text.

        Raises:
          ConfigError: an id is negative or exceeds 32 bits.
        """
        plain = [int(token) for token in ids]
        bad = next((token for token in plain if not 0 <= token <= MAX_TOKEN_ID), None)
        if bad is not None:
            raise ConfigError(f"token ids must be in [0, {MAX_TOKEN_ID}], got {bad}")
        return self._tokenizer.decode(plain, skip_special_tokens=skip_special_tokens)

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        now: datetime.datetime | None = None,
    ) -> MarkedText:
        """The prompt that the model's chat template makes of `messages`: to be encoded without adding
        special tokens, because the template itself writes them all.

        Args:
          messages: JSON objects with a `role` and usually a `content`, oldest first.
          add_generation_prompt: end with the words that begin an assistant's answer.
          now: the time told to templates that ask for it; this module has no clock.

        Raises:
          ConfigError: the model has no chat template, a message is malformed or of a role that the
            template does not know, or the template asks for the time and `now` is None.
          TemplateError: the template refuses the messages or is broken.
          ContextOverflow: they have more tokens than this tokenizer is limited to, by far.
        """
        if self._most_tokens is not None:
            self._require_short(_characters(messages))
        return self._chat_template.render(messages, add_generation_prompt=add_generation_prompt, now=now)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        now: datetime.datetime | None = None,
    ) -> str:
        """`chat_text` to look at. Its characters no longer say who wrote them: encode `chat_text`.

        Raises:
          ConfigError, TemplateError: as `chat_text`.
        """
        return self.chat_text(messages, add_generation_prompt=add_generation_prompt, now=now).text

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        now: datetime.datetime | None = None,
    ) -> list[int]:
        """Token ids of `chat_text`: the template's special tokens, and none that a message spells.

        Raises:
          ConfigError: as `chat_text` and `encode`.
          TemplateError: as `chat_text`.
        """
        text = self.chat_text(messages, add_generation_prompt=add_generation_prompt, now=now)
        return self.encode(text, add_special_tokens=False)

    @property
    def _chat_template(self) -> "ChatTemplate":
        return self._unlimited._compiled_template

    @functools.cached_property
    def _compiled_template(self) -> "ChatTemplate":
        # Compiled on first use: a model with a broken template still answers plain prompts, and these do
        # not wait for Jinja.
        if self._files.chat_template is None:
            raise ConfigError("the model has no chat template; send a plain prompt instead")
        from jaxllm.chat_template import ChatTemplate

        return ChatTemplate(self._files.chat_template, self._files.special, self._tokenizer.spelled)


def _characters(messages: Any) -> int:
    """Of all texts in messages as JSON, which is how templates see them."""
    try:
        return sum(map(len, json.JSONEncoder(ensure_ascii=False).iterencode(messages)))
    except (TypeError, ValueError, RecursionError):
        return 0  # What is no JSON is refused with its own words.


def open_tokenizer(
    tokenizer_json: str, eos_ids: Sequence[int] = (), special: Mapping[str, str] | None = None
) -> AnyTokenizer:
    """A tokenizer: of known make in this process, of any other in a bounded one.

    Raises:
      CheckpointError: `tokenizer_json` is not a tokenizer.
    """
    make = LibraryTokenizer if is_ordinary(tokenizer_json) else ConfinedTokenizer
    return make(tokenizer_json, eos_ids, special or {})


def _is_token_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_TOKEN_ID


def _require(name: str, condition: bool, allowed: str, value: Any) -> None:
    if not condition:
        raise CheckpointError(f"{name} must be {allowed}, got {value!r:.80}; prepare the model again")
