"""Bucket of the tiny LM that plans requests."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.models import tiny_lm as tlm
from jaxllm.models.tiny_lm import TlmConfig
from jaxllm.serving.buckets.bucket import Bucket, ids


@dataclasses.dataclass(frozen=True)
class TlmShapes:
    """Shapes from which the buckets of a tiny LM are lowered.

    Attributes:
      cfg: the tiny LM.
      params: shapes of its parameters.
    """

    cfg: TlmConfig
    params: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class TinyLmBucket(Bucket):
    """Computes the scores of a prompt's tokens, and the decision.

    Attributes:
      tokens: length of the row.
    """

    tokens: int

    def lower(self, model: TlmShapes, /) -> jax.stages.Lowered:
        """(params, row, mask) -> scores, decision."""
        mask = jax.ShapeDtypeStruct((1, self.tokens), jnp.bool_)
        step = jax.jit(functools.partial(tlm.forward_both, cfg=model.cfg))
        return step.lower(model.params, ids(1, self.tokens), mask)
