"""What is compiled for each bucket: the step that it names, traced for the shapes that it names."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.branching import target_room
from jaxllm.config import Bucket, ModelConfig
from jaxllm.documents import Branches
from jaxllm.elastic.submodel import (
    CountedSubModel,
    layer_part,
    part_of_sub_model,
    sub_model,
    whole_params,
)
from jaxllm.kv.cache import Places, TreeRows, grow, new_cache
from jaxllm.kv.chunks import chunk_shapes, encode_chunks, reads_addresses
from jaxllm.layer_steps import (
    attend_layer,
    attend_restored,
    combine_experts,
    expert_tile,
    final_rows,
    head_piece,
    load_cache,
    restore_layer,
)
from jaxllm.models import tlm
from jaxllm.models.decoder import embed_tokens, forward_layer
from jaxllm.models.parameters import Params
from jaxllm.models.tlm import TlmConfig
from jaxllm.quant import PANEL, BlockedArray, QArray, Weight, blocked_shapes
from jaxllm.sampling import Sampling, sample, sampler_state
from jaxllm.speculative.decoding import draft, follow, keep_path, settle, verify
from jaxllm.speculative.tree import new_tree
from jaxllm.steps import decode_tokens, prefill_chunk, route_documents, score_branches, score_chunk
from jaxllm.used_units import PARAMETER
from serving.bucket_plan import ENCODED_CHUNKS
from serving.options import EngineOptions
from serving.text import MAX_STOP_IDS

EXPERT_PARTS = ("gate", "up", "down")


def lower(
    bucket: Bucket, cfg: ModelConfig, params: Params | CountedSubModel, options: EngineOptions
) -> jax.stages.Lowered:
    """Traces the graph of a bucket.

    Args:
      bucket: which.
      cfg: the model, or the sub-model of the bucket's level.
      params: its parameters, or those of the whole model.
      options: resolved options of the engine.
    """
    dtype = jnp.dtype(options.activation_dtype)
    # Contexts that outlive a call are stored by what was attended to in them.
    empty = functools.partial(
        new_cache, cfg, batch=1, dtype=jnp.dtype(options.cache_dtype), mass=bool(options.kv_codec)
    )
    make_cache = functools.partial(empty, tokens=bucket.cache_tokens)
    if bucket.kind == "start":
        return jax.jit(make_cache).lower()
    if bucket.kind == "grow":
        short = jax.eval_shape(functools.partial(empty, tokens=bucket.tokens))
        # Nothing to donate: no buffer of the short cache has the size of one of the long.
        return jax.jit(functools.partial(grow, tokens=bucket.cache_tokens)).lower(short)
    if bucket.kind in ("load", "restore", "embed", "encode"):
        return _lower_context(bucket, cfg, params, options, jax.eval_shape(make_cache))
    if bucket.kind in ("rows", "layer", "tree", "norm", "head"):
        return _lower_piece(bucket, cfg, params, options, jax.eval_shape(make_cache))
    if bucket.kind in ("attend", "attend_tree", "expert", "combine"):
        return _lower_experts(bucket, cfg, params, options, jax.eval_shape(make_cache))
    if bucket.kind in ("draft", "follow", "verify", "settle", "keep"):
        return _lower_tree(bucket, cfg, params, options, jax.eval_shape(make_cache))
    sampler = shapes_of(sampler_state(Sampling(), [], cfg.vocab_size, 0))
    if bucket.kind == "sample":
        logits = jax.ShapeDtypeStruct((1, cfg.vocab_size), jnp.float32)
        return jax.jit(sample, donate_argnums=(1,)).lower(logits, sampler)

    def jitted(step: Callable[..., Any], *donated: int) -> Any:
        def run(params: Params | CountedSubModel, *rest: Any) -> Any:
            return step(sub_model(params, cfg), *rest, cfg=cfg, dtype=dtype)

        return jax.jit(run, donate_argnums=donated)

    shapes = shapes_of(params)
    scalar = jax.ShapeDtypeStruct((), jnp.int32)
    rows = jax.ShapeDtypeStruct((bucket.rows, bucket.tokens), jnp.int32)
    if bucket.kind == "branches":
        flat = jax.ShapeDtypeStruct((target_room(bucket.rows, bucket.tokens),), jnp.int32)
        branches = Branches(rows, rows)  # pyright: ignore[reportArgumentType]: shapes
        return jitted(score_branches).lower(shapes, rows, rows, branches, flat, flat, scalar)
    if bucket.kind == "routing":
        return jitted(route_documents).lower(shapes, rows, rows)
    cache = jax.eval_shape(make_cache)
    if bucket.kind == "prefill":
        flag = jax.ShapeDtypeStruct((), jnp.bool_)
        return jitted(prefill_chunk, 4).lower(shapes, rows, scalar, flag, cache)
    if bucket.kind == "score":
        return jitted(score_chunk, 4).lower(shapes, rows, rows, scalar, cache)
    step = functools.partial(decode_tokens, block=bucket.tokens)
    token = jax.ShapeDtypeStruct((1,), jnp.int32)
    stop_ids = jax.ShapeDtypeStruct((MAX_STOP_IDS,), jnp.int32)
    return jitted(step, 2, 3).lower(shapes, token, cache, sampler, stop_ids, scalar)


def layer_params(params: Params | CountedSubModel, layer: int, like: int) -> dict[str, Any] | CountedSubModel:
    """One layer's parameters under the names of another's, whose graphs it shares."""
    if isinstance(params, CountedSubModel):
        return layer_part(params, layer, like)
    prefix = f"layers.{layer}."
    return {
        f"layers.{like}.{name.removeprefix(prefix)}": each
        for name, each in params.items()
        if name.startswith(prefix)
    }


def any_expert(bits: int) -> str:
    """What the names of parameters begin with that stand for any expert of a width."""
    return f"any_expert.{bits}"


def router_params(params: Params, layer: int) -> dict[str, Any]:
    """The router of a sparse layer and the norm before it."""
    prefix = f"layers.{layer}."
    return {
        name.removeprefix(prefix): each
        for name, each in params.items()
        if name.startswith((f"{prefix}router", f"{prefix}ffn_norm."))
    }


def counts_alone(params: Params | CountedSubModel) -> dict[str, Any]:
    """What says how many units are used, where anything does."""
    return {PARAMETER: params.counts} if isinstance(params, CountedSubModel) else {}


def embedding_params(params: Params | CountedSubModel) -> dict[str, Any]:
    """What embeds tokens."""
    return {name: each for name, each in whole_params(params).items() if name.startswith("embed.")}


def norm_params(params: Params | CountedSubModel) -> dict[str, Any]:
    """The norm behind the last layer."""
    return {name: each for name, each in whole_params(params).items() if name.startswith("final_norm.")}


def source_shape(cfg: ModelConfig, options: EngineOptions, layer: int, cache_tokens: int) -> tuple[Any, ...]:
    """Shape and dtype of what `load_chunks` reads a layer's chunks from, for all of a cache's."""
    chunks = -(-cache_tokens // options.kv_chunk_tokens)
    if reads_addresses(jnp.dtype(options.cache_dtype)):
        return (chunks, 3), np.uint32
    shape = chunk_shapes(cfg, tokens=options.kv_chunk_tokens, dtype=options.cache_dtype)[layer]
    return (chunks, max(options.chunk_format.sizes(shape).values())), np.uint8


def _lower_context(
    bucket: Bucket, cfg: ModelConfig, params: Params | CountedSubModel, options: EngineOptions, cache: Any
) -> jax.stages.Lowered:
    """The graphs of stored contexts; `cache` has the shapes of one."""
    dtype, layer = jnp.dtype(options.activation_dtype), bucket.layer
    positions = jax.ShapeDtypeStruct((bucket.tokens,), jnp.int32)
    if bucket.kind == "embed":

        def embedded(params: Params, tokens: jax.Array, positions: jax.Array) -> jax.Array:
            return embed_tokens(part_of_sub_model(params, cfg), tokens, positions, cfg=cfg, dtype=dtype)

        row = jax.ShapeDtypeStruct((1, bucket.tokens), jnp.int32)
        return jax.jit(embedded).lower(shapes_of(embedding_params(params)), row, positions)
    form = options.chunk_format
    past = cache.keys[layer], cache.values[layer]
    if bucket.kind == "encode":
        numbers = jax.ShapeDtypeStruct((ENCODED_CHUNKS,), jnp.int32)
        encode = functools.partial(encode_chunks, form=form, bits=bucket.bits)
        return jax.jit(encode).lower(past, numbers)
    sources = [
        jax.ShapeDtypeStruct(*source_shape(cfg, options, each, bucket.cache_tokens))
        for each in range(cfg.layers)
    ]
    bits = jax.ShapeDtypeStruct(sources[0].shape[:1], jnp.int32)
    if bucket.kind == "load":
        addresses = reads_addresses(jnp.dtype(options.cache_dtype))
        every = jax.ShapeDtypeStruct((cfg.layers, *sources[0].shape), jnp.uint32)
        of_all = every if addresses else tuple(sources)
        load = functools.partial(load_cache, cfg=cfg, form=form)
        return jax.jit(load, donate_argnums=(1,)).lower(shapes_of(counts_alone(params)), cache, of_all, bits)

    x = jax.ShapeDtypeStruct((1, bucket.tokens, cfg.hidden_size), dtype)
    at = Places(positions, jax.ShapeDtypeStruct((), jnp.int32))  # pyright: ignore[reportArgumentType]: shapes
    if cfg.is_sparse(layer) and f"layers.{layer}.experts.up" not in whole_params(params):
        whole = whole_params(params)
        own, router = shapes_of(layer_params(whole, layer, layer)), shapes_of(router_params(whole, layer))
        attend = functools.partial(attend_restored, cfg=cfg, layer=layer, form=form)
        return jax.jit(attend, donate_argnums=(2, 4)).lower(own, router, x, at, past, sources[layer], bits)

    def restored(params: Params | CountedSubModel, *rest: Any) -> Any:
        return restore_layer(part_of_sub_model(params, cfg), *rest, cfg=cfg, layer=layer, form=form)

    weights = shapes_of(layer_params(params, layer, layer))
    return jax.jit(restored, donate_argnums=(1, 3)).lower(weights, x, at, past, sources[layer], bits)


def _lower_piece(
    bucket: Bucket, cfg: ModelConfig, params: Params | CountedSubModel, options: EngineOptions, cache: Any
) -> jax.stages.Lowered:
    """The graphs of models whose weights come by pieces; `cache` has the shapes of one."""
    dtype, layer, tokens = jnp.dtype(options.activation_dtype), bucket.layer, bucket.tokens
    whole = whole_params(params)
    positions = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    if bucket.kind == "rows":
        table = table_shapes(whole["embed.tokens"], tokens * row_step(whole["embed.tokens"]))
        embedding = {**shapes_of(embedding_params(params)), "embed.tokens": table}
        embed = functools.partial(embed_tokens, cfg=cfg, dtype=dtype)
        return jax.jit(embed).lower(embedding, jax.ShapeDtypeStruct((1, tokens), jnp.int32), positions)
    if bucket.kind == "head":
        table = table_shapes(whole["embed.tokens" if cfg.tied_head else "head"], bucket.bits)
        hidden = jax.ShapeDtypeStruct((bucket.rows, cfg.hidden_size), dtype)
        return jax.jit(functools.partial(head_piece, cfg=cfg)).lower(table, hidden)
    x = jax.ShapeDtypeStruct((1, tokens, cfg.hidden_size), dtype)
    if bucket.kind == "norm":
        rows = jax.ShapeDtypeStruct((bucket.rows,), jnp.int32)
        return jax.jit(functools.partial(final_rows, cfg=cfg)).lower(shapes_of(norm_params(params)), x, rows)
    at = _places(tokens, tree=bucket.kind == "tree")
    mass = _mass_by_node(cache, tokens) if bucket.kind == "tree" else cache.mass

    def run(params: Params | CountedSubModel, *rest: Any) -> Any:
        weights = part_of_sub_model(params, cfg)
        return forward_layer(weights, *rest, cfg=cfg, layer=layer, padded=tokens > 1)

    weights = shapes_of(layer_params(params, layer, layer))
    past = cache.keys[layer], cache.values[layer]
    return jax.jit(run, donate_argnums=(1, 3, 4)).lower(weights, x, at, past, mass)


def _mass_by_node(cache: Any, nodes: int) -> Any:
    """The shape of a cache's mass while a tree is read (see `KVCache`)."""
    if cache.mass is None:
        return None
    rows, capacity = cache.mass.shape
    return jax.ShapeDtypeStruct((rows, 1 + nodes, capacity), cache.mass.dtype)


