"""Steps of token trees: growth, verification, and the update of both caches (LLMCad, arXiv 2309.04255,
sections 3.2 and 3.3)."""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxllm.axes import Axes, shaped
from jaxllm.config import ModelConfig
from jaxllm.kv.cache import KVCache, TokenPositions, TreePositions
from jaxllm.models.decoder import forward_at, logits
from jaxllm.models.parameters import Params
from jaxllm.nn.states import after_path
from jaxllm.sampling import SamplerState
from jaxllm.speculation.growth import Growth
from jaxllm.speculation.tree import (
    CELLS,
    RANKS,
    TokenTree,
    accepted_nodes,
    best_confidence,
    choices,
    deepest,
    grow,
    new_tree,
    next_tips,
    path_to,
)

# Drafter and target each have a cache of the sequence without its last token, the root; node i of a tree is
# in row `length + i` of both. The accepted path moves to the rows after the sequence; the rest of the tree is
# dropped.


@shaped(nodes="int32 T", valid="int32", B=1)
def read_nodes(
    params: Params,
    tree: TokenTree,
    nodes: jax.Array,
    valid: jax.Array,
    cache: KVCache,
    *,
    cfg: ModelConfig,
    dtype: DTypeLike,
) -> tuple[jax.Array, KVCache]:
    """Runs some nodes of a tree through the model, after or together with their ancestors.

    Args:
      nodes: `[T]` int32, ascending.
      valid: int32 scalar; the first `valid` nodes are valid.
      cache: cache of the sequence without the root, with room for the tree after it; its length is not
        changed.

    Returns:
      Logits `[T, V]` float32 after each node, undefined after padding, and the cache.
    """
    rows = TreePositions(base=cache.length, rows=cache.length + nodes, mask=tree.ancestors[nodes])
    at = TokenPositions(positions=cache.length + tree.depths[nodes], valid=valid, tree=rows)
    hidden, cache = forward_at(params, tree.tokens[nodes][None], cache, at, cfg=cfg, dtype=dtype)
    return logits(params, hidden, cfg=cfg, batch_invariant=True, valid_rows=valid)[0], cache


@shaped(nodes="int32 P", count="int32", B=1)
def keep_path(cache: KVCache, nodes: jax.Array, count: jax.Array) -> KVCache:
    """Moves a path of the tree to the end of the cache's sequence, and drops the rest of the tree.

    Args:
      cache: cache with the tree's rows from `length` on. If its mass is by node, only the mass of the
        sequence and of kept nodes is summed.
      nodes: `[P]` int32, ascending.
      count: int32 scalar; the first `count` nodes are kept.
    """

    def summed(mass: jax.Array) -> jax.Array:
        # Entry 0 is the sequence's; dropped nodes get an index out of range, which is ignored.
        at = jnp.where(jnp.arange(nodes.shape[0]) < count, nodes + 1, mass.shape[1])
        kept = jnp.zeros(mass.shape[1], mass.dtype).at[0].set(1.0).at[at].set(1.0, mode="drop")
        return (jnp.asarray(mass) * kept[:, None]).sum(1)

    if cache.mass is not None and cache.mass.ndim == 3:
        cache = cache.with_mass(summed)
    if cache.states is not None:
        cache = dataclasses.replace(cache, states=after_path(cache.states, nodes, count))
    return dataclasses.replace(_moved(cache, nodes, count), length=cache.length + count)


def _moved(cache: KVCache, nodes: jax.Array, count: jax.Array) -> KVCache:
    """The cache with the rows of some ascending nodes moved to consecutive rows from `length` on."""
    index = jnp.arange(nodes.shape[0], dtype=jnp.int32)
    source = jnp.where(index < count, nodes, index)
    # No ascending node is before its destination, so one gather of all rows comes before the write.
    # In the rows after coded chunks.
    end = cache.length if cache.coded is None else cache.length - cache.coded.tokens
    rows = jnp.minimum(end + source, np.int32(cache.capacity_tokens - 1))
    # One block, which is written in place: XLA copies a whole cache for each write to rows apart.
    destination = TokenPositions.after(end, nodes.shape[0], count)

    def moved(values: jax.Array) -> jax.Array:
        if cache.places is None:
            return destination.write(values, values[:, :, rows])
        # The heads of all layers of a stack alike.
        flat = values.reshape(-1, *values.shape[-3:])
        return destination.write(flat, flat[:, :, rows]).reshape(values.shape)

    keys, values = (tuple(map(moved, layers)) for layers in (cache.keys, cache.values))
    mass = cache.mass
    if mass is not None:
        # The mass moves with its rows; that of other nodes is dropped.
        before = jnp.arange(mass.shape[1], dtype=jnp.int32) < end
        at = jnp.where(index < count, end + index, mass.shape[1])
        mass = jnp.where(before, mass, 0).at[:, at].set(mass[:, rows], mode="drop")
    return dataclasses.replace(cache, keys=keys, values=values, mass=mass)


