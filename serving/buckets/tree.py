"""Buckets of token trees: drafting, verification, and the update of both caches."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.kv.cache import KVCache
from jaxllm.models.parameters import Params
from jaxllm.sampling import Progress, SamplerState
from jaxllm.serving.buckets.bucket import (
    SCALAR,
    Bucket,
    ModelShapes,
    ids,
    mass_by_node,
    shapes_of,
    tree_shapes,
)
from jaxllm.serving.ground.text_stream import MAX_STOP_IDS
from jaxllm.speculation.token_tree import Growth
from jaxllm.speculation.tree import TokenTree
from jaxllm.steps.trees import DraftEnd, draft, follow, keep_path, prune, settle, verify


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyBucket(Bucket):
    """Verifies a token tree after the sequence in a cache (see `steps.trees.verify`).

    Attributes:
      nodes: capacity of the tree (M).
      cache_tokens: length of the target's cache.
    """

    nodes: int
    cache_tokens: int

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(params, tree, cache, sampler's fixed part, its progress, limit) -> tokens, count, path, cache,
        progress."""

        def step(
            params: Params,
            tree: TokenTree,
            cache: KVCache,
            fixed: SamplerState,
            progress: Progress,
            limit: jax.Array,
            **static: Any,
        ) -> Any:
            *found, state = verify(params, tree, cache, fixed.after(progress), limit, **static)
            return *found, state.progress

        cache, state = model.cache(self.cache_tokens), model.sampler
        tree = tree_shapes(self.nodes)
        return model.jitted(step, 2, 4).lower(model.params, tree, cache, state.fixed, state.progress, SCALAR)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftBucket(Bucket):
    """Grows a token tree after the sequence in the drafter's cache (see `steps.drafting.draft`).

    Attributes:
      nodes: capacity of the tree (M).
      cache_tokens: length of the drafter's cache.
      growth: growth of the tree.
    """

    nodes: int
    cache_tokens: int
    growth: Growth

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(params, tree, fed, cache, end) -> tree, fed, cache, steps."""
        step = model.jitted(functools.partial(draft, growth=self.growth), 1, 2, 3)
        tree, fed, cache = tree_shapes(self.nodes), _fed(self.nodes), model.cache(self.cache_tokens)
        return step.lower(
            model.params, tree, fed, cache, shapes_of(DraftEnd.at_room(self.nodes, stop_ids=MAX_STOP_IDS))
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FollowBucket(Bucket):
    """Moves the drafter's cache and tree to the end of the accepted path (see `steps.trees.follow`).

    Attributes:
      nodes: capacity of the tree (M).
      cache_tokens: length of the drafter's cache.
    """

    nodes: int
    cache_tokens: int

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(cache, tree, fed, path, count, token) -> cache, tree, fed, number of missing nodes."""
        cache, tree = model.cache(self.cache_tokens), tree_shapes(self.nodes)
        step = jax.jit(follow, donate_argnums=(0,))
        return step.lower(cache, tree, _fed(self.nodes), ids(self.nodes), SCALAR, SCALAR)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PruneBucket(Bucket):
    """Drops the least confident nodes of the drafter's tree (see `steps.trees.prune`).

    Attributes:
      nodes: capacity of the tree (M).
      cache_tokens: length of the drafter's cache.
    """

    nodes: int
    cache_tokens: int

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(cache, tree, fed, most) -> cache, tree, fed, new indices of nodes."""
        cache, tree = model.cache(self.cache_tokens), tree_shapes(self.nodes)
        return jax.jit(prune, donate_argnums=(0,)).lower(cache, tree, _fed(self.nodes), SCALAR)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SettleBucket(Bucket):
    """Decides which path of a tree is accepted, by the logits after its nodes (see `steps.trees.settle`). All
    levels share it.

    Attributes:
      nodes: capacity of the tree (M).
    """

    nodes: int

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(tree, logits, sampler's fixed part, its progress, limit) -> tokens, count, path, progress."""

        def step(
            tree: TokenTree, logits: jax.Array, fixed: SamplerState, progress: Progress, limit: jax.Array
        ) -> Any:
            *found, state = settle(tree, logits, fixed.after(progress), limit)
            return *found, state.progress

        logits, state = jax.ShapeDtypeStruct((self.nodes, model.cfg.vocab_size), jnp.float32), model.sampler
        shapes = tree_shapes(self.nodes), logits, state.fixed, state.progress, SCALAR
        return jax.jit(step, donate_argnums=(3,)).lower(*shapes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeepBucket(Bucket):
    """Moves an accepted path to the end of the sequence in a cache (see `steps.trees.keep_path`).

    Attributes:
      nodes: capacity of the tree (M).
      cache_tokens: length of the target's cache.
    """

    nodes: int
    cache_tokens: int

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(cache without mass, mass by node, path, count) -> cache."""

        def kept(cache: Any, mass: Any, *rest: Any) -> Any:
            return keep_path(dataclasses.replace(cache, mass=mass), *rest)

        # Not donated: the mass that is returned has another shape.
        cache = model.cache(self.cache_tokens)
        mass, cache = mass_by_node(cache, self.nodes), dataclasses.replace(cache, mass=None)
        return jax.jit(kept, donate_argnums=(0,)).lower(cache, mass, ids(self.nodes), SCALAR)


def _fed(nodes: int) -> jax.ShapeDtypeStruct:
    """Shape of the mask of nodes that the drafter's cache has."""
    return jax.ShapeDtypeStruct((nodes,), jnp.bool_)
