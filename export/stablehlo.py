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
from jaxllm.export.contents import require_family, require_format
from jaxllm.export.folder import finish, new_folder
from jaxllm.export.folder_format.manifest import TINY_WEIGHTS, WEIGHTS, Manifest, Precision
from jaxllm.export.folder_format.signature import Signature
from jaxllm.export.folder_format.weights import write_weights
from jaxllm.export.programs.jax_programs import StableHloExecutor
from jaxllm.export.signatures import ExportPlan, step_shapes, subject_step, tiny_signatures, tiny_weights
from jaxllm.export.subject import Subject
from jaxllm.export.verification import run_of_folder, verify, write_golden
from jaxllm.kernels.native import without_native_kernels
from jaxllm.serving.host.progress import Progress

PLATFORMS = ("cpu", "cuda", "tpu")
SUFFIX = ".jaxexport"
DTYPES = {"f32": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16)}


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
      precision: precision of weights, activations and caches.
      platforms: platforms to run on, of `PLATFORMS`.
      progress: callback for ("export" or "verify", programs done, number of programs).

    Raises:
      ConfigError: an option is out of its domain, the folder exists, or the extra is missing.
      ProgramError: a program computes other results than its step (see `verification.verify`).
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
            if progress is not None:
                progress("export", done + 1, len(signatures))
        manifest = finish(
            folder,
            subject,
            plan,
            signatures,
            format="stablehlo",
            precision=precision,
            platforms=tuple(platforms),
        )
        if jax.default_backend() in [{"cuda": "gpu"}.get(each, each) for each in platforms]:
            verify(run_of_folder(folder, subject), signatures, subject, plan, precision, progress)
            return write_golden(folder, StableHloExecutor(manifest, folder), subject)
        return manifest


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
