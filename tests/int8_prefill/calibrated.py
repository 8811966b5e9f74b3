"""The tiny model with outliers put into it, and its calibration."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.bundle.layout import contracted_axis
from jaxllm.config import ModelConfig
from jaxllm.int8_prefill.calibration import OutlierRecipe, PrefillCalibration, with_outliers
from jaxllm.int8_prefill.fitting import random_calibration
from jaxllm.int8_prefill.recipe import ShadowRecipe
from jaxllm.models.parameters import param_specs
from jaxllm.quant import quantize, to_blocks
from tests.tiny import TINY, tiny_params

RECIPE = ShadowRecipe(most_channels=0.06)
# No more channels than may be outliers: 64 and 80 of them there are.
OUTLIERS = OutlierRecipe(channels=2, factor=256)


@functools.cache
def outlying(cfg: ModelConfig = TINY):
    """Parameters in floats, with outliers."""
    return with_outliers(cfg, dict(tiny_params(cfg)), OUTLIERS)


@functools.cache
def floating(cfg: ModelConfig = TINY):
    """The same on the device."""
    return {name: jnp.asarray(each) for name, each in outlying(cfg).items()}


@functools.cache
def stored(cfg: ModelConfig = TINY):
    """The same at 8 bits, in blocks."""
    specs, found = param_specs(cfg), {}
    for name, value in outlying(cfg).items():
        if specs[name].role == "vector":
            found[name] = jnp.asarray(value)
        else:
            blocks = to_blocks(quantize(value, bits=8, axis=contracted_axis(specs[name])))
            found[name] = jax.tree.map(jnp.asarray, blocks)
    return found


def texts(cfg: ModelConfig = TINY, count: int = 4, length: int = 48) -> np.ndarray:
    return np.random.default_rng(1).integers(0, cfg.vocab_size, (count, length)).astype(np.int32)


@functools.cache
def calibrated(cfg: ModelConfig = TINY, shadows: int = 1) -> PrefillCalibration:
    """With a shadow in so many layers, the most important."""
    found = random_calibration(cfg, floating(cfg), texts(cfg), shadows=shadows, recipe=RECIPE)
    return dataclasses.replace(found, losses={100: (0.001, 0.002)})
