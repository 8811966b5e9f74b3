"""Opens a folder of programs as an engine that samples by NumPy, after checking that this device can run
it; finds the profile of this device for it.

A profile is stored in the user's cache directory under a key of the programs and of the device (processor,
cores, runtime), so that a folder copied from another device is measured again, and one with an updated loop
is not.
"""

import contextlib
import importlib.metadata
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxllm.config import FULL_LEVEL
from jaxllm.errors import BudgetExceeded, ConfigError, ProgramError, one_line
from jaxllm.export.device.host_sampling import HostChooser
from jaxllm.export.folder_format.manifest import Manifest
from jaxllm.export.folder_format.parts import STAGE_FILES
from jaxllm.export.programs.executor import Accelerator
from jaxllm.export.programs.golden import require_golden
from jaxllm.export.programs.model import ProgramModel, open_program_model
from jaxllm.serving.elastic.profile import DeviceProfile, load_profile, save_profile
from jaxllm.serving.engine.engine import Engine
from jaxllm.serving.ground.speculation_options import SpeculationOptions
from jaxllm.serving.host.machine import cpu_features, usable_cores
from jaxllm.serving.host.progress import Progress
from jaxllm.serving.host.user_cache import device_file, make_private_folder

# Package of each format's runtime; StableHLO requires JAX, which a device may have.
RUNTIMES = {"tflite": "ai-edge-litert", "stablehlo": "jax"}
_FLOAT_BYTES = 4
_log = logging.getLogger(__name__)


def open_device(
    folder: Path,
    *,
    level: int = FULL_LEVEL,
    threads: int = 0,
    memory_bytes: int = 0,
    drafts: SpeculationOptions | None = None,
    processors: int = 1,
    accelerator: Accelerator = "cpu",
) -> Engine[ProgramModel]:
    """Opens a folder, and prepares its programs: no request compiles anything but the first chat its
    template. At its first start on this device its golden answers are compared.

    Args:
      folder: folder of `jaxllm export`, as `device`, `tflite` or `stablehlo`.
      level: default level of requests, in percent.
      threads: number of threads that compute; 0 for all cores of this process.
      memory_bytes: memory limit of weights, caches and logits; 0 for no limit.
      drafts: options of the drafts of the level's answers; None for no drafts.
      processors: see `open_program_model`.
      accelerator: what runs LiteRT's programs. The CPU does, with a warning, where an accelerator cannot open
        them, computes otherwise, or has ended the process that tried it.

    Raises:
      ProgramError: the folder is corrupt, of several exports, computes otherwise here than where it was made,
        or its runtime here is older than required.
      ConfigError: the runtime is missing, or the folder lacks the level or programs that verify drafts.
      BudgetExceeded: it needs more memory than allowed.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; make one with `jaxllm export --format device`")
    manifest = Manifest.read(folder)
    require_runtime(folder, manifest)
    require_memory(folder, manifest, memory_bytes, staged=processors > 1)

    def opened(accelerator: Accelerator) -> Engine[ProgramModel]:
        with _first_start(manifest, accelerator, threads) as first:
            model = open_program_model(
                folder,
                threads=threads,
                token_chooser=HostChooser(),
                processors=processors,
                accelerator=accelerator,
            )
            speculation = None if drafts is None else model.drafts(level, drafts, threads=threads)
            engine = Engine(model, level, speculation)
            # A device that never chats has no memory for Jinja.
            engine.warm_up(chats=False)
            for each in engine.levels:
                engine.at(each).warm_up(chats=False)
            if first:
                require_golden(manifest, engine)
        return engine

    if accelerator != "cpu":
        try:
            return opened(accelerator)
        except ProgramError as error:
            _log.warning("the %s is not used, but the CPU: %s", accelerator.upper(), one_line(error))
    return opened("cpu")


@contextlib.contextmanager
def _first_start(manifest: Manifest, accelerator: Accelerator, threads: int) -> Iterator[bool]:
    """Yields whether programs have not answered on this device yet; remembers that they did unless the block
    fails.

    Raises:
      ProgramError: an earlier process ended in the block, on an accelerator.
    """
    files = sorted((name, stored.xxh3_128) for name, stored in manifest.files.items())
    facts = {"golden": files, **device_facts(manifest, threads), "accelerator": accelerator}
    passed, begun = (device_file(facts, f".{each}") for each in ("passed", "begun"))
    first, dangerous = not passed.exists(), accelerator != "cpu"
    if first and dangerous and begun.exists():
        raise ProgramError(f"it has ended a process that tried it; to try it again, remove {begun}")
    try:
        if first and dangerous:
            make_private_folder(begun.parent)
            begun.touch()
        yield first
    except BaseException:
        begun.unlink(missing_ok=True)
        raise
    if first:
        try:
            make_private_folder(passed.parent)
            passed.touch()
            begun.unlink(missing_ok=True)
        except OSError as error:
            _log.warning("%s: the first start is not remembered (%s)", passed.parent, error.strerror)


def require_runtime(folder: Path, manifest: Manifest) -> None:
    """Checks that the runtime of a folder is installed, and not older than the one that its programs were
    tested with.

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
    # JAX guarantees to load its older programs, and those of the next months; it reports programs that it
    # cannot.
    if manifest.format != "stablehlo" and _numbers(there) < _numbers(wanted):
        raise ProgramError(
            f"{folder} was tried with {package} {wanted}, and {there} here is older; "
            f"pip install '{package}>={wanted}', or export the model with {there}"
        )


