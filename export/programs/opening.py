"""Opens the executor of a program folder."""

from pathlib import Path
from typing import TYPE_CHECKING

from jaxllm.errors import BudgetExceeded, ConfigError
from jaxllm.export.folder_format.manifest import Manifest
from jaxllm.export.programs.executor import Executor
from jaxllm.serving.host.machine import memory_bytes
from jaxllm.serving.host.user_cache import buckets_bytes

if TYPE_CHECKING:
    from jaxllm.serving.buckets.bucket_table import CompiledBucketFolder


def open_executor(folder: Path, *, threads: int = 0) -> Executor:
    """Opens the executor of a folder of `jaxllm export`.

    Args:
      folder: folder of programs.
      threads: number of threads of LiteRT; 0 for all cores of this process.

    Raises:
      ProgramError: the folder is not one of programs, corrupt, or of other weights.
      ConfigError: its runtime is not installed, or it does not support this device.
      BudgetExceeded: its caches are larger than this machine's memory.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; make one with `jaxllm export`")
    manifest = Manifest.read(folder)
    there = memory_bytes()
    for level in manifest.levels:
        taken = manifest.cache_bytes(level, manifest.context_tokens) + manifest.source_bytes(level)
        if there is not None and taken > there:
            raise BudgetExceeded(
                f"{folder}: caches of {manifest.context_tokens} tokens take {taken:,} bytes, and this "
                f"machine has {there:,}; export the model with a shorter --context"
            )
    if manifest.format == "stablehlo":
        from jaxllm.export.programs.stablehlo import StableHloExecutor

        return StableHloExecutor(manifest, folder, cached_buckets())
    from jaxllm.export.programs.litert import LiteRtExecutor

    return LiteRtExecutor(manifest, folder, threads=threads)


def cached_buckets() -> "CompiledBucketFolder | None":
    """This user's folder of compiled buckets; None if its limit is 0."""
    # Here, because LiteRT's programs run without JAX.
    from jaxllm.serving.buckets.bucket_table import CompiledBucketFolder

    return CompiledBucketFolder.of_user(limit_bytes=buckets_bytes())
