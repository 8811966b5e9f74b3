"""Access to the chunks of contexts in the caches of one level, for a model of any kind; and the delays of
restoring them. Imports no JAX."""

import abc
import dataclasses
import logging
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.contexts.codecs import STATE
from jaxllm.contexts.recompute import Delay
from jaxllm.contexts.tolerance import KEPT
from jaxllm.errors import CheckpointError, one_line
from jaxllm.files.atomic import temporary_file
from jaxllm.serving.contexts.memory import Blobs, Stored, blob_memory
from jaxllm.serving.contexts.record import Origin
from jaxllm.serving.host.direct_io import PieceReader, Storage, aligned

# Width and blob of some chunks in one layer, by number.
LayerBlobs = Mapping[int, tuple[int, np.ndarray]]
_SIZES_BYTES = (1 << 14, 1 << 18, 1 << 20)
_REPEATS = 5
_TIMED = "timed"
# Per byte: the slowest storage of phones, eMMC 5.1 (250 MB/s, 11,000 reads per second: Samsung's press
# release of the 512 GB eUFS 3.1, 17 March 2020).
UNMEASURED_READ = Delay(fixed_ms=1000 / 11_000, per_unit_ms=1e3 / 250e6)
_NEVER_MS = 1e9


class ChunkAccess(abc.ABC):
    """Loads chunks of contexts into caches of one level, and encodes those of caches. Here are the defaults
    of a model whose chunks are only loaded, all at once, and have one width.

    Attributes:
      runner: runner of the level.
      origin: origin of contexts at the level; its model and adapter are left out.
      chunk_tokens: tokens of a chunk (C).
      widths: allowed widths of chunks in bits, descending.
      layer_bytes: bytes of one chunk in each layer `[L]`, by width.
      layers: number of blobs of a chunk, one per layer.
      reference_bytes: bytes of one chunk that ratios refer to (see `ChunkShape`).
      state_bytes: bytes of a context besides its whole chunks.
      kept: bits -> share of information that chunks retain.
      computes: whether a chunk can be recomputed between others that are loaded.
      coded: whether answers attend to chunks in place (see `EngineOptions.attend_coded`).
      stays: whether the cache of the last call stays in memory for the next one.
    """

    computes = coded = stays = False
    reference_bytes = 0
    kept: Mapping[int, float] = KEPT

    def __init__(self, runner: Any, origin: Origin, widths: tuple[int, ...]) -> None:
        self.runner, self.origin, self.widths = runner, origin, widths
        self.chunk_tokens, self.layer_bytes = origin.chunk_tokens, origin.layer_bytes
        self.layers = len(self.layer_bytes[widths[0]])
        self.state_bytes = sum(self.layer_bytes.get(STATE, ()))

    @abc.abstractmethod
    def load(self, cache: Any, chunks: Mapping[int, Stored]) -> Any:
        """Decodes stored chunks into a cache (donated), at their positions.

        Raises:
          CheckpointError: a blob's size does not fit its width.
        """

    @abc.abstractmethod
    def encode(
        self,
        cache: Any,
        chunks: Mapping[int, int],
        stored: Mapping[int, Stored] | None = None,
        *,
        into: Mapping[int, Stored] | None = None,
    ) -> Mapping[int, Stored]:
        """Encodes chunks of a context.

        Args:
          cache: cache; unchanged.
          chunks: width of each chunk to encode, by number.
          stored: current stored chunks that the cache attends to in place.
          into: memory for the chunks (see `room`); None allocates it.

        Returns:
          The stored chunks, by number.
        """

    @abc.abstractmethod
    def mass(self, cache: Any) -> np.ndarray:
        """The attention mass of each position, `[>= tokens]`."""

    @abc.abstractmethod
    def loaded(self, cache: Any, length: int) -> Any:
        """A cache with `length` tokens, once nothing reads the blobs that it was loaded from."""

    def start(self, tokens: int) -> Any:
        """An empty cache with room for `tokens` tokens."""
        return self.runner.start(tokens)

    def slid(self, cache: Any, chunks: Any) -> Any:
        """A cache after its first chunk, in which no attention is counted yet; `chunks` are the chunks that
        it attends to in place."""
        del chunks
        return cache

    def feeds(self, chunk: Any) -> bool:
        """Whether a chunk of a prompt can be fed during a restore."""
        del chunk
        return False

    def rehearse(self) -> Delay:
        """Runs all of its buckets once, and times recomputing chunks of one layer."""
        return Delay(fixed_ms=0.0, per_unit_ms=_NEVER_MS)

    def chunk_bytes(self, bits: int) -> int:
        """Bytes of one chunk over all layers."""
        return sum(self.layer_bytes[bits])

    def room(self, chunks: Mapping[int, int]) -> dict[int, Stored]:
        """Allocates memory for chunks to be encoded, of these widths by number, each blob separately."""
        return {
            chunk: (bits, Blobs(blob_memory(size) for size in self.layer_bytes[bits]))
            for chunk, bits in chunks.items()
        }


def require_sizes(layer: int, chunks: Sequence[int], found: Sequence[int], wanted: Sequence[int]) -> None:
    """Checks the sizes of chunks' blobs in a layer.

    Raises:
      CheckpointError: one does not fit its width.
    """
    for chunk, size, right in zip(chunks, found, wanted, strict=True):
        if size != right:
            raise CheckpointError(
                f"chunk {chunk} has {size} bytes in layer {layer}, and its width requires {right}: it is not "
                "of this model and codec"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Delays:
    """Delays of one layer of a context: of chunks read from storage, per byte, and of recomputing chunks, per
    chunk."""

    read: Delay
    compute: Delay


def measure_read(folder: Path, storage: Storage) -> Delay:
    """Times reads from a temporary file of random bytes in `folder`.

    If there is no space for the file, or the device fails, logs a warning and returns `UNMEASURED_READ`: a
    full device must not prevent opening a store and deleting contexts.
    """
    try:
        with temporary_file(folder / _TIMED) as (path, file):
            file.write(np.random.default_rng(0).bytes(_SIZES_BYTES[-1]))
            file.flush()
            os.fsync(file.fileno())
            with PieceReader(path, storage) as reader:
                # Like chunks, into allocated memory.
                memory = aligned(_SIZES_BYTES[-1])

                def once(size: int) -> None:
                    reader.read_into(memory, 0, 0, size)

                times = [median_ms(once, lambda size=size: size) for size in _SIZES_BYTES]
    except (OSError, CheckpointError) as error:
        logging.getLogger("jaxllm").warning(
            "%s: reads cannot be timed (%s); %.0f MB/s and %.1f ms each are assumed",
            folder, one_line(error), 1e-3 / UNMEASURED_READ.per_unit_ms, UNMEASURED_READ.fixed_ms,
        )  # fmt: skip
        return UNMEASURED_READ
    return Delay.fit(_SIZES_BYTES, times)


def median_ms(run: Callable[[Any], object], prepare: Callable[[], Any]) -> float:
    """The median time of `run(prepare())`, without `prepare`, after a warm-up run."""
    times = []
    for _ in range(1 + _REPEATS):
        given = prepare()
        began = time.perf_counter()
        run(given)
        times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times[1:])
