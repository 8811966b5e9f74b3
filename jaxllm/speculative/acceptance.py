"""Chooses the target's token after every node of a token tree, without changing the target's answer.

After each node the target's token is chosen as in plain decoding: by the same sampler, with the same draw,
after the same tokens. So the answer is that of the target alone, greedy or sampled, whatever the tree
contains.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxllm.axes import Axes
from jaxllm.sampling import SamplerState, likeliest, sample
from jaxllm.speculative.tree import TokenTree


def choices(tree: TokenTree, logits: jax.Array, sampler: SamplerState) -> jax.Array:
    """The target's token after each node, `[M]` int32, or `NO_TOKEN` (see `sample`).

    Args:
      tree: the tree; the root's token is already counted in `sampler`.
      logits: `[M, V]` float32, the target's logits after each node.
      sampler: state of the sequence up to the root, batch 1.
    """

    axes = Axes("choices", B=1)
    tree.check(axes)
    axes.check(jnp.float32, "M V", logits=logits)
    sampler.check(axes)

    def by_sampler(logits: jax.Array) -> jax.Array:
        counts = jax.lax.cond(sampler.penalized, _counted, _as_before, tree, logits, sampler.counts)

        def at_node(node: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
            row, counts, depth = node
            state = dataclasses.replace(sampler, counts=counts[None], drawn=sampler.drawn + depth)
            return sample(row[None], state)[0][0]

        # A loop, not `vmap`: the sampler branches on a request's options, and `vmap` would compute all
        # branches.
        return jax.lax.map(at_node, (logits, counts, tree.depths))

    plain = (sampler.temperature <= 0) & ~sampler.penalized
    return jax.lax.cond(plain, likeliest, by_sampler, logits)


def _counted(tree: TokenTree, logits: jax.Array, counts: jax.Array) -> jax.Array:
    """How often each token occurs in the answer after each node, `[M, V]` int32."""
    said = tree.ancestors.at[:, 0].set(False).astype(jnp.float32)
    of_token = jax.nn.one_hot(tree.tokens, logits.shape[-1], dtype=jnp.float32)
    return counts + (said @ of_token).astype(jnp.int32)


def _as_before(tree: TokenTree, logits: jax.Array, counts: jax.Array) -> jax.Array:
    """The root's counts for every node, `[M, V]` int32, for samplings without penalties, which do not read
    them."""
    del tree
    return jnp.broadcast_to(counts, logits.shape)
