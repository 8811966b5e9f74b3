"""A segment: some chunks of one context in one file, all of one layer together.

    header   magic, version, size and xxh3_128 of the table; the table as JSON: which chunks, at how many
             bits, how large each layer's blobs are, and a checksum of each blob
    layers   each at a whole page: the blobs of all its chunks, one behind the other

A segment is written once, whole or not at all, and never changed: what is newer stands in a newer one. So a
kill at any moment leaves older segments as they were.
"""

import dataclasses
import itertools
import json
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash

from jaxllm.atomic import atomic_file
from jaxllm.errors import CheckpointError, ConfigError
from serving.direct_io import PAGE, PieceReader, Storage

_MAGIC = b"JXLKVSEG"
VERSION = 1
_HEAD = struct.Struct("<8sIQ16s")
# Nobody's table is longer; a length from a file is not believed.
_MOST_TABLE_BYTES = 1 << 26
_MOST_CHUNKS = 1 << 20
_DIGEST_DIGITS = 16
# Reads that are closer than this are one read.
_GAP_BYTES = 1 << 16

# Of each chunk by number: its bits, and each layer's blob.
Chunks = Mapping[int, tuple[int, Sequence[np.ndarray]]]


@dataclasses.dataclass(frozen=True)
class StoredChunk:
    """A chunk in a segment: its number in the context, and its width."""

    chunk: int
    bits: int


class Segment:
    """An open segment. Threads may read it together.

    Attributes:
      path: of the file.
      chunks: in it, ascending.
      layers: how many there are.
    """

    def __init__(self, path: Path, storage: Storage | None = None) -> None:
        """Opens a segment and reads its table.

        Raises:
          CheckpointError: it is missing, truncated, corrupt or of another version.
        """
        self.path = path
        self._reader = PieceReader(path, storage)
        try:
            table, end = _read_table(path, self._reader)
            self.chunks = tuple(StoredChunk(int(chunk), int(bits)) for chunk, bits in table["chunks"])
            self._sizes = {int(bits): [int(each) for each in of] for bits, of in table["blob_bytes"].items()}
            self._checksums: list[list[str]] = table["checksums"]
            self.layers = len(self._checksums)
            self._check(path)
            self._starts = [self._layer_starts(layer) for layer in range(self.layers)]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            self._reader.close()
            raise CheckpointError(f"{path}: its table is malformed ({error!r:.120})") from error
        except CheckpointError:
            self._reader.close()
            raise
        self._places = {stored.chunk: place for place, stored in enumerate(self.chunks)}
        offset = end
        self._offsets = []
        for starts in self._starts:
            self._offsets.append(offset)
            offset += -(-starts[-1] // PAGE) * PAGE
        if offset != self._reader.size_bytes:
            self._reader.close()
            raise CheckpointError(
                f"{path} has {self._reader.size_bytes} bytes, its table says {offset}: it is truncated"
            )

    @property
    def size_bytes(self) -> int:
        """Of the file."""
        return self._reader.size_bytes

    @property
    def bytes_read(self) -> int:
        """Since it was opened."""
        return self._reader.bytes_read

    @property
    def caching(self) -> str:
        """How it is read."""
        return self._reader.caching

    def read(self, layer: int, chunks: Sequence[int]) -> list[np.ndarray]:
        """The blobs of some of its chunks in one layer, uint8, in few reads.

        Raises:
          CheckpointError: a blob is not what was written.
        """
        starts, offset = self._starts[layer], self._offsets[layer]
        if missing := set(chunks) - set(self._places):
            raise CheckpointError(f"{self.path} lacks chunk {min(missing)}")
        places = [self._places[chunk] for chunk in chunks]
        found: dict[int, np.ndarray] = {}
        for run in _runs(sorted(set(places)), starts):
            begin = starts[run[0]]
            piece = self._reader.read(offset + begin, starts[run[-1] + 1] - begin)
            for place in run:
                blob = piece[starts[place] - begin : starts[place + 1] - begin]
                if xxhash.xxh3_64_hexdigest(blob.data) != self._checksums[layer][place]:
                    chunk = self.chunks[place].chunk
                    raise CheckpointError(f"{self.path}: chunk {chunk} of layer {layer} is corrupt")
                found[place] = blob
        return [found[place] for place in places]

    def verify(self) -> list[int]:
        """Reads all of it.

        Returns:
          The chunks that are corrupt in some layer, ascending.
        """
        corrupt = set()
        for layer, stored in itertools.product(range(self.layers), self.chunks):
            if stored.chunk in corrupt:
                continue
            try:
                self.read(layer, [stored.chunk])
            except CheckpointError:
                corrupt.add(stored.chunk)
        return sorted(corrupt)

    def close(self) -> None:
        """Closes the file."""
        self._reader.close()

    def __enter__(self) -> "Segment":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self, path: Path) -> None:
        numbers = [stored.chunk for stored in self.chunks]
        if not 0 < len(numbers) <= _MOST_CHUNKS or numbers != sorted(set(numbers)) or numbers[0] < 0:
            raise CheckpointError(f"{path}: its chunks are not in order")
        if any(len(of) != self.layers or min(of) < 1 for of in self._sizes.values()) or not self.layers:
            raise CheckpointError(f"{path}: its layers are not all of one model")
        if any(len(of) != len(numbers) or not all(isinstance(x, str) for x in of) for of in self._checksums):
            raise CheckpointError(f"{path}: it lacks checksums")

    def _layer_starts(self, layer: int) -> list[int]:
        """Where each blob of a layer begins, and the last one ends."""
        return [0, *itertools.accumulate(self._sizes[stored.bits][layer] for stored in self.chunks)]


