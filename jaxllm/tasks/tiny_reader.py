"""What a tiny LM reads of a prompt, and what its scores say of the model's tokens.

Training, benchmarks and service read by this alone, so that a tiny LM meets a prompt as it was trained to:
the same text, in rows of the same length, with the same words free to go.
"""

import dataclasses

import numpy as np

from jaxllm.bundle.tiny_lm import TinyLm
from jaxllm.elastic.compression import spread, word_count, word_scores
from jaxllm.elastic.reading import read_scores, reading_rows
from jaxllm.tasks.droppable import PromptTokens
from jaxllm.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, eq=False)
class TinyReader:
    """How prompts become a tiny LM's rows.

    Attributes:
      own: the tiny LM's tokenizer; None where it reads the model's tokens.
      mark_ids: the token of each of `marks()`.
      row_tokens: W, the length of a row.
    """

    own: Tokenizer | None
    mark_ids: tuple[int, ...]
    row_tokens: int

    @classmethod
    def of(cls, tiny: TinyLm) -> "TinyReader":
        """As a tiny LM was trained to read."""
        own = None if tiny.tokenizer is None else Tokenizer(tiny.tokenizer)
        return cls(own, tiny.mark_ids, tiny.row_tokens)

    def tokens(self, prompt: PromptTokens) -> PromptTokens:
        """A prompt of the model's tokens in the tiny LM's."""
        if self.own is None:
            return prompt
        ids, offsets = self.own.encode_with_offsets(prompt.marked, add_special_tokens=False)
        return dataclasses.replace(
            prompt, ids=np.asarray(ids, np.int32), offsets=offsets, find_spans=lambda: prompt.spans
        )

    def rows(self, prompt: PromptTokens) -> tuple[np.ndarray, np.ndarray]:
        """The rows `[R, W]` of a prompt of the model's tokens, and their mask (see `reading_rows`)."""
        return reading_rows(self.tokens(prompt).ids, self.row_tokens)

    def keep_likely(self, prompt: PromptTokens, logits: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """How likely each of the model's tokens should be kept, `[T]` float64.

        Where the tiny LM has tokens of its own, all of the model's tokens of a word have the mean of its.

        Args:
          prompt: of the model's tokens.
          logits: `[R, W]` float, what the score head said of the prompt's rows.
          mask: of the rows.
        """
        likely = 1 / (1 + np.exp(-read_scores(logits, mask).astype(np.float64)))
        if self.own is None:
            return likely
        words = self.tokens(prompt).words
        count = word_count(prompt.text, prompt.boundaries)
        return spread(word_scores(likely, words, count), prompt.words)
