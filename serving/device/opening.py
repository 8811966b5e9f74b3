"""Opens a folder of programs as an engine that draws tokens by NumPy, after checking that this device can run
it."""

import importlib.metadata
import math
import re
from pathlib import Path

from jaxllm.config import WHOLE
from jaxllm.errors import BudgetExceeded, ConfigError, ProgramError
from jaxllm.program_folder.manifest import Manifest
from jaxllm.program_folder.stages import STAGE_FILES
from serving.device.host_chooser import HostChooser
from serving.engine import Engine
from serving.programs.model import ProgramModel, open_program
from serving.speculation.options import SpeculationOptions

# The package that runs each format; StableHLO takes JAX, which a device may have.
RUNTIMES = {"tflite": "ai-edge-litert", "stablehlo": "jax", "iree": "iree-base-runtime"}
# LiteRT and IREE have two sets of caches, of which a step reads one and writes the other.
_CACHE_SETS = {"tflite": 2, "stablehlo": 1, "iree": 2}
_FLOAT_BYTES = 4


def open_device(
    folder: Path,
    *,
    level: int = WHOLE,
    threads: int = 0,
    memory_bytes: int = 0,
    drafts: SpeculationOptions | None = None,
    machine_code: bool = False,
    processors: int = 1,
) -> Engine[ProgramModel]:
    """Opens a folder, and gets its programs and the chat template ready: no request compiles anything.

    Args:
      folder: that `jaxllm export` wrote, as `device`, `tflite`, `stablehlo` or `iree`.
      level: that answers where a request names none, in percent.
      threads: that compute; 0 for all cores of this process.
      memory_bytes: most that weights, caches and logits may take; 0 for no limit.
      drafts: how answers of the level are drafted; None for no drafts.
      machine_code, processors: see `open_program`.

    Raises:
      ProgramError: the folder is corrupt, of several exports, or its runtime here is older than it takes.
      ConfigError: the runtime is missing, or the folder lacks the level or programs that verify drafts.
      BudgetExceeded: it takes more memory than allowed.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; make one with `jaxllm export --format device`")
    manifest = Manifest.read(folder)
    require_runtime(folder, manifest)
    require_memory(folder, manifest, memory_bytes, staged=processors > 1)
    model = open_program(
        folder, threads=threads, token_chooser=HostChooser(), machine_code=machine_code, processors=processors
    )
    speculation = None if drafts is None else model.drafts(level, drafts, threads=threads)
    engine = Engine(model, level, speculation)
    engine.warm_up()
    for each in engine.levels:
        engine.at(each).warm_up()
    return engine


def require_runtime(folder: Path, manifest: Manifest) -> None:
    """Checks that the runtime of a folder is here, and no older than the one that its programs were tried
    with.

    Raises:
      ConfigError: it is missing.
      ProgramError: it is older.
    """
    package = RUNTIMES[manifest.format]
    try:
        there = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError(
            f"{folder} needs {package}, which is not installed; pip install {package}"
        ) from error
    wanted = manifest.made_with.get(package, "")
    # JAX promises to read its older programs, and those of the next months; it tells what it cannot read.
    if manifest.format != "stablehlo" and _numbers(there) < _numbers(wanted):
        raise ProgramError(
            f"{folder} was tried with {package} {wanted}, and {there} here is older; "
            f"pip install '{package}>={wanted}', or export the model with {there}"
        )


def require_memory(folder: Path, manifest: Manifest, memory_bytes: int, *, staged: bool = False) -> None:
    """Checks what a folder takes: its weights, with those of its stages if `staged`, the longest caches of
    the whole model, and its logits.

    Raises:
      BudgetExceeded: more than `memory_bytes`, unless that is 0.
    """
    taken = needed_bytes(manifest, staged=staged)
    if memory_bytes and taken > memory_bytes:
        raise BudgetExceeded(
            f"{folder} takes {taken:,} bytes for weights, caches of {manifest.context_tokens} tokens and "
            f"logits, and {memory_bytes:,} are allowed; allow more, or export the model with a shorter "
            "--context or a smaller --precision"
        )


def weights_bytes(manifest: Manifest, *, staged: bool = False) -> int:
    """Bytes of a folder's weights, programs included where they hold them, with those of its stages if
    `staged`."""
    stages = () if staged else STAGE_FILES.values()
    holding = [name for name in manifest.files if _holds_weights(name) and name not in stages]
    return sum(manifest.files[name].size_bytes for name in holding)


def needed_bytes(manifest: Manifest, *, staged: bool = False) -> int:
    """Bytes of weights (see `weights_bytes`), of the longest caches of the whole model, and of the
    logits of all programs."""
    itemsize = _FLOAT_BYTES if manifest.cache_dtype == "float32" else 2
    shapes = manifest.cache_shapes(WHOLE, manifest.context_tokens).values()
    caches = _CACHE_SETS.get(manifest.format, 1) * itemsize * sum(math.prod(each) for each in shapes)
    caches += itemsize * sum(math.prod(each) for each in manifest.source_shapes(WHOLE).values())
    without_logits = ("encode", "tiny_lm")
    kinds = [(each.kind, each.tokens) for each in manifest.signatures if each.kind not in without_logits]
    # A block takes a bias, the prompt's tokens and their counts in place of giving logits.
    rows = sum(3 if kind == "block" else tokens for kind, tokens in kinds if kind != "prefill")
    if (inputs := manifest.adapters) is not None:
        # None, and each of the folder, at every level.
        caches += _FLOAT_BYTES * (1 + len(inputs.names)) * sum(map(inputs.size, manifest.levels))
    return (
        weights_bytes(manifest, staged=staged)
        + caches
        + _FLOAT_BYTES * rows * manifest.levels[WHOLE].cfg.vocab_size
    )


def _holds_weights(name: str) -> bool:
    return name.endswith((".tflite", ".safetensors"))


def _numbers(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()
