"""From documents to token ids: with this room's own tokenizers, or with any model's and its chat template."""

import hashlib
import json
from collections.abc import Sequence
from typing import Protocol

import tokenizers

from jaxllm.errors import ConfigError
from jaxllm.tasks.prompts import end_of_turn_id, prompt_ids
from jaxllm.tokenizer import Tokenizer
from training.documents import Document, Special
from training.tokenizer import token_id


class Encoder(Protocol):
    """What a corpus needs of a tokenizer."""

    @property
    def identity(self) -> str:
        """Differs where the ids may."""
        ...

    @property
    def vocab_size(self) -> int:
        """One more than the highest id."""
        ...

    def encode(self, documents: Sequence[Document]) -> list[tuple[list[int], int]]:
        """Of each document its ids, and how many of them are the prompt's."""
        ...


class PieceEncoder:
    """Encodes pieces as they stand, by a tokenizer that `train_tokenizer` made."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        # A special token's name inside a text is text.
        self._plain = tokenizers.Tokenizer.from_str(tokenizer.to_str())
        self._plain.encode_special_tokens = True

    @property
    def identity(self) -> str:
        """The tokenizer's own file."""
        return self._tokenizer.to_str()

    @property
    def vocab_size(self) -> int:
        """Tokens, special ones included."""
        return self._tokenizer.get_vocab_size()

    def encode(self, documents: Sequence[Document]) -> list[tuple[list[int], int]]:
        """See `Encoder`."""
        texts = [text for document in documents for text in document.texts]
        encodings = iter(self._plain.encode_batch_fast(texts, add_special_tokens=False))
        return [self._joined(document, encodings) for document in documents]

    def _joined(self, document: Document, encodings) -> tuple[list[int], int]:
        ids: list[int] = []
        prompt_tokens = 0
        for number, piece in enumerate(document.pieces, start=1):
            special = isinstance(piece, Special)
            ids += [token_id(self._tokenizer, piece.token)] if special else next(encodings).ids
            if number == document.prompt_pieces:
                prompt_tokens = len(ids)
        return ids, prompt_tokens


class ModelEncoder:
    """Encodes as a served model would read it: questions through its own chat template.

    Raises:
      ConfigError: the model has no token that ends a text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        end = end_of_turn_id(tokenizer)
        if end is None:
            raise ConfigError("the model names no end token, so it cannot learn where an answer ends")
        self._end_of_turn, self._end_of_text = end, tokenizer.eos_ids[-1]

    @property
    def identity(self) -> str:
        """A digest of the tokenizer's files."""
        return hashlib.sha256(json.dumps(self._tokenizer.files.to_json()).encode()).hexdigest()

    @property
    def vocab_size(self) -> int:
        """One more than the highest id."""
        return self._tokenizer.vocab_size

    def encode(self, documents: Sequence[Document]) -> list[tuple[list[int], int]]:
        """See `Encoder`."""
        return [self._one(document) for document in documents]

    def _one(self, document: Document) -> tuple[list[int], int]:
        example = document.example
        if example is None:
            return [*self._tokenizer.encode("".join(document.texts)), self._end_of_text], 0
        prompt = prompt_ids(self._tokenizer, example)
        answer = self._tokenizer.encode(example.answer, add_special_tokens=False)
        end = self._end_of_turn if example.form == "chat" else self._end_of_text
        return [*prompt, *answer, end], len(prompt)
