"""Defines the step that grows token trees (LLMCad, arXiv 2309.04255, sections 3.2 and 3.3)."""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.axes import Axes
from jaxllm.config import ModelConfig
from jaxllm.kv.cache import KVCache
from jaxllm.models.parameters import Params
from jaxllm.speculative.calibration import CELLS, RANKS
from jaxllm.speculative.growth import Growth
from jaxllm.speculative.pacer import best_confidence, grow, next_tips
from jaxllm.speculative.tree import TokenTree
from jaxllm.steps.trees import read_nodes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftEnd:
    """Conditions that end drafting, any of which does, and what drafting goes by.

    Attributes:
      alpha: float32 scalar; no branch is at least as confident (see `fallback`).
      run: float32 scalar; the branches of the next run are not more confident in sum, each beyond `branch`
        (see `tree_size.Worth`).
      branch: float32 scalar; a branch is extended if it is more confident.
      free: int32 scalar; up to so many runs in all, `run` and `branch` are 0 where drafting would end.
      most: int32 scalar, number of wanted nodes; no branch can add a node to the `most` most confident ones,
        though the tree may have more nodes. By another pacer than "confidence": the tree has `most` nodes.
      limit: int32 scalar, most runs of the drafter.
      depth: int32 scalar; no node gets a child deeper than this.
      stop_ids: `[n]` int32, tokens that end the answer, so that nothing follows them; -1 for none.
      temperature: float32 scalar, at which the drafter's probabilities are taken. A drafter that is the
        target at fewer bits knows better than its probabilities say what a target will take that takes the
        likeliest token.
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
        """Ends where a tree of this room is full; confidences are not calibrated, and none of so many
        `stop_ids` is a token."""
        least, none, zero = np.float32(1e-30), np.float32(0), np.int32(0)
        most, shifts = np.int32(room), np.zeros((RANKS, CELLS), np.float32)
        stops = np.full(stop_ids, -1, np.int32)
        return cls(least, none, none, zero, most, most, most, stops, np.float32(temperature), shifts)

    def check(self, axes: Axes) -> None:
        """Asserts the shapes above, where a step that takes them is traced."""
        axes.check(jnp.float32, "", alpha=self.alpha, run=self.run, branch=self.branch)
        axes.check(jnp.float32, "", temperature=self.temperature)
        axes.check(jnp.float32, f"{RANKS} {CELLS}", shifts=self.shifts)
        axes.check(jnp.int32, "", free=self.free, most=self.most)
        axes.check(jnp.int32, "", limit=self.limit, depth=self.depth)
        axes.check(jnp.int32, "n", stop_ids=self.stop_ids)


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
    """Grows a tree in one dispatch, the most confident branches first, until drafting ends.

    Args:
      params: of the drafter.
      tree: the tree; donated, as are `fed` and the cache.
      fed: `[M]` bool, nodes whose rows the drafter's cache has.
      cache: of the drafter.
      end: conditions that end drafting.
      cfg: the drafter.
      growth: of the tree, see `growth.Growth`.
      dtype: of the activations.

    Returns:
      The tree, `fed`, the cache, and the number of runs of the drafter (int32 scalar).
    """

    axes = Axes("draft", B=1, H=cfg.head_dim)
    tree.check(axes)
    axes.check(jnp.bool_, "M", fed=fed)
    end.check(axes)
    cache.check(axes)

    def ended(tree: TokenTree, fed: jax.Array) -> jax.Array:
        """Nodes after which nothing is added."""
        stopped = jnp.any(tree.tokens[:, None] == end.stop_ids, axis=1)
        return fed | stopped | (tree.depths >= end.depth)

    def tips(tree: TokenTree, fed: jax.Array, done: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The next tips, how many are valid, and whether running on them is worth it."""

        def chosen(least: jax.Array) -> tuple[jax.Array, jax.Array]:
            return next_tips(tree, ended(tree, fed), growth.tips, pacer=growth.pacer, least=least)

        nodes, valid = chosen(jnp.asarray(end.branch))
        beyond = jnp.where(jnp.arange(growth.tips) < valid, tree.confidences[nodes] - end.branch, 0.0)
        pays, free = jnp.sum(beyond) > end.run, done < end.free
        # Free runs come last: before them each run that pays less would only delay one that pays more.
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
        # A node whose children did not fit is run on again, where there is room: else none would ever follow.
        grew = jnp.any(grown.parents == nodes[:, None], axis=1)
        real = grew & (jnp.arange(growth.tips, dtype=jnp.int32) < valid)
        fed = fed.at[jnp.where(real, nodes, tree.room)].set(True, mode="drop")
        return grown, fed, cache, done + 1

    return jax.lax.while_loop(more, step, (tree, fed, cache, jnp.zeros((), jnp.int32)))
