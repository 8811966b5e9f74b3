"""Encodes documents as token ids: by a tokenizer trained here, or by any model's with its chat template."""

import dataclasses
import datetime
import hashlib
import json
from collections.abc import Iterator, Sequence

import tokenizers

from jaxllm.errors import ConfigError
from jaxllm.tasks.example import TaskExample
from jaxllm.text.marked_text import MarkedText
from jaxllm.text.prompts import end_of_turn_id, prompt_text
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.training.data.documents import Document, Special
from jaxllm.training.data.tokenizer import token_id

# Date for templates that write one: constant, so that tokens are reproducible.
_NOW = datetime.datetime(2024, 7, 26, tzinfo=datetime.UTC)
# Changed whenever the same files give other ids.
_MODEL_ENCODING = "special tokens' names are text"


class PieceEncoder:
    """Encodes pieces unchanged, by a tokenizer of `train_tokenizer`."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        # A special token's name inside a text is text.
        self._plain = tokenizers.Tokenizer.from_str(tokenizer.to_str())
        self._plain.encode_special_tokens = True

    @property
    def identity(self) -> str:
        """The tokenizer's own file, which differs if the ids may differ."""
        return self._tokenizer.to_str()

    @property
    def vocab_size(self) -> int:
        """Tokens, special ones included."""
        return self._tokenizer.get_vocab_size()

    def encode(self, documents: Sequence[Document]) -> list[tuple[list[int], int]]:
        """Returns the ids of each document, and the number of the prompt's."""
        texts = [text for document in documents for text in document.texts]
        encodings = iter(self._plain.encode_batch_fast(texts, add_special_tokens=False))
        return [self._joined(document, encodings) for document in documents]

    def _joined(self, document: Document, encodings) -> tuple[list[int], int]:
        if document.tools:
            raise ConfigError(
                "a new model has no place for the tools of a conversation; leave such lines out, or train a "
                "model on whose chat template knows tools"
            )
        ids: list[int] = []
        prompt_tokens = 0
        for number, piece in enumerate(document.pieces, start=1):
            special = isinstance(piece, Special)
            ids += [token_id(self._tokenizer, piece.token)] if special else next(encodings).ids
            if number == document.prompt_pieces:
                prompt_tokens = len(ids)
        return ids, prompt_tokens


class ModelEncoder:
    """Encodes as a served model encodes its prompts: questions through its own chat template, and a special
    token's name inside a text as text.

    Raises:
      ConfigError: the model has no token for the end of a text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        end = end_of_turn_id(tokenizer, now=_NOW)
        if end is None:
            raise ConfigError("the model names no end token, so it cannot learn where an answer ends")
        self._end_of_turn, self._end_of_text = end, tokenizer.eos_ids[-1]

    @property
    def identity(self) -> str:
        """A digest of the tokenizer's files, and of how they are used."""
        facts = [_MODEL_ENCODING, self._tokenizer.files.to_json()]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    @property
    def vocab_size(self) -> int:
        """One more than the highest id."""
        return self._tokenizer.vocab_size

    def encode(self, documents: Sequence[Document]) -> list[tuple[list[int], int]]:
        """See `PieceEncoder`."""
        parts = [self._parts(each) for each in documents]
        # All texts of a kind at once, which the tokenizer's threads share.
        ids: dict[bool, Iterator[list[int]]] = {}
        for special in (True, False):
            texts = [text for each in parts for text, added in each.texts if added == special]
            ids[special] = iter(self._tokenizer.encode_many(texts, add_special_tokens=special))
        return [self._joined(each, [next(ids[added]) for _, added in each.texts]) for each in parts]

    def _joined(self, parts: "_Parts", ids: list[list[int]]) -> tuple[list[int], int]:
        if not parts.prompt:
            return [*ids[0], parts.end], 0
        prompt, answer = ids
        if not prompt:
            raise ConfigError(f"a question without a token: {parts.texts[0][0].text!r:.200}")
        return [*prompt, *answer, parts.end], len(prompt)

    def _parts(self, document: Document) -> "_Parts":
        example, content = document.example, MarkedText.of_content
        if document.messages:
            messages = [{"role": role, "content": text} for role, text in document.messages]
            tools = json.loads(document.tools or "[]")
            prompt = self._tokenizer.chat_text(messages, tools=tools, continue_final=False, now=_NOW)
            return _Parts(((prompt, False), (content(document.answer), False)), True, self._end_of_turn)
        if example is None:
            return _Parts(((content("".join(document.texts)), True),), False, self._end_of_text)
        end = self._end_of_turn if example.form == "chat" else self._end_of_text
        return _Parts((self._prompt(example), (content(example.answer), False)), True, end)

    def _prompt(self, example: TaskExample) -> tuple[MarkedText, bool]:
        text, special = prompt_text(self._tokenizer, example, now=_NOW)
        if example.form == "text":
            # A user may spell special tokens in a text to continue; a corpus may not.
            text = MarkedText.of_content(text.text)
        return text, special


# What a corpus is encoded by.
Encoder = PieceEncoder | ModelEncoder


@dataclasses.dataclass(frozen=True)
class _Parts:
    """A document as texts to encode, each with whether special tokens are added, whether the first is a
    prompt, and the token after them."""

    texts: tuple[tuple[MarkedText, bool], ...]
    prompt: bool
    end: int
