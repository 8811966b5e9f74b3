"""Reading a token tree with a model: the draft's growing of it, the target's verification, what is kept.

LLMCad (arXiv 2309.04255, sections 3.2 and 3.3). Draft and target each have a cache that holds the sequence
without its last token, the root; a tree's node i lies in row `length + i` of both. A path that is accepted
moves to the rows behind the sequence, and everything else of the tree is forgotten.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.axes import Axes
from jaxllm.config import ModelConfig
from jaxllm.kv.cache import KVCache, TokenPositions, TreePositions
from jaxllm.models.decoder import forward_at, logits
from jaxllm.models.parameters import Params
from jaxllm.sampling import SamplerState
from jaxllm.speculative.acceptance import choices
from jaxllm.speculative.pacer import Growth, best_confidence, grow, next_tips
from jaxllm.speculative.tree import TokenTree, accepted_nodes, deepest, new_tree, path_to


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
    axes = Axes("read_nodes", B=1, H=cfg.head_dim)
    tree.check(axes)
    axes.check(jnp.int32, "T", nodes=nodes)
    axes.check(jnp.int32, "", valid=valid)
    cache.check(axes)
    rows = TreePositions(base=cache.length, rows=cache.length + nodes, mask=tree.ancestors[nodes])
    at = TokenPositions(positions=cache.length + tree.depths[nodes], valid=valid, tree=rows)
    hidden, cache = forward_at(params, tree.tokens[nodes][None], cache, at, cfg=cfg, dtype=dtype)
    return logits(params, hidden, cfg=cfg, rowwise=True)[0], cache


def keep_path(cache: KVCache, nodes: jax.Array, count: jax.Array) -> KVCache:
    """The cache with a path of the tree behind its sequence, instead of the tree.

    Args:
      cache: with the tree's rows from `length` on. Where its mass is counted by node, that of what is kept
        stays alone.
      nodes: `[P]` int32, ascending.
      count: int32 scalar, how many of them, the first, are kept.
    """
    axes = Axes("keep_path", B=1)
    cache.check(axes)
    axes.check(jnp.int32, "P", nodes=nodes)
    axes.check(jnp.int32, "", count=count)
    mass = cache.mass
    if mass is not None and mass.ndim == 3:
        # Behind the sequence's own row; what is not kept aims behind the last one.
        at = jnp.where(jnp.arange(nodes.shape[0]) < count, nodes + 1, mass.shape[1])
        kept = jnp.zeros(mass.shape[1], mass.dtype).at[0].set(1.0).at[at].set(1.0, mode="drop")
        cache = dataclasses.replace(cache, mass=(mass * kept[:, None]).sum(1))
    return dataclasses.replace(_moved(cache, nodes, count), length=cache.length + count)


def _moved(cache: KVCache, nodes: jax.Array, count: jax.Array) -> KVCache:
    """The cache with the rows of some ascending nodes one behind the other, where the tree began."""
    place = jnp.arange(nodes.shape[0], dtype=jnp.int32)
    source = jnp.where(place < count, nodes, place)
    # Ascending nodes never lie before their place, so that reading all rows first is a plain gather.
    rows = jnp.minimum(cache.length + source, np.int32(cache.capacity_tokens - 1))
    behind = TokenPositions(positions=cache.length + place, valid=count)

    def moved(values: jax.Array) -> jax.Array:
        return behind.write(values, values[:, :, rows])

    keys, values = (tuple(map(moved, layers)) for layers in (cache.keys, cache.values))
    mass = cache.mass
    if mass is not None:
        # What was attended to moves with its rows; what is not kept leaves none behind.
        before = jnp.arange(mass.shape[1], dtype=jnp.int32) < cache.length
        at = jnp.where(place < count, cache.length + place, mass.shape[1])
        mass = jnp.where(before, mass, 0).at[:, at].set(mass[:, rows], mode="drop")
    return dataclasses.replace(cache, keys=keys, values=values, mass=mass)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftEnd:
    """Where drafting ends.

    Attributes:
      alpha: float32 scalar, confidence that every branch has fallen below (see `fallback`).
      most: int32 scalar, nodes that are wanted: growing ends where no branch could bring one that is among
        the so many most confident; there may be more of less confidence. Not `paced`, as soon as there are
        so many.
      limit: int32 scalar, most runs of the draft.
    """

    alpha: jax.Array | np.floating
    most: jax.Array | np.integer
    limit: jax.Array | np.integer

    def check(self, axes: Axes) -> None:
        """Asserts the shapes above, where a step that takes them is traced."""
        axes.check(jnp.float32, "", alpha=self.alpha)
        axes.check(jnp.int32, "", most=self.most, limit=self.limit)


def draft(
    params: Params,
    tree: TokenTree,
    fed: jax.Array,
    cache: KVCache,
    end: DraftEnd,
    *,
    cfg: ModelConfig,
    growth: Growth,
    dtype: jnp.dtype,
) -> tuple[TokenTree, jax.Array, KVCache, jax.Array]:
    """Grows a tree in one dispatch: the most confident branches first, until none is more confident than
    alpha, the most confident nodes are found, or `limit` readings are done.

    Args:
      params: the draft's parameters.
      tree: the tree; donated, as are `fed` and the cache.
      fed: `[M]` bool, which nodes the draft has read.
      cache: the draft's.
      end: where it ends.
      cfg: the draft.
      growth: how the tree grows.
      dtype: of the activations.

    Returns:
      The tree, the nodes read, the cache, and how often the draft was run (int32 scalar).
    """

    axes = Axes("draft", B=1, H=cfg.head_dim)
    tree.check(axes)
    axes.check(jnp.bool_, "M", fed=fed)
    end.check(axes)
    cache.check(axes)

    def more(carry: tuple[TokenTree, jax.Array, KVCache, jax.Array]) -> jax.Array:
        tree, fed, _, done = carry
        tip = best_confidence(tree, fed)
        # What grows from a branch is less confident than its tip.
        found = (
            jnp.sum(tree.used & (tree.confidences >= tip), dtype=jnp.int32) if growth.paced else tree.count
        )
        enough = (found >= end.most) | (tree.count >= tree.room)
        return (tip >= end.alpha) & ~enough & (done < end.limit)

    def step(
        carry: tuple[TokenTree, jax.Array, KVCache, jax.Array],
    ) -> tuple[TokenTree, jax.Array, KVCache, jax.Array]:
        tree, fed, cache, done = carry
        nodes, valid = next_tips(tree, fed, growth.tips, paced=growth.paced)
        out, cache = read_nodes(params, tree, nodes, valid, cache, cfg=cfg, dtype=dtype)
        probabilities = jax.nn.softmax(out, axis=-1)
        grown = grow(tree, nodes, valid, probabilities, branches=growth.branches, threshold=growth.threshold)
        real = jnp.arange(growth.tips, dtype=jnp.int32) < valid
        fed = fed.at[jnp.where(real, nodes, tree.room)].set(True, mode="drop")
        return grown, fed, cache, done + 1

    return jax.lax.while_loop(more, step, (tree, fed, cache, jnp.zeros((), jnp.int32)))


def verify(
    params: Params,
    tree: TokenTree,
    cache: KVCache,
    sampler: SamplerState,
    limit: jax.Array,
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
      limit: int32 scalar, most tokens that may be said, at least 1.
      cfg: the target.
      dtype: of the activations.

    Returns:
      Tokens `[M]` int32 of which the first count are the answer's next ones (those of the path behind the
      root, then the one that the target says itself), their count (int32 scalar, at least 1), the path's
      nodes `[M]`, of which as many are kept in the cache, the cache, and the sampler behind them.
    """
    axes = Axes("verify", B=1, H=cfg.head_dim, V=cfg.vocab_size)
    tree.check(axes)
    cache.check(axes)
    sampler.check(axes)
    axes.check(jnp.int32, "", limit=limit)
    nodes = jnp.arange(tree.room, dtype=jnp.int32)
    if cache.mass is not None:
        # Which nodes count is only known when they are read.
        by_node = jnp.pad(cache.mass[:, None], ((0, 0), (0, tree.room), (0, 0)))
        cache = dataclasses.replace(cache, mass=by_node)
    out, cache = read_nodes(params, tree, nodes, tree.count, cache, cfg=cfg, dtype=dtype)
    tokens, count, path, sampler = settle(tree, out, sampler, limit)
    return tokens, count, path, keep_path(cache, path, count), sampler


