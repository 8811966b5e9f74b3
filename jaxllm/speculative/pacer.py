"""Chooses the branch of a token tree that grows next, and its new nodes (LLMCad, section 3.2).

The cumulative confidence of a branch is the draft's probability that all of its tokens are right. To make the
least of them as large as possible (max-min fairness, equations 1 and 2), the branch with the highest
confidence grows first: growing can only lower it. If the draft gives several tokens a high probability, the
branch divides.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.axes import Axes
from jaxllm.speculative.tree import TokenTree, add_nodes

# A token at least this likely opens a branch of its own (section 3.2).
BRANCH_CONFIDENCE = 0.3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Growth:
    """How a draft grows trees.

    Attributes:
      tips: branches that the draft runs on at a time.
      branches: most children of a node.
      threshold: see `grow`.
      paced: see `next_tips`.
    """

    tips: int
    branches: int
    threshold: float = BRANCH_CONFIDENCE
    paced: bool = True


def next_tips(
    tree: TokenTree, fed: jax.Array, count: int, *, paced: bool = True
) -> tuple[jax.Array, jax.Array]:
    """The nodes that the draft runs on next.

    Args:
      tree: the tree.
      fed: `[M]` bool, nodes that the draft has run on.
      count: number of nodes to choose.
      paced: choose by falling confidence; else in the order of the nodes.

    Returns:
      `[count]` int32, ascending, and how many of them are valid (the others repeat the last node).
    """
    axes = Axes("next_tips")
    tree.check(axes)
    axes.check(jnp.bool_, "M", fed=fed)
    waiting = tree.used & ~fed
    age = -jnp.arange(tree.room, dtype=jnp.float32) / np.float32(tree.room) + 1
    most, nodes = jax.lax.top_k(jnp.where(waiting, tree.confidences if paced else age, -1.0), count)
    there = most >= 0
    chosen = jnp.sort(jnp.where(there, nodes, tree.room - 1).astype(jnp.int32))
    return chosen, jnp.sum(there, dtype=jnp.int32)


def grow(
    tree: TokenTree,
    tips: jax.Array,
    valid: jax.Array,
    probabilities: jax.Array,
    *,
    branches: int,
    threshold: float = BRANCH_CONFIDENCE,
) -> TokenTree:
    """Adds the draft's tokens after nodes that it has just run on: the likeliest token, and every other one
    with a probability above `threshold`.

    Args:
      tree: the tree.
      tips: `[T]` int32, the nodes.
      valid: int32 scalar, how many of them are valid.
      probabilities: `[T, V]` float32, the draft's probabilities after each.
      branches: most children of a node.
      threshold: see above.
    """
    axes = Axes("grow")
    tree.check(axes)
    axes.check(jnp.int32, "T", tips=tips)
    axes.check(jnp.int32, "", valid=valid)
    axes.check(jnp.float32, "T V", probabilities=probabilities)
    confidences, tokens = jax.lax.top_k(probabilities, branches)
    real = jnp.arange(tips.shape[0], dtype=jnp.int32) < valid
    first = jnp.arange(branches, dtype=jnp.int32) == 0
    wanted = real[:, None] & (first | (confidences > np.float32(threshold)))
    # By falling confidence: if the tree is full, the least likely tokens are left out.
    paths = tree.confidences[tips][:, None] * confidences
    order = jnp.argsort(-jnp.where(wanted, paths, -1.0).reshape(-1), stable=True)
    parents = jnp.broadcast_to(tips[:, None], tokens.shape)
    flat = (each.reshape(-1)[order] for each in (parents, tokens.astype(jnp.int32), confidences, wanted))
    return add_nodes(tree, *flat)[0]


def best_confidence(tree: TokenTree, fed: jax.Array) -> jax.Array:
    """Tc, the highest cumulative confidence of a branch that can still grow: float32 scalar, 0 if none can;
    `fed` is `[M]` bool, as in `next_tips`."""
    axes = Axes("best_confidence")
    tree.check(axes)
    axes.check(jnp.bool_, "M", fed=fed)
    return jnp.max(jnp.where(tree.used & ~fed, tree.confidences, 0.0))
