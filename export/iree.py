"""Compiles the StableHLO programs to IREE modules (`.vmfb`), for this host and for Android.

Callers pass the weights in the order of their names, then caches, tokens and positions. Modules for this host
are run once; those for Android cannot run here, and are checked to contain machine code for its processor.
"""

import dataclasses
import importlib.metadata
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from export.contents import require_contents, require_family
from export.extras import require_format
from export.folder import ProgramKind, finish, new_folder
from export.signatures import ExportPlan
from export.stablehlo import traced
from export.stored_levels import stored_levels, widened
from export.subject import Subject
from export.trial import require_alike, trial
from jaxllm.errors import ConfigError, ProgramError, one_line
from jaxllm.program_folder.manifest import WEIGHTS, Manifest, Precision, Signature
from jaxllm.program_folder.weights import write_weights
from jaxllm.steps.exported import ParamsOf
from serving.host.progress import Progress
from serving.programs.iree import PACKAGE, PROCESSOR, processor_key, runtime_version

SUFFIX = ".vmfb"
HOST, ANDROID = "host", "aarch64-linux-android"
_OPTIMIZE = "--iree-opt-level=O3"
_TARGETS: Mapping[str, tuple[str, ...]] = {
    HOST: ("--iree-llvmcpu-target-cpu=host", _OPTIMIZE),
    ANDROID: (
        f"--iree-llvmcpu-target-triple={ANDROID}",
        "--iree-llvmcpu-target-cpu-features=+dotprod,+i8mm",
        _OPTIMIZE,
    ),
}
_ELF = b"\x7fELF"
# Offset of the machine field in an ELF header, and its value for AArch64.
_MACHINE_OFFSET, _AARCH64 = 18, 183
_FLOAT = np.dtype(np.float32)
# Relative to the largest logit or cached value; sums are in another order.
_TOLERANCE = 1e-4


def export_iree(
    subject: Subject,
    out: Path,
    plan: ExportPlan,
    *,
    targets: tuple[str, ...] = (HOST, ANDROID),
    precision: Precision = "f32",
    progress: Progress | None = None,
) -> Manifest:
    """Writes a folder of modules, one for each signature and target, with the weights beside them.

    Args:
      subject: the model, in float32.
      out: the folder to make.
      plan: the signatures. targets: `HOST`, `ANDROID` or both.
      precision: f32; or int8, with weights at 8 bits that modules widen (see `stored_levels`).
      progress: called with ("export", modules done, modules in all).

    Raises:
      ConfigError: the compiler is not installed, refuses the model, the plan has blocks of tokens, or the
        folder exists.
      ProgramError: a module computes other results than the step, or is for another processor.
    """
    require_format("iree")
    from iree import compiler

    require_contents("iree", plan, levels=len(subject.levels) - 1, adapters=subject.adapters is not None)
    require_family("iree", precision, subject.cfg, levels=len(subject.levels) > 1)
    subject, params_of = dataclasses.replace(subject, tiny_lm=None), None
    if precision == "int8":
        subject, params_of = stored_levels(subject), widened
    # Short caches only on request, because each module takes seconds to compile.
    plan = dataclasses.replace(plan, cache_tokens=plan.cache_tokens or ()).resolved(subject.cfg)
    signatures = [each for level in subject.levels for each in plan.signatures(level, str)]
    with new_folder(out) as folder:
        write_weights(folder / WEIGHTS, subject.arrays, model=subject.model)
        done = 0
        for signature in signatures:
            program = traced(
                signature,
                subject,
                plan,
                precision="f32",
                platforms=("cpu",),
                params_of=params_of,
                branches=False,
            )
            for target in targets:
                try:
                    module = compiler.compile_str(
                        program.mlir_module_serialized,
                        input_type="stablehlo",
                        target_backends=["llvm-cpu"],
                        extra_args=list(_TARGETS[target]),
                    )
                except compiler.CompilerToolError as error:
                    raise ConfigError(
                        f"IREE cannot compile {signature.name} for {target} ({one_line(error)}); export the "
                        "model as stablehlo"
                    ) from error
                if target == HOST:
                    run_once(module, signature, subject, plan, params_of)
                else:
                    require_machine(module, signature.name)
                (folder / module_file(signature, target)).write_bytes(module)
                done += 1
                if progress is not None:
                    progress("export", done, len(signatures) * len(targets))
        return finish(
            folder,
            subject,
            plan,
            [dataclasses.replace(each, file=module_file(each, targets[0])) for each in signatures],
            ProgramKind(
                format="iree",
                precision=precision,
                cache_dtype=_FLOAT.name,
                platforms=targets,
                holds_weights=False,
                made_with={
                    "iree-base-compiler": importlib.metadata.version("iree-base-compiler"),
                    PACKAGE: runtime_version(),
                    PROCESSOR: processor_key(),
                },
            ),
        )


def module_file(signature: Signature, target: str) -> str:
    """The file of a signature's module for a target."""
    return f"{signature.name}.{target}{SUFFIX}"


def require_machine(module: bytes, name: str) -> None:
    """Checks that all machine code in a module is for 64-bit ARM.

    Raises:
      ProgramError: there is none, or some is for another processor.
    """
    machines, at = set(), module.find(_ELF)
    # A header that ends before its machine field does not count.
    while 0 <= at <= len(module) - _MACHINE_OFFSET - 2:
        machines.add(struct.unpack_from("<H", module, at + _MACHINE_OFFSET)[0])
        at = module.find(_ELF, at + 1)
    if machines != {_AARCH64}:
        raise ProgramError(
            f"{name} was compiled for machines {sorted(machines)}, not for {_AARCH64} (AArch64); check the "
            "version of iree-base-compiler"
        )


def run_once(
    module: bytes,
    signature: Signature,
    subject: Subject,
    plan: ExportPlan,
    params_of: ParamsOf | None = None,
) -> None:
    """Compares a module for this host with its step, on random caches.

    Raises:
      ProgramError: the results differ.
    """
    from iree import runtime

    caches, inputs, wanted = trial(signature, subject, plan, _FLOAT, params_of)
    weights = subject.weights(signature.level)
    context = runtime.SystemContext(config=runtime.Config("local-task"))
    vm = runtime.VmModule.copy_buffer(context.instance, module)
    context.add_vm_module(vm)
    results: Any = context.modules[vm.name]["main"](*jax.tree.leaves((weights, caches, *inputs)))
    got = {name: each.to_host() for name, each in zip(sorted(wanted), results, strict=True)}
    require_alike(got, wanted, name=f"{signature.name} of IREE", tolerance=_TOLERANCE)
