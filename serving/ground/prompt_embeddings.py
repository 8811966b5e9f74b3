"""Prompt embeddings: rows in place of some of a prompt's tokens.

In token sequences each row has an id beyond the vocabulary, a hash of its content: sessions compare
prefixes by ids, and no row equals a token. Such an id is never embedded.
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError

if TYPE_CHECKING:
    from jaxllm.models.layer import InputEmbeddings

# Number of ids for rows, above the vocabulary: together they fit int32.
_IDS = 1 << 30


@dataclasses.dataclass(frozen=True, eq=False)
class PromptEmbeddings:
    """Prompt embeddings: inputs of the first layer in place of some tokens' embeddings.

    Attributes:
      at: `[n]` int, positions in the prompt, ascending.
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
        """The prompt with the rows' ids at their positions.

        Raises:
          ConfigError: the rows do not fit the prompt or the model.
        """
        if self.rows.shape[1] != cfg.hidden_size:
            raise ConfigError(
                f"rows have {self.rows.shape[1]} numbers, {cfg.model_type} takes {cfg.hidden_size}"
            )
        if self.at[-1] >= len(prompt):
            raise ConfigError(f"a row stands at {self.at[-1]}, the prompt has {len(prompt)} tokens")
        # Here, because few prompts have embeddings, and OpenSSL takes megabytes.
        import hashlib

        placed = list(prompt)
        for at, row in zip(self.at.tolist(), self.rows, strict=True):
            digest = hashlib.blake2b(row.tobytes(), digest_size=4).digest()
            placed[at] = cfg.vocab_size + int.from_bytes(digest, "little") % _IDS
        return tuple(placed)

    @classmethod
    def joined(cls, *parts: "tuple[int, PromptEmbeddings | None]") -> "PromptEmbeddings | None":
        """Concatenates the rows of consecutive prompts, each given with the position of its start; None if
        there are none."""
        found = [(first, rows) for first, rows in parts if rows is not None]
        if not found:
            return None
        at = np.concatenate([first + rows.at for first, rows in found])
        return cls(at, np.concatenate([rows.rows for _, rows in found]))

    def before(self, tokens: int) -> "PromptEmbeddings | None":
        """The rows of the first `tokens` tokens; None if there are none."""
        count = int(np.searchsorted(self.at, tokens))
        return PromptEmbeddings(self.at[:count], self.rows[:count]) if count else None

    def kept(self, kept: np.ndarray) -> "PromptEmbeddings":
        """The rows after other tokens of the prompt were dropped.

        Args:
          kept: `[n]` int, positions of the remaining tokens, ascending, including those of all rows.

        Raises:
          ConfigError: a row is dropped.
        """
        at = np.searchsorted(kept, self.at)
        if (at >= len(kept)).any() or (np.asarray(kept)[at] != self.at).any():
            raise ConfigError("a plan drops rows of an image, which must all stay; ask without `shorten`")
        return PromptEmbeddings(at, self.rows)

    def of_chunk(self, first: int, length: int) -> "InputEmbeddings":
        """The rows of the `length` tokens from `first` on."""
        # Imported here: devices that only run exported programs have no JAX.
        from jaxllm.models.layer import InputEmbeddings

        begin, end = np.searchsorted(self.at, (first, first + length))
        rows, given = np.zeros((length, self.rows.shape[1]), np.float32), np.zeros(length, np.bool_)
        places = self.at[begin:end] - first
        rows[places], given[places] = self.rows[begin:end], True
        return InputEmbeddings(rows, given)
