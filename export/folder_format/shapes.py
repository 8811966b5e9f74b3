"""Shapes of a program's arguments besides weights, to trace and compile it."""

from typing import Any

import jax
import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.export.folder_format.arrays import SOURCE_TOKENS, cache_shapes, source_shapes
from jaxllm.export.folder_format.codecs import CHUNK_TOKENS, coded_shapes
from jaxllm.export.folder_format.controls import control_shapes
from jaxllm.export.folder_format.manifest import CODED_KINDS, Signature


def input_shapes(
    signature: Signature,
    cfg: ModelConfig,
    cache_tokens: int,
    cache_dtype: np.dtype,
    source_tokens: int = 0,
    adapter_size: int = 0,
) -> tuple[Any, ...]:
    """Returns caches by name, `tokens`, `input_pos`; for a tree, its mask (see
    `jaxllm.export.steps.exported`), for a block its controls by name (see `controls`); for an
    encoder-decoder its source by name. A program that encodes has no caches, and the number of tokens in
    place of positions; one of the tiny LM a row, and its mask. A program of chunks has caches, their
    numbers and, to load them, their arrays (see `codecs`). With adapters, the last argument is `adapter`
    `[N]` (see `adapters`).

    Args:
      signature: signature of the program.
      cfg: config of its level's sub-model.
      cache_tokens: length of its caches (S).
      cache_dtype: dtype of keys and values.
      source_tokens: number of rows of an encoder-decoder's source's keys and values (R).
      adapter_size: size of an adapter (N); 0 if programs accept none.
    """
    if signature.kind == "tiny_lm":
        row = (1, signature.tokens)
        return {}, jax.ShapeDtypeStruct(row, np.int32), jax.ShapeDtypeStruct(row, np.bool_)
    if signature.kind in CODED_KINDS:
        caches = {
            name: jax.ShapeDtypeStruct(shape, cache_dtype)
            for name, shape in cache_shapes(cfg, cache_tokens).items()
        }
        count = signature.tokens // CHUNK_TOKENS
        numbers = jax.ShapeDtypeStruct((count,), np.int32)
        if signature.kind == "encode_chunks":
            return caches, numbers
        coded = coded_shapes(cfg, signature.codec, signature.bits, count)
        return caches, numbers, {name: jax.ShapeDtypeStruct(*each) for name, each in coded.items()}
    if signature.kind == "encode":
        tokens = jax.ShapeDtypeStruct((1, signature.tokens), np.int32)
        return {}, tokens, jax.ShapeDtypeStruct((1,), np.int32)
    count = 1 if signature.kind == "block" else signature.tokens
    caches = {
        name: jax.ShapeDtypeStruct(shape, cache_dtype)
        for name, shape in cache_shapes(cfg, cache_tokens).items()
    }
    tokens = jax.ShapeDtypeStruct((1, count), np.int32)
    shapes = (caches, tokens, jax.ShapeDtypeStruct((count,), np.int32))
    if signature.kind == "block":
        wanted = control_shapes(cfg.vocab_size)
        shapes = (*shapes, {name: jax.ShapeDtypeStruct(*each) for name, each in wanted.items()})
    elif signature.kind == "verify":
        shapes = (*shapes, jax.ShapeDtypeStruct((count, count), np.bool_))
    if adapter_size:
        shapes = (*shapes, jax.ShapeDtypeStruct((adapter_size,), np.float32))
    if cfg.encoder is None:
        return shapes
    source = {
        name: jax.ShapeDtypeStruct(shape, np.int32 if name == SOURCE_TOKENS else cache_dtype)
        for name, shape in source_shapes(cfg, source_tokens).items()
    }
    return (*shapes, source)
