"""What comes back of a token tree: all that a round is told."""

from typing import Any, NamedTuple, Self

import numpy as np


class Verdict(NamedTuple):
    """What a target says of a tree.

    Attributes:
      tokens: `[n]` int32, the next tokens of the answer, at least one; the last is the target's own.
      path: `[n]` int32, the accepted nodes from the root on, behind each of which the token of its place is
        said.
    """

    tokens: np.ndarray
    path: np.ndarray

    @classmethod
    def of(cls, tokens: Any, count: Any, path: Any) -> Self:
        """From what the graphs return."""
        n = int(count)
        return cls(np.asarray(tokens)[:n], np.asarray(path)[:n])
