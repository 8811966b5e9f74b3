"""Encodes text as token ids, and decodes them.

`TokenizerFiles` (`tokenizer_files.py`) has all data of a tokenizer as plain strings, which a bundle stores;
`Tokenizer` is made from it. Hugging Face folders are read by `jaxllm/checkpoints/tokenizer_folder.py`,
messages are rendered by `chat_template.py`. A tokenizer of unknown cost runs in a child process
(`ConfinedTokenizer`).
"""

import contextlib
import copy
import datetime
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import numpy as np
import xxhash

from jaxllm.errors import CheckpointError, ConfigError, ContextOverflow, TemplateError
from jaxllm.text.library_tokenizer import MAX_TOKEN_ID, Encoded, LibraryTokenizer
from jaxllm.text.marked_text import PLACE, MarkedText
from jaxllm.text.tokenizer_files import TOOLS_TEMPLATE, TokenizerFiles

if TYPE_CHECKING:
    from jaxllm.text.answer_syntax import AnswerFormat
    from jaxllm.text.chat_template import ChatTemplate

# A limited tokenizer refuses texts with more characters per token than this. Text has some four; the longest
# tokens of published vocabularies are runs of 128 spaces.
MAX_CHARACTERS_PER_TOKEN = 64
_USUAL_CHARACTERS = 8
_LEAST_PART = 4096
# Allowance for tokens of a word that is cut in the middle.
_OPEN_TOKENS = 256
LOAD_S = 30.0
CALL_S = 10.0
# Further time for long texts.
_S_PER_CHARACTER = 1e-5
_LEAST_BYTES = 1 << 31
# A loaded tokenizer needs many times the size of its tokenizer.json.
_BYTES_PER_CHARACTER = 64


class ConfinedTokenizer:
    """A `LibraryTokenizer` in a child process, with the same attributes and methods.

    Raises:
      CheckpointError: `tokenizer_json` is not a tokenizer, or cannot be loaded within its bounds.
    """

    def __init__(self, tokenizer_json: str, eos_ids: Sequence[int], special: Mapping[str, str]) -> None:
        # Here, because few tokenizers are confined, and a start waits for imports.
        from jaxllm.text.child_process import ChildFailed, TextProcess

        load = {
            "operation": "load",
            "tokenizer_json": tokenizer_json,
            "eos_ids": list(eos_ids),
            "special": dict(special),
        }
        memory_bytes = _LEAST_BYTES + _BYTES_PER_CHARACTER * len(tokenizer_json)
        self._process = TextProcess(memory_bytes=memory_bytes, setup=load, setup_s=LOAD_S)
        try:
            facts = self._process.ask({"operation": "facts"}, limit_s=CALL_S)
        except ChildFailed as error:
            raise CheckpointError(
                f"malformed tokenizer.json: {error}; save it again with the tokenizers library, or take "
                "another one"
            ) from error
        self.vocab_size: int = facts["vocab_size"]
        self.spelled: tuple[str, ...] = tuple(facts["spelled"])

    def encode_marked(self, text: MarkedText, *, add_special_tokens: bool) -> Encoded:
        """See `LibraryTokenizer`."""
        edges = np.flatnonzero(np.diff(text.content, prepend=False, append=False)).reshape(-1, 2)
        ids, offsets = self._ask(
            {
                "operation": "encode",
                "text": text.text,
                "content": edges.tolist(),
                "add_special_tokens": add_special_tokens,
            },
            CALL_S + _S_PER_CHARACTER * len(text.text),
            "cannot read this text",
        )
        return Encoded(ids, [(start, end) for start, end in offsets])

    def encode_many(self, texts: Sequence[MarkedText], *, add_special_tokens: bool) -> list[list[int]]:
        """See `LibraryTokenizer`; one after the other."""
        return [self.encode_marked(each, add_special_tokens=add_special_tokens).ids for each in texts]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """See `LibraryTokenizer`."""
        arguments = {"ids": list(ids), "skip_special_tokens": skip_special_tokens}
        request = {"operation": "call", "method": "decode", "arguments": arguments}
        return self._ask(request, CALL_S + _S_PER_CHARACTER * len(ids), "cannot write these tokens")

    def token_id(self, token: str) -> int | None:
        """See `LibraryTokenizer`."""
        request = {"operation": "call", "method": "token_id", "arguments": {"token": token}}
        return self._ask(request, CALL_S, "cannot be asked for a token")

    def vocabulary(self) -> dict[str, int]:
        """See `LibraryTokenizer`."""
        request = {"operation": "call", "method": "vocabulary", "arguments": {}}
        return self._ask(request, LOAD_S, "cannot be asked for its tokens")

    def _ask(self, request: Mapping[str, object], limit_s: float, what: str) -> Any:
        from jaxllm.text.child_process import ChildFailed

        try:
            return self._process.ask(request, limit_s=limit_s)
        except ChildFailed as error:
            raise ConfigError(
                f"the model's tokenizer {what}: {error}; prepare the model with another one"
            ) from error


