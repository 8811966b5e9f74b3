"""Compares a program with its step, once on the same inputs, before it is shipped."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.errors import ProgramError
from jaxllm.export.folder_format.arrays import SOURCE_TOKENS, cache_shapes, source_shapes
from jaxllm.export.folder_format.codecs import CHUNK_TOKENS, coded_shapes
from jaxllm.export.folder_format.controls import STOP_IDS, controls
from jaxllm.export.folder_format.manifest import CODED_KINDS, Signature
from jaxllm.export.signatures import ExportPlan, subject_step
from jaxllm.export.subject import Subject
from jaxllm.export.tiny_lm import tiny_weights
from jaxllm.kernels.native import without_native_kernels
from jaxllm.sampling_state import NO_TOKEN, Sampling, sampler_state


class Trial(NamedTuple):
    """Arguments of a program, and its expected results.

    Attributes:
      caches: random, by name.
      inputs: tokens, positions; for a tree its mask, for a block its controls; of an encoder-decoder its
        source, random, too.
      wanted: results of the step by name.
    """

    caches: dict[str, np.ndarray]
    inputs: tuple[Any, ...]
    wanted: dict[str, jax.Array]


def trial(
    signature: Signature,
    subject: Subject,
    plan: ExportPlan,
    dtype: np.dtype,
) -> Trial:
    """Runs the step of a signature with activations and caches of `dtype`."""
    if signature.kind == "tiny_lm":
        return _tiny_trial(signature, subject, dtype)
    if signature.kind in CODED_KINDS:
        return _coded_trial(signature, subject, plan, dtype)
    cfg, room = subject.levels[signature.level].cfg, plan.room(signature)
    inputs, draw = example_inputs(signature, cfg, room), np.random.default_rng(0)
    if signature.kind == "encode":
        caches = {}
    else:
        caches = {
            name: draw.standard_normal(shape).astype(dtype) for name, shape in cache_shapes(cfg, room).items()
        }
        if subject.adapters is not None:
            size = subject.adapters.inputs.size(signature.level)
            inputs = (*inputs, (0.1 * draw.standard_normal(size)).astype(np.float32))
        if cfg.encoder is not None:
            shapes = source_shapes(cfg, max(plan.encode_tokens))
            source = {name: draw.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
            source[SOURCE_TOKENS] = np.array([max(1, max(plan.encode_tokens) - 1)], np.int32)
            inputs = (*inputs, source)
    with without_native_kernels():
        step = jax.jit(subject_step(signature, subject, dtype))
        wanted = step(subject.weights(signature.level), caches, *inputs)
    return Trial(caches, inputs, wanted)


def _coded_trial(signature: Signature, subject: Subject, plan: ExportPlan, dtype: np.dtype) -> Trial:
    """Makes chunks of random caches, or such arrays of them as another program would return."""
    cfg, draw = subject.levels[signature.level].cfg, np.random.default_rng(signature.bits)
    shapes, count = cache_shapes(cfg, plan.room(signature)), signature.tokens // CHUNK_TOKENS
    caches = {name: draw.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    inputs: tuple[Any, ...] = (np.arange(count, dtype=np.int32)[::-1].copy(),)
    if signature.kind == "load_chunks":
        coded = coded_shapes(cfg, signature.codec, signature.bits, count)
        inputs = (
            *inputs,
            {name: draw.integers(0, 99, shape).astype(to) for name, (shape, to) in coded.items()},
        )
    with without_native_kernels():
        wanted = jax.jit(subject_step(signature, subject, dtype))({}, caches, *inputs)
    return Trial(caches, inputs, wanted)


def _tiny_trial(signature: Signature, subject: Subject, dtype: np.dtype) -> Trial:
    tiny = subject.tiny_lm
    assert tiny is not None
    draw, shape = np.random.default_rng(signature.tokens), (1, signature.tokens)
    row = draw.integers(0, tiny.cfg.encoder.vocab_size, shape)
    mask = np.ones(row.shape, np.bool_)
    mask[:, -1] = False
    inputs = row.astype(np.int32), mask
    with without_native_kernels():
        wanted = jax.jit(subject_step(signature, subject, dtype))(tiny_weights(tiny), {}, *inputs)
    return Trial({}, inputs, wanted)


def example_inputs(signature: Signature, cfg: ModelConfig, cache_tokens: int) -> tuple[Any, ...]:
    """Returns tokens, positions; for a tree a mask, for a block controls: a chunk whose last token is
    padding, a tree of two branches, a greedy block of full length, or a source whose last token is padding.

    Greedy, because a sum that two compilers round differently may decide between sampled tokens.
    """
    count = signature.tokens
    draw = np.random.default_rng(count)
    tokens = draw.integers(0, cfg.vocab_size, (1, count)).astype(np.int32)
    if signature.kind == "encode":
        return tokens, np.array([max(1, count - 1)], np.int32)
    start = min(3, cache_tokens - count)
    positions = np.arange(start, start + count, dtype=np.int32)
    if signature.kind == "block":
        state = sampler_state(Sampling(), [], cfg.vocab_size, 0)
        stop_ids = np.full(STOP_IDS, NO_TOKEN, np.int32)
        return tokens[:, :1], positions[:1], controls(state, stop_ids, count)
    if signature.kind != "verify":
        if count > 1:
            positions[-1] = 0
        return tokens, positions
    mask = np.tril(np.ones((count, count), np.bool_))
    # The last node is a second child of the root.
    mask[-1, 1:-1] = False
    positions[-1] = start + 1
    return tokens, positions, mask


def require_alike(
    got: Mapping[str, Any], wanted: Mapping[str, jax.Array], *, name: str, tolerance: float
) -> None:
    """Checks the results of the program `name` against expected ones.

    Args:
      got, wanted: logits and caches by name.
      name: display name.
      tolerance: allowed difference, relative to the largest magnitude of the array (at least 1).

    Raises:
      ProgramError: a result differs by more.
    """
    for output, each in wanted.items():
        this, that = (np.asarray(array, np.float32) for array in (got[output], each))
        worst, largest = float(np.abs(this - that).max()), float(np.abs(that).max())
        if not worst <= tolerance * max(1.0, largest):
            raise ProgramError(
                f"the program {name} differs from its step by {worst:.3g} in {output}; "
                "report this model and the versions of jax and of what compiled it"
            )
