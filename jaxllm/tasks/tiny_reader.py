"""Converts prompts to a tiny LM's input, and its scores to scores of the model's tokens.

Training, benchmarks and service all use this module, so that a tiny LM gets prompts as in its training: the
same text, in rows of the same length, with the same droppable words.
"""

import dataclasses
from typing import Protocol

import numpy as np

from jaxllm.elastic.compression import input_rows, read_scores, word_count, word_scores
from jaxllm.text.droppable import PromptTokens
from jaxllm.text.tokenizer import Tokenizer, TokenizerFiles


class ReadTokens(Protocol):
    """Facts about a tiny LM's tokens (see `jaxllm.bundle.tiny_lm.TinyLm`)."""

    @property
    def mark_ids(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def row_tokens(self) -> int: ...  # noqa: D102
    @property
    def tokenizer(self) -> TokenizerFiles | None: ...  # noqa: D102


@dataclasses.dataclass(frozen=True, eq=False)
class TinyReader:
    """Converts prompts to rows of a tiny LM's input.

    Attributes:
      own: the tiny LM's tokenizer; None if it uses the model's tokens.
      mark_ids: token ids of `marks()`.
      row_tokens: W, tokens of a row.
    """

    own: Tokenizer | None
    mark_ids: tuple[int, ...]
    row_tokens: int

    @classmethod
    def of(cls, tiny: ReadTokens) -> "TinyReader":
        """The reader of a tiny LM."""
        own = None if tiny.tokenizer is None else Tokenizer(tiny.tokenizer)
        return cls(own, tiny.mark_ids, tiny.row_tokens)

    def tokens(self, prompt: PromptTokens) -> PromptTokens:
        """A prompt of the model's tokens, re-encoded in the tiny LM's tokens."""
        if self.own is None:
            return prompt
        ids, offsets = self.own.encode_with_offsets(prompt.marked, add_special_tokens=False)
        return dataclasses.replace(
            prompt, ids=np.asarray(ids, np.int32), offsets=offsets, find_spans=lambda: prompt.spans
        )

    def rows(self, prompt: PromptTokens) -> tuple[np.ndarray, np.ndarray]:
        """The rows `[R, W]` of a prompt of the model's tokens, and their mask (see `input_rows`)."""
        return input_rows(self.tokens(prompt).ids, self.row_tokens)

    def keep_likely(self, prompt: PromptTokens, logits: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """The probability of keeping each of the model's tokens, `[T]` float64.

        If the tiny LM has tokens of its own, all of the model's tokens of a word get the mean of the word's
        tiny LM tokens.

        Args:
          prompt: prompt in the model's tokens.
          logits: `[R, W]` float, the score head's output for the prompt's rows.
        """
        likely = 1 / (1 + np.exp(-read_scores(logits, mask).astype(np.float64)))
        if self.own is None:
            return likely
        words = self.tokens(prompt).words
        count = word_count(prompt.text, prompt.boundaries)
        # Of tokens of no word, which index the last entry, 1.
        return np.append(word_scores(likely, words, count), 1.0)[prompt.words]