def settle(
    tree: TokenTree, logits: jax.Array, sampler: SamplerState, limit: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, SamplerState]:
    """What a target says whose logits `[M, V]` float32 behind a tree's nodes are known (see `verify`).

    Returns:
      Tokens, their count, the path's nodes, and the sampler.
    """
    Axes("settle").check(jnp.int32, "", limit=limit)
    chosen = choices(tree, logits, sampler)
    last = deepest(tree, accepted_nodes(tree, chosen))
    path, count = path_to(tree, last)
    count = jnp.minimum(count, limit)
    # Behind each node of the path the target says the next one, and behind the last a token of its own.
    tokens = chosen[path]
    said = (jnp.arange(tree.room, dtype=jnp.int32) < count).astype(jnp.int32)
    counts = sampler.counts.at[0, tokens].add(said)
    return tokens, count, path, dataclasses.replace(sampler, counts=counts, drawn=sampler.drawn + count)


def follow(
    cache: KVCache, tree: TokenTree, fed: jax.Array, path: jax.Array, count: jax.Array, token: jax.Array
) -> tuple[KVCache, TokenTree, jax.Array, jax.Array]:
    """The draft's cache and tree behind what the target has accepted.

    Where the draft had foreseen the target's own token, what it has drafted behind that stays: the tree may
    have grown since the target began to read it (LLMCad, section 3.4).

    Args:
      cache: the draft's, with the old tree's rows.
      tree: the old tree.
      fed: `[M]` bool, which of its nodes the draft has read.
      path: `[P]` int32, the accepted nodes, ascending.
      count: int32 scalar, how many.
      token: int32 scalar, the target's own behind them: the new root.

    Returns:
      The cache with the path behind its sequence and the new tree's rows behind that; the tree; which of its
      nodes the draft has read; and how many of the path's last nodes it has not (int32 scalar): tokens that
      it must still be fed before the root.
    """
    axes = Axes("follow", B=1)
    tree.check(axes)
    axes.check(jnp.bool_, "M", fed=fed)
    axes.check(jnp.int32, "P", path=path)
    axes.check(jnp.int32, "", count=count, token=token)
    cache.check(axes)
    place = jnp.arange(path.shape[0], dtype=jnp.int32)
    kept = (
        jnp.zeros(tree.room, jnp.bool_).at[jnp.where(place < count, path, tree.room)].set(True, mode="drop")
    )
    read = jnp.sum(kept & fed, dtype=jnp.int32)
    behind = (tree.parents == path[count - 1]) & (tree.tokens == token) & tree.used
    heir = jnp.argmax(behind).astype(jnp.int32)
    later = tree.ancestors[:, heir] & behind[heir]
    grown, fed_then = _subtree(tree, fed, later, token)
    # Only what was read has rows, and behind a path that was not read to its end nothing was.
    rows = jnp.nonzero((kept & fed) | later, size=tree.room, fill_value=np.iinfo(np.int32).max)[0]
    total = read + jnp.sum(later, dtype=jnp.int32)
    cache = _moved(cache, rows.astype(jnp.int32), total)
    return dataclasses.replace(cache, length=cache.length + read), grown, fed_then, count - read


