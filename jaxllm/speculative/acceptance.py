"""What the target accepts of a token tree, without changing what it would have said alone.

The target chooses behind every node as plain decoding would there: by the same sampler, with the same draw,
after the same tokens. The answer is then the very one that the target gives without a draft, greedy or not,
whatever the tree holds.
"""

import dataclasses

import jax
import jax.numpy as jnp

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
