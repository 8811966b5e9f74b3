"""The verdict on a token tree: all that a target says of it."""

from typing import Any, NamedTuple, Self

import numpy as np


class Verdict(NamedTuple):
    """The tokens that a target accepts of a tree, and its own behind them.

    Attributes:
      tokens: `[n]` int32, the next tokens of the answer, at least one; the last is the target's own.
      path: `[n]` int32, the accepted nodes from the root on, behind each of which the token of its place is
        said.
    """

    tokens: np.ndarray
    path: np.ndarray

    @classmethod
    def of(cls, tokens: Any, count: Any, path: Any) -> Self:
        """From what a bucket returns."""
        n = int(count)
        return cls(np.asarray(tokens)[:n], np.asarray(path)[:n])
