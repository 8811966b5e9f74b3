"""Buckets that sample tokens: the first of an answer, and blocks of further ones."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.kv.cache import KVCache
from jaxllm.models.parameters import Params
from jaxllm.sampling import Progress, SamplerState, sample
from jaxllm.serving.buckets.bucket import SCALAR, Bucket, ModelShapes, ids
from jaxllm.serving.ground.text_stream import MAX_STOP_IDS
from jaxllm.steps.model import BlockEnd, decode_tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleBucket(Bucket):
    """Draws one token from logits (see `sampling.sample`). All levels share it."""

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(logits, sampler's fixed part, its progress) -> token, progress."""

        def run(logits: jax.Array, fixed: SamplerState, progress: Progress) -> tuple[jax.Array, Progress]:
            token, state = sample(logits, fixed.after(progress))
            return token, state.progress

        logits, state = jax.ShapeDtypeStruct((1, model.cfg.vocab_size), jnp.float32), model.sampler
        return jax.jit(run, donate_argnums=(2,)).lower(logits, state.fixed, state.progress)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeBucket(Bucket):
    """Decodes consecutive tokens in one dispatch (see `steps.model.decode_tokens`).

    Attributes:
      block_tokens: maximum number of tokens per dispatch.
      cache_tokens: length of the cache.
    """

    block_tokens: int
    cache_tokens: int

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(params, token, cache, sampler's fixed part, its progress, end) -> tokens, count, cache,
        progress."""

        def step(
            params: Params,
            token: jax.Array,
            cache: KVCache,
            fixed: SamplerState,
            progress: Progress,
            end: BlockEnd,
            **static: Any,
        ) -> tuple[jax.Array, jax.Array, KVCache, Progress]:
            sampler, block = fixed.after(progress), self.block_tokens
            found = decode_tokens(params, token, cache, sampler, end, block=block, **static)
            tokens, count, cache, sampler = found
            return tokens, count, cache, sampler.progress

        cache, state = model.cache(self.cache_tokens), model.sampler
        stop_ids: Any = ids(MAX_STOP_IDS)
        limit: Any = SCALAR
        end = BlockEnd(stop_ids, limit)
        return model.jitted(step, 2, 4).lower(model.params, ids(1), cache, state.fixed, state.progress, end)
