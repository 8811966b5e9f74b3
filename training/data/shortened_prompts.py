"""Drops words of questions, so that sub-models learn to answer prompts that a tiny LM has shortened.

Large models can answer a prompt with dropped words; small ones have to train on such prompts. Words are
dropped at random and not by a tiny LM's scores, so that a recovery does not depend on a tiny LM, which is
trained later on the recovered model's answers.
"""

import dataclasses
import re

from jaxllm.tasks.example import TaskExample, pseudo_random
from jaxllm.text.droppable import free_spans
from jaxllm.training.data.documents import Document, chat_document

# Minimum share of the droppable words that stays, as in the shortest prompt that a service makes.
LEAST_SHARE = 0.2
# White space belongs to the word after it, as in `jaxllm.elastic.compression`.
_WORD = re.compile(r"\s*\S+")


def shortened_document(document: Document, share: float) -> Document:
    """Returns a document; a `share` of the questions with options lose words.

    The choice of questions and words follows from the question only.

    Args:
      document: document of an example; any other is returned unchanged.
      share: share in [0, 1] of the questions that lose words.
    """
    example = document.example
    if example is None or not example.options or pseudo_random(f"shortened\0{example.user}") >= share:
        return document
    kept = LEAST_SHARE + (1 - LEAST_SHARE) * pseudo_random(f"kept\0{example.user}")
    return chat_document(with_fewer_words(example, kept), origin=document.origin)


def with_fewer_words(example: TaskExample, share: float) -> TaskExample:
    """Returns a question with about a `share` of its droppable words (see `free_spans`), sampled at random.

    At least one word of the user's text stays.
    """
    user = example.user
    spans = free_spans(user, goes_on=example.form == "text")
    words = [found.span() for first, last in spans for found in _WORD.finditer(user, first, last)]
    draws = [pseudo_random(f"{place}\0{user}") for place in range(len(words))]
    gone = [word for word, draw in zip(words, draws, strict=True) if draw >= share]
    left = _without(user, gone)
    if not left.strip():
        luckiest = words[draws.index(min(draws))]
        left = _without(user, [word for word in gone if word != luckiest])
    return dataclasses.replace(example, user=left)


def _without(text: str, spans: list[tuple[int, int]]) -> str:
    """A text without some characters, `[first, last)` each, ascending."""
    edges = [0, *(place for span in spans for place in span), len(text)]
    return "".join(text[first:last] for first, last in zip(edges[::2], edges[1::2], strict=True))
