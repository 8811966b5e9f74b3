"""Adds prompt lookup to the trees of another drafter.

Small models copy badly, and copies (names, quotes, code, a text to shorten) need no model. Both propose
trees with the same root; their union is one tree, in which a token that both propose is one node.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxllm.serving.ground.speculation_options import TreeShape
from jaxllm.serving.host.progress import Progress
from jaxllm.serving.speculation.drafter import Drafter, DrafterMemory, Growing
from jaxllm.serving.speculation.host_tree import united
from jaxllm.serving.speculation.ngram_drafter import NgramDrafter
from jaxllm.speculation.token_tree import TokenTree


class LookupDrafter:
    """Unites another drafter's trees with those of prompt lookup (see `Drafter`); if trees are lines, uses
    the line that is expected to give more tokens."""

    def __init__(self, drafter: Drafter, shape: TreeShape) -> None:
        self._drafter, self._ngrams, self._lines = drafter, NgramDrafter(shape), shape.branches == 1
        # The last tree, the number of the drafter's nodes in it, and the lookup's index of each node, or -1.
        self._tree: TokenTree | None = None
        self._known = 1
        self._places = np.zeros(1, np.int64)

    @property
    def step_s(self) -> float:
        """Time of a step of the other drafter."""
        return self._drafter.step_s

    @property
    def run_s(self) -> float:
        """See `Drafter`: that of the other drafter."""
        return self._drafter.run_s

    @property
    def branch_s(self) -> float:
        """See `Drafter`: that of the other drafter."""
        return self._drafter.branch_s

    @property
    def steps(self) -> int:
        """Number of steps of the other drafter."""
        return self._drafter.steps

    @property
    def memory(self) -> DrafterMemory | None:
        """Memory of the other drafter."""
        return self._drafter.memory

    def warm_up(self, progress: Progress | None = None, *, tokens: int | None = None) -> None:
        """See `Drafter`."""
        self._drafter.warm_up(progress, tokens=tokens)

    def read(self, source: tuple[int, ...]) -> None:
        """See `Drafter`."""
        self._drafter.read(source)
        self._ngrams.read(source)

    def grow(self, sequence: Sequence[int], root: int, growing: Growing, cache: Any) -> tuple[TokenTree, Any]:
        """See `Drafter`; the union may have twice as many nodes as are enough."""
        tree, cache = self._drafter.grow(sequence, root, growing, cache)
        other, cache = self._ngrams.grow(sequence, root, growing, cache)
        self._known = int(tree.count)
        if not self._lines:
            self._tree, self._places = united(tree, other)
        elif _promised(other) > _promised(tree):
            self._tree, self._known, self._places = other, 1, np.arange(int(other.count))
        else:
            self._tree, self._places = tree, np.full(int(tree.count), -1)
        return self._tree, cache

    def step(self) -> bool:
        """See `Drafter`."""
        return self._drafter.step()

    def follow(self, path: Sequence[int], token: int) -> None:
        """See `Drafter`."""
        assert self._tree is not None
        nodes = np.asarray(path)
        found = self._places[nodes]
        if (found >= 0).any():
            self._ngrams.follow(found[found >= 0].tolist(), token)
        # For the other drafter, the first accepted node that only the lookup had is the target's token.
        known = nodes[nodes < self._known]
        if len(known) < len(nodes):
            token = int(np.asarray(self._tree.tokens)[nodes[len(known)]])
        self._drafter.follow(known.tolist(), token)


def _promised(tree: TokenTree) -> float:
    """The expected number of accepted tokens of a line."""
    return float(np.asarray(tree.confidences)[: int(tree.count)].sum())
