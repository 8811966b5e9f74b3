"""Shapes of a program's arguments besides weights, to trace and compile it."""

from typing import Any

import jax
import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.program_folder.controls import control_shapes
from jaxllm.program_folder.manifest import Signature, cache_shapes


def input_shapes(
    signature: Signature, cfg: ModelConfig, cache_tokens: int, cache_dtype: np.dtype
) -> tuple[Any, ...]:
    """Caches by name, `tokens`, `input_pos`; for a tree, its mask (see `jaxllm.steps.exported`), for a block
    its controls by name (see `controls`).

    Args:
      signature: of the program.
      cfg: its level's sub-model.
      cache_tokens: length of its caches (S).
      cache_dtype: of keys and values.
    """
    count = 1 if signature.kind == "block" else signature.tokens
    caches = {
        name: jax.ShapeDtypeStruct(shape, cache_dtype)
        for name, shape in cache_shapes(cfg, cache_tokens).items()
    }
    tokens = jax.ShapeDtypeStruct((1, count), np.int32)
    shapes = (caches, tokens, jax.ShapeDtypeStruct((count,), np.int32))
    if signature.kind == "block":
        wanted = control_shapes(cfg.vocab_size)
        return (*shapes, {name: jax.ShapeDtypeStruct(*each) for name, each in wanted.items()})
    mask = jax.ShapeDtypeStruct((count, count), np.bool_)
    return (*shapes, mask) if signature.kind == "verify" else shapes
