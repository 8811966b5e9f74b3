"""Encodes documents as token ids: by a tokenizer trained here, or by any model's with its chat template."""

import datetime
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxllm.errors import ConfigError
from jaxllm.text.marked_text import MarkedText
from jaxllm.text.prompts import end_of_turn_id, prompt_text
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.training.data.documents import SPECIAL_TOKENS, Document, Special

# Date for templates that write one: constant, so that tokens are reproducible.
_NOW = datetime.datetime(2024, 7, 26, tzinfo=datetime.UTC)
# Changed whenever the same files give other ids.
_MODEL_ENCODING = "special tokens' names are text"


# The 256 bytes and the specials must fit before the first merge.
MIN_VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> tokenizers.Tokenizer:
    """Learns byte-level BPE merges for models that are trained from scratch; the same texts always give the
    same tokenizer.

    Every byte is in the initial alphabet, so any text can be encoded and nothing maps to an unknown token;
    digits are single tokens, so that a number's pieces mean the same everywhere. No token is added before or
    after a text: packing marks the ends of documents.

    Args:
      vocab_size: number of tokens, including the special ones (the first ids) and the 256 bytes.

    Returns:
      A tokenizer with exactly `vocab_size` tokens, for `tokenizer.json`.

    Raises:
      ConfigError: `vocab_size` is below `MIN_VOCAB_SIZE`, or the text is too small or too uniform to
        fill the vocabulary.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise ConfigError(
            f"vocab_size must be at least {MIN_VOCAB_SIZE} (256 bytes and "
            f"{len(SPECIAL_TOKENS)} special tokens), got {vocab_size}"
        )
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    size = tokenizer.get_vocab_size()
    if size != vocab_size:
        raise ConfigError(
            f"the text has only enough distinct pieces for {size} tokens, the recipe asks for "
            f"{vocab_size}; give more text or lower vocab_size"
        )
    return tokenizer


def token_id(tokenizer: tokenizers.Tokenizer, token: str) -> int:
    """The id of a special token.

    Raises:
      ConfigError: the tokenizer has no such token.
    """
    found = tokenizer.token_to_id(token)
    if found is None:
        raise ConfigError(f"the tokenizer has no {token} token; train it with `train_tokenizer`")
    return found


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
        found = []
        for document in documents:
            if document.tools or any(each.more or each.role == "tool" for each in document.messages):
                raise ConfigError(
                    "a new model has no place for the tools of a conversation, nor for reasoning; leave such "
                    "lines out, or train a model on whose chat template knows them"
                )
            ids, prompt_tokens = [], 0
            for number, piece in enumerate(document.pieces, start=1):
                special = isinstance(piece, Special)
                ids += [token_id(self._tokenizer, piece.token)] if special else next(encodings).ids
                if number == document.prompt_pieces:
                    prompt_tokens = len(ids)
            found.append((ids, prompt_tokens))
        return found


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
            texts = [text for own, _ in parts for text, added in own if added == special]
            ids[special] = iter(self._tokenizer.encode_many(texts, add_special_tokens=special))
        found = []
        for texts, end in parts:
            *prompt, answer = [next(ids[added]) for _, added in texts]
            if prompt == [[]]:
                raise ConfigError(f"a question without a token: {texts[0][0].text!r:.200}")
            before = prompt[0] if prompt else []
            found.append(([*before, *answer, end], len(before)))
        return found

    def _parts(self, document: Document) -> tuple[list[tuple[MarkedText, bool]], int]:
        """A document's prompt, if it has one, and its other text, each with whether special tokens are added;
        and the token after them."""
        example, content = document.example, MarkedText.of_content
        if document.messages:
            *before, last = document.messages
            messages, tools = [each.plain() for each in before], json.loads(document.tools or "[]")
            prompt = self._tokenizer.chat_text(messages, tools=tools, continue_final=False, now=_NOW)
            answer = content(last.content)
            if last.more:
                answer = self._written([*messages, last.plain()], tools, prompt)
            return [(prompt, False), (answer, False)], self._end_of_turn
        if example is None:
            return [(content("".join(document.texts)), True)], self._end_of_text
        prompt, special = prompt_text(self._tokenizer, example, now=_NOW)
        if example.form == "text":
            # A user may spell special tokens in a text to continue; a corpus may not.
            prompt = content(prompt.text)
        end = self._end_of_turn if example.form == "chat" else self._end_of_text
        return [(prompt, special), (content(example.answer), False)], end

    def _written(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], prompt: MarkedText
    ) -> MarkedText:
        """The last message, with its calls or reasoning, as the chat template writes it behind a prompt."""
        whole = self._tokenizer.chat_text(messages, tools=tools, add_generation_prompt=False, now=_NOW)
        end = self._tokenizer.decode([self._end_of_turn], skip_special_tokens=False)
        last = whole.text.find(end, len(prompt.text))
        if not whole.text.startswith(prompt.text) or last < 0:
            raise ConfigError(
                "the model's chat template writes this answer in another way than after its own prompt, so "
                f"it cannot be learnt: {json.dumps(messages[-1])!r:.200}; leave such lines out (--skip-bad)"
            )
        return whole.part(len(prompt.text), last)


# What a corpus is encoded by.
Encoder = PieceEncoder | ModelEncoder
