"""What the target accepts of a token tree, without changing what it would have said alone.

`choices` makes the target choose behind every node as plain decoding would there: by the same sampler, with
the same draw, after the same tokens. The answer is then the very one that the target gives without a
draft, greedy or not, whatever the tree holds. `accept_drawn` instead decides by rejection, for trees whose
branches were drawn from the draft's own distribution: for the same seed another answer than plain decoding's,
but of the same distribution, and with more of the draft's tokens in it.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.sampling import SamplerState, likeliest, sample
from jaxllm.speculative.tree import TokenTree


def choices(tree: TokenTree, logits: jax.Array, sampler: SamplerState) -> jax.Array:
    """The token that the target says behind each node, `[N]` int32, or `NO_TOKEN` (see `sample`).

    Args:
      tree: the tree; the root's token is already counted in `sampler`.
      logits: `[N, V]` float32, the target's behind each node.
      sampler: of the sequence up to the root, batch 1.
    """

    def by_sampler(logits: jax.Array) -> jax.Array:
        counts = jax.lax.cond(sampler.penalized, _counted, _as_before, tree, logits, sampler.counts)

        def at_node(node: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
            row, counts, depth = node
            state = dataclasses.replace(sampler, counts=counts[None], drawn=sampler.drawn + depth)
            return sample(row[None], state)[0][0]

        # One after the other: what chooses a token is made for one request, and branches on its options.
        return jax.lax.map(at_node, (logits, counts, tree.depths))

    plain = (sampler.temperature <= 0) & ~sampler.penalized
    return jax.lax.cond(plain, likeliest, by_sampler, logits)


def _counted(tree: TokenTree, logits: jax.Array, counts: jax.Array) -> jax.Array:
    """How often the answer holds each token behind each node, `[N, V]` int32."""
    said = tree.ancestors.at[:, 0].set(False).astype(jnp.float32)
    of_token = jax.nn.one_hot(tree.tokens, logits.shape[-1], dtype=jnp.float32)
    return counts + (said @ of_token).astype(jnp.int32)


def _as_before(tree: TokenTree, logits: jax.Array, counts: jax.Array) -> jax.Array:
    """The counts that nobody reads, `[N, V]` int32."""
    del tree
    return jnp.broadcast_to(counts, logits.shape)


def accept_drawn(
    tree: TokenTree, target: jax.Array, draft: jax.Array, key: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Accepts a path by recursive rejection (SpecInfer, arXiv 2305.09781, algorithm 2; with candidates drawn
    without replacement, as in arXiv 2402.14160, section 3.2).

    Children of one node must have been drawn one after the other from the draft's distribution there without
    the ones before. A child x is accepted with probability min(1, p(x) / q(x)); if it is not, p becomes the
    positive part of p - q and q loses x, both normalized, and the next child is tried.

    Args:
      tree: the tree; siblings lie in the order in which they were drawn.
      target: `[N, V]` float32, the target's probabilities behind each node.
      draft: `[N, V]` float32, the draft's.
      key: of the draw.

    Returns:
      The last accepted node and the token behind it, which the target says itself: int32 scalars. Together
      they are distributed as the target's own tokens.
    """
    draws = jax.random.uniform(jax.random.fold_in(key, 0), (tree.room,))

    def normalized(weights: jax.Array) -> jax.Array:
        return weights / jnp.maximum(jnp.sum(weights), np.float32(1e-30))

    def visit(node: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        here, p, q = carry
        token = tree.tokens[node]
        tried = (tree.parents[node] == here) & (node < tree.count)
        accepted = tried & (draws[node] * q[token] < p[token])
        left = jnp.maximum(p - q, 0)
        # Where nothing is left, p was q: what was drawn from q is accepted, and this is not reached.
        rest = jnp.where(jnp.sum(left) > 0, normalized(left), p)
        without = normalized(q.at[token].set(0))
        refused = tried & ~accepted
        p = jnp.where(accepted, target[node], jnp.where(refused, rest, p))
        q = jnp.where(accepted, draft[node], jnp.where(refused, without, q))
        return jnp.where(accepted, node, here), p, q

    start = (jnp.zeros((), jnp.int32), target[0], draft[0])
    here, p, _ = jax.lax.fori_loop(1, tree.room, visit, start)
    token = jax.random.categorical(jax.random.fold_in(key, 1), jnp.log(p))
    return here, token.astype(jnp.int32)
