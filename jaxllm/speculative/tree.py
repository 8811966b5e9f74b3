"""The token tree: several continuations of a sequence in arrays of static size.

LLMCad (arXiv 2309.04255, section 3.2). A node is a token behind its parent's; the root is the last token of
the sequence, which is in no cache yet. Children lie behind their parents, so that the order of nodes is one
in which they can be fed. In a cache a tree lies behind the sequence, node i in row `length + i`, and what a
node may attend to beside the sequence is itself and its ancestors: branches share rows, and nothing is copied
until a path is accepted.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.errors import ConfigError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenTree:
    """A tree with room for N nodes.

    Invariants: the first `count` (int32 scalar, at least 1) nodes are in use, node 0 is the root;
    `parents[i]` is less than i (-1 for the root); `depths` count from 0 at the root; `confidences` are
    products along the path from the root, whose own is 1, so that none is larger than its parent's.

    Attributes:
      tokens: `[N]` int32.
      parents: `[N]` int32.
      depths: `[N]` int32.
      confidences: `[N]` float32, cumulative.
      ancestors: `[N, N]` bool, whether node j lies on the path from the root to node i, both ends among it; a
        node that is not in use has none.
      count: how many nodes there are.
    """

    tokens: jax.Array
    parents: jax.Array
    depths: jax.Array
    confidences: jax.Array
    ancestors: jax.Array
    count: jax.Array

    @property
    def room(self) -> int:
        """Nodes that fit (N)."""
        return self.tokens.shape[0]

    @property
    def used(self) -> jax.Array:
        """Which nodes there are, `[N]` bool."""
        return jnp.arange(self.room, dtype=jnp.int32) < self.count


def new_tree(root: jax.Array, room: int) -> TokenTree:
    """A tree of a root alone.

    Args:
      root: int32 scalar, its token.
      room: most nodes it will have.

    Raises:
      ConfigError: there is no room.
    """
    if room < 1:
        raise ConfigError(f"a token tree has room for its root at least, got {room}")
    first = jnp.arange(room, dtype=jnp.int32) == 0
    return TokenTree(
        tokens=jnp.where(first, jnp.asarray(root, jnp.int32), 0),
        parents=jnp.full(room, -1, jnp.int32),
        depths=jnp.zeros(room, jnp.int32),
        confidences=first.astype(jnp.float32),
        ancestors=first[:, None] & first,
        count=jnp.ones((), jnp.int32),
    )


def add_nodes(
    tree: TokenTree, parents: jax.Array, tokens: jax.Array, confidences: jax.Array, wanted: jax.Array
) -> tuple[TokenTree, jax.Array]:
    """Adds nodes behind those that there are, as many as fit.

    Args:
      tree: the tree.
      parents: `[M]` int32, nodes in use.
      tokens: `[M]` int32.
      confidences: `[M]` float32, each token's own given its parent.
      wanted: `[M]` bool; the others are left out.

    Returns:
      The tree, and where each went `[M]` int32: -1 for what was left out or had no room.
    """
    place = tree.count + jnp.cumsum(wanted.astype(jnp.int32)) - 1
    fits = wanted & (place < tree.room)
    # What is dropped aims behind the last node.
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
        ancestors=put(tree.ancestors, tree.ancestors[behind] | (at[:, None] == index)),
        count=tree.count + jnp.sum(fits, dtype=jnp.int32),
    )
    return grown, jnp.where(fits, place, -1)


def accepted_nodes(tree: TokenTree, chosen: jax.Array) -> jax.Array:
    """Which nodes are what the target itself says, `[N]` bool: the root, and each node whose ancestors all
    are what was chosen behind their parents.

    Args:
      tree: the tree.
      chosen: `[N]` int32, the token that the target chooses behind each node.
    """
    as_chosen = (tree.tokens == chosen[jnp.maximum(tree.parents, 0)]) | (tree.parents < 0)
    wrong = tree.ancestors & ~as_chosen
    return tree.used & ~jnp.any(wrong, axis=1)


def deepest(tree: TokenTree, accepted: jax.Array) -> jax.Array:
    """The accepted node farthest from the root, the first of equals: int32 scalar."""
    return jnp.argmax(jnp.where(accepted, tree.depths, -1)).astype(jnp.int32)


def path_to(tree: TokenTree, node: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The nodes from the root to `node`, in order.

    Returns:
      `[N]` int32, and how many of them are on the path; those behind repeat the last one.
    """
    on_path = tree.ancestors[node]
    nodes = jnp.nonzero(on_path, size=tree.room, fill_value=np.iinfo(np.int32).max)[0].astype(jnp.int32)
    return jnp.minimum(nodes, node), jnp.sum(on_path, dtype=jnp.int32)
