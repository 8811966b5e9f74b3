"""The token tree, drafted continuations of a sequence in arrays of static size, and its size (LLMCad, arXiv
2309.04255, sections 3.2 and 3.3).

A node is a token that follows its parent's token. The root is the last token of the sequence, which is in no
cache yet. Children come after their parents in the order of nodes. In a cache node i is at row `length + i`,
after the sequence, and attends to the sequence, its ancestors and itself: branches share rows, and nothing is
copied until a path is accepted. This module imports no JAX: `tree.py` registers the structure with it.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxllm.axes import Axes
from jaxllm.speculation.growth import LEAST, MOST, START

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
      probabilities: `[M]` float32, the drafter's probability of each token after its parent, before
        calibration (see `jaxllm.speculation.tree.Calibration`); 1 for the root.
      ancestors: `[M, M]` bool, `[i, j]`: whether node j is on the path from the root to node i, including
        both ends; false for unused nodes.
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
        """Maximum number of nodes (M)."""
        return self.tokens.shape[0]

    @property
    def used(self) -> "jax.Array":
        """Nodes in use, `[M]` bool."""
        return self.count > np.arange(self.room, dtype=np.int32)

    def check(self, axes: Axes) -> None:
        """Asserts the shapes above at trace time."""
        axes.check(np.int32, "M", tokens=self.tokens, parents=self.parents, depths=self.depths)
        axes.check(np.float32, "M", confidences=self.confidences, probabilities=self.probabilities)
        axes.check(np.bool_, "M M", ancestors=self.ancestors)
        axes.check(np.int32, "", count=self.count)


# Decides by measured times how far a tree grows, and how many of its nodes are verified.
#
# A pass drafts and verifies; it costs time, and gives tokens. Over many passes the throughput is maximized
# by spending time on whatever gives more tokens than passes give on average in that time: at `rate` tokens
# per second, a second costs `rate` tokens. The rate follows from the passes that are chosen by it, and
# converges to the maximum.


# Before anything is measured, a run of the drafter has to bring so many tokens.
_FIRST_RUN_TOKENS = 0.25


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassTimes:
    """Times of the parts of a pass, in seconds.

    Attributes:
      run_s: time of a run of the drafter, without its branches.
      branch_s: time per branch of a run.
      verify_s: time of a verification, by the size of its tree.
      free_s: drafting time that delays nothing, because storage reads meanwhile.
    """

    run_s: float
    branch_s: float
    verify_s: Mapping[int, float]
    free_s: float = 0.0

    @property
    def node_s(self) -> float:
        """Time to verify one more node."""
        least, most = min(self.verify_s), max(self.verify_s)
        return max(0.0, self.verify_s[most] - self.verify_s[least]) / max(1, most - least)


@dataclasses.dataclass(frozen=True)
class Growing:
    """Rule that ends the growth of a tree, by the minimum yields of a drafter's work in expected tokens.

    Attributes:
      alpha: minimum confidence of a branch to grow, the yield of a node that is drafted at no cost.
      most: sufficient number of nodes.
      temperature: temperature of the target's sampler; 0 is greedy.
      run: minimum yield of all branches of a run, beyond the minimum of each.
      branch: minimum yield of each of them, as its confidence.
      free_runs: number of runs that may yield less.
      depth: maximum depth of a node, by the number of wanted tokens.
      stop_ids: tokens that end a branch, padded as for `Decoding.decode`; empty for none.
    """

    alpha: float
    most: int
    temperature: float = 0.0
    run: float = 0.0
    branch: float = 0.0
    free_runs: int = 0
    depth: int = 1 << 30
    stop_ids: tuple[int, ...] = ()


def worthwhile(growing: Growing, times: PassTimes, rate: float, *, tips: int, yields: float) -> Growing:
    """A rule with the minimum yields that measured times ask for.

    Args:
      growing: the rule.
      times: times of the parts of a pass.
      rate: tokens per second from passes; 0 before the first.
      tips: maximum number of branches of a run.
      yields: total confidence of a branch's new nodes, as a share of its own.
    """
    if rate <= 0:
        return dataclasses.replace(growing, alpha=LEAST, run=_FIRST_RUN_TOKENS)
    node = rate * times.node_s
    # Each branch adds at least one node, which is verified.
    branch = (rate * times.branch_s + node) / yields
    whole_s = times.run_s + tips * times.branch_s
    free = int(times.free_s / whole_s) if whole_s > 0 else 0
    alpha, run = min(MOST, max(LEAST, node)), rate * times.run_s / yields
    return dataclasses.replace(growing, alpha=alpha, run=run, branch=branch, free_runs=free)


def verified_nodes(confidences: Sequence[float] | np.ndarray, times: PassTimes, rate: float) -> int:
    """The most profitable size of the tree to verify: its expected tokens minus the cost of its time.

    Args:
      confidences: confidences of the nodes, falling; their sum is the expected number of tokens, of which
        the root's is the target's own.
      times: times of the parts of a pass.
      rate: tokens per second from passes; 0 before the first: the minimum size with room for all.

    Returns:
      A size of `times.verify_s`, at most the smallest with room for all nodes.
    """
    promised, count = np.cumsum(confidences), len(confidences)
    sizes = sorted(times.verify_s)
    room = next((size for size in sizes if size >= count), sizes[-1])
    if rate <= 0:
        return room
    fitting = (size for size in sizes if size <= room)
    return max(fitting, key=lambda size: promised[min(count, size) - 1] - rate * times.verify_s[size])


@dataclasses.dataclass(frozen=True)
class Fallback:
    """The self-adaptive fallback threshold (LLMCad, section 3.3): verify once no branch has a confidence
    above alpha.

    Attributes:
      alpha: value in [LEAST, MOST].
    """

    alpha: float = START

    def after(self, *, drafted: int, correct: int, confidence: float) -> "Fallback":
        """The threshold for the next tree (equation 3).

        Args:
          drafted: number of tokens on the branch that matches the target best, without the root (N_all).
          correct: number of accepted tokens among them (N_correct).
          confidence: Tc when the tree was verified.
        """
        if correct == drafted:
            return Fallback(max(LEAST, 0.5 * self.alpha))
        # In logarithms, because a confidence may be as small as the smallest float.
        share = (drafted - correct) / drafted
        power = math.log(self.alpha) - share * math.log(max(confidence, LEAST))
        return Fallback(min(MOST, math.exp(min(power, 0.0))))


# Functions of token trees on the host, of NumPy arrays.


def root_alone(root: int, room: int) -> TokenTree:
    """A tree of one root (see `jaxllm.speculation.tree.new_tree`)."""
    first = np.arange(room) == 0
    return _tree(
        tokens=np.where(first, np.int32(root), np.int32(0)),
        parents=np.full(room, -1, np.int32),
        depths=np.zeros(room, np.int32),
        confidences=first.astype(np.float32),
        probabilities=first.astype(np.float32),
        ancestors=first[:, None] & first,
        count=np.int32(1),
    )


def on_host(tree: TokenTree) -> TokenTree:
    """A copy of a tree in NumPy arrays."""
    return _tree(**{each.name: np.array(getattr(tree, each.name)) for each in dataclasses.fields(tree)})


def by_confidence(tree: TokenTree) -> np.ndarray:
    """The nodes, most confident first; a parent, which is at least as confident, comes before its
    children."""
    confidences = np.asarray(tree.confidences)[: int(tree.count)]
    return np.argsort(-confidences, kind="stable")


def some_nodes(tree: TokenTree, nodes: np.ndarray, room: int) -> TokenTree:
    """A tree of room `room` of some nodes of a tree, which are ascending and each with its parent."""
    count = len(nodes)
    ancestors = np.zeros((room, room), bool)
    ancestors[:count, :count] = np.asarray(tree.ancestors)[np.ix_(nodes, nodes)]

    def cut(values: np.ndarray, empty: float) -> np.ndarray:
        out = np.full(room, empty, values.dtype)
        out[:count] = values[nodes]
        return out

    parents = cut(np.asarray(tree.parents), -1)
    parents[1:count] = np.searchsorted(nodes, parents[1:count])
    return _tree(
        tokens=cut(np.asarray(tree.tokens), 0),
        parents=parents,
        depths=cut(np.asarray(tree.depths), 0),
        confidences=cut(np.asarray(tree.confidences), 0.0),
        probabilities=cut(np.asarray(tree.probabilities), 0.0),
        ancestors=ancestors,
        count=np.int32(count),
    )


def grown(tree: TokenTree, tokens: list[int], parents: list[int], confidences: list[float]) -> TokenTree:
    """The tree with further nodes, as many as fit, of these tokens, parents and cumulative confidences."""
    first, room = int(tree.count), tree.room
    names = ("tokens", "parents", "depths", "confidences", "probabilities")
    parts = [np.array(getattr(tree, name)) for name in names]
    ancestors = np.array(tree.ancestors)
    last = min(room, first + len(tokens))
    for node, token, parent, confidence in zip(
        range(first, last), tokens, parents, confidences, strict=False
    ):
        own = confidence / max(float(parts[3][parent]), 1e-30)
        values = token, parent, parts[2][parent] + 1, confidence, own
        for part, value in zip(parts, values, strict=True):
            part[node] = value
        ancestors[node] = ancestors[parent]
        ancestors[node, node] = True
    return _tree(**dict(zip(names, parts, strict=True)), ancestors=ancestors, count=np.int32(last))


def united(tree: TokenTree, other: TokenTree) -> tuple[TokenTree, np.ndarray]:
    """The union of two trees with the same root: the first one's nodes, then those only in the other. A
    node in both has the larger confidence.

    Returns:
      The tree, with room for all nodes, and the index of each of its nodes in `other`, or -1.
    """
    count, others = int(tree.count), int(other.count)
    if others == 1:
        return tree, np.where(np.arange(count) == 0, 0, -1)
    whole = some_nodes(tree, np.arange(count), max(tree.room, count + others - 1))
    tokens, parents = np.asarray(tree.tokens), np.asarray(tree.parents)
    confidences = np.array(whole.confidences)
    nodes = {(int(parents[node]), int(tokens[node])): node for node in range(1, count)}
    place, added = {0: 0}, list[int]()
    for node in range(1, others):
        edge = place[int(other.parents[node])], int(other.tokens[node])
        if (found := nodes.get(edge)) is None:
            added.append(node)
            found = nodes[edge] = count + len(added) - 1
        else:
            confidences[found] = max(confidences[found], other.confidences[node])
        place[node] = found
    union = grown(
        dataclasses.replace(whole, confidences=confidences),  # pyright: ignore[reportArgumentType]
        [int(other.tokens[node]) for node in added],
        [place[int(other.parents[node])] for node in added],
        [float(other.confidences[node]) for node in added],
    )
    places = np.full(int(union.count), -1, np.int64)
    places[list(place.values())] = list(place.keys())
    return union, places


def accepted_path(tree: TokenTree, chosen: np.ndarray) -> np.ndarray:
    """The accepted nodes `[n]` int32, from the root on (see `jaxllm.speculation.tree.accepted_nodes`);
    `chosen` `[M]` is the target's next token after each node."""
    parents, tokens, path = np.asarray(tree.parents), np.asarray(tree.tokens), [0]
    for node in range(1, int(tree.count)):
        if parents[node] == path[-1] and tokens[node] == chosen[path[-1]]:
            path.append(node)
    return np.array(path, np.int32)


def matching_tokens(tree: TokenTree, last: int) -> int:
    """Number of tokens, without the root, of the most confident branch through the last accepted node
    `last`."""
    through = np.flatnonzero(np.asarray(tree.ancestors)[: int(tree.count), last])
    tips = through[~np.isin(through, np.asarray(tree.parents)[through])]
    return int(tree.depths[tips[np.argmax(np.asarray(tree.confidences)[tips])]])


def open_confidence(tree: TokenTree) -> float:
    """Tc: the highest cumulative confidence of a branch's tip."""
    count = int(tree.count)
    inner = set(np.asarray(tree.parents)[:count].tolist())
    return max((float(tree.confidences[node]) for node in range(count) if node not in inner), default=0.0)


def _tree(**fields: np.ndarray | np.generic) -> TokenTree:
    return TokenTree(**fields)  # pyright: ignore[reportArgumentType]: of the host