AnyTokenizer = LibraryTokenizer | ConfinedTokenizer


class ChatOptions(TypedDict, total=False):
    """Options of `Tokenizer.chat_text`."""

    tools: Sequence[Mapping[str, Any]]
    add_generation_prompt: bool
    continue_final: bool | None
    now: datetime.datetime | None
    template_options: Mapping[str, Any] | None


class Tokenizer:
    """A model's tokenizer. Stateless between calls; threads may share it.

    Raises:
      CheckpointError: `files.tokenizer_json` is not a tokenizer.
    """

    def __init__(self, files: TokenizerFiles, *, ordinary: bool | None = None) -> None:
        """Makes a tokenizer from its data.

        Args:
          ordinary: result of `is_ordinary` for `files.tokenizer_json`; None to compute it.
        """
        self.files = files
        self._tokenizer = open_tokenizer(
            files.tokenizer_json, files.eos_ids, files.special, ordinary=ordinary
        )
        self._most_tokens: int | None = None
        self._unlimited = self

    @property
    def digest(self) -> str:
        """XXH3-128 of the text of its `tokenizer.json`, in hex: equal ones give equal ids."""
        return xxhash.xxh3_128_hexdigest(self.files.tokenizer_json.encode(errors="surrogatepass"))

    def limited(self, most_tokens: int) -> "Tokenizer":
        """A tokenizer that refuses texts of more tokens without encoding all of them.

        Its results may still have some tokens more than `most_tokens`, because the tokens of a cut word are
        unknown. It shares all data with this tokenizer, at no cost.
        """
        limited = copy.copy(self)
        limited._most_tokens = most_tokens
        return limited

    @property
    def vocab_size(self) -> int:
        """One more than the highest token id. A model's embedding may have more rows than this, never
        fewer."""
        return self._tokenizer.vocab_size

    def same_tokens(self, other: "Tokenizer") -> bool:
        """Whether both have the same tokens with the same ids."""
        return self.vocabulary() == other.vocabulary()

    def vocabulary(self) -> Mapping[str, int]:
        """The id of every token, by its name in the tokenizer's file."""
        return self._tokenizer.vocabulary()

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Every token that ends an answer."""
        return self.files.eos_ids

    @property
    def bos_id(self) -> int | None:
        """The token that begins a text, if the model has one."""
        return self.files.bos_id

    @functools.cached_property
    def adds_bos(self) -> bool:
        """Whether `encode` begins a text with `bos_id`: a tokenizer may name that token without adding it."""
        return self.bos_id is not None and self.encode("a")[:1] == [self.bos_id]

    @functools.cached_property
    def special_tokens(self) -> tuple[tuple[str, int], ...]:
        """The texts and ids of the special tokens, which have no text in `decode`."""
        found = ((text, self._tokenizer.token_id(text)) for text in self._tokenizer.spelled)
        return tuple((text, number) for text, number in found if number is not None)

    @property
    def has_chat_template(self) -> bool:
        """Whether `render_chat` and `encode_chat` can be used."""
        return self.files.chat_template is not None

    @property
    def chat_template(self) -> str:
        """The Jinja source of the chat template; empty for none."""
        return self.files.chat_template or ""

    def encode(
        self, text: str | MarkedText, *, add_special_tokens: bool = True, special: bool = True
    ) -> list[int]:
        """Token ids of `text`.

        Args:
          text: text to encode; in a `MarkedText` only the template's characters become special tokens,
            never content.
          add_special_tokens: whether to add the model's begin and end tokens, if any.
          special: whether special tokens spelled in a plain text become these tokens, as in Hugging Face's
            tokenizers. Pass False for untrusted text.

        Raises:
          ConfigError: `text` is not text, or has a lone surrogate, which UTF-8 cannot encode.
          ContextOverflow: it has more tokens than this tokenizer's limit.
        """
        return self._encode(text, add_special_tokens, special).ids

    def encode_many(
        self, texts: Sequence[str | MarkedText], *, add_special_tokens: bool = True, special: bool = True
    ) -> list[list[int]]:
        """`encode` of several texts, on all cores if the tokenizer runs in this process; for training.

        Raises:
          ConfigError, ContextOverflow: as `encode`.
        """
        marked = [self._marked(each, special) for each in texts]
        return self._tokenizer.encode_many(marked, add_special_tokens=add_special_tokens)

    def encode_with_offsets(
        self, text: str | MarkedText, *, add_special_tokens: bool = True, special: bool = True
    ) -> tuple[list[int], np.ndarray]:
        """`encode`, and the characters of `text` of each token.

        Returns:
          The ids; and `[T, 2]` int64, first and last + 1 character. Added begin and end tokens have none;
          tokens that share the bytes of a character all have it.

        Raises:
          ConfigError, ContextOverflow: as `encode`.
        """
        encoded = self._encode(text, add_special_tokens, special)
        return encoded.ids, np.array(encoded.offsets, np.int64).reshape(-1, 2)

    def _encode(self, text: str | MarkedText, add_special_tokens: bool, special: bool) -> Encoded:
        marked = self._marked(text, special)
        return self._tokenizer.encode_marked(marked, add_special_tokens=add_special_tokens)

    def _marked(self, text: str | MarkedText, special: bool) -> MarkedText:
        """Converts a text to one that this tokenizer can encode."""
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
        return text

    def _require_short(self, characters: int) -> None:
        most = self._most_tokens
        if most is not None and characters > most * MAX_CHARACTERS_PER_TOKEN:
            raise ContextOverflow(
                f"the prompt has {characters} characters; at most {most * MAX_CHARACTERS_PER_TOKEN} are read "
                f"where {most} tokens fit; shorten it"
            )

    def _require_fitting(self, text: MarkedText) -> None:
        """Encodes growing prefixes of a text that may be too long, up to twice the limit."""
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

        Ids past the vocabulary (the padding rows of a model) have no text.

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
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
        continue_final: bool | None = None,
        now: datetime.datetime | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> MarkedText:
        """The prompt of `messages` by the model's chat template. Encode it without adding special tokens,
        because the template writes all of them.

        Args:
          messages: JSON objects with a `role` and usually a `content`, oldest first.
          tools: JSON objects for templates that support tools. Their text is content, like that of messages.
          add_generation_prompt: whether the prompt ends where an assistant's text continues.
          continue_final: whether that is after the last message's text, else at the beginning of a new
            turn; None continues the last message if it is an assistant's.
          now: time for templates; this module has no clock.
          template_options: further variables of the template, such as `enable_thinking`; plain JSON.

        Raises:
          ConfigError: the model has no chat template, a message is malformed or has an unknown role, there
            are tools without support of the template, the last message cannot be continued, or the template
            requires the time and `now` is None.
          TemplateError: the template refuses the messages or is broken.
          ContextOverflow: they have far more tokens than this tokenizer's limit.
        """
        if self._most_tokens is not None:
            self._require_short(_characters(messages) + _characters(list(tools)))
        if continue_final is None:
            # Malformed messages are refused when they are rendered.
            last = messages[-1] if isinstance(messages, Sequence) and messages else None
            continue_final = isinstance(last, Mapping) and last.get("role") == "assistant"
        if not (add_generation_prompt and continue_final):
            return self._template(tools).render(
                messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                now=now,
                options=template_options,
            )
        text = self._template(tools).render(
            _open_ended(messages), tools=tools, add_generation_prompt=False, now=now, options=template_options
        )
        end = text.text.rfind(PLACE)
        if end < 0:
            raise ConfigError(
                "the model's chat template does not write the text of the last message, which the answer "
                "would continue; end with another message"
            )
        return text.part(0, end)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]) -> str:
        """`chat_text` as a plain string, for display. To encode use `chat_text`, which marks content.

        Raises:
          ConfigError, TemplateError: as `chat_text`.
        """
        return self.chat_text(messages, **options).text

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]) -> list[int]:
        """Token ids of `chat_text`: the template's special tokens, and none that a message spells.

        Raises:
          ConfigError: as `chat_text` and `encode`.
          TemplateError: as `chat_text`.
        """
        return self.encode(self.chat_text(messages, **options), add_special_tokens=False)

    @property
    def chat_reads_parts_alone(self) -> bool:
        """Whether there is a chat template that supports contents as lists of parts, but not as texts.

        Raises:
          TemplateError: the template is broken.
        """
        return self.has_chat_template and self._template().reads_parts_alone

    def compile_chat_template(self) -> None:
        """Compiles the chat template, if there is one, so that the first chat need not wait for it. A
        broken one is reported by the chat that uses it: plain prompts do not need it."""
        if self.has_chat_template:
            with contextlib.suppress(TemplateError):
                self._template()

    @property
    def answer_format(self) -> "AnswerFormat":
        """The format of the model's answers, with its special tokens (see `ChatTemplate.answer_format`)."""
        return self._unlimited._answer_format

    @functools.cached_property
    def _answer_format(self) -> "AnswerFormat":
        from jaxllm.text.answer_syntax import PLAIN_FORMAT, with_tokens

        if not self.has_chat_template:
            return PLAIN_FORMAT
        return with_tokens(self._template(["any"]).answer_format, self.special_tokens, self.eos_ids)

    def _template(self, tools: Sequence[Any] = ()) -> "ChatTemplate":
        """The template of a conversation: some models have another one for tools."""
        return self._unlimited._compiled_templates[bool(tools)]

    @functools.cached_property
    def _compiled_templates(self) -> "tuple[ChatTemplate, ChatTemplate]":
        # Lazily: a model with a broken template still answers plain prompts, without importing Jinja.
        if (source := self.files.chat_template) is None:
            raise ConfigError("the model has no chat template; send a plain prompt instead")
        from jaxllm.text.chat_template import ChatTemplate

        made = ChatTemplate(source, self.files.special, self._tokenizer.spelled)
        own = self.files.templates.get(TOOLS_TEMPLATE, source)
        return made, made if own == source else ChatTemplate(own, self.files.special, self._tokenizer.spelled)


