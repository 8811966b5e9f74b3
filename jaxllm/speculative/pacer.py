"""Which branch of a token tree grows next, and into what (LLMCad, section 3.2).

A branch is as good as its cumulative confidence, the probability that all of it is right as the draft sees
it. To make the least of them as large as possible (max-min fairness, equations 1 and 2), the branch whose tip
has the highest grows first: growing only ever lowers it. Where the draft is torn between tokens, the branch
divides.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.speculative.tree import TokenTree, add_nodes

# A token at least this likely opens a branch of its own (section 3.2).
BRANCH_CONFIDENCE = 0.3


def next_tips(
    tree: TokenTree, fed: jax.Array, count: int, *, paced: bool = True
) -> tuple[jax.Array, jax.Array]:
    """The nodes that the draft should read next.

    Args:
      tree: the tree.
      fed: `[N]` bool, the nodes that it has read.
      count: how many to choose.
      paced: the most confident first; else the oldest, whatever they promise.

    Returns:
      `[count]` int32 in ascending order, and how many of them there are (those behind repeat the last node).
    """
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
    """Adds what the draft would say behind nodes that it has just read: its likeliest token, and every other
    one that is likelier than `threshold`.

    Args:
      tree: the tree.
      tips: `[M]` int32, the nodes.
      valid: int32 scalar, how many of them are real.
      probabilities: `[M, V]` float32, the draft's behind each.
      branches: most children of a node.
      threshold: see above.
    """
    confidences, tokens = jax.lax.top_k(probabilities, branches)
    real = jnp.arange(tips.shape[0], dtype=jnp.int32) < valid
    first = jnp.arange(branches, dtype=jnp.int32) == 0
    wanted = real[:, None] & (first | (confidences > np.float32(threshold)))
    # The best of all first: where the room ends, the least likely are left out.
    paths = tree.confidences[tips][:, None] * confidences
    order = jnp.argsort(-jnp.where(wanted, paths, -1.0).reshape(-1), stable=True)
    parents = jnp.broadcast_to(tips[:, None], tokens.shape)
    flat = (each.reshape(-1)[order] for each in (parents, tokens.astype(jnp.int32), confidences, wanted))
    return add_nodes(tree, *flat)[0]


def best_confidence(tree: TokenTree, fed: jax.Array) -> jax.Array:
    """Tc, the highest cumulative confidence of a branch that could still grow (float32 scalar, 0 where none
    could)."""
    return jnp.max(jnp.where(tree.used & ~fed, tree.confidences, 0.0))
