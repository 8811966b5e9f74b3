"""Buckets of mixtures whose experts are loaded one by one: a sparse layer up to its experts, one tile of one
expert, and the sum of the experts' outputs."""

import dataclasses
import functools
from typing import Any

import jax

from jaxllm.kv.cache import Past
from jaxllm.kv.positions import TokenPositions
from jaxllm.steps.layers import attend_layer, attend_restored, combine_experts, expert_tile
from serving.buckets.bucket import SCALAR, Bucket, ModelShapes, mass_by_node, position_shapes
from serving.buckets.context import layer_chunk_shapes
from serving.buckets.parts import EXPERT_PARTS, any_expert, expert_norm, layer_params, router_params


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttendBucket(Bucket):
    """Runs a sparse layer over a chunk, up to its experts (see `steps.layers.attend_layer`).

    Attributes:
      tokens: length of the chunk, padding included.
      cache_tokens: length of the cache.
      layer: the first of the layers that share the bucket.
    """

    tokens: int
    cache_tokens: int
    layer: int

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(layer's params, next router, x, positions, keys and values, mass) -> tokens at experts, a
        buffer for their outputs, keys and values, mass."""
        past, mass = model.past(self.layer, self.cache_tokens), model.cache(self.cache_tokens).mass
        return _lower_attend(model, self.layer, position_shapes(self.tokens), past, mass)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttendTreeBucket(Bucket):
    """`AttendBucket` over a token tree.

    Attributes:
      nodes: capacity of the tree (M).
      cache_tokens: length of the cache.
      layer: the first of the layers that share the bucket.
    """

    nodes: int
    cache_tokens: int
    layer: int

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """See `AttendBucket`; the mass is by node."""
        past, at = model.past(self.layer, self.cache_tokens), position_shapes(self.nodes, tree=True)
        mass = mass_by_node(model.cache(self.cache_tokens), self.nodes)
        return _lower_attend(model, self.layer, at, past, mass)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttendRestoredBucket(Bucket):
    """Restores a sparse layer of a context, up to its experts (see `steps.layers.attend_restored`).

    Attributes:
      tokens: of recomputed chunks.
      cache_tokens: length of the cache.
      layer: the first of the layers that share the bucket.
    """

    tokens: int
    cache_tokens: int
    layer: int

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(layer's params, next router, x, positions, keys and values, chunks) -> tokens at experts,
        a buffer for their outputs, keys and values."""
        layer = self.layer
        attend = functools.partial(attend_restored, cfg=model.cfg, layer=layer)
        at, past = (
            position_shapes(self.tokens, consecutive=False),
            model.past(layer, self.cache_tokens),
        )
        return jax.jit(attend, donate_argnums=(2, 4)).lower(
            layer_params(model.params, layer, layer),
            router_params(model.weights, layer),
            model.hidden(self.tokens),
            at,
            past,
            layer_chunk_shapes(model, layer, self.cache_tokens),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertBucket(Bucket):
    """Runs one tile of tokens through one expert (see `steps.layers.expert_tile`). All layers share it.

    Attributes:
      tokens: of the tile's chunk.
      bits: bitwidth of the expert.
    """

    tokens: int
    bits: int

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(expert, norm, tokens at experts, number of the tile, out) -> out."""
        weights, (before, out) = model.weights, _at_experts(model, self.tokens)
        expert = {name: weights[f"{any_expert(self.bits)}.{name}"] for name in EXPERT_PARTS}
        norm = expert_norm(router_params(weights, _first_sparse(model)))
        step = jax.jit(functools.partial(expert_tile, cfg=model.cfg), donate_argnums=(4,))
        return step.lower(expert, norm, before, SCALAR, out)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CombineBucket(Bucket):
    """Sums the outputs of experts (see `steps.layers.combine_experts`). All layers share it.

    Attributes:
      tokens: of the chunk.
    """

    tokens: int

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(tokens at experts, out) -> x."""
        # Nothing is donated: no result has the shape of the outputs of all tiles.
        return jax.jit(combine_experts).lower(*_at_experts(model, self.tokens))


def _lower_attend(
    model: ModelShapes, layer: int, at: TokenPositions, past: Past, mass: Any
) -> jax.stages.Lowered:
    attend = functools.partial(attend_layer, cfg=model.cfg, layer=layer)
    x = model.hidden(at.positions.shape[0])
    return jax.jit(attend, donate_argnums=(2, 4, 5)).lower(
        layer_params(model.params, layer, layer), router_params(model.weights, layer), x, at, past, mass
    )


def _at_experts(model: ModelShapes, tokens: int) -> tuple[Any, Any]:
    """Shapes of tokens at experts, and of the experts' outputs."""
    layer = _first_sparse(model)
    # Any cache length gives the same shapes.
    capacity = model.options.cache_tokens[0]
    attend = functools.partial(attend_layer, cfg=model.cfg, layer=layer)
    before, out, *_ = jax.eval_shape(
        attend,
        layer_params(model.params, layer, layer),
        router_params(model.weights, layer),
        model.hidden(tokens),
        position_shapes(tokens),
        model.past(layer, capacity),
        model.cache(capacity).mass,
    )
    return before, out


def _first_sparse(model: ModelShapes) -> int:
    return next(layer for layer in range(model.cfg.layers) if model.cfg.is_sparse(layer))
