"""Drafts without a model: proposes the tokens that followed earlier occurrences of the last few tokens.

Prompt lookup as in llama.cpp and transformers, but as a tree: each different continuation is a branch.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from jaxllm.serving.ground.speculation_options import TreeShape
from jaxllm.serving.speculation.costs import DraftTimes
from jaxllm.serving.speculation.drafter import Drafter
from jaxllm.serving.speculation.host_tree import grown, root_alone, united
from jaxllm.speculation.token_tree import Growing, TokenTree

# Lengths of n-grams to look up, longest first.
_LENGTHS = (5, 4, 3, 2)
# Assumed share of accepted tokens of each length before the first verification.
_FIRST_RATE = 0.6
_NEW_SHARE = 0.2
# Stands between a source and its answer; no token has this id.
_END = -1


class NgramDrafter(Drafter):
    """Grows trees of earlier continuations in the text (see `Drafter`)."""

    def __init__(self, shape: TreeShape) -> None:
        self.times, self._shape = DraftTimes(), shape
        self._rates: dict[int, float] = dict.fromkeys(_LENGTHS, _FIRST_RATE)
        self._length, self._tree = 0, root_alone(0, shape.room)
        self._source: tuple[int, ...] = ()

    def read(self, source: tuple[int, ...]) -> None:
        """See `Drafter`; the source is looked up, too."""
        self._source = (*source, _END) if source else ()

    def grow(self, sequence: Sequence[int], root: int, growing: Growing, cache: Any) -> tuple[TokenTree, Any]:
        """See `Drafter`."""
        text = np.array([*self._source, *sequence, root], np.int64)
        tree, most = root_alone(root, self._shape.room), min(growing.most, self._shape.room)
        self._length = next((each for each in _LENGTHS if _ends(text, each)[:1]), 0)
        self._tree = tree
        self.times.steps += 1
        if not self._length:
            return tree, cache
        rate, children = self._rates[self._length], dict[tuple[int, int], int]()
        tokens, parents, confidences = list[int](), list[int](), list[float]()
        for continuation in self._continuations(text):
            node, confidence = 0, 1.0
            for token in _until(continuation[: growing.depth], growing.stop_ids):
                confidence *= rate
                if confidence < growing.alpha:
                    break
                if (child := children.get((node, token))) is None:
                    if len(tokens) + 1 >= most:
                        break
                    tokens.append(token)
                    parents.append(node)
                    confidences.append(confidence)
                    child = children[node, token] = len(tokens)
                node = child
        self._tree = grown(tree, tokens, parents, confidences)
        return self._tree, cache

    def follow(self, path: Sequence[int], token: int) -> None:
        """See `Drafter`."""
        depth = int(np.max(self._tree.depths))
        if self._length and depth:
            right, rate = len(path) - 1, self._rates[self._length]
            # Tokens after the first wrong one were not verified.
            for each in [1.0] * right + [0.0] * (right < depth):
                rate += _NEW_SHARE * (each - rate)
            # Clipped, so that every length is tried again: texts change.
            self._rates[self._length] = float(np.clip(rate, 0.05, 0.95))

    def _continuations(self, text: np.ndarray) -> Iterator[list[int]]:
        """Continuations of the last n-gram, the latest first, as many as a node may have children."""
        for end in _ends(text, self._length)[: self._shape.branches]:
            found = text[end : end + self._shape.room].tolist()
            yield found[: found.index(_END)] if _END in found else found


def _until(tokens: list[int], stop_ids: Collection[int]) -> list[int]:
    """Tokens up to the first that ends the answer."""
    return tokens[: next((place + 1 for place, each in enumerate(tokens) if each in stop_ids), len(tokens))]


def _ends(text: np.ndarray, length: int) -> list[int]:
    """The ends of earlier occurrences of the last `length` tokens, the latest first."""
    if len(text) <= length:
        return []
    windows = np.lib.stride_tricks.sliding_window_view(text[:-1], length)
    return (np.flatnonzero((windows == text[-length:]).all(axis=1))[::-1] + length).tolist()


class LookupDrafter:
    """Adds prompt lookup to the trees of another drafter (see `Drafter`).

    Small models copy badly, and copies (names, quotes, code, a text to shorten) need no model. Both propose
    trees with the same root; their union is one tree, in which a token that both propose is one node. If
    trees are lines, the line that is expected to give more tokens is used.
    """

    def __init__(self, drafter: Drafter, shape: TreeShape) -> None:
        self._drafter, self._ngrams, self._lines = drafter, NgramDrafter(shape), shape.branches == 1
        self.times, self.most_bytes = drafter.times, drafter.most_bytes
        self.release, self.warm_up, self.step = drafter.release, drafter.warm_up, drafter.step
        # The last tree, the number of the drafter's nodes in it, and the lookup's index of each node, or -1.
        self._tree: TokenTree | None = None
        self._known = 1
        self._places = np.zeros(1, np.int64)

    @property
    def size_bytes(self) -> int:
        """See `Drafter`."""
        return self._drafter.size_bytes

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
