"""Exports StableHLO programs with separate weights, which any JAX runs without model code.

Weights are arguments, so that all programs share one copy, and a level uses prefixes of its arrays.
Artifacts are those of `jax.export`, each for all requested platforms. Callers of a program donate its
caches.
"""

from collections.abc import Sequence
from pathlib import Path

import jax
import jax.export
import ml_dtypes
import numpy as np

from jaxllm.errors import ConfigError, ProgramError
from jaxllm.export.contents import require_family, require_format
from jaxllm.export.folder import finish, new_folder
from jaxllm.export.folder_format.manifest import TINY_WEIGHTS, WEIGHTS, Manifest, Precision
from jaxllm.export.folder_format.signature import (
    CHUNK_TOKENS,
    CHUNKS,
    CODED_KINDS,
    MASK,
    POSITIONS,
    SOURCE_TOKENS,
    STOP_IDS,
    Interface,
    Signature,
    controls,
)
from jaxllm.export.folder_format.weights import read_weights, write_weights
from jaxllm.export.signatures import (
    ExportPlan,
    step_shapes,
    step_weights,
    subject_step,
    tiny_signatures,
    tiny_weights,
)
from jaxllm.export.subject import Subject
from jaxllm.kernels.native import without_native_kernels
from jaxllm.sampling_state import NO_TOKEN, Sampling, sampler_state
from jaxllm.serving.host.progress import Progress

PLATFORMS = ("cpu", "cuda", "tpu")
SUFFIX = ".jaxexport"
DTYPES = {"f32": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16)}
# Allowed difference of two compilations of one step, relative to the array's largest magnitude (at least 1).
_TOLERANCE = {"f32": 1e-5, "bf16": 2e-2}


def export_stablehlo(
    subject: Subject,
    out: Path,
    plan: ExportPlan,
    *,
    precision: Precision = "f32",
    platforms: Sequence[str] = PLATFORMS,
    progress: Progress | None = None,
) -> Manifest:
    """Writes a folder of StableHLO programs, each compared with its step.

    Args:
      subject: the model, with weights of `DTYPES[precision]`.
      out: the folder to make.
      plan: the programs.
      precision: precision of weights, activations and caches.
      platforms: platforms to run on, of `PLATFORMS`.
      progress: callback for ("export", programs done, number of programs).

    Raises:
      ConfigError: an option is out of its domain, the folder exists, or the extra is missing.
      ProgramError: a program computes other results than its step (see `verify`).
    """
    require_format("stablehlo")
    require_family("stablehlo", precision, subject.cfg, levels=len(subject.levels) > 1)
    unknown = [each for each in platforms if each not in PLATFORMS]
    if unknown or not platforms:
        raise ConfigError(
            f"platforms must be of {', '.join(PLATFORMS)}, got {', '.join(platforms) or 'none'}"
        )
    plan = plan.resolved(subject.cfg)
    signatures = [
        each for level in subject.levels for each in plan.signatures(level, lambda name: f"{name}{SUFFIX}")
    ]
    signatures += tiny_signatures(subject.tiny_lm, lambda name: f"{name}{SUFFIX}")
    with new_folder(out) as folder:
        write_weights(folder / WEIGHTS, subject.arrays, model=subject.model)
        if subject.tiny_lm is not None:
            write_weights(folder / TINY_WEIGHTS, tiny_weights(subject.tiny_lm), model=subject.model)
        for done, signature in enumerate(signatures):
            exported = traced(signature, subject, plan, precision=precision, platforms=platforms)
            (folder / signature.file).write_bytes(exported.serialize())
            if jax.default_backend() in [{"cuda": "gpu"}.get(each, each) for each in platforms]:
                verify(folder, signature, subject, plan, precision=precision)
            if progress is not None:
                progress("export", done + 1, len(signatures))
        return finish(
            folder,
            subject,
            plan,
            signatures,
            format="stablehlo",
            precision=precision,
            platforms=tuple(platforms),
        )


