"""Buckets of token trees: drafting, verification, and the update of both caches."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.serving.buckets.bucket import (
    SCALAR,
    ChunkBucket,
    ModelShapes,
    TokensBucket,
    ids,
    mass_shape,
    shapes_of,
    tree_shapes,
    with_sampler,
)
from jaxllm.serving.ground.text_stream import MAX_STOP_IDS
from jaxllm.speculation.growth import Growth
from jaxllm.steps.trees import DraftEnd, draft, follow, keep_path, prune, settle, verify


class VerifyBucket(ChunkBucket):
    """Verifies a token tree after the sequence in a cache (see `steps.trees.verify`)."""

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(params, tree, cache, sampler's fixed part, its progress, limit) -> tokens, count, path, cache,
        progress."""
        shapes = tree_shapes(self.tokens), model.cache(self.cache_tokens), *model.sampler, SCALAR
        return model.lowered(with_sampler(verify, 3), *shapes, donated=(2, 4))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftBucket(ChunkBucket):
    """Grows a token tree after the sequence in the drafter's cache (see `steps.trees.draft`)."""

    growth: Growth

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(params, tree, fed, cache, end) -> tree, fed, cache, steps."""
        end = shapes_of(DraftEnd.at_room(self.tokens, stop_ids=MAX_STOP_IDS))
        shapes = tree_shapes(self.tokens), _fed(self.tokens), model.cache(self.cache_tokens), end
        return model.lowered(functools.partial(draft, growth=self.growth), *shapes, donated=(1, 2, 3))


class FollowBucket(ChunkBucket):
    """Moves the drafter's cache and tree to the end of the accepted path (see `steps.trees.follow`)."""

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(cache, tree, fed, path, count, token) -> cache, tree, fed, number of missing nodes."""
        shapes = model.cache(self.cache_tokens), tree_shapes(self.tokens), _fed(self.tokens)
        step = jax.jit(follow, donate_argnums=(0,))
        return step.lower(*shapes, ids(self.tokens), SCALAR, SCALAR)


class PruneBucket(ChunkBucket):
    """Drops the least confident nodes of the drafter's tree (see `steps.trees.prune`)."""

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(cache, tree, fed, most) -> cache, tree, fed, new indices of nodes."""
        shapes = model.cache(self.cache_tokens), tree_shapes(self.tokens), _fed(self.tokens)
        return jax.jit(prune, donate_argnums=(0,)).lower(*shapes, SCALAR)


class SettleBucket(TokensBucket):
    """Decides which path of a tree is accepted, by the logits after its nodes (see `steps.trees.settle`). All
    levels share it."""

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(tree, logits, sampler's fixed part, its progress, limit) -> tokens, count, path, progress."""
        logits = jax.ShapeDtypeStruct((self.tokens, model.cfg.vocab_size), jnp.float32)
        step = jax.jit(with_sampler(settle, 2), donate_argnums=(3,))
        return step.lower(tree_shapes(self.tokens), logits, *model.sampler, SCALAR)


class KeepBucket(ChunkBucket):
    """Moves an accepted path to the end of the sequence in a cache (see `steps.trees.keep_path`)."""

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(cache without mass, mass by node, path, count) -> cache."""

        def kept(cache: Any, mass: Any, *rest: Any) -> Any:
            return keep_path(dataclasses.replace(cache, mass=mass), *rest)

        # Not donated: the mass that is returned has another shape.
        cache = model.cache(self.cache_tokens)
        mass, cache = mass_shape(cache, self.tokens), dataclasses.replace(cache, mass=None)
        return jax.jit(kept, donate_argnums=(0,)).lower(cache, mass, ids(self.tokens), SCALAR)


def _fed(nodes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((nodes,), jnp.bool_)
