"""A model's drafts with what the text has said before among them.

A small model mostly has no room for copying, and what is copied (names, quotes, code, a text to shorten)
needs no model. Both propose trees behind the same root; the union is one tree, in which what both say is one
node.
"""

from collections.abc import Sequence

import numpy as np

from jaxllm.speculative.tree import TokenTree
from serving.host.progress import Progress
from serving.speculation.drafter import Drafter
from serving.speculation.host_tree import united
from serving.speculation.ngram_drafter import NgramDrafter
from serving.speculation.options import TreeShape


class LookupDrafter:
    """Another drafter's trees, with those of prompt lookup; of lines the one that promises more tokens (see
    `Drafter`)."""

    def __init__(self, drafter: Drafter, shape: TreeShape) -> None:
        self._drafter, self._ngrams, self._lines = drafter, NgramDrafter(shape), shape.branches == 1
        # The last tree, how many of its nodes the drafter knows, and which of the looked up ones each is.
        self._tree: TokenTree | None = None
        self._known = 1
        self._places = np.zeros(1, np.int64)

    @property
    def step_s(self) -> float:
        """What a step of the other drafter takes."""
        return self._drafter.step_s

    @property
    def steps(self) -> int:
        """Of the other drafter."""
        return self._drafter.steps

    def warm_up(self, progress: Progress | None = None, *, tokens: int | None = None) -> None:
        """See `Drafter`."""
        self._drafter.warm_up(progress, tokens=tokens)

    def grow(self, sequence: Sequence[int], root: int, alpha: float, most: int) -> TokenTree:
        """See `Drafter`; there may be twice as many nodes as `most`, of which the most confident count."""
        tree = self._drafter.grow(sequence, root, alpha, most)
        other = self._ngrams.grow(sequence, root, alpha, most)
        self._known = int(tree.count)
        if not self._lines:
            self._tree, self._places = united(tree, other)
        elif _promised(other) > _promised(tree):
            self._tree, self._known, self._places = other, 1, np.arange(int(other.count))
        else:
            self._tree, self._places = tree, np.full(int(tree.count), -1)
        return self._tree

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
        # Behind a node that only the text knew, the other knows none: to it, that node is what was said.
        known = nodes[nodes < self._known]
        if len(known) < len(nodes):
            token = int(np.asarray(self._tree.tokens)[nodes[len(known)]])
        self._drafter.follow(known.tolist(), token)


def _promised(tree: TokenTree) -> float:
    """How many tokens a line should bring."""
    return float(np.asarray(tree.confidences)[: int(tree.count)].sum())
