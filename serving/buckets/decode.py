"""Buckets that draw tokens: the first of an answer, and blocks of further ones."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.sampling import sample
from jaxllm.steps.model import BlockEnd, decode_tokens
from serving.buckets.bucket import SCALAR, Bucket, ModelShapes, ids
from serving.text_stream import MAX_STOP_IDS


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleBucket(Bucket):
    """Draws one token from logits (see `sampling.sample`). All levels share it."""

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(logits, sampler) -> token, sampler."""
        logits = jax.ShapeDtypeStruct((1, model.cfg.vocab_size), jnp.float32)
        return jax.jit(sample, donate_argnums=(1,)).lower(logits, model.sampler)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeBucket(Bucket):
    """Decodes tokens one after the other in one dispatch (see `steps.model.decode_tokens`).

    Attributes:
      block_tokens: most tokens per dispatch.
      cache_tokens: length of the cache.
    """

    block_tokens: int
    cache_tokens: int

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(params, token, cache, sampler, end) -> tokens, count, cache, sampler."""
        step = model.jitted(functools.partial(decode_tokens, block=self.block_tokens), 2, 3)
        cache = model.cache(self.cache_tokens)
        stop_ids: Any = ids(MAX_STOP_IDS)
        limit: Any = SCALAR
        return step.lower(model.params, ids(1), cache, model.sampler, BlockEnd(stop_ids, limit))
