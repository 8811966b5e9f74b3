"""Predicts a token's experts from its token id.

In the first layers a router's input depends mostly on the token itself. So the ids of the next tokens (the
one just sampled, those that a draft proposes) predict their experts before any layer is computed.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from jaxllm.errors import ConfigError


@dataclasses.dataclass(frozen=True, eq=False)
class TokenExperts:
    """The experts that each token id of a text visited most.

    Attributes:
      tokens: `[T]` int32, ascending, the ids that occurred.
      experts: `[L, T, k]` int, per sparse layer.
    """

    tokens: np.ndarray
    experts: np.ndarray

    @classmethod
    def none(cls, layers: int, choices: int) -> "TokenExperts":
        """Statistics without any token."""
        return cls(np.zeros(0, np.int32), np.zeros((layers, 0, choices), np.uint8))

    def chances(self, layer: int, tokens: np.ndarray, experts: int) -> np.ndarray | None:
        """The predicted probability of a visit of some tokens to each expert of a layer.

        Args:
          layer: the sparse layer, from 0.
          tokens: `[M]` int.
          experts: of the layer (E).

        Returns:
          `[E]` float32, which sums to one: the mean over the tokens that occurred in the text; None if none
          did.
        """
        at = np.searchsorted(self.tokens, tokens)
        within = at < len(self.tokens)
        known = at[within][self.tokens[at[within]] == tokens[within]]
        if not len(known):
            return None
        visits = np.bincount(self.experts[layer, known].reshape(-1), minlength=experts)
        return (visits / visits.sum()).astype(np.float32)

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Arrays to store."""
        return {"tokens": self.tokens, "token_experts": self.experts}

    @classmethod
    def from_arrays(
        cls, arrays: Mapping[str, np.ndarray], *, layers: int, experts: int, choices: int
    ) -> "TokenExperts":
        """The inverse of `to_arrays`; `none` if there are no arrays.

        Raises:
          ConfigError: the arrays are malformed, or belong to another model.
        """
        if "tokens" not in arrays:
            return cls.none(layers, choices)
        tokens, visited = np.asarray(arrays["tokens"]), np.asarray(arrays.get("token_experts"))
        sound = tokens.dtype == np.int32 and tokens.ndim == 1 and visited.dtype == _width(experts)
        sound = sound and visited.shape == (layers, len(tokens), choices)
        sound = sound and visited.min(initial=0) >= 0 and visited.max(initial=0) < experts
        if not sound or np.any(np.diff(tokens) <= 0):
            raise ConfigError("the statistics of tokens' experts are of another model")
        return cls(tokens, visited)


def count_tokens(ids: np.ndarray, tokens: np.ndarray, experts: int) -> TokenExperts:
    """Counts the visits of a text's tokens.

    Args:
      ids: `[L, M, k]` int, the experts that each of M tokens visited at each sparse layer.
      tokens: `[M]` int, their ids.
      experts: of a layer (E).
    """
    seen, which = np.unique(tokens, return_inverse=True)
    most = []
    for layer in ids:
        at = which[:, None] * experts + layer
        visits = np.bincount(at.reshape(-1), minlength=len(seen) * experts).reshape(-1, experts)
        most.append(np.argsort(-visits, axis=-1, kind="stable")[:, : ids.shape[-1]])
    return TokenExperts(seen.astype(np.int32), np.stack(most).astype(_width(experts)))


def _width(experts: int) -> type[np.generic]:
    return np.uint8 if experts <= 256 else np.int32
