"""Limits of a program: the arrays it takes and gives, its operations, and its work."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxllm.program_folder.arrays import SOURCE_TOKENS, source_shapes
from jaxllm.program_folder.codecs import CHUNK_TOKENS, coded_shapes
from jaxllm.program_folder.controls import COUNT, NEXT_TOKENS
from jaxllm.program_folder.manifest import Manifest, Signature
from jaxllm.program_folder.shapes import input_shapes
from jaxllm.program_folder.tiny_lm import KEEP, MODEL, PROMPT

# Shape and the dtype's name.
Array = tuple[tuple[int, ...], str]

# Factors over the expected numbers of any model, so that no real program is refused.
_OPERATIONS, _LARGEST, _WORK = 4000, 256, 64
# Limits of small programs.
_SMALL, _SMALL_WORK = 1 << 20, 1 << 34


@dataclasses.dataclass(frozen=True, kw_only=True)
class Allowance:
    """Limits of a program.

    Attributes:
      inputs, outputs: arrays that it takes and gives, in the order of their names.
      loops: whether it may loop, as over the experts of a mixture or the tokens of a block.
      operations: most operations, those of functions counted at each call.
      largest_elements: most elements of one array.
      work: most additions, multiplications and copies of elements, one round of each loop.
    """

    inputs: tuple[Array, ...]
    outputs: tuple[Array, ...]
    loops: bool
    operations: int
    largest_elements: int
    work: int


def arguments(signature: Signature, manifest: Manifest, weights: Mapping[str, Any]) -> tuple[Any, ...]:
    """Shapes of a program's arguments; `weights` are its level's."""
    cfg, dtype = manifest.levels[signature.level].cfg, jax.numpy.dtype(manifest.cache_dtype)
    shapes = {name: jax.ShapeDtypeStruct(each.shape, each.dtype) for name, each in weights.items()}
    sources = max(manifest.encode_tokens(signature.level), default=0)
    adapter = 0 if manifest.adapters is None else manifest.adapters.size(signature.level)
    return (shapes, *input_shapes(signature, cfg, manifest.room(signature), dtype, sources, adapter))


def results(signature: Signature, manifest: Manifest) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of a program's results."""
    dtype = jax.numpy.dtype(manifest.cache_dtype)
    if signature.kind == "tiny_lm":
        assert manifest.tiny_lm is not None
        sizes = {
            KEEP: signature.tokens,
            MODEL: len(manifest.tiny_lm.levels),
            PROMPT: len(manifest.tiny_lm.prompt_ratios),
        }
        return {name: jax.ShapeDtypeStruct((1, size), np.float32) for name, size in sizes.items()}
    if signature.kind == "encode_chunks":
        count = signature.tokens // CHUNK_TOKENS
        coded = coded_shapes(manifest.levels[signature.level].cfg, signature.codec, signature.bits, count)
        return {name: jax.ShapeDtypeStruct(*each) for name, each in coded.items()}
    if signature.kind == "encode":
        shapes = source_shapes(manifest.levels[signature.level].cfg, signature.tokens)
        return {
            name: jax.ShapeDtypeStruct(shape, dtype)
            for name, shape in shapes.items()
            if name != SOURCE_TOKENS
        }
    caches = manifest.cache_shapes(signature.level, manifest.room(signature))
    found = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in caches.items()}
    if signature.kind == "block":
        found[NEXT_TOKENS] = jax.ShapeDtypeStruct((1, signature.tokens), np.int32)
        found[COUNT] = jax.ShapeDtypeStruct((1,), np.int32)
    elif signature.kind not in ("prefill", "load_chunks"):
        vocab_size = manifest.levels[signature.level].cfg.vocab_size
        found["logits"] = jax.ShapeDtypeStruct((1, signature.tokens, vocab_size), np.float32)
    return found


def allowance(signature: Signature, manifest: Manifest, weights: Mapping[str, Any]) -> Allowance:
    """The limits of the program of a signature."""
    cfg = manifest.levels[signature.level].cfg
    inputs, outputs = (
        tuple((tuple(each.shape), each.dtype.name) for each in jax.tree.leaves(part))
        for part in (arguments(signature, manifest, weights), results(signature, manifest))
    )
    sizes = [math.prod(shape) for shape, _ in (*inputs, *outputs)]
    sides = [cfg] if cfg.encoder is None else [cfg, cfg.encoder]
    layers, experts = (sum(getattr(each, name) for each in sides) for name in ("layers", "experts"))
    return Allowance(
        inputs=inputs,
        outputs=outputs,
        loops=experts > 0 or signature.kind == "block",
        operations=_OPERATIONS * (layers + 1),
        largest_elements=_SMALL + _LARGEST * max(sizes),
        work=_SMALL_WORK + _WORK * signature.tokens * sum(sizes),
    )
