"""The token tree: drafted continuations of a sequence in arrays of static size (LLMCad, arXiv 2309.04255,
section 3.2).

A node is a token that follows its parent's token. The root is the last token of the sequence, which is in no
cache yet. Children come after their parents in the order of nodes. In a cache node i is at row `length + i`,
after the sequence, and attends to the sequence, its ancestors and itself: branches share rows, and nothing is
copied until a path is accepted. This module imports no JAX: `tree.py` registers the structure with it.
"""

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from jaxllm.axes import Axes

if TYPE_CHECKING:
    import jax


@dataclasses.dataclass(frozen=True)
class TokenTree:
    """A tree with room for M nodes.

    Invariants: the first `count` nodes are in use, node 0 is the root; `parents[i]` is less than i (-1 for
    the root); `depths` count from 0 at the root; `confidences` are products along the path from the root,
    whose own is 1, so that none is larger than its parent's.

    Attributes:
      tokens: `[M]` int32.
      parents: `[M]` int32.
      depths: `[M]` int32.
      confidences: `[M]` float32, cumulative.
      probabilities: `[M]` float32, what the drafter gave each token after its parent, before calibration (see
        `calibration`); 1 for the root.
      ancestors: `[M, M]` bool, `[i, j]`: whether node j is on the path from the root to node i, both ends
        included; false for nodes that are not in use.
      count: int32 scalar, number of nodes in use, at least 1.
    """

    tokens: "jax.Array"
    parents: "jax.Array"
    depths: "jax.Array"
    confidences: "jax.Array"
    probabilities: "jax.Array"
    ancestors: "jax.Array"
    count: "jax.Array"

    @property
    def room(self) -> int:
        """Nodes that fit (M)."""
        return self.tokens.shape[0]

    @property
    def used(self) -> "jax.Array":
        """Which nodes are in use, `[M]` bool."""
        return self.count > np.arange(self.room, dtype=np.int32)

    def check(self, axes: Axes) -> None:
        """Asserts the shapes above, where a step that takes the tree is traced."""
        axes.check(np.int32, "M", tokens=self.tokens, parents=self.parents, depths=self.depths)
        axes.check(np.float32, "M", confidences=self.confidences, probabilities=self.probabilities)
        axes.check(np.bool_, "M M", ancestors=self.ancestors)
        axes.check(np.int32, "", count=self.count)
