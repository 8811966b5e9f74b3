"""What is compiled for each bucket: the step that it names, traced for the shapes that it names."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.branching import target_room
from jaxllm.config import Bucket, ModelConfig
from jaxllm.documents import Branches
from jaxllm.elastic.submodel import CountedSubModel, sub_model
from jaxllm.kv.cache import grow, new_cache
from jaxllm.models import tlm
from jaxllm.models.parameters import Params
from jaxllm.models.tlm import TlmConfig
from jaxllm.sampling import Sampling, sample, sampler_state
from jaxllm.steps import decode_tokens, prefill_chunk, route_documents, score_branches, score_chunk
from serving.options import EngineOptions

MAX_STOP_IDS = 16


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
    empty = functools.partial(new_cache, cfg, batch=1, dtype=jnp.dtype(options.cache_dtype))
    make_cache = functools.partial(empty, tokens=bucket.cache_tokens)
    if bucket.kind == "start":
        return jax.jit(make_cache).lower()
    if bucket.kind == "grow":
        short = jax.eval_shape(functools.partial(empty, tokens=bucket.tokens))
        # Nothing to donate: no buffer of the short cache has the size of one of the long.
        return jax.jit(functools.partial(grow, tokens=bucket.cache_tokens)).lower(short)
    sampler = _shapes(sampler_state(Sampling(), [], cfg.vocab_size, 0))
    if bucket.kind == "sample":
        logits = jax.ShapeDtypeStruct((1, cfg.vocab_size), jnp.float32)
        return jax.jit(sample, donate_argnums=(1,)).lower(logits, sampler)

    def jitted(step: Callable[..., Any], *donated: int) -> Any:
        def run(params: Params | CountedSubModel, *rest: Any) -> Any:
            return step(sub_model(params, cfg), *rest, cfg=cfg, dtype=dtype)

        return jax.jit(run, donate_argnums=donated)

    shapes = _shapes(params)
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


def lower_tiny_lm(bucket: Bucket, cfg: TlmConfig, params: Any) -> jax.stages.Lowered:
    """Traces the tiny LM's pass over a row of `bucket.tokens` tokens: scores and decision."""
    shape = (bucket.rows, bucket.tokens)
    row, mask = jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.bool_)
    return jax.jit(functools.partial(tlm.forward_both, cfg=cfg)).lower(_shapes(params), row, mask)


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype), tree)
