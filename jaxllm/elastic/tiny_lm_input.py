"""Makes the tiny LM's input: an SLO's two marks, followed by a prompt.

A prompt that is longer than a row is split into several rows of about the same length, each with the marks in
front. Scores are taken from all rows, and the decision is their mean (`pooled`).
"""

from typing import Any

import numpy as np

from jaxllm.elastic.slo import Slo, marks_of
from jaxllm.errors import ConfigError

MARKS = 2


def input_rows(ids: np.ndarray, row_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Splits a prompt into rows with room for the marks.

    Args:
      ids: `[T]` int, the prompt's tokens.
      row_tokens: W, tokens of a row, more than the marks alone.

    Returns:
      `[R, W]` int32 tokens, the first two of each row zeros; `[R, W]` bool, True = a mark or a real token.

    Raises:
      ConfigError: a row has no room for a token.
    """
    room = row_tokens - MARKS
    if room < 1:
        raise ConfigError(f"a row of {row_tokens} tokens has no room for a token after {MARKS} marks")
    parts = np.array_split(np.asarray(ids, np.int32), max(1, -(-len(ids) // room)))
    tokens = np.zeros((len(parts), row_tokens), np.int32)
    mask = np.zeros((len(parts), row_tokens), bool)
    mask[:, :MARKS] = True
    for row, part in enumerate(parts):
        tokens[row, MARKS : MARKS + len(part)] = part
        mask[row, MARKS : MARKS + len(part)] = True
    return tokens, mask


def marked(tokens: np.ndarray, slo: Slo, mark_ids: tuple[int, ...]) -> np.ndarray:
    """A copy of rows `[..., W]` with an SLO's marks in front; `mark_ids` are the token ids of `marks()`."""
    told = tokens.copy()
    told[..., :MARKS] = [mark_ids[place] for place in marks_of(slo)]
    return told


def read_scores(scores: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """The scores of a prompt's tokens `[T]`, from the scores of its rows `[R, W]`."""
    return scores[:, MARKS:][mask[:, MARKS:]]


def pooled(logits: Any) -> Any:
    """The logits of a prompt's decision `[..., C]`: the mean over its rows `[..., R, C]`."""
    return logits.mean(-2)
