"""Defines the verdict of a verification."""

from typing import Any, NamedTuple, Self

import numpy as np


class Verdict(NamedTuple):
    """The accepted tokens of a token tree, and the target's next token after them.

    Attributes:
      tokens: `[n]` int32, the next tokens of the answer, at least one; the last is sampled from the target.
      path: `[n]` int32, the accepted nodes from the root on; `tokens[i]` follows `path[i]`.
    """

    tokens: np.ndarray
    path: np.ndarray

    @classmethod
    def of(cls, tokens: Any, count: Any, path: Any) -> Self:
        """The first `count` tokens and nodes of a bucket's results."""
        n = int(count)
        return cls(np.asarray(tokens)[:n], np.asarray(path)[:n])
