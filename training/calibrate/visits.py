"""Statistics of the experts that tokens visit."""

import dataclasses

import numpy as np

from jaxllm.experts.activation_paths import PathCounts, count_paths
from jaxllm.experts.token_experts import TokenExperts, count_tokens


@dataclasses.dataclass(frozen=True)
class Visited:
    """The visits of a text's tokens to the experts of a decoder, or of an encoder.

    Attributes:
      paths: which experts follow which.
      tokens: the experts of each token.
    """

    paths: PathCounts
    tokens: TokenExperts

    @classmethod
    def of(cls, ids: np.ndarray, tokens: np.ndarray, experts: int) -> "Visited":
        """Counts visits.

        Args:
          ids: `[L_sparse, M, k]` int, the experts that M tokens visit.
          tokens: `[M]` int, their ids.
          experts: of a layer (E).
        """
        return cls(count_paths(ids, experts), count_tokens(ids, tokens, experts))

    @property
    def shares(self) -> np.ndarray:
        """The shares of a layer's visits that its experts have, `[L_sparse, E]`."""
        return self.paths.alone / np.maximum(self.paths.alone.sum(-1, keepdims=True), 1.0)
