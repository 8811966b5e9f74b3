"""Bucket of prefill: one chunk of a prompt through all layers."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxllm.steps.model import prefill_chunk
from serving.buckets.bucket import SCALAR, Bucket, ModelShapes, ids


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillBucket(Bucket):
    """Prefills one chunk of a prompt (see `steps.model.prefill_chunk`).

    Attributes:
      tokens: length of the chunk, padding included.
      cache_tokens: length of the cache.
    """

    tokens: int
    cache_tokens: int

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(params, row, valid, last, cache) -> logits, cache."""
        row, flag = ids(1, self.tokens), jax.ShapeDtypeStruct((), jnp.bool_)
        step = model.jitted(prefill_chunk, 4)
        return step.lower(model.params, row, SCALAR, flag, model.cache(self.cache_tokens))
