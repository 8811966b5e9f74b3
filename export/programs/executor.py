"""Opens the executor of a program folder; defines the protocol of executors.

`live.py` jits the steps themselves, `stablehlo.py` runs files of `jax.export`, `litert.py` a `.tflite` model.
"""

import math
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from jaxllm.errors import BudgetExceeded, ConfigError
from jaxllm.export.folder_format.manifest import Manifest, Signature
from jaxllm.export.programs.adapters import FolderAdapters
from jaxllm.serving.host.machine import memory_bytes
from jaxllm.serving.host.progress import Progress
from jaxllm.serving.host.user_cache import buckets_bytes

if TYPE_CHECKING:
    from jaxllm.serving.buckets.store import CompiledBucketFolder


class Executor(Protocol):
    """Runs the programs of a manifest. Its caches are opaque: a result of `start`, `restored`, `grow`,
    `run` or `keep` is passed to `grow`, `run` or `keep`, once.

    Attributes:
      lock: lock that the caller acquires: one call at a time.
      moves_rows: whether `keep` is implemented; else trees must be lines, whose accepted nodes are already
        at their positions.
      adapters: low-rank adapters that its programs accept, and the current one.
      stops_early: whether a block of tokens ends after a stop token or its limit; else it costs as much as
        a full one.
    """

    lock: threading.RLock
    moves_rows: bool
    adapters: FolderAdapters
    stops_early: bool

    @property
    def manifest(self) -> Manifest:
        """The manifest of the programs."""
        ...

    def prepare(self, signatures: Sequence[Signature], progress: Progress | None = None) -> None:
        """Prepares programs, and the buckets that grow their caches, so that a request compiles nothing."""
        ...

    def is_ready(self, signature: Signature) -> bool:
        """Whether a program can run at once."""
        ...

    def start(self, level: int, cache_tokens: int) -> Any:
        """Returns empty caches of a level, of a length that it has programs for."""
        ...

    def grow(self, level: int, caches: Any, cache_tokens: int) -> Any:
        """Copies the sequence into caches of the next length, `cache_tokens`."""
        ...

    def rows(self, level: int, caches: Any, tokens: int) -> dict[str, np.ndarray]:
        """Copies of the first `tokens` rows of each cache, `[1, K, tokens, H]`; the caches stay."""
        ...

    def restored(self, level: int, cache_tokens: int, rows: Mapping[str, np.ndarray]) -> Any:
        """Returns caches of a level, of a length that it has programs for, that begin with `rows` (see
        `rows`)."""
        ...

    def encode(self, signature: Signature, tokens: np.ndarray, count: int) -> Any:
        """Encodes a source.

        Args:
          signature: signature of a program that encodes.
          tokens: `[1, T]` int32.
          count: number of valid tokens.

        Returns:
          The source for `run` and `run_block`, any number of times.
        """
        ...

    def run(
        self,
        signature: Signature,
        caches: Any,
        tokens: np.ndarray,
        input_pos: np.ndarray,
        mask: np.ndarray | None = None,
        source: Any = None,
    ) -> tuple[Any, Any]:
        """Runs one step.

        Args:
          signature: signature of the program.
          caches: donated.
          tokens: `[1, T]` int32.
          input_pos: `[T]` int32.
          mask: `[T, T]` bool, of a tree (see `jaxllm.export.steps.exported.run_tree`).
          source: source of an encoder-decoder (see `encode`).

        Returns:
          Logits `[1, T, V]` float32, which NumPy can read, or None from a prefill; and the caches.
        """
        ...

    def run_block(
        self,
        signature: Signature,
        caches: Any,
        token: int,
        at: int,
        controls: Mapping[str, np.ndarray],
        source: Any = None,
    ) -> tuple[np.ndarray, Any]:
        """Decodes several tokens in one step.

        Args:
          signature: signature of the program.
          caches: donated; with room for `limit` tokens.
          token: the last one, not yet in the caches.
          at: its position.
          controls: see `jaxllm.export.folder_format.controls`.
          source: source of an encoder-decoder (see `encode`).

        Returns:
          The next tokens `[n]` int32, and the caches.
        """
        ...

    def run_tiny_lm(
        self, signature: Signature, tokens: np.ndarray, mask: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Reads a row of a prompt to plan.

        Args:
          signature: signature of a program of the tiny LM.
          tokens: `[1, T]` int32.
          mask: `[1, T]` bool.

        Returns:
          Logits by name (see `jaxllm.export.folder_format.tiny_lm`).
        """
        ...

    def encode_chunks(self, signature: Signature, caches: Any, chunks: np.ndarray) -> dict[str, np.ndarray]:
        """Encodes chunks of the caches, which are not donated.

        Args:
          signature: signature of a program that encodes chunks.
          caches: see `run`.
          chunks: `[n]` int32, their numbers, as many as the program requires; the last may be repeated.

        Returns:
          Their arrays by name (see `jaxllm.export.folder_format.codecs`).
        """
        ...

    def load_chunks(
        self, signature: Signature, caches: Any, chunks: np.ndarray, coded: Mapping[str, np.ndarray]
    ) -> Any:
        """Writes chunks by their arrays into caches, which are donated; for the arguments see
        `encode_chunks`.

        Returns:
          The caches.
        """
        ...

    def keep(self, signature: Signature, caches: Any, at: int, path: np.ndarray) -> Any:
        """Moves an accepted path of a tree to the beginning of the tree in the caches.

        Args:
          signature: signature of the program that verified the tree.
          caches: caches, donated.
          at: position of the tree's root.
          path: `[n]` int32, accepted nodes, ascending.

        Returns:
          The caches.
        """
        ...


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
    _require_room(folder, manifest)
    if manifest.format == "stablehlo":
        from jaxllm.export.programs.stablehlo import StableHloExecutor

        return StableHloExecutor(manifest, folder, kept_buckets())
    from jaxllm.export.programs.litert import LiteRtExecutor

    return LiteRtExecutor(manifest, folder, threads=threads)


def kept_buckets() -> "CompiledBucketFolder | None":
    """This user's folder of compiled buckets; None if its limit is 0."""
    # Here, because LiteRT's programs run without JAX.
    from jaxllm.serving.buckets.store import CompiledBucketFolder

    return CompiledBucketFolder.of_user(limit_bytes=buckets_bytes())


def _require_room(folder: Path, manifest: Manifest) -> None:
    """Raises BudgetExceeded if a level's longest caches exceed the memory of this machine."""
    there = memory_bytes()
    if there is None:
        return
    itemsize = 4 if manifest.cache_dtype == "float32" else 2
    for level in manifest.levels:
        shapes = manifest.cache_shapes(level, manifest.context_tokens) | manifest.source_shapes(level)
        taken = itemsize * sum(math.prod(each) for each in shapes.values())
        if taken > there:
            raise BudgetExceeded(
                f"{folder}: caches of {manifest.context_tokens} tokens take {taken:,} bytes, and this "
                f"machine has {there:,}; export the model with a shorter --context"
            )
