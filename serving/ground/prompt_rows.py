"""Rows in place of a prompt's tokens.

In a sequence of token ids a row has an id behind the vocabulary, made of its content: so sessions find out by
ids alone what they have in their cache, and nobody takes a row for a token. Such an id is never embedded.
"""

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError

if TYPE_CHECKING:
    from jaxllm.models.layer import InputRows

# Ids of rows take so many numbers behind a vocabulary: together they fit int32.
_IDS = 1 << 30


@dataclasses.dataclass(frozen=True, eq=False)
class PromptRows:
    """Rows that the first layer reads in place of some tokens' embeddings.

    Attributes:
      at: `[n]` int, their places in the prompt, ascending.
      rows: `[n, D]` float32, as `inputs_embeds` of transformers.
    """

    at: np.ndarray
    rows: np.ndarray

    def __post_init__(self) -> None:
        at, rows = np.asarray(self.at), np.asarray(self.rows, np.float32)
        if at.ndim != 1 or rows.ndim != 2 or len(at) != len(rows) or not len(at):
            raise ConfigError(
                f"rows must be [n, D] at n places of the prompt, got {list(rows.shape)} at {list(at.shape)}"
            )
        if not np.issubdtype(at.dtype, np.integer) or at[0] < 0 or (np.diff(at) <= 0).any():
            raise ConfigError("places of rows must be whole numbers, ascending from 0; sort them")
        if not np.isfinite(rows).all():
            raise ConfigError("rows hold NaN or infinite values; look at what made them")
        object.__setattr__(self, "at", at.astype(np.int64))
        object.__setattr__(self, "rows", rows)

    def placed(self, prompt: Sequence[int], cfg: ModelConfig) -> tuple[int, ...]:
        """The prompt with an id of each row in its place.

        Raises:
          ConfigError: the rows do not fit the prompt or the model.
        """
        if self.rows.shape[1] != cfg.hidden_size:
            raise ConfigError(
                f"rows have {self.rows.shape[1]} numbers, {cfg.model_type} takes {cfg.hidden_size}"
            )
        if self.at[-1] >= len(prompt):
            raise ConfigError(f"a row stands at {self.at[-1]}, the prompt has {len(prompt)} tokens")
        placed = list(prompt)
        for at, row in zip(self.at.tolist(), self.rows, strict=True):
            digest = hashlib.blake2b(row.tobytes(), digest_size=4).digest()
            placed[at] = cfg.vocab_size + int.from_bytes(digest, "little") % _IDS
        return tuple(placed)

    @classmethod
    def joined(cls, *parts: "tuple[int, PromptRows | None]") -> "PromptRows | None":
        """Rows of several prompts that follow each other, each with the place at which it begins; None where
        none has any."""
        found = [(first, rows) for first, rows in parts if rows is not None]
        if not found:
            return None
        at = np.concatenate([first + rows.at for first, rows in found])
        return cls(at, np.concatenate([rows.rows for _, rows in found]))

    def before(self, tokens: int) -> "PromptRows | None":
        """Those of the first `tokens` tokens; None where there are none."""
        count = int(np.searchsorted(self.at, tokens))
        return PromptRows(self.at[:count], self.rows[:count]) if count else None

    def kept(self, kept: np.ndarray) -> "PromptRows":
        """The rows where other tokens of the prompt are dropped.

        Args:
          kept: `[n]` int, places of the tokens that stay, ascending; those of all rows among them.

        Raises:
          ConfigError: a row is dropped.
        """
        at = np.searchsorted(kept, self.at)
        if (at >= len(kept)).any() or (np.asarray(kept)[at] != self.at).any():
            raise ConfigError("a plan drops rows of an image, which must all stay; ask without `shorten`")
        return PromptRows(at, self.rows)

    def of_chunk(self, first: int, length: int) -> "InputRows":
        """Those of the `length` tokens from `first` on."""
        # Here, because devices that run programs alone have no JAX.
        from jaxllm.models.layer import InputRows

        begin, end = np.searchsorted(self.at, (first, first + length))
        rows, given = np.zeros((length, self.rows.shape[1]), np.float32), np.zeros(length, np.bool_)
        places = self.at[begin:end] - first
        rows[places], given[places] = self.rows[begin:end], True
        return InputRows(rows, given)
