"""Buckets that decode under a grammar, and what they ask for masks."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.serving.buckets.bucket import SCALAR, ModelShapes, ids, with_sampler
from jaxllm.serving.buckets.model import DecodeBucket
from jaxllm.serving.ground.text_stream import MAX_STOP_IDS
from jaxllm.steps.guided import GuidedEnd, decode_guided


@dataclasses.dataclass(frozen=True)
class Guide:
    """The process that follows an answer through its grammar, asked while the device decodes.

    Attributes:
      channel: `[2]` uint32, the handle of a `jaxllm.kernels.native_masks.MaskChannel`.
      left: number of tokens that may follow; -1 for any number.
      allowed: `[V]` bool, the allowed next tokens.
    """

    channel: np.ndarray
    left: int
    allowed: np.ndarray

    def end(self, stop_ids: np.ndarray, limit: int) -> GuidedEnd:
        """The end conditions of a block."""
        mask = np.where(self.allowed, 0, -np.inf).astype(np.float32)
        return GuidedEnd(stop_ids, np.int32(limit), self.channel, np.int32(self.left), mask)


class GuidedBucket(DecodeBucket):
    """Decodes tokens under a grammar (see `steps.guided.decode_guided`)."""

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(params, token, cache, sampler's fixed part, its progress, end) -> tokens, counts, cache,
        progress."""
        step = with_sampler(functools.partial(decode_guided, block=self.block_tokens), 3)
        channel, mask = jax.ShapeDtypeStruct((2,), jnp.uint32), model.sampler[0].bias
        end: Any = ids(MAX_STOP_IDS), SCALAR, channel, SCALAR, mask
        shapes = ids(1), model.cache(self.cache_tokens), *model.sampler, GuidedEnd(*end)
        return model.lowered(step, *shapes, donated=(2, 4))