def _places(tokens: int, *, tree: bool) -> Places:
    """The shapes of where tokens stand, one behind the other or as a tree."""
    positions, scalar = jax.ShapeDtypeStruct((tokens,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    if not tree:
        return Places(positions, scalar, run=True)  # pyright: ignore[reportArgumentType]
    rows = TreeRows(scalar, positions, jax.ShapeDtypeStruct((tokens, tokens), jnp.bool_))  # pyright: ignore
    return Places(positions, scalar, rows)  # pyright: ignore[reportArgumentType]


def _lower_experts(
    bucket: Bucket, cfg: ModelConfig, params: Params | CountedSubModel, options: EngineOptions, cache: Any
) -> jax.stages.Lowered:
    """The graphs of mixtures whose experts come one by one; `cache` has the shapes of one."""
    whole, layer, tokens = whole_params(params), bucket.layer, bucket.tokens
    x = jax.ShapeDtypeStruct((1, tokens, cfg.hidden_size), jnp.dtype(options.activation_dtype))
    attend = functools.partial(attend_layer, cfg=cfg, layer=layer)
    weights = shapes_of(layer_params(whole, layer, layer))
    router = shapes_of(router_params(whole, layer))
    past = cache.keys[layer], cache.values[layer]
    at = _places(tokens, tree=bucket.kind == "attend_tree")
    mass = _mass_by_node(cache, tokens) if bucket.kind == "attend_tree" else cache.mass
    if bucket.kind in ("attend", "attend_tree"):
        return jax.jit(attend, donate_argnums=(2, 4, 5)).lower(weights, router, x, at, past, mass)
    before, out, *_ = jax.eval_shape(attend, weights, router, x, at, past, cache.mass)
    if bucket.kind == "combine":
        # The outputs of all tiles have no other shape to be given back in.
        return jax.jit(combine_experts).lower(before, out)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    expert = {name: shapes_of(whole[f"{any_expert(bucket.bits)}.{name}"]) for name in EXPERT_PARTS}
    norm = {name: each for name, each in router.items() if name != "router"}
    return jax.jit(functools.partial(expert_tile, cfg=cfg), donate_argnums=(4,)).lower(
        expert, norm, before, number, out
    )


def _lower_tree(
    bucket: Bucket, cfg: ModelConfig, params: Params | CountedSubModel, options: EngineOptions, cache: Any
) -> jax.stages.Lowered:
    """The graphs of token trees; `cache` has the shapes of one."""
    dtype, shape, nodes = jnp.dtype(options.activation_dtype), options.trees, bucket.tokens
    assert shape is not None
    scalar = jax.ShapeDtypeStruct((), jnp.int32)
    path, fed = jax.ShapeDtypeStruct((nodes,), jnp.int32), jax.ShapeDtypeStruct((nodes,), jnp.bool_)
    tree = jax.eval_shape(functools.partial(new_tree, room=nodes), scalar)
    if bucket.kind == "keep":

        def kept(cache: Any, mass: Any, *rest: Any) -> Any:
            return keep_path(dataclasses.replace(cache, mass=mass), *rest)

        # The mass comes out in another shape than it goes in.
        mass, cache = _mass_by_node(cache, nodes), dataclasses.replace(cache, mass=None)
        return jax.jit(kept, donate_argnums=(0,)).lower(cache, mass, path, scalar)
    if bucket.kind == "follow":
        return jax.jit(follow, donate_argnums=(0,)).lower(cache, tree, fed, path, scalar, scalar)
    if bucket.kind == "draft":

        def drafted(params: Params | CountedSubModel, *rest: Any) -> Any:
            return draft(
                sub_model(params, cfg),
                *rest,
                cfg=cfg,
                dtype=dtype,
                tips=shape.tips,
                branches=shape.branches,
                threshold=shape.threshold,
                paced=shape.paced,
            )

        alpha = jax.ShapeDtypeStruct((), jnp.float32)
        grown = jax.jit(drafted, donate_argnums=(1, 2, 3))
        return grown.lower(shapes_of(params), tree, fed, cache, alpha, scalar, scalar)
    sampler = shapes_of(sampler_state(Sampling(), [], cfg.vocab_size, 0))
    if bucket.kind == "settle":
        logits = jax.ShapeDtypeStruct((nodes, cfg.vocab_size), jnp.float32)
        return jax.jit(settle, donate_argnums=(2,)).lower(tree, logits, sampler, scalar)

    def verified(params: Params | CountedSubModel, *rest: Any) -> Any:
        return verify(sub_model(params, cfg), *rest, cfg=cfg, dtype=dtype)

    return jax.jit(verified, donate_argnums=(2, 3)).lower(shapes_of(params), tree, cache, sampler, scalar)


def row_step(table: Weight) -> int:
    """Rows of a vocabulary's table that are stored together."""
    return PANEL if isinstance(table, BlockedArray | QArray) else 1


def table_shapes(table: Weight, rows: int) -> Any:
    """The shapes of a table `[V, D]` that has only some rows."""
    shape = (rows, table.shape[-1])
    if isinstance(table, BlockedArray):
        parts = blocked_shapes(shape, bits=table.bits, group=table.group, axis=table.axis)
        data, scale = (
            jax.ShapeDtypeStruct(part, leaf.dtype)
            for part, leaf in zip(parts, (table.data, table.scale), strict=True)
        )
        return dataclasses.replace(table, data=data, scale=scale, shape=shape)  # pyright: ignore
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype), table)


def lower_tiny_lm(bucket: Bucket, cfg: TlmConfig, params: Any) -> jax.stages.Lowered:
    """Traces the tiny LM's pass over a row of `bucket.tokens` tokens: scores and decision."""
    shape = (bucket.rows, bucket.tokens)
    row, mask = jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.bool_)
    return jax.jit(functools.partial(tlm.forward_both, cfg=cfg)).lower(shapes_of(params), row, mask)


def shapes_of(tree: Any) -> Any:
    """Shapes and dtypes instead of arrays."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype), tree)
