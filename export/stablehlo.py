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

from jaxllm.errors import ConfigError
from jaxllm.export.contents import require_family
from jaxllm.export.extras import require_format
from jaxllm.export.folder import ProgramKind, finish, new_folder
from jaxllm.export.folder_format.manifest import CODED_KINDS, WEIGHTS, Manifest, Signature
from jaxllm.export.folder_format.tiny_lm import TINY_WEIGHTS
from jaxllm.export.folder_format.weights import read_weights, write_weights
from jaxllm.export.signatures import ExportPlan, step_shapes, subject_step
from jaxllm.export.subject import Subject
from jaxllm.export.tiny_lm import tiny_signatures, tiny_weights
from jaxllm.export.trial import require_alike, trial
from jaxllm.kernels.native import without_native_kernels
from jaxllm.serving.host.progress import Progress

PLATFORMS = ("cpu", "cuda", "tpu")
SUFFIX = ".jaxexport"
DTYPES = {"f32": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16)}
# Allowed difference of two compilations of one step, relative to the largest logit or cached value.
_TOLERANCE = {"f32": 1e-5, "bf16": 2e-2}


def export_stablehlo(
    subject: Subject,
    out: Path,
    plan: ExportPlan,
    *,
    precision: str = "f32",
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
            ProgramKind(
                format="stablehlo",
                precision=precision,  # pyright: ignore[reportArgumentType]: a key of DTYPES
                cache_dtype=DTYPES[precision].name,
                platforms=tuple(platforms),
                holds_weights=False,
            ),
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
    weights.

    Raises:
      ProgramError: the results differ.
    """
    caches, inputs, wanted = trial(signature, subject, plan, DTYPES[precision])
    if signature.kind == "tiny_lm":
        weights = read_weights(folder / TINY_WEIGHTS, model=subject.model)
    elif signature.kind in CODED_KINDS:
        weights = {}
    else:
        stored = read_weights(folder / WEIGHTS, model=subject.model)
        weights = subject.levels[signature.level].views(stored)
    program = jax.export.deserialize(bytearray((folder / signature.file).read_bytes()))
    got = jax.jit(program.call)(weights, caches, *inputs)
    require_alike(got, wanted, name=signature.name, tolerance=_TOLERANCE[precision])