def require_memory(folder: Path, manifest: Manifest, memory_bytes: int, *, staged: bool = False) -> None:
    """Checks the memory of a folder: its weights, with those of its stages if `staged`, the longest caches
    of the whole model, and its logits.

    Raises:
      BudgetExceeded: it is more than `memory_bytes`, unless that is 0.
    """
    taken = needed_bytes(manifest, staged=staged)
    if memory_bytes and taken > memory_bytes:
        raise BudgetExceeded(
            f"{folder} takes {taken:,} bytes for weights, caches of {manifest.context_tokens} tokens and "
            f"logits, and {memory_bytes:,} are allowed; allow more, or export the model with a shorter "
            "--context or a smaller --precision"
        )


def weights_bytes(manifest: Manifest, *, staged: bool = False) -> int:
    """Returns bytes of a folder's weights, with the programs that contain them, and with those of its
    stages if `staged`."""
    others = () if staged else STAGE_FILES.values()
    return sum(
        stored.size_bytes
        for name, stored in manifest.files.items()
        if name.endswith((".tflite", ".safetensors")) and name not in others
    )


def needed_bytes(manifest: Manifest, *, staged: bool = False) -> int:
    """Bytes of weights (see `weights_bytes`), of the longest caches of the whole model, and of the
    logits of all programs."""
    caches = longest_cache_bytes(manifest) + manifest.source_bytes(FULL_LEVEL)
    without_logits = ("encode", "tiny_lm")
    kinds = [(each.kind, each.tokens) for each in manifest.signatures if each.kind not in without_logits]
    # A block has a bias, the prompt's tokens and their counts in place of logits.
    rows = sum(3 if kind == "block" else tokens for kind, tokens in kinds if kind != "prefill")
    if (inputs := manifest.adapters) is not None:
        # None, and each of the folder, at every level.
        caches += _FLOAT_BYTES * (1 + len(inputs.names)) * sum(map(inputs.size, manifest.levels))
    return (
        weights_bytes(manifest, staged=staged)
        + caches
        + _FLOAT_BYTES * rows * manifest.levels[FULL_LEVEL].cfg.vocab_size
    )


def longest_cache_bytes(manifest: Manifest) -> int:
    """Returns bytes of the longest caches of one answer of the whole model."""
    return manifest.cache_bytes(FULL_LEVEL, manifest.context_tokens)


def _numbers(version: str) -> tuple[int, ...]:
    """Returns the numbers that a version begins with."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def device_profile(
    engine: Engine[ProgramModel], *, threads: int = 0, whole: bool = False, progress: Progress | None = None
) -> DeviceProfile:
    """Returns the profile of an engine over programs; measured and stored if there is none yet.

    Args:
      engine: engine, warmed up.
      threads: number of threads that it computes with; 0 for all cores of this process.
      whole: whether to measure every level at every length, which is a matter of minutes; else a coarse
        profile will do.

    Raises:
      ConfigError: the profile cannot be read or written.
    """
    path = profile_path(engine, threads=threads)
    known = load_profile(path)
    if known is not None and known.levels == engine.levels and not (whole and known.coarse):
        return known
    # Here, because few starts measure.
    from jaxllm.serving.elastic.profiling import measure_coarsely, measure_together

    found = measure_together([engine], progress=progress)[0] if whole else measure_coarsely(engine)
    save_profile(found, path)
    return found


def profile_path(engine: Engine[ProgramModel], *, threads: int = 0) -> Path:
    """The path of the profile of an engine's programs on this device."""
    facts = {
        "version": 1,
        "programs": engine.model.program_files,
        **device_facts(engine.model.executor.manifest, threads),
        "processors": 1 if engine.model.stages is None else 2,
    }
    return device_file(facts, ".json")


def device_facts(manifest: Manifest, threads: int) -> dict[str, Any]:
    """What identifies this device and its runtime."""
    return {
        "runtime": importlib.metadata.version(RUNTIMES[manifest.format]),
        "device": [*cpu_features(), threads or usable_cores()],
    }
