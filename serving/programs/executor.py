"""The executors of programs: one protocol, with a file for each kind.

`live.py` jits the steps themselves, `stablehlo.py` runs what `jax.export` wrote, `litert.py` a `.tflite`
model.
"""

import math
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxllm.errors import BudgetExceeded, ConfigError
from jaxllm.program_folder.manifest import Manifest, Signature
from serving.buckets.compiled_folder import CompiledBucketFolder
from serving.host.machine import memory_bytes
from serving.host.progress import Progress
from serving.host.user_cache import executables_bytes


class Executor(Protocol):
    """Runs the programs of a manifest. Caches are its own business: what `start`, `grow`, `run` and `keep`
    return is only ever given back to `grow`, `run` or `keep`, once.

    Attributes:
      lock: taken by whoever calls: one call at a time.
      moves_rows: whether there is `keep`; else trees must be lines, of which whatever is accepted lies where
        it belongs.
    """

    lock: threading.RLock
    moves_rows: bool

    @property
    def manifest(self) -> Manifest:
        """What there is to run."""
        ...

    def prepare(self, signatures: Sequence[Signature], progress: Progress | None = None) -> None:
        """Gets programs ready, and the ways from their caches into longer ones, so that none is made under a
        request."""
        ...

    def is_ready(self, signature: Signature) -> bool:
        """Whether a program can run at once."""
        ...

    def start(self, level: int, cache_tokens: int) -> Any:
        """Empty caches of a level, of a length that it has programs for."""
        ...

    def grow(self, level: int, caches: Any, cache_tokens: int) -> Any:
        """The same sequence in caches of the next such length, `cache_tokens`."""
        ...

    def run(
        self,
        signature: Signature,
        caches: Any,
        tokens: np.ndarray,
        input_pos: np.ndarray,
        mask: np.ndarray | None = None,
    ) -> tuple[Any, Any]:
        """One step.

        Args:
          signature: which program.
          caches: donated.
          tokens: `[1, T]` int32.
          input_pos: `[T]` int32.
          mask: `[T, T]` bool, of a tree (see `jaxllm.steps.exported.run_tree`).

        Returns:
          Logits `[1, T, V]` float32, which NumPy can read, or None from a prefill; and the caches.
        """
        ...

    def keep(self, signature: Signature, caches: Any, at: int, path: np.ndarray) -> Any:
        """The caches with a path of a tree where the tree began.

        Args:
          signature: that has read the tree.
          caches: donated.
          at: the row of the tree's root.
          path: `[n]` int32, nodes, ascending.
        """
        ...


def open_executor(folder: Path, *, threads: int = 0) -> Executor:
    """The executor of a folder that `jaxllm export` wrote.

    Args:
      folder: the folder.
      threads: that LiteRT computes with; 0 for all cores of this process.

    Raises:
      ProgramError: the folder is no program, corrupt, or of other weights.
      ConfigError: what runs it is not installed, or not for this device.
      BudgetExceeded: its caches are larger than this machine's memory.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; make one with `jaxllm export`")
    manifest = Manifest.read(folder)
    _require_room(folder, manifest)
    if manifest.format == "stablehlo":
        from serving.programs.stablehlo import StableHloExecutor

        return StableHloExecutor(manifest, folder, kept_executables())
    if manifest.format != "tflite":
        raise ConfigError(
            f"{folder} holds {manifest.format} modules, for programs of your own; export the model as "
            "stablehlo or tflite to run it here"
        )
    from serving.programs.litert import LiteRtExecutor

    return LiteRtExecutor(manifest, folder, threads=threads)


def kept_executables() -> CompiledBucketFolder | None:
    """Where this user keeps what was compiled; None to keep nothing."""
    return CompiledBucketFolder.of_user(limit_bytes=executables_bytes())


def _require_room(folder: Path, manifest: Manifest) -> None:
    """Raises BudgetExceeded if the memory of this machine does not hold a level's longest caches."""
    there = memory_bytes()
    if there is None:
        return
    itemsize = 4 if manifest.cache_dtype == "float32" else 2
    for level in manifest.levels:
        shapes = manifest.cache_shapes(level, manifest.context_tokens).values()
        taken = itemsize * sum(math.prod(each) for each in shapes)
        if taken > there:
            raise BudgetExceeded(
                f"{folder}: caches of {manifest.context_tokens} tokens take {taken:,} bytes, and this "
                f"machine has {there:,}; export the model with a shorter --context"
            )
