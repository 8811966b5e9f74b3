"""Token trees as the host has them: the same structure, of NumPy's arrays."""

import jax
import numpy as np

from jaxllm.speculative.tree import TokenTree


def root_alone(root: int, room: int) -> TokenTree:
    """A tree of a root (see `jaxllm.speculative.tree.new_tree`)."""
    first = np.arange(room) == 0
    return _tree(
        tokens=np.where(first, np.int32(root), np.int32(0)),
        parents=np.full(room, -1, np.int32),
        depths=np.zeros(room, np.int32),
        confidences=first.astype(np.float32),
        count=np.int32(1),
    )


def on_host(tree: TokenTree) -> TokenTree:
    """The tree in arrays of its own, whatever becomes of the other's."""
    return jax.tree.map(np.array, tree)


def first_nodes(tree: TokenTree, count: int, room: int) -> TokenTree:
    """The first `count` nodes of a tree, in one with room for `room`."""

    def cut(values: np.ndarray, empty: float) -> np.ndarray:
        out = np.full(room, empty, values.dtype)
        out[:count] = values[:count]
        return out

    return _tree(
        tokens=cut(np.asarray(tree.tokens), 0),
        parents=cut(np.asarray(tree.parents), -1),
        depths=cut(np.asarray(tree.depths), 0),
        confidences=cut(np.asarray(tree.confidences), 0.0),
        count=np.int32(count),
    )


def seen_of(tree: TokenTree) -> np.ndarray:
    """What each node may attend to, `[N, N]` bool (see `jaxllm.speculative.tree.ancestors`)."""
    count, parents = int(tree.count), np.asarray(tree.parents)
    seen = np.zeros((tree.room, tree.room), bool)
    for node in range(count):
        if parents[node] >= 0:
            seen[node] = seen[parents[node]]
        seen[node, node] = True
    return seen


def open_confidence(tree: TokenTree) -> float:
    """Tc: the highest cumulative confidence of a branch's tip."""
    count = int(tree.count)
    inner = set(np.asarray(tree.parents)[:count].tolist())
    return max((float(tree.confidences[node]) for node in range(count) if node not in inner), default=0.0)


def _tree(**fields: np.ndarray | np.generic) -> TokenTree:
    return TokenTree(**fields)  # pyright: ignore[reportArgumentType]: of the host