@shaped(limit="int32", B=1)
def verify(
    params: Params,
    tree: TokenTree,
    cache: KVCache,
    sampler: SamplerState,
    limit: jax.Array,
    *,
    cfg: ModelConfig,
    dtype: DTypeLike,
) -> tuple[jax.Array, jax.Array, jax.Array, KVCache, SamplerState]:
    """Runs a whole tree through the target and accepts the path that the target would have sampled.

    Args:
      cache: cache of the target; donated.
      sampler: sampler of the sequence up to the root, batch 1; donated.
      limit: int32 scalar, maximum number of tokens of the result, at least 1.

    Returns:
      Tokens `[M]` int32, of which the first `count` are the answer's next ones (the path after the root, then
      the target's own token); `count`, an int32 scalar of at least 1; the path's nodes `[M]`, of which the
      first `count` are kept in the cache; the cache; and the sampler after them.
    """
    nodes = jnp.arange(tree.room, dtype=jnp.int32)
    if cache.mass is not None:
        # The accepted nodes are known only after the forward pass.
        by_node = [(0, 0), (0, tree.room), (0, 0)]
        cache = cache.with_mass(lambda mass: jnp.pad(jnp.asarray(mass)[:, None], by_node))
    if cache.states is not None:
        cache = dataclasses.replace(cache, states=cache.states.with_nodes(tree.room))
    out, cache = read_nodes(params, tree, nodes, tree.count, cache, cfg=cfg, dtype=dtype)
    tokens, count, path, sampler = settle(tree, out, sampler, limit)
    return tokens, count, path, keep_path(cache, path, count), sampler


@shaped(limit="int32")
def settle(
    tree: TokenTree, logits: jax.Array, sampler: SamplerState, limit: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, SamplerState]:
    """The result of `verify` from the target's logits `[M, V]` float32 after a tree's nodes.

    Returns:
      Tokens, their count, the path's nodes, and the sampler.
    """
    chosen = choices(tree, logits, sampler)
    last = deepest(tree, accepted_nodes(tree, chosen))
    path, count = path_to(tree, last)
    count = jnp.minimum(count, limit)
    # After each node of the path the target samples the next node, and after the last one a new token.
    tokens = chosen[path]
    said = (jnp.arange(tree.room, dtype=jnp.int32) < count).astype(jnp.int32)
    counts = sampler.counts.at[0, tokens].add(said)
    return tokens, count, path, dataclasses.replace(sampler, counts=counts, drawn=sampler.drawn + count)


@shaped(fed="bool M", path="int32 P", count="int32", token="int32", B=1)
def follow(
    cache: KVCache, tree: TokenTree, fed: jax.Array, path: jax.Array, count: jax.Array, token: jax.Array
) -> tuple[KVCache, TokenTree, jax.Array, jax.Array]:
    """Moves the drafter's cache and tree to the end of the accepted path.

    If the tree has the target's token after the path, its subtree becomes the new tree: it may have grown
    during the verification (LLMCad, section 3.4).

    Args:
      cache: cache of the drafter, with the old tree's rows.
      tree: the old tree.
      fed: `[M]` bool, nodes whose rows the cache has.
      path: `[P]` int32, the accepted nodes, ascending.
      count: int32 scalar, number of accepted nodes.
      token: int32 scalar, the target's token after them: the new root.

    Returns:
      The cache with the path at the end of its sequence and the new tree's rows after it; the new tree; its
      `fed`; and the number of the path's last nodes that the cache lacks (int32 scalar): the drafter must run
      these tokens before the root.
    """
    index = jnp.arange(path.shape[0], dtype=jnp.int32)
    kept = (
        jnp.zeros(tree.room, jnp.bool_).at[jnp.where(index < count, path, tree.room)].set(True, mode="drop")
    )
    read = jnp.sum(kept & fed, dtype=jnp.int32)
    behind = (tree.parents == path[count - 1]) & (tree.tokens == token) & tree.used
    heir = jnp.argmax(behind).astype(jnp.int32)
    later = tree.ancestors[:, heir] & behind[heir]
    grown, fed_then = _subtree(tree, fed, later, token)
    # Only nodes in `fed` have rows; if the path lacks rows, no node after it has any.
    rows = jnp.nonzero((kept & fed) | later, size=tree.room, fill_value=np.iinfo(np.int32).max)[0]
    total = read + jnp.sum(later, dtype=jnp.int32)
    cache = _moved(cache, rows.astype(jnp.int32), total)
    return dataclasses.replace(cache, length=cache.length + read), grown, fed_then, count - read


