"""Functions of token trees on the host: the same structure, of NumPy arrays."""

import dataclasses

import numpy as np

from jaxllm.speculation.token_tree import TokenTree


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
