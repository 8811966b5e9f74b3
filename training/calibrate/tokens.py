"""Reads the tokens of texts that calibrations measure on."""

import itertools
from collections.abc import Sequence
from pathlib import Path

from jaxllm.bundle import Bundle
from jaxllm.text.tokenizer import Tokenizer
from training.data.documents import builtin_texts, read_texts, text_document
from training.data.encoders import ModelEncoder


def text_tokens(bundle: Bundle, count: int, paths: Sequence[Path]) -> list[int]:
    """At least `count` tokens of texts, one after the other, if there are as many.

    Args:
      bundle: whose tokenizer encodes.
      count: after so many tokens no other text is read.
      paths: of files; Python's language reference if there are none.

    Raises:
      ConfigError: a file cannot be read.
    """
    # Alternately from several files, so that none is left out however long the first is.
    texts = itertools.chain.from_iterable(itertools.zip_longest(*map(read_texts, paths)))
    documents = [text_document(text) for text in texts if text]
    documents = documents or [text_document(text) for text in builtin_texts()]
    encoder = ModelEncoder(Tokenizer(bundle.tokenizer_files()))
    tokens: list[int] = []
    for document in documents:
        if len(tokens) >= count:
            break
        tokens += encoder.encode([document])[0][0]
    return tokens