def _subtree(
    tree: TokenTree, fed: jax.Array, nodes: jax.Array, token: jax.Array
) -> tuple[TokenTree, jax.Array]:
    """The part of a tree that some nodes `[M]` bool are, the first of them its root, or where there are none
    a root alone; and which of its nodes are read."""
    count = jnp.sum(nodes, dtype=jnp.int32)
    order = jnp.nonzero(nodes, size=tree.room, fill_value=0)[0].astype(jnp.int32)
    new = jnp.cumsum(nodes.astype(jnp.int32)) - 1
    there = jnp.arange(tree.room, dtype=jnp.int32) < count
    root = order[0]
    whole = tree.confidences[root]
    first = jnp.arange(tree.room, dtype=jnp.int32) == 0
    alone = new_tree(token, tree.room)
    part = TokenTree(
        tokens=jnp.where(there, tree.tokens[order], 0),
        parents=jnp.where(there & ~first, new[tree.parents[order]], -1),
        depths=jnp.where(there, tree.depths[order] - tree.depths[root], 0),
        confidences=jnp.where(there, tree.confidences[order] / jnp.maximum(whole, np.float32(1e-30)), 0.0),
        ancestors=tree.ancestors[order][:, order] & there[:, None] & there,
        count=count,
    )
    found = jax.tree.map(lambda some, none: jnp.where(count > 0, some, none), part, alone)
    return found, there & fed[order]
