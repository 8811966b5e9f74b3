"""Buckets of exported programs: their steps under JAX, and the updates of their caches."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.errors import ProgramError, one_line
from jaxllm.export.folder_format.manifest import CODED_KINDS, Manifest, Signature
from jaxllm.export.folder_format.shapes import input_shapes
from jaxllm.sampling import Sampling, sample, sampler_state
from jaxllm.serving.buckets.bucket import Bucket, ids, shapes_of, tree_shapes
from jaxllm.speculation.tree import choices

Caches = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class ProgramShapes:
    """Shapes and functions from which the buckets of one level of a program folder are lowered.

    Attributes:
      manifest: manifest of the folder.
      weights: weights of the level, or their shapes.
      step: the function `(weights, caches, tokens, input_pos[, mask])` of a signature.
      path: path of a signature's program, for messages.
      tiny_lm: weights of the tiny LM, or their shapes.
    """

    manifest: Manifest
    weights: Mapping[str, Any]
    step: Callable[[Signature], Callable[..., dict[str, jax.Array]]]
    path: Callable[[Signature], str]
    tiny_lm: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramBucket(Bucket):
    """Runs one exported step.

    Attributes:
      signature: signature of the step.
      contents: digest of its program.
    """

    signature: Signature
    contents: str

    def lower(self, model: ProgramShapes, /) -> jax.stages.Lowered:
        """(weights, caches, tokens, positions, and perhaps a mask or controls, and a source) -> caches and
        logits; for a program that encodes: (weights, no caches, tokens, number) -> the source's arrays."""
        manifest, signature = model.manifest, self.signature
        cfg, dtype = manifest.levels[signature.level].cfg, jnp.dtype(manifest.cache_dtype)
        sources = max(manifest.encode_tokens(signature.level), default=0)
        adapter = 0 if manifest.adapters is None else manifest.adapters.size(signature.level)
        shapes = input_shapes(signature, cfg, manifest.room(signature), dtype, sources, adapter)
        weights = model.tiny_lm if signature.kind == "tiny_lm" else model.weights
        weights = {} if signature.kind in CODED_KINDS else weights
        # Exported functions do not donate: without donation here every step would copy the caches. Encoded
        # caches stay.
        donated = () if signature.kind == "encode_chunks" else (1,)
        step = jax.jit(model.step(signature), donate_argnums=donated, keep_unused=True)
        return step.lower(weights, *shapes)

    def compile(self, model: ProgramShapes, /) -> jax.stages.Compiled:
        """See `Bucket`.

        Raises:
          ProgramError: the program is rejected, or cannot be compiled.
        """
        try:
            return super().compile(model)
        except (ProgramError, MemoryError):
            raise
        except Exception as error:  # JAX and XLA raise errors of many types here.
            raise ProgramError(
                f"{model.path(self.signature)}: cannot be compiled ({one_line(error)}); export the model "
                "again"
            ) from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramGrowBucket(Bucket):
    """Pads a level's caches.

    Attributes:
      short_tokens, long_tokens: lengths before and after.
      shapes: name, shape and dtype of each cache before.
    """

    short_tokens: int
    long_tokens: int
    shapes: tuple[tuple[str, tuple[int, ...], str], ...]

    def lower(self, model: ProgramShapes, /) -> jax.stages.Lowered:
        """(caches) -> caches."""
        del model
        # Nothing is donated: no buffer of the short caches has the size of one of the long caches.
        grow = jax.jit(functools.partial(_padded, tokens=self.long_tokens - self.short_tokens))
        return grow.lower(_named(self.shapes))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramKeepBucket(Bucket):
    """Moves the accepted path of a tree to the tree's first row.

    Attributes:
      nodes: capacity of the tree (M).
      shapes: name, shape and dtype of each cache.
    """

    nodes: int
    shapes: tuple[tuple[str, tuple[int, ...], str], ...]

    def lower(self, model: ProgramShapes, /) -> jax.stages.Lowered:
        """(caches, row of the root, nodes) -> caches."""
        del model
        keep = jax.jit(_moved, donate_argnums=(0,))
        return keep.lower(_named(self.shapes), np.int32(0), ids(self.nodes))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChoiceBucket(Bucket):
    """Draws a token after each node of a tree from logits on the host (see
    `jaxllm.speculation.tree.choices`).

    Attributes:
      nodes: capacity of the tree; 0 for the next token of a sequence (see `jaxllm.sampling.sample`).
      vocab_tokens: size of the vocabulary (V).
    """

    nodes: int
    vocab_tokens: int

    def lower(self, model: None, /) -> jax.stages.Lowered:
        """([tree,] logits, sampler) -> token and sampler, or tokens."""
        del model
        logits = jax.ShapeDtypeStruct((max(1, self.nodes), self.vocab_tokens), np.float32)
        sampler = shapes_of(sampler_state(Sampling(), [], self.vocab_tokens, 0))
        if not self.nodes:
            return jax.jit(sample).lower(logits, sampler)
        return jax.jit(choices).lower(tree_shapes(self.nodes), logits, sampler)


def named_shapes(shapes: Mapping[str, jax.ShapeDtypeStruct]) -> tuple[tuple[str, tuple[int, ...], str], ...]:
    """Shapes of caches as fields of buckets: name, shape and dtype, sorted by name."""
    return tuple(sorted((name, each.shape, str(each.dtype)) for name, each in shapes.items()))


def _named(shapes: tuple[tuple[str, tuple[int, ...], str], ...]) -> dict[str, jax.ShapeDtypeStruct]:
    return {name: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for name, shape, dtype in shapes}


def _padded(caches: Caches, *, tokens: int) -> Caches:
    return {name: jnp.pad(rows, ((0, 0), (0, 0), (0, tokens), (0, 0))) for name, rows in caches.items()}


def _moved(caches: Caches, at: jax.Array, nodes: jax.Array) -> Caches:
    """The rows of some nodes moved to consecutive rows from `at` on, the first row of the tree."""
    return {
        name: jax.lax.dynamic_update_slice_in_dim(rows, jnp.take(rows, at + nodes, axis=2), at, axis=2)
        for name, rows in caches.items()
    }