def _open_ended(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Messages whose last one ends with `PLACE`; raises ConfigError if it has no text at its end."""
    *before, last = messages
    content = last.get("content")
    if last.get("role") != "assistant" or last.get("tool_calls"):
        what = "calls tools; send their results"
        if last.get("role") != "assistant":
            what = f"is of {last.get('role')!r:.40}"
        raise ConfigError(f"an answer continues an assistant's text, and the last message is none: it {what}")
    if isinstance(content, str | None):
        return [*before, {**last, "content": f"{content or ''}{PLACE}"}]
    if isinstance(content, Sequence) and all(isinstance(each, Mapping) for each in content):
        return [*before, {**last, "content": [*content, {"type": "text", "text": PLACE}]}]
    raise ConfigError(f"the content of the last message is a text or a list of parts, got {content!r:.80}")


def _characters(messages: Any) -> int:
    """Number of characters of all messages as JSON, the form in which templates get them."""
    try:
        return len(json.dumps(messages, ensure_ascii=False))
    except (TypeError, ValueError, RecursionError):
        return 0  # Values that are not JSON are refused later, with a separate message.


def open_tokenizer(
    tokenizer_json: str,
    eos_ids: Sequence[int] = (),
    special: Mapping[str, str] | None = None,
    *,
    ordinary: bool | None = None,
) -> AnyTokenizer:
    """Opens a tokenizer: in this process if it only has well-known parts, else in a child process.

    Args:
      tokenizer_json: the text of a tokenizer.json.
      eos_ids: tokens that end an answer.
      special: names that a chat template may use, and their tokens.
      ordinary: result of `is_ordinary` for the text; None to compute it.

    Raises:
      CheckpointError: `tokenizer_json` is not a tokenizer.
    """
    if ordinary is None:
        from jaxllm.text.tokenizer_bounds import is_ordinary

        ordinary = is_ordinary(tokenizer_json)
    make = LibraryTokenizer if ordinary else ConfinedTokenizer
    return make(tokenizer_json, eos_ids, special or {})