@shaped(fed="bool M", most="int32", B=1)
def prune(
    cache: KVCache, tree: TokenTree, fed: jax.Array, most: jax.Array
) -> tuple[KVCache, TokenTree, jax.Array, jax.Array]:
    """Drops the least confident nodes of a tree, so that others can grow.

    Args:
      cache: cache of the drafter, with the tree's rows.
      fed: `[M]` bool, nodes whose rows the cache has.
      most: int32 scalar, at least 1; number of nodes to keep, including all of their parents.

    Returns:
      The cache with the rows of kept nodes; their tree; its `fed`, without nodes that have lost all
      children; and `[M]` int32, the new index of each node, -1 for dropped ones.
    """
    # A parent is at least as confident as its children, and comes before them.
    order = jnp.argsort(jnp.where(tree.used, -tree.confidences, 1.0), stable=True)
    kept = jnp.zeros(tree.room, jnp.bool_).at[order].set(jnp.arange(tree.room) < most) & tree.used
    # A node that loses all of its children is run again: else none would ever follow.
    parents = jnp.any((tree.parents[:, None] == jnp.arange(tree.room)) & kept[:, None], axis=0)
    found, fed_then = _subtree(tree, fed & parents, kept, tree.tokens[0])
    rows = jnp.nonzero(kept, size=tree.room, fill_value=np.iinfo(np.int32).max)[0].astype(jnp.int32)
    places = jnp.where(kept, jnp.cumsum(kept.astype(jnp.int32)) - 1, -1)
    return _moved(cache, rows, found.count), found, fed_then, places


def _subtree(
    tree: TokenTree, fed: jax.Array, nodes: jax.Array, token: jax.Array
) -> tuple[TokenTree, jax.Array]:
    """The subtree of some nodes `[M]` bool, with the first as root, or only a root if there are
    none; and its `fed`."""
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
        probabilities=jnp.where(there, jnp.where(first, 1.0, tree.probabilities[order]), 0.0),
        parents=jnp.where(there & ~first, new[tree.parents[order]], -1),
        depths=jnp.where(there, tree.depths[order] - tree.depths[root], 0),
        confidences=jnp.where(there, tree.confidences[order] / jnp.maximum(whole, np.float32(1e-30)), 0.0),
        ancestors=tree.ancestors[order][:, order] & there[:, None] & there,
        count=count,
    )
    found = jax.tree.map(lambda some, none: jnp.where(count > 0, some, none), part, alone)
    return found, there & fed[order]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftEnd:
    """Conditions that end drafting, each sufficient, and parameters of drafting.

    Attributes:
      alpha: float32 scalar; drafting ends if no branch is at least as confident (see `fallback`).
      run: float32 scalar; drafting ends if the total confidence of the next run's branches, each beyond
        `branch`, is not larger (see `token_tree.Growing`).
      branch: float32 scalar; a branch is extended if it is more confident.
      free: int32 scalar; up to this total number of runs, `run` and `branch` are 0 where drafting would end.
      most: int32 scalar, number of wanted nodes; drafting ends if no branch can add a node to the `most`
        most confident ones, though the tree may have more nodes. With a pacer other than "confidence": if
        the tree has `most` nodes.
      limit: int32 scalar, maximum number of runs of the drafter.
      depth: int32 scalar, maximum depth of a child.
      stop_ids: `[n]` int32, tokens that end the answer, so that nothing follows them; -1 for none.
      temperature: float32 scalar, temperature of the drafter's probabilities. A drafter that is the target
        at fewer bits is underconfident for a greedy target.
      shifts: `[RANKS, CELLS]` float32, from probabilities to confidences (see `calibration.calibrated`).
    """

    alpha: jax.Array | np.floating
    run: jax.Array | np.floating
    branch: jax.Array | np.floating
    free: jax.Array | np.integer
    most: jax.Array | np.integer
    limit: jax.Array | np.integer
    depth: jax.Array | np.integer
    stop_ids: jax.Array | np.ndarray
    temperature: jax.Array | np.floating
    shifts: jax.Array | np.ndarray

    @classmethod
    def at_room(cls, room: int, *, temperature: float = 1.0, stop_ids: int = 1) -> Self:
        """Ends when a tree of this room is full; confidences are not calibrated, and none of `stop_ids`
        stop ids is a token."""
        least, none, zero = np.float32(1e-30), np.float32(0), np.int32(0)
        most, shifts = np.int32(room), np.zeros((RANKS, CELLS), np.float32)
        stops = np.full(stop_ids, -1, np.int32)
        return cls(least, none, none, zero, most, most, most, stops, np.float32(temperature), shifts)

    def check(self, axes: Axes) -> None:
        """Asserts the shapes above at trace time."""
        axes.check(jnp.float32, "", alpha=self.alpha, run=self.run, branch=self.branch)
        axes.check(jnp.float32, "", temperature=self.temperature)
        axes.check(jnp.float32, f"{RANKS} {CELLS}", shifts=self.shifts)
        axes.check(jnp.int32, "", free=self.free, most=self.most)
        axes.check(jnp.int32, "", limit=self.limit, depth=self.depth)
        axes.check(jnp.int32, "n", stop_ids=self.stop_ids)


