"""Reading a token tree with a model: the draft's growing of it, the target's verification, what is kept.

LLMCad (arXiv 2309.04255, sections 3.2 and 3.3). Draft and target each have a cache that holds the sequence
without its last token, the root; a tree's node i lies in row `length + i` of both. A path that is accepted
moves to the rows behind the sequence, and everything else of the tree is forgotten.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.kv.cache import KVCache, Places, TreeRows
from jaxllm.models.decoder import forward_at, logits
from jaxllm.models.parameters import Params
from jaxllm.sampling import SamplerState
from jaxllm.speculative.acceptance import choices
from jaxllm.speculative.pacer import BRANCH_CONFIDENCE, best_confidence, grow, next_tips
from jaxllm.speculative.tree import TokenTree, accepted_nodes, ancestors, deepest, new_tree, path_to


def read_nodes(
    params: Params,
    tree: TokenTree,
    nodes: jax.Array,
    valid: jax.Array,
    cache: KVCache,
    *,
    cfg: ModelConfig,
    dtype: jnp.dtype,
) -> tuple[jax.Array, KVCache]:
    """Reads some nodes of a tree, all of whose ancestors are read before or with them.

    Args:
      params: the model's parameters.
      tree: the tree.
      nodes: `[T]` int32, ascending.
      valid: int32 scalar, how many of them, the first, are real.
      cache: of the sequence without the root, with room for the tree behind it; its length does not change.
      cfg: the model.
      dtype: of the activations.

    Returns:
      Logits `[T, V]` float32 behind each node, and the cache.
    """
    rows = TreeRows(base=cache.length, rows=cache.length + nodes, seen=ancestors(tree)[nodes])
    at = Places(positions=cache.length + tree.depths[nodes], valid=valid, tree=rows)
    hidden, cache = forward_at(params, tree.tokens[nodes][None], cache, at, cfg=cfg, dtype=dtype)
    return logits(params, hidden, cfg=cfg)[0], cache


def keep_path(cache: KVCache, nodes: jax.Array, count: jax.Array) -> KVCache:
    """The cache with a path of the tree behind its sequence, instead of the tree.

    Args:
      cache: with the tree's rows from `length` on.
      nodes: `[N]` int32, ascending.
      count: int32 scalar, how many of them, the first, are kept.
    """
    place = jnp.arange(nodes.shape[0], dtype=jnp.int32)
    source = jnp.where(place < count, nodes, place)
    # Ascending nodes never lie before their place, so that reading all rows first is a plain gather.
    rows = jnp.minimum(cache.length + source, np.int32(cache.capacity_tokens - 1))
    behind = Places(positions=cache.length + place, valid=count)

    def moved(values: jax.Array) -> jax.Array:
        return behind.write(values, values[:, :, rows])

    return dataclasses.replace(
        cache,
        keys=tuple(map(moved, cache.keys)),
        values=tuple(map(moved, cache.values)),
        length=cache.length + count,
    )


def draft(
    params: Params,
    tree: TokenTree,
    fed: jax.Array,
    cache: KVCache,
    alpha: jax.Array,
    limit: jax.Array,
    *,
    cfg: ModelConfig,
    tips: int,
    branches: int,
    dtype: jnp.dtype,
    threshold: float = BRANCH_CONFIDENCE,
) -> tuple[TokenTree, jax.Array, KVCache, jax.Array]:
    """Grows a tree in one dispatch: the most confident branches first, until none is more confident than
    alpha, the tree is full, or `limit` readings are done.

    Args:
      params: the draft's parameters.
      tree: the tree; donated, as are `fed` and the cache.
      fed: `[N]` bool, which nodes the draft has read.
      cache: the draft's.
      alpha: float32 scalar, see `fallback`.
      limit: int32 scalar.
      cfg: the draft.
      tips: how many branches are read at a time.
      branches: most children of a node.
      dtype: of the activations.
      threshold: see `pacer.grow`.

    Returns:
      The tree, the nodes read, the cache, and how often the draft was run (int32 scalar).
    """

    def more(carry: tuple[TokenTree, jax.Array, KVCache, jax.Array]) -> jax.Array:
        tree, fed, _, done = carry
        return (best_confidence(tree, fed) >= alpha) & (tree.count < tree.room) & (done < limit)

    def step(
        carry: tuple[TokenTree, jax.Array, KVCache, jax.Array],
    ) -> tuple[TokenTree, jax.Array, KVCache, jax.Array]:
        tree, fed, cache, done = carry
        nodes, valid = next_tips(tree, fed, tips)
        out, cache = read_nodes(params, tree, nodes, valid, cache, cfg=cfg, dtype=dtype)
        probabilities = jax.nn.softmax(out, axis=-1)
        grown = grow(tree, nodes, valid, probabilities, branches=branches, threshold=threshold)
        real = jnp.arange(tips, dtype=jnp.int32) < valid
        fed = fed.at[jnp.where(real, nodes, tree.room)].set(True, mode="drop")
        return grown, fed, cache, done + 1

    return jax.lax.while_loop(more, step, (tree, fed, cache, jnp.zeros((), jnp.int32)))


def verify(
    params: Params,
    tree: TokenTree,
    cache: KVCache,
    sampler: SamplerState,
    *,
    cfg: ModelConfig,
    dtype: jnp.dtype,
) -> tuple[jax.Array, jax.Array, jax.Array, KVCache, SamplerState]:
    """The target reads a whole tree at once and says how much of it is its own answer.

    Args:
      params: the target's parameters.
      tree: the tree.
      cache: the target's; donated.
      sampler: of the sequence up to the root, batch 1; donated.
      cfg: the target.
      dtype: of the activations.

    Returns:
      Tokens `[N]` int32 of which the first count are the answer's next ones (those of the path behind the
      root, then the one that the target says itself), their count (int32 scalar, at least 1), the path's
      nodes `[N]`, of which as many are kept in the cache, the cache, and the sampler behind them.
    """
    nodes = jnp.arange(tree.room, dtype=jnp.int32)
    out, cache = read_nodes(params, tree, nodes, tree.count, cache, cfg=cfg, dtype=dtype)
    chosen = choices(tree, out, sampler)
    last = deepest(tree, accepted_nodes(tree, chosen))
    path, count = path_to(tree, last)
    # Behind each node of the path the target says the next one, and behind the last a token of its own.
    tokens = chosen[path]
    said = (nodes < count).astype(jnp.int32)
    counts = sampler.counts.at[0, tokens].add(said)
    sampler = dataclasses.replace(sampler, counts=counts, drawn=sampler.drawn + count)
    return tokens, count, path, keep_path(cache, path, count), sampler


def follow(
    cache: KVCache, fed: jax.Array, path: jax.Array, count: jax.Array, token: jax.Array, *, room: int
) -> tuple[KVCache, TokenTree, jax.Array]:
    """The draft's cache and a new tree behind what the target has accepted.

    Args:
      cache: the draft's, with the old tree's rows.
      fed: `[N]` bool, which of its nodes the draft had read.
      path: `[N]` int32, the accepted nodes.
      count: int32 scalar, how many.
      token: int32 scalar, the target's own behind them: the new root.
      room: of the new tree.

    Returns:
      The cache with the path behind its sequence; the tree; and how many of the path's last nodes the draft
      has not read (int32 scalar): tokens that it must still be fed before the root.
    """
    place = jnp.arange(path.shape[0], dtype=jnp.int32)
    read = jnp.sum((place < count) & fed[path], dtype=jnp.int32)
    return keep_path(cache, path, read), new_tree(token, room), count - read
