"""Weights of 8 bits for formats whose weights are arguments: `{name}.levels` int8 and `{name}.scale` float32.

A program widens them where it uses them, which a compiler may fuse with the product; activations stay floats.
There is one scale per output channel, as in `quantized.quantized_subject`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from export.quantized import LEVELS, SCALE, plain_product, quantized_subject
from export.subject import Subject
from jaxllm.config import ModelConfig
from jaxllm.models.parameters import Params, param_specs
from jaxllm.program_folder.levels import Argument, ProgramLevel
from jaxllm.quant import OwnProduct, QArray, Weight
from jaxllm.steps.exported import with_adapters

_EMBEDDING = "embed.tokens"


def stored_levels(subject: Subject) -> Subject:
    """A subject whose matrices are levels and scales; recovery adapters and vectors stay floats."""
    # Its adapters are rounded, too: these stay what they are.
    quantized, scales = quantized_subject(subject)
    arrays = {
        name: each for name, each in subject.arrays.items() if name not in scales or name.startswith("level_")
    }
    specs = param_specs(subject.cfg)
    for name, spec in specs.items():
        if spec.role == "vector":
            continue
        across = spec.role == "from_units"
        shape = (*(1,) * (len(spec.shape) - 1), spec.shape[-1]) if across else (*spec.shape[:-1], 1)
        scale = scales[name].astype(np.float32).reshape(shape)
        arrays[f"{name}{LEVELS}"] = np.rint(quantized.arrays[name] / scale).astype(np.int8)
        arrays[f"{name}{SCALE}"] = scale
    levels = {}
    for level, entry in subject.levels.items():
        weights = {}
        for name, each in entry.weights.items():
            if name not in specs or specs[name].role == "vector":
                weights[name] = each
                continue
            own = each.shape[:1] if specs[name].role != "from_units" else (1,)
            scale = arrays[f"{name}{SCALE}"]
            weights[f"{name}{LEVELS}"] = Argument(stored=f"{name}{LEVELS}", shape=each.shape)
            weights[f"{name}{SCALE}"] = Argument(stored=f"{name}{SCALE}", shape=(*own, *scale.shape[1:]))
        levels[level] = ProgramLevel(cfg=entry.cfg, weights=weights)
    return dataclasses.replace(subject, arrays=arrays, levels=levels)


def widened(weights: Mapping[str, Weight], cfg: ModelConfig) -> Params:
    """The parameters of a level whose matrices are levels and scales (a `ParamsOf`)."""
    arrays: Mapping[str, Any] = weights
    matrices = [name for name in param_specs(cfg) if f"{name}{LEVELS}" in arrays]
    parts = {f"{name}{part}" for name in matrices for part in (LEVELS, SCALE)}
    whole = {name: each for name, each in arrays.items() if name not in parts}
    for name in matrices:
        levels, scale = arrays[f"{name}{LEVELS}"], arrays[f"{name}{SCALE}"]
        whole[name] = _wide(levels, scale)
        if name == _EMBEDDING:
            # Looked up row by row: only the rows are widened.
            rows = QArray(levels, scale, bits=8, group=0, axis=-1, columns=levels.shape[-1])
            whole[name] = OwnProduct(whole[name], plain_product, rows)
    return with_adapters(whole, cfg)


def _wide(levels: jax.Array, scale: jax.Array) -> jax.Array:
    return levels.astype(jnp.float32) * scale
