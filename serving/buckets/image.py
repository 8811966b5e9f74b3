"""Bucket of the encoder of images: one tile."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.models.encoder.siglip import ImageEncoderConfig, image_rows
from jaxllm.serving.buckets.bucket import Bucket


@dataclasses.dataclass(frozen=True)
class ImageShapes:
    """Shapes from which the bucket of an encoder is lowered.

    Attributes:
      cfg: the encoder.
      params: shapes of its parameters.
    """

    cfg: ImageEncoderConfig
    params: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageBucket(Bucket):
    """Computes the rows of one tile."""

    def lower(self, model: ImageShapes, /) -> jax.stages.Lowered:
        """(params, pixels) -> rows."""
        cfg = model.cfg
        pixels = jax.ShapeDtypeStruct((1, cfg.channels, cfg.image_size, cfg.image_size), jnp.float32)
        return jax.jit(functools.partial(image_rows, cfg=cfg)).lower(model.params, pixels)