def write_segment(
    path: Path,
    chunks: Chunks,
    storage: Storage | None = None,
    *,
    flush: bool = True,
) -> None:
    """Writes a segment, whole or not at all.

    Args:
      path: of the file.
      chunks: of each chunk its bits, and of each layer its blob, uint8 `[bytes]`; all blobs of one width and
        layer are of one size.
      storage: what it is written to, where that is emulated.
      flush: wait until the device has it (see `atomic_file`).

    Raises:
      ConfigError: there are no chunks, or their layers or sizes differ.
      OSError: the file cannot be written, because there is no room for it, say.
    """
    if not chunks:
        raise ConfigError("a segment needs at least one chunk")
    order = sorted(chunks)
    layers = len(chunks[order[0]][1])
    sizes: dict[int, list[int]] = {}
    for chunk in order:
        bits, blobs = chunks[chunk]
        if sizes.setdefault(bits, [blob.nbytes for blob in blobs]) != [blob.nbytes for blob in blobs]:
            raise ConfigError(f"chunk {chunk} has blobs of other sizes than others at {bits} bits")
        if len(blobs) != layers:
            raise ConfigError(f"chunk {chunk} has {len(blobs)} layers, others {layers}")
    text = _table(chunks, lambda blob: xxhash.xxh3_64_hexdigest(_bytes(blob)))
    began = time.perf_counter()
    with atomic_file(path, flush=flush) as file:
        file.write(_HEAD.pack(_MAGIC, VERSION, len(text), xxhash.xxh3_128_digest(text)) + text)
        _pad(file)
        for layer in range(layers):
            for chunk in order:
                file.write(_bytes(chunks[chunk][1][layer]))
            _pad(file)
        size = file.tell()
    if storage is not None:
        storage.await_written(began, size)


def file_bytes(chunks: Chunks) -> int:
    """The size of the file that `write_segment` makes of some chunks; 0 of none."""
    if not chunks:
        return 0
    digest = "0" * _DIGEST_DIGITS
    layers = zip(*(blobs for _, blobs in chunks.values()), strict=True)
    parts = [
        _HEAD.size + len(_table(chunks, lambda _: digest)),
        *(sum(b.nbytes for b in each) for each in layers),
    ]
    return sum(-(-part // PAGE) * PAGE for part in parts)


def _table(chunks: Chunks, checksum: Callable[[np.ndarray], str]) -> bytes:
    order = sorted(chunks)
    sizes = {str(bits): [blob.nbytes for blob in blobs] for bits, blobs in chunks.values()}
    layers = len(chunks[order[0]][1])
    table = {
        "chunks": [[chunk, chunks[chunk][0]] for chunk in order],
        "blob_bytes": sizes,
        "checksums": [[checksum(chunks[chunk][1][layer]) for chunk in order] for layer in range(layers)],
    }
    return json.dumps(table, separators=(",", ":")).encode()


def _read_table(path: Path, reader: PieceReader) -> tuple[dict[str, Any], int]:
    """The table, and where the first layer begins."""
    if reader.size_bytes < PAGE:
        raise CheckpointError(f"{path} has {reader.size_bytes} bytes: it is no segment of a context")
    magic, version, size, digest = _HEAD.unpack(reader.read(0, _HEAD.size).tobytes())
    if magic != _MAGIC:
        raise CheckpointError(f"{path} is no segment of a context")
    if version != VERSION:
        raise CheckpointError(f"{path} is of version {version}, this jaxllm reads {VERSION}")
    if size > min(_MOST_TABLE_BYTES, reader.size_bytes - _HEAD.size):
        raise CheckpointError(f"{path}: its table of {size} bytes does not fit the file: it is truncated")
    text = reader.read(_HEAD.size, size).tobytes()
    if xxhash.xxh3_128_digest(text) != digest:
        raise CheckpointError(f"{path}: its table is corrupt")
    return json.loads(text), -(-(_HEAD.size + size) // PAGE) * PAGE


def _runs(places: Sequence[int], starts: Sequence[int]) -> list[list[int]]:
    """Places divided into runs that are read in one go, gaps and all."""
    runs: list[list[int]] = []
    for place in places:
        if runs and starts[place] - starts[runs[-1][-1] + 1] <= _GAP_BYTES:
            runs[-1].append(place)
        else:
            runs.append([place])
    return runs


def _bytes(blob: np.ndarray) -> memoryview:
    return np.ascontiguousarray(blob).reshape(-1).view(np.uint8).data


def _pad(file: BinaryIO) -> None:
    file.write(b"\0" * (-file.tell() % PAGE))
