"""Bucket of integer prefill on one processor: one chunk of a prompt through all layers."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.int8_prefill.subgraphs import LayerCalibration, calibration_arrays
from jaxllm.models.layer_stack import by_address
from jaxllm.serving.buckets.bucket import SCALAR, Bucket, ModelShapes, ids, shapes_of
from jaxllm.serving.int8_prefill.stage_bucket import calibration_shapes
from jaxllm.steps.integer import prefill_integer_chunk


@dataclasses.dataclass(frozen=True, kw_only=True)
class IntegerChunkBucket(Bucket):
    """Prefills one chunk of a prompt in integers (see `steps.integer.prefill_integer_chunk`).

    Attributes:
      tokens: length of the chunk, padding included.
      cache_tokens: length of the cache.
      shadowed: per layer, whether it has a shadow.
      float_rows: number of channels with float rows of a layer with a shadow.
    """

    tokens: int
    cache_tokens: int
    shadowed: tuple[bool, ...]
    float_rows: int

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(params, row, valid, last, cache) -> logits, counts of outliers, cache."""
        row, flag = ids(1, self.tokens), jax.ShapeDtypeStruct((), jnp.bool_)
        beside = [
            shapes_of(calibration_arrays(self._calibration(model, layer)))
            for layer in range(model.cfg.layers)
        ]
        params: Any = by_address(model.weights, model.cfg.whole, beside)
        step = model.jitted(prefill_integer_chunk, 4)
        return step.lower(params, row, SCALAR, flag, model.cache(self.cache_tokens))

    def _calibration(self, model: ModelShapes, layer: int) -> LayerCalibration:
        every = calibration_shapes(model.cfg.whole, layer, self.float_rows)
        return every if self.shadowed[layer] else LayerCalibration(every.steps)
