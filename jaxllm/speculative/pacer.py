"""Chooses the branch of a token tree that grows next, and its new nodes (LLMCad, section 3.2).

The cumulative confidence of a branch is the draft's probability that all of its tokens are right. Ours grows
the branch with the highest confidence first: what verification is expected to accept is the sum of the nodes'
confidences, and growing can only lower them. As published, tokens are divided among branches in proportion to
their confidences (max-min fairness, equations 1 and 2; see `missing_tokens`). If the draft gives several
tokens a high probability, the branch divides.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.axes import Axes
from jaxllm.speculative.calibration import calibrated
from jaxllm.speculative.growth import BRANCH_CONFIDENCE, Pacer
from jaxllm.speculative.tree import TokenTree, add_nodes


def next_tips(
    tree: TokenTree,
    fed: jax.Array,
    count: int,
    *,
    pacer: Pacer = "confidence",
    least: jax.Array | float = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """The nodes that the draft runs on next.

    Args:
      tree: the tree.
      fed: `[M]` bool, nodes that the draft has run on.
      count: number of nodes to choose.
      pacer: the order of choice.
      least: float32 scalar; branches are left out unless they are more confident.

    Returns:
      `[count]` int32, ascending, and how many of them are valid (the others repeat the last node).
    """
    axes = Axes("next_tips")
    tree.check(axes)
    axes.check(jnp.bool_, "M", fed=fed)
    if pacer == "confidence":
        rank = tree.confidences
    elif pacer == "fair":
        rank = missing_tokens(tree, fed)
    else:
        rank = -jnp.arange(tree.room, dtype=jnp.float32)
    able = tree.used & ~fed & (tree.confidences > least)
    most, nodes = jax.lax.top_k(jnp.where(able, rank, -jnp.inf), count)
    there = most > -jnp.inf
    chosen = jnp.sort(jnp.where(there, nodes, tree.room - 1).astype(jnp.int32))
    return chosen, jnp.sum(there, dtype=jnp.int32)


def missing_tokens(tree: TokenTree, fed: jax.Array) -> jax.Array:
    """The tokens that each branch lacks of its share of all drafted ones: f of equation 1.

    f(x) = N · C_x / Σ C_i - T_x, where N is the number of drafted tokens (the paper's M), C_i the cumulative
    confidence of branch i and T_x the number of tokens of branch x. Equation 2 takes the least f as the
    objective of max-min fairness: a token to branch x takes one from its f, so the branch with the largest f
    gets the next one.

    Args:
      tree: the tree.
      fed: `[M]` bool, as in `next_tips`; the branches end in the other nodes.

    Returns:
      `[M]` float32 of the nodes in which branches end, undefined elsewhere.
    """
    axes = Axes("missing_tokens")
    tree.check(axes)
    axes.check(jnp.bool_, "M", fed=fed)
    whole = jnp.sum(jnp.where(tree.used & ~fed, tree.confidences, 0.0))
    # Confidences may be as small as the smallest float, and their sum 0.
    shares = tree.confidences / jnp.maximum(whole, np.finfo(np.float32).tiny)
    return (tree.count - 1).astype(jnp.float32) * shares - tree.depths.astype(jnp.float32)


def grow(
    tree: TokenTree,
    tips: jax.Array,
    valid: jax.Array,
    probabilities: jax.Array,
    shifts: jax.Array | np.ndarray,
    *,
    branches: int,
    threshold: float = BRANCH_CONFIDENCE,
) -> TokenTree:
    """Adds the draft's tokens after nodes that it has just run on: the likeliest token, and every other one
    with a confidence above `threshold`.

    Args:
      tree: the tree.
      tips: `[T]` int32, the nodes.
      valid: int32 scalar, how many of them are valid.
      probabilities: `[T, V]` float32, the draft's probabilities after each.
      shifts: of their calibration (see `calibration.calibrated`).
      branches: most children of a node.
      threshold: see above.
    """
    axes = Axes("grow")
    tree.check(axes)
    axes.check(jnp.int32, "T", tips=tips)
    axes.check(jnp.int32, "", valid=valid)
    axes.check(jnp.float32, "T V", probabilities=probabilities)
    own, tokens = jax.lax.top_k(probabilities, branches)
    confidences = calibrated(own, jnp.asarray(shifts))
    real = jnp.arange(tips.shape[0], dtype=jnp.int32) < valid
    first = jnp.arange(branches, dtype=jnp.int32) == 0
    wanted = real[:, None] & (first | (confidences > np.float32(threshold)))
    # By falling confidence: if the tree is full, the least likely tokens are left out.
    paths = tree.confidences[tips][:, None] * confidences
    order = jnp.argsort(-jnp.where(wanted, paths, -1.0).reshape(-1), stable=True)
    parents = jnp.broadcast_to(tips[:, None], tokens.shape)
    new = parents, tokens.astype(jnp.int32), confidences, wanted, own
    flat = (each.reshape(-1)[order] for each in new)
    return add_nodes(tree, *flat)[0]


def best_confidence(tree: TokenTree, fed: jax.Array) -> jax.Array:
    """Tc, the highest cumulative confidence of a branch that can still grow: float32 scalar, 0 if none can;
    `fed` is `[M]` bool, as in `next_tips`."""
    axes = Axes("best_confidence")
    tree.check(axes)
    axes.check(jnp.bool_, "M", fed=fed)
    return jnp.max(jnp.where(tree.used & ~fed, tree.confidences, 0.0))