def traced(
    signature: Signature,
    subject: Subject,
    plan: ExportPlan,
    *,
    precision: str,
    platforms: Sequence[str],
    branches: bool = True,
) -> jax.export.Exported:
    """Traces a signature's program. Unused weights stay arguments, so that all programs have the same ones.
    For `branches` see `without_native_kernels`."""
    dtype = DTYPES[precision]
    step = subject_step(signature, subject, dtype)
    shapes = step_shapes(signature, subject, plan, dtype)
    with without_native_kernels(branches=branches):
        return jax.export.export(jax.jit(step, keep_unused=True), platforms=tuple(platforms))(*shapes)


def verify(folder: Path, signature: Signature, subject: Subject, plan: ExportPlan, *, precision: str) -> None:
    """Compares a program from its file, with the weights from theirs, with its step and the subject's
    weights, once on the same inputs.

    Raises:
      ProgramError: the results differ.
    """
    dtype = DTYPES[precision]
    interface = plan.interface(signature, subject, dtype)
    vocab_size = subject.levels[signature.level].cfg.vocab_size
    if signature.kind == "tiny_lm":
        assert subject.tiny_lm is not None
        weights = read_weights(folder / TINY_WEIGHTS, model=subject.model)
        vocab_size = subject.tiny_lm.cfg.encoder.vocab_size
    elif signature.kind in CODED_KINDS:
        weights = {}
    else:
        stored = read_weights(folder / WEIGHTS, model=subject.model)
        weights = subject.levels[signature.level].views(stored)
    caches, inputs = example_arguments(signature, interface, vocab_size, plan.room(signature))
    with without_native_kernels():
        step = jax.jit(subject_step(signature, subject, dtype))
        wanted = step(dict(step_weights(signature, subject)), caches, inputs)
    program = jax.export.deserialize(bytearray((folder / signature.file).read_bytes()))
    got = jax.jit(program.call)(weights, caches, inputs)
    for output, each in wanted.items():
        this, that = (np.asarray(array, np.float32) for array in (got[output], each))
        worst, largest = float(np.abs(this - that).max()), float(np.abs(that).max())
        if not worst <= _TOLERANCE[precision] * max(1.0, largest):
            raise ProgramError(
                f"the program {signature.name} differs from its step by {worst:.3g} in {output}; "
                "report this model and the versions of jax and of what compiled it"
            )


def example_arguments(
    signature: Signature, interface: Interface, vocab_size: int, cache_tokens: int
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Returns random caches and inputs of a program: a chunk whose last token is padding, a tree of two
    branches, a greedy block of full length, a source whose last token is padding, chunks in reverse order.

    Greedy, because a sum that two compilers round differently may decide between sampled tokens.
    """
    count, draw = signature.tokens, np.random.default_rng(signature.tokens + signature.bits)

    def drawn(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        if dtype.kind in "iub":
            return draw.integers(0, {"i": vocab_size, "u": 99, "b": 2}[dtype.kind], shape).astype(dtype)
        return (0.1 * draw.standard_normal(shape)).astype(dtype)

    caches = {name: 10 * drawn(*each) for name, each in interface.caches.items()}
    inputs = {name: drawn(*each) for name, each in interface.inputs.items()}
    if signature.kind == "tiny_lm":
        inputs[MASK] = np.arange(count)[None] < count - 1
    if signature.kind == "encode":
        inputs[SOURCE_TOKENS][:] = max(1, count - 1)
    elif SOURCE_TOKENS in inputs:
        inputs[SOURCE_TOKENS][:] = max(1, interface.inputs["source_k_0"][0][2] - 1)
    if CHUNKS in inputs:
        inputs[CHUNKS] = np.arange(count // CHUNK_TOKENS, dtype=np.int32)[::-1].copy()
    if POSITIONS not in inputs:
        return caches, inputs
    start = min(3, cache_tokens - count)
    positions = np.arange(start, start + len(inputs[POSITIONS]), dtype=np.int32)
    inputs[POSITIONS] = positions
    if signature.kind == "block":
        state = sampler_state(Sampling(), [], vocab_size, 0)
        inputs |= controls(state, np.full(STOP_IDS, NO_TOKEN, np.int32), count)
    elif signature.kind == "verify":
        inputs[MASK] = np.tril(np.ones((count, count), np.bool_))
        # The last node is a second child of the root.
        inputs[MASK][-1, 1:-1] = False
        positions[-1] = start + 1
    elif count > 1:
        positions[-1] = 0
    return caches, inputs