@shaped(fed="bool M", B=1)
def draft(
    params: Params,
    tree: TokenTree,
    fed: jax.Array,
    cache: KVCache,
    end: DraftEnd,
    *,
    cfg: ModelConfig,
    growth: Growth,
    dtype: DTypeLike,
) -> tuple[TokenTree, jax.Array, KVCache, jax.Array]:
    """Grows a tree in one dispatch, the most confident branches first, until drafting ends.

    Args:
      tree: the tree; donated, as are `fed` and the cache.
      fed: `[M]` bool, nodes whose rows the drafter's cache has.
      end: conditions that end drafting.
      growth: growth of the tree, see `growth.Growth`.

    Returns:
      The tree, `fed`, the cache, and the number of runs of the drafter (int32 scalar).
    """

    def ended(tree: TokenTree, fed: jax.Array) -> jax.Array:
        stopped = jnp.any(tree.tokens[:, None] == end.stop_ids, axis=1)
        return fed | stopped | (tree.depths >= end.depth)

    def tips(tree: TokenTree, fed: jax.Array, done: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The next tips, the number of valid ones, and whether running on them is worth it."""

        def chosen(least: jax.Array) -> tuple[jax.Array, jax.Array]:
            return next_tips(tree, ended(tree, fed), growth.tips, pacer=growth.pacer, least=least)

        nodes, valid = chosen(jnp.asarray(end.branch))
        beyond = jnp.where(jnp.arange(growth.tips) < valid, tree.confidences[nodes] - end.branch, 0.0)
        pays, free = jnp.sum(beyond) > end.run, done < end.free
        # Free runs come last: earlier, each less profitable run would only delay a more profitable one.
        nodes, valid = chosen(jnp.where(pays, end.branch, 0.0))
        return nodes, valid, pays | free

    def more(carry: tuple[TokenTree, jax.Array, KVCache, jax.Array]) -> jax.Array:
        tree, fed, _, done = carry
        tip = best_confidence(tree, ended(tree, fed))
        # Nodes that grow from a branch are less confident than its tip.
        found = tree.count
        if growth.pacer == "confidence":
            found = jnp.sum(tree.used & (tree.confidences >= tip), dtype=jnp.int32)
        enough = (found >= end.most) | (tree.count >= tree.room)
        return (tip >= end.alpha) & ~enough & (done < end.limit) & tips(tree, fed, done)[2]

    def step(
        carry: tuple[TokenTree, jax.Array, KVCache, jax.Array],
    ) -> tuple[TokenTree, jax.Array, KVCache, jax.Array]:
        tree, fed, cache, done = carry
        nodes, valid, _ = tips(tree, fed, done)
        out, cache = read_nodes(params, tree, nodes, valid, cache, cfg=cfg, dtype=dtype)
        probabilities = jax.nn.softmax(out / end.temperature, axis=-1)
        sizes = {"branches": growth.branches, "threshold": growth.threshold}
        grown = grow(tree, nodes, valid, probabilities, end.shifts, **sizes)
        # A node whose children did not fit is run again when there is room: else none would ever follow.
        grew = jnp.any(grown.parents == nodes[:, None], axis=1)
        real = grew & (jnp.arange(growth.tips, dtype=jnp.int32) < valid)
        fed = fed.at[jnp.where(real, nodes, tree.room)].set(True, mode="drop")
        return grown, fed, cache, done + 1

    return jax.lax.while_loop(more, step, (tree, fed, cache, jnp.zeros((), jnp.int32)))
