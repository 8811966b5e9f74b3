"""Buckets of mixtures whose experts are loaded individually: a sparse layer up to its experts, tiles through
resident experts, or one tile through one expert, and the sum of the experts' outputs."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.kernels.native_products import StoredExperts, begun_shape
from jaxllm.serving.buckets.bucket import (
    SCALAR,
    Bucket,
    ModelShapes,
    TokensBucket,
    any_expert,
    expert_norm,
    expert_parts,
    layer_params,
    mass_shape,
    position_shapes,
    router_params,
)
from jaxllm.serving.buckets.layer import OfLayerBucket, layer_chunk_shapes
from jaxllm.steps.sparse_layers import (
    SparseLayer,
    attend_layer,
    attend_restored,
    combine_experts,
    expert_tile,
    stored_tiles,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _SparseBucket(Bucket):
    """A part of a sparse layer; for `loss` see `ExpertOptions`, `ahead` layers' routers run ahead."""

    loss: float = 0.0
    ahead: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttendBucket(_SparseBucket, OfLayerBucket):
    """Runs a sparse layer over a chunk or a token tree, up to its experts (see
    `steps.sparse_layers.attend_layer`); or restores it, of a context of which `tokens` tokens are recomputed
    (see `attend_restored`).

    Attributes:
      tree: whether the tokens are a tree; then attention mass is counted by node.
      restored: whether the layer is restored.
    """

    tree: bool = False
    restored: bool = False

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(layer's params, next routers, x, positions, keys and values, mass) -> tokens at experts, a
        buffer for their outputs, keys and values, mass; of a restored layer chunks in place of the mass."""
        if self.restored:
            step, donated = attend_restored, (2, 4)
            at = position_shapes(self.tokens, consecutive=False)
            last = layer_chunk_shapes(model, self.layer, self.cache_tokens)
        else:
            step, donated, at = attend_layer, (2, 4, 5), position_shapes(self.tokens, tree=self.tree)
            last = mass_shape(model.cache(self.cache_tokens), self.tokens if self.tree else None)
        attend = functools.partial(step, of=SparseLayer(model.cfg, self.layer, self.loss))
        params = layer_params(model.params, self.layer, self.layer)
        routers = [router_params(model.weights, self.layer)] * self.ahead
        past = model.past(self.layer, self.cache_tokens)
        return jax.jit(attend, donate_argnums=donated).lower(
            params, routers, model.hidden(self.tokens), at, past, last
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _AtExperts(_SparseBucket, TokensBucket):
    """Runs a chunk of tokens at the experts of a sparse layer. All layers share it."""

    def at_experts(self, model: ModelShapes) -> tuple[Any, Any]:
        """Shapes of tokens at experts, and of the experts' outputs."""
        # Any cache length gives the same shapes.
        capacity, layer = model.options.cache_tokens[0], _first_sparse(model)
        before, out, *_ = jax.eval_shape(
            functools.partial(attend_layer, of=SparseLayer(model.cfg, layer, self.loss)),
            layer_params(model.params, layer, layer),
            [router_params(model.weights, layer)] * self.ahead,
            model.hidden(self.tokens),
            position_shapes(self.tokens),
            model.past(layer, capacity),
            model.cache(capacity).mass,
        )
        return before, out


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertBucket(_AtExperts):
    """Runs one tile of tokens through one expert (see `steps.sparse_layers.expert_tile`), if no native
    kernel finds experts by address.

    Attributes:
      form: format of the expert.
    """

    form: str

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(expert, norm, tokens at experts, number of the tile, out) -> out."""
        weights, (before, out) = model.weights, self.at_experts(model)
        expert = {name: weights[f"{any_expert(self.form)}.{name}"] for name in expert_parts(model.cfg)}
        norm = expert_norm(weights, _first_sparse(model))
        step = jax.jit(functools.partial(expert_tile, cfg=model.cfg), donate_argnums=(4,))
        return step.lower(expert, norm, before, SCALAR, out)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredExpertsBucket(_AtExperts):
    """Runs tiles of tokens through resident experts, in one call of a native kernel (see
    `steps.sparse_layers.stored_tiles`).

    Attributes:
      early: whether tiles can begin with only the high plane of their expert.
    """

    early: bool

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(experts, norm, tokens at experts, actions, out, partial results) -> out, partial results."""
        cfg, (before, out) = model.cfg, self.at_experts(model)
        shape: Any = jax.ShapeDtypeStruct
        handle = shape((2,), jnp.uint32)
        weights = StoredExperts(handle, shape((), jnp.int32), cfg.experts, cfg.expert_ffn_size)
        norm = expert_norm(model.weights, _first_sparse(model))
        (tiles,) = before.tiles.expert.shape
        kept = begun_shape(tiles, cfg.expert_ffn_size, cfg.hidden_size) if self.early else (0,)
        step = jax.jit(functools.partial(stored_tiles, cfg=cfg), donate_argnums=(4, 5))
        actions, begun = shape((tiles,), jnp.int32), shape(kept, jnp.int32)
        return step.lower(weights, norm, before, actions, out, begun)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CombineBucket(_AtExperts):
    """Sums the outputs of experts (see `steps.sparse_layers.combine_experts`)."""

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(tokens at experts, out) -> x."""
        # Nothing is donated: no result has the shape of the outputs of all tiles.
        return jax.jit(combine_experts).lower(*self.at_experts(model))


def _first_sparse(model: ModelShapes) -> int:
    return next(layer for layer in range(model.cfg.layers) if model.cfg.is_sparse(layer))
