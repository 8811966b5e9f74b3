"""Buckets of token trees: drafting, verification, and the update of both caches."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.speculative.pacer import Growth
from jaxllm.steps.trees import DraftEnd, draft, follow, keep_path, settle, verify
from serving.buckets.bucket import SCALAR, Bucket, ModelShapes, ids, mass_by_node, tree_shapes


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
        """(params, tree, cache, sampler, limit) -> tokens, count, path, cache, sampler."""
        cache = model.cache(self.cache_tokens)
        step = model.jitted(verify, 2, 3)
        return step.lower(model.params, tree_shapes(self.nodes), cache, model.sampler, SCALAR)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftBucket(Bucket):
    """Grows a token tree after the sequence in the drafter's cache (see `steps.trees.draft`).

    Attributes:
      nodes: capacity of the tree (M).
      cache_tokens: length of the drafter's cache.
      growth: how the tree grows.
    """

    nodes: int
    cache_tokens: int
    growth: Growth

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(params, tree, fed, cache, end) -> tree, fed, cache, steps."""
        step = model.jitted(functools.partial(draft, growth=self.growth), 1, 2, 3)
        tree, fed, cache = tree_shapes(self.nodes), _fed(self.nodes), model.cache(self.cache_tokens)
        alpha: Any = jax.ShapeDtypeStruct((), jnp.float32)
        count: Any = SCALAR
        return step.lower(model.params, tree, fed, cache, DraftEnd(alpha, count, count))


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
class SettleBucket(Bucket):
    """Decides which path of a tree is accepted, by the logits after its nodes (see `steps.trees.settle`). All
    levels share it.

    Attributes:
      nodes: capacity of the tree (M).
    """

    nodes: int

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(tree, logits, sampler, limit) -> tokens, count, path, sampler."""
        logits = jax.ShapeDtypeStruct((self.nodes, model.cfg.vocab_size), jnp.float32)
        step = jax.jit(settle, donate_argnums=(2,))
        return step.lower(tree_shapes(self.nodes), logits, model.sampler, SCALAR)


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
