"""Functions of token trees in compiled steps: a new one, further nodes, the accepted path."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.axes import Axes
from jaxllm.errors import ConfigError
from jaxllm.speculative.token_tree import TokenTree

# Steps take it as a tree of arrays.
jax.tree_util.register_dataclass(TokenTree)


def new_tree(root: jax.Array, room: int) -> TokenTree:
    """A tree with a root alone.

    Args:
      root: int32 scalar, the root's token.
      room: the most nodes of the tree (M).

    Raises:
      ConfigError: `room` is below 1.
    """
    if room < 1:
        raise ConfigError(f"a token tree has room for its root at least, got {room}")
    root = jnp.asarray(root, jnp.int32)
    # A root of rank 1 would become the token of every node.
    Axes("new_tree").check(jnp.int32, "", root=root)
    first = jnp.arange(room, dtype=jnp.int32) == 0
    return TokenTree(
        tokens=jnp.where(first, root, 0),
        parents=jnp.full(room, -1, jnp.int32),
        depths=jnp.zeros(room, jnp.int32),
        confidences=first.astype(jnp.float32),
        probabilities=first.astype(jnp.float32),
        ancestors=first[:, None] & first,
        count=jnp.ones((), jnp.int32),
    )


def line_tree(tokens: Sequence[int]) -> TokenTree:
    """A tree of one branch, whose nodes stand as decoded tokens would."""
    count = len(tokens)
    return TokenTree(
        tokens=jnp.asarray(tokens, jnp.int32),
        parents=jnp.arange(-1, count - 1, dtype=jnp.int32),
        depths=jnp.arange(count, dtype=jnp.int32),
        confidences=jnp.ones(count),
        probabilities=jnp.ones(count),
        ancestors=jnp.tril(jnp.ones((count, count), bool)),
        count=jnp.asarray(count, jnp.int32),
    )


def add_nodes(
    tree: TokenTree,
    parents: jax.Array,
    tokens: jax.Array,
    confidences: jax.Array,
    wanted: jax.Array,
    probabilities: jax.Array | None = None,
) -> tuple[TokenTree, jax.Array]:
    """Adds nodes after the existing ones, as many as fit.

    Args:
      tree: the tree.
      parents: `[T]` int32, nodes in use.
      tokens: `[T]` int32.
      confidences: `[T]` float32, of each token given its parent.
      wanted: `[T]` bool; the others are left out.
      probabilities: `[T]` float32 (see `TokenTree`); None for `confidences`.

    Returns:
      The tree, and the index of each new node `[T]` int32: -1 if it was left out or did not fit.
    """
    axes = Axes("add_nodes")
    tree.check(axes)
    axes.check(jnp.int32, "T", parents=parents, tokens=tokens)
    probabilities = confidences if probabilities is None else probabilities
    axes.check(jnp.float32, "T", confidences=confidences, probabilities=probabilities)
    axes.check(jnp.bool_, "T", wanted=wanted)
    place = tree.count + jnp.cumsum(wanted.astype(jnp.int32)) - 1
    fits = wanted & (place < tree.room)
    # Node M does not exist: `mode="drop"` drops what does not fit.
    at = jnp.where(fits, place, tree.room)
    behind = jnp.maximum(parents, 0)
    index = jnp.arange(tree.room, dtype=jnp.int32)

    def put(values: jax.Array, new: jax.Array) -> jax.Array:
        return values.at[at].set(new.astype(values.dtype), mode="drop")

    grown = TokenTree(
        tokens=put(tree.tokens, tokens),
        parents=put(tree.parents, parents),
        depths=put(tree.depths, tree.depths[behind] + 1),
        confidences=put(tree.confidences, tree.confidences[behind] * confidences),
        probabilities=put(tree.probabilities, probabilities),
        ancestors=put(tree.ancestors, tree.ancestors[behind] | (at[:, None] == index)),
        count=tree.count + jnp.sum(fits, dtype=jnp.int32),
    )
    return grown, jnp.where(fits, place, -1)


def accepted_nodes(tree: TokenTree, chosen: jax.Array) -> jax.Array:
    """The accepted nodes, `[M]` bool: the root, and each node that with all of its ancestors is the target's
    token after its parent.

    Args:
      tree: the tree.
      chosen: `[M]` int32, the target's token after each node.
    """
    axes = Axes("accepted_nodes")
    tree.check(axes)
    axes.check(jnp.int32, "M", chosen=chosen)
    as_chosen = (tree.tokens == chosen[jnp.maximum(tree.parents, 0)]) | (tree.parents < 0)
    wrong = tree.ancestors & ~as_chosen
    return tree.used & ~jnp.any(wrong, axis=1)


def deepest(tree: TokenTree, accepted: jax.Array) -> jax.Array:
    """The deepest of the nodes that are `accepted` (`[M]` bool), the first of equals: int32 scalar."""
    axes = Axes("deepest")
    tree.check(axes)
    axes.check(jnp.bool_, "M", accepted=accepted)
    return jnp.argmax(jnp.where(accepted, tree.depths, -1)).astype(jnp.int32)


def path_to(tree: TokenTree, node: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The nodes from the root to `node` (int32 scalar), in order.

    Returns:
      `[M]` int32, and how many of them are on the path; the others repeat the last one.
    """
    axes = Axes("path_to")
    tree.check(axes)
    axes.check(jnp.int32, "", node=node)
    on_path = tree.ancestors[node]
    nodes = jnp.nonzero(on_path, size=tree.room, fill_value=np.iinfo(np.int32).max)[0].astype(jnp.int32)
    return jnp.minimum(nodes, node), jnp.sum(on_path, dtype=jnp.int32)
