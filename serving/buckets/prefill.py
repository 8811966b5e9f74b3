"""Bucket of prefill: one chunk of a prompt through all layers."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxllm.models.layer import InputRows
from jaxllm.serving.buckets.bucket import SCALAR, Bucket, ModelShapes, ids
from jaxllm.steps.model import prefill_chunk


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillBucket(Bucket):
    """Prefills one chunk of a prompt (see `steps.model.prefill_chunk`).

    Attributes:
      tokens: length of the chunk, including padding.
      cache_tokens: length of the cache.
      rows: whether prompt embeddings are an input.
    """

    tokens: int
    cache_tokens: int
    rows: bool = False

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(params, row, valid, last, cache[, inputs]) -> logits, cache."""
        row, flag = ids(1, self.tokens), jax.ShapeDtypeStruct((), jnp.bool_)
        step, inputs = model.jitted(prefill_chunk, 4), []
        if self.rows:
            wide = jax.ShapeDtypeStruct((self.tokens, model.cfg.hidden_size), jnp.float32)
            inputs = [InputRows(wide, jax.ShapeDtypeStruct((self.tokens,), jnp.bool_))]  # pyright: ignore
        return step.lower(model.params, row, SCALAR, flag, model.cache(self.cache_tokens), *inputs)
