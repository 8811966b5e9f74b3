"""Reads and writes segments: some chunks of one context in one file, layer by layer.

    header   magic, version, size and xxh3_128 of the index; the index as JSON: numbers, widths and sources of
             chunks, sizes of each layer's blobs, and a checksum of each blob
    layers   each page-aligned: the blobs of all its chunks, consecutively

In an encrypted segment (version 3) the index is preceded by its key's id and its salt, and followed by a
tag; tags of blobs replace checksums; the offsets of blobs are the same.

A segment is written once, atomically, and never changed: newer chunks go to a newer segment, so that a kill
never affects older segments. The record that names a segment has the checksum of its index.

Segments stay open between calls, because opening one takes as long as a read of one of its chunks. Prompt
embeddings (`rows`) are stored in a segment of one chunk: its first layer has positions, its second rows, in
float32. They cannot be recomputed; they count for quotas as chunks do.
"""

import collections
import itertools
import json
import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import xxhash

from jaxllm.contexts.codecs import RAW, STATE, WIDTHS
from jaxllm.errors import CheckpointError, ConfigError, Unreadable
from jaxllm.files.atomic import atomic_file
from jaxllm.serving.contexts.encryption import HEAD_BYTES, TAG_BYTES, Seal, Vault, require_form
from jaxllm.serving.contexts.layout import SEGMENT_HEAD
from jaxllm.serving.contexts.memory import copied_blob
from jaxllm.serving.contexts.record import Record
from jaxllm.serving.ground.prompt_embeddings import PromptEmbeddings
from jaxllm.serving.host.direct_io import PAGE, PieceReader, ScratchMemory, pages_bytes
from jaxllm.serving.host.storage import Storage

VERSION, SEALED_VERSION = 2, 3
_HEAD = struct.Struct("<8sIQ16s")
# Limits of an index: what a file says is not trusted.
_MAX_INDEX_BYTES, _MAX_CHUNKS, _MAX_LAYERS, _MAX_BLOB_BYTES = 1 << 26, 1 << 20, 1 << 12, 1 << 31
# Digits of a checksum.
_DIGITS = 16
# Blobs that are closer than this are read together.
_GAP_BYTES = 1 << 16
# Chunk number -> its bits, and its blob of each layer.
Chunks = Mapping[int, tuple[int, Sequence[np.ndarray]]]
# Each needs one file descriptor.
_MAX_OPEN = 128
_PLACE, _ROW = np.dtype("<i8"), np.dtype("<f4")


class StoredChunk(NamedTuple):
    """A chunk in a segment: its number in the context, its width, and the checksum of its inputs (see
    `Record.sources`)."""

    chunk: int
    bits: int
    source: str


class Segment:
    """An open segment. Thread-safe.

    Attributes:
      path: path of the file.
      chunks: its chunks, ascending.
      layers: number of layers.
      checksum: checksum of its index.
      blob_bytes: bytes of a blob in each layer, by the width of a chunk.
      caching: the way of reads: "direct" or "buffered".
    """

    def __init__(
        self,
        path: Path,
        storage: Storage | None = None,
        vault: Vault | None = None,
        scratch: ScratchMemory | None = None,
    ) -> None:
        """Opens a segment and reads its index; an encrypted one with the keys in a vault. `scratch` is memory
        for reads, which segments may share.

        Raises:
          CheckpointError: it is missing, truncated, corrupt or of another version.
          Unreadable: storage refuses.
        """
        self.path, self._scratch = path, scratch or ScratchMemory()
        self._reader = PieceReader(path, storage, follow_links=False)
        try:
            index, self.checksum, end, self._seal = _read_index(path, self._reader, vault)
            self.chunks, self.blob_bytes, self._checksums = _checked(index)
            self.layers = len(self._checksums)
            # Per layer, offsets of its blobs and of the last one's end; and the layer's offset in the file.
            self._starts = [
                [0, *itertools.accumulate(self.blob_bytes[each.bits][layer] for each in self.chunks)]
                for layer in range(self.layers)
            ]
            sizes = [-(-starts[-1] // PAGE) * PAGE for starts in self._starts]
            *self._offsets, end = itertools.accumulate(sizes, initial=end)
            if end != self._reader.size_bytes:
                raise CheckpointError(
                    f"{path} has {self._reader.size_bytes} bytes, its index says {end}: it is truncated"
                )
        except (ValueError, RecursionError) as error:
            self.close()
            raise CheckpointError(f"{path}: its index is malformed ({error!s:.120})") from error
        except BaseException:
            self.close()
            raise
        self.caching = self._reader.caching
        self._places = {stored.chunk: place for place, stored in enumerate(self.chunks)}

    def read(self, layer: int, chunks: Sequence[int]) -> list[np.ndarray]:
        """The blobs of some of its chunks in one layer, uint8, in few reads. Each has its own memory, so that
        none references the others.

        Raises:
          CheckpointError: a blob has changed.
          Unreadable: storage refuses.
        """
        starts, offset = self._starts[layer], self._offsets[layer]
        if missing := set(chunks) - set(self._places):
            raise CheckpointError(f"{self.path} lacks chunk {min(missing)}")
        places = [self._places[chunk] for chunk in chunks]
        # Places to read at once, with the gaps between them.
        runs: list[list[int]] = []
        for place in sorted(set(places)):
            if runs and starts[place] - starts[runs[-1][-1] + 1] <= _GAP_BYTES:
                runs[-1].append(place)
            else:
                runs.append([place])
        found: dict[int, np.ndarray] = {}
        for run in runs:
            first, size = offset + starts[run[0]], starts[run[-1] + 1] - starts[run[0]]
            with self._scratch.taken(pages_bytes(first, size)) as memory:
                self._reader.read_into(memory, first % PAGE, first, size)
                # Offset of the layer.
                piece = first % PAGE - starts[run[0]]
                for place in run:
                    blob = memory[piece + starts[place] : piece + starts[place + 1]]
                    found[place] = self._checked_blob(blob, layer, place)
        return [found[place] for place in places]

    def verify(self) -> set[int]:
        """Reads all blobs, and returns the chunks that are corrupt in some layer.

        Raises:
          Unreadable: storage refuses.
        """
        corrupt: set[int] = set()
        for layer, stored in itertools.product(range(self.layers), self.chunks):
            if stored.chunk in corrupt:
                continue
            try:
                self.read(layer, [stored.chunk])
            except Unreadable:
                raise
            except CheckpointError:
                corrupt.add(stored.chunk)
        return corrupt

    def close(self) -> None:
        """Closes the file."""
        self._reader.close()

    def __enter__(self) -> "Segment":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _checked_blob(self, blob: np.ndarray, layer: int, place: int) -> np.ndarray:
        """A copy of a blob, decrypted if necessary."""
        chunk, checksum = self.chunks[place].chunk, self._checksums[layer][place]
        try:
            if self._seal is not None:
                data = blob.tobytes() + bytes.fromhex(checksum)
                return copied_blob(self._seal.opened(_number(layer, chunk), data))
            blob = copied_blob(blob)
            intact = xxhash.xxh3_64_hexdigest(blob.data) == checksum
        except (CheckpointError, ValueError):
            intact = False
        if not intact:
            raise CheckpointError(f"{self.path}: chunk {chunk} of layer {layer} is corrupt")
        return blob


class OpenSegments:
    """The most recently opened segments. For one thread, except `forget`."""

    def __init__(self, storage: Storage, vault: Vault | None = None) -> None:
        self._storage, self._vault, self._scratch = storage, vault, ScratchMemory()
        self._open: collections.OrderedDict[Path, Segment] = collections.OrderedDict()
        # Those that are about to be removed: another thread may still read them.
        self._forgotten: collections.deque[Path] = collections.deque()

    def open(self, paths: Sequence[Path]) -> list[Segment]:
        """Opens segments, which stay open until others are opened or one is removed.

        Raises:
          CheckpointError: one is missing or damaged.
          Unreadable: storage refuses.
        """
        while self._forgotten:
            path = self._forgotten[0]
            for each in [each for each in self._open if path in (each, each.parent)]:
                self._open.pop(each).close()
            self._forgotten.popleft()
        for path in paths:
            if path not in self._open:
                self._open[path] = Segment(path, self._storage, self._vault, self._scratch)
            self._open.move_to_end(path)
        while len(self._open) > max(_MAX_OPEN, len(paths)):
            self._open.popitem(last=False)[1].close()
        return [self._open[path] for path in paths]

    def forget(self, path: Path) -> None:
        """Closes a segment that is about to be removed, or all in a folder, before the next open."""
        self._forgotten.append(path)

    def close(self) -> None:
        """Closes all."""
        while self._open:
            self._open.popitem()[1].close()


class StoredContext:
    """A context's chunks on storage. Thread-safe.

    Attributes:
      record: record of the context.
      layers: number of layers of its chunks; 0 without chunks.
      caching: the way of reads: "direct" or "buffered"; empty if nothing is stored.
    """

    def __init__(self, record: Record, segments: Mapping[str, Segment]) -> None:
        """See the class; `segments` are the context's open segments, by name.

        Raises:
          CheckpointError: a segment is not the one that the record names.
        """
        for name, segment in segments.items():
            if mismatched := mismatched_chunks(record, name, segment):
                raise CheckpointError(
                    f"{segment.path}: chunk {min(mismatched)} is not the one that the context's record means"
                )
        self.record, self._segments = record, segments
        any_segment = next(iter(segments.values()), None)
        self.layers = 0 if any_segment is None else any_segment.layers
        self.caching = "" if any_segment is None else any_segment.caching

    def read(self, layer: int, chunks: Sequence[int]) -> list[np.ndarray]:
        """The blobs of some chunks in one layer, uint8, in few reads.

        Raises:
          CheckpointError: one is corrupt.
          Unreadable: storage refuses.
        """
        found: dict[int, np.ndarray] = {}
        for name in {self.record.files[chunk] for chunk in chunks}:
            own = [chunk for chunk in chunks if self.record.files[chunk] == name]
            found |= zip(own, self._segments[name].read(layer, own), strict=True)
        return [found[chunk] for chunk in chunks]


def write_segment(
    path: Path,
    chunks: Chunks,
    sources: Sequence[str],
    storage: Storage | None = None,
    *,
    flush: bool = True,
    vault: Vault | None = None,
) -> str:
    """Writes a segment atomically.

    Args:
      path: path of the file.
      chunks: bits of each chunk, and its blob of each layer, uint8 `[bytes]`; at least one, and all blobs of
        one width and layer have one size.
      sources: checksum of the inputs of each chunk, by number (see `Record.sources`).
      storage: storage of the folder, if it is emulated.
      flush: whether to wait until the device has it (see `atomic_file`).
      vault: keys for encryption; None for no encryption.

    Returns:
      The checksum of its index.

    Raises:
      ConfigError: the layers or sizes of chunks differ.
      OSError: the file cannot be written, for example because the device is full.
    """
    order = sorted(chunks)
    layers = len(chunks[order[0]][1])
    sizes: dict[int, list[int]] = {}
    for chunk in order:
        bits, own = chunks[chunk][0], [blob.nbytes for blob in chunks[chunk][1]]
        if sizes.setdefault(bits, own) != own or len(own) != layers:
            raise ConfigError(f"chunk {chunk} has other layers or sizes than others at {bits} bits")
    named = {chunk: sources[chunk] for chunk in order}
    if vault is None:
        checksums = [
            [xxhash.xxh3_64_hexdigest(_bytes(chunks[chunk][1][layer])) for chunk in order]
            for layer in range(layers)
        ]
        version, text = VERSION, _index(chunks, named, checksums)
    else:
        seal, sealed = vault.new_seal(path.parent.parent.name), {}
        for chunk in order:
            bits, blobs = chunks[chunk]
            coded = [seal.sealed(_number(layer, chunk), _bytes(blob)) for layer, blob in enumerate(blobs)]
            sealed[chunk] = (bits, [np.frombuffer(each, np.uint8) for each in coded])
        # Tags replace checksums.
        tags = [[sealed[n][1][layer][-TAG_BYTES:].tobytes().hex() for n in order] for layer in range(layers)]
        chunks = {n: (bits, [each[:-TAG_BYTES] for each in blobs]) for n, (bits, blobs) in sealed.items()}
        version, text = SEALED_VERSION, seal.head(_index(chunks, named, tags), _named(path))
    began = time.perf_counter()
    with atomic_file(path, flush=flush) as file:
        file.write(_HEAD.pack(SEGMENT_HEAD, version, len(text), xxhash.xxh3_128_digest(text)) + text)
        _pad(file)
        for layer in range(layers):
            for chunk in order:
                file.write(_bytes(chunks[chunk][1][layer]))
            _pad(file)
        size = file.tell()
    if storage is not None:
        storage.await_written(began, size)
    return xxhash.xxh3_128_hexdigest(text)


def file_bytes(chunks: Chunks, *, encrypted: bool = False) -> int:
    """The size of the file that `write_segment` makes of some chunks; 0 for no chunks."""
    if not chunks:
        return 0
    checksum, more = ("0" * 2 * TAG_BYTES, HEAD_BYTES) if encrypted else ("0" * _DIGITS, 0)
    layers = list(zip(*(blobs for _, blobs in chunks.values()), strict=True))
    checksums = [[checksum] * len(chunks)] * len(layers)
    text = _index(chunks, dict.fromkeys(chunks, "0" * _DIGITS), checksums)
    parts = [_HEAD.size + more + len(text), *(sum(blob.nbytes for blob in each) for each in layers)]
    return sum(-(-part // PAGE) * PAGE for part in parts)


def mismatched_chunks(record: Record, name: str, segment: Segment) -> set[int]:
    """The chunks that a record has in a segment, but that the segment lacks or has with another width, other
    bytes per layer than the record's origin requires, or computed from another origin or other tokens."""
    own = {chunk for chunk, file in enumerate(record.files) if file == name}
    if segment.checksum != record.checksums.get(name):
        return own
    sizes = record.origin.layer_bytes
    right = {
        each.chunk
        for each in segment.chunks
        if each.chunk in own
        and (record.bits[each.chunk], record.sources[each.chunk]) == (each.bits, each.source)
        and sizes.get(each.bits) == tuple(segment.blob_bytes[each.bits])
    }
    return own - right


def row_chunks(rows: PromptEmbeddings | None) -> Chunks:
    """Prompt embeddings as the one chunk of a segment, of the source `ROWS_SOURCE`; no chunk for none."""
    if rows is None:
        return {}
    places, wide = rows.at.astype(_PLACE), np.ascontiguousarray(rows.rows, _ROW)
    return {0: (RAW, [each.reshape(-1).view(np.uint8) for each in (places, wide)])}


ROWS_SOURCE = ("rows",)


def read_rows(
    folder: Path, record: Record, storage: Storage, vault: Vault | None = None
) -> PromptEmbeddings | None:
    """The prompt embeddings of a context for its tokens; None for none.

    Raises:
      CheckpointError: they are damaged, and with them the context.
      Unreadable: storage refuses.
    """
    if not record.rows:
        return None
    path = folder / record.rows
    damaged = CheckpointError(
        f"{path}: the rows of the context's images are not what was written; make a new context"
    )
    with Segment(path, storage, vault) as segment:
        known = [(each.chunk, each.bits) for each in segment.chunks] == [(0, RAW)]
        if segment.checksum != record.checksums.get(record.rows) or segment.layers != 2 or not known:
            raise damaged
        places, wide = (segment.read(layer, [0])[0] for layer in range(2))
    count = places.size // _PLACE.itemsize
    if not count or places.size % _PLACE.itemsize or wide.size % (count * _ROW.itemsize):
        raise damaged
    try:
        rows = PromptEmbeddings(places.copy().view(_PLACE), wide.copy().view(_ROW).reshape(count, -1))
    except ConfigError as error:
        raise damaged from error
    return rows.before(len(record.tokens))


def _number(layer: int, chunk: int) -> int:
    """The number of a blob under a seal; the index is 0."""
    return 1 + layer * _MAX_CHUNKS + chunk


def _named(path: Path) -> str:
    """The name that an encrypted index is authenticated with."""
    return f"{path.parent.name}/{path.name}"


def _index(chunks: Chunks, sources: Mapping[int, str], checksums: list[list[str]]) -> bytes:
    index = {
        "chunks": [[chunk, chunks[chunk][0], sources[chunk]] for chunk in sorted(chunks)],
        "blob_bytes": {str(bits): [blob.nbytes for blob in blobs] for bits, blobs in chunks.values()},
        "checksums": checksums,
    }
    return json.dumps(index, separators=(",", ":")).encode()


def _read_index(path: Path, reader: PieceReader, vault: Vault | None) -> tuple[Any, str, int, Seal | None]:
    """The index, its checksum, the offset of the first layer, and the seal of an encrypted segment."""
    if reader.size_bytes < PAGE:
        raise CheckpointError(f"{path} has {reader.size_bytes} bytes: it is not a segment of a context")
    magic, version, size, digest = _HEAD.unpack(reader.read(0, _HEAD.size).tobytes())
    if magic != SEGMENT_HEAD:
        raise CheckpointError(f"{path} is not a segment of a context")
    if version not in (VERSION, SEALED_VERSION):
        # Records of this version never name segments of another version.
        raise CheckpointError(f"{path} is of version {version}, this jaxllm reads {VERSION}")
    if size > min(_MAX_INDEX_BYTES, reader.size_bytes - _HEAD.size):
        raise CheckpointError(f"{path}: its index of {size} bytes does not fit the file: it is truncated")
    text = reader.read(_HEAD.size, size).tobytes()
    if xxhash.xxh3_128_digest(text) != digest:
        raise CheckpointError(f"{path}: its index is corrupt")
    seal = None
    require_form(path, vault, encrypted=version == SEALED_VERSION)
    if version == SEALED_VERSION and vault is not None:
        text, seal = vault.opened_head(path.parent.parent.name, text, _named(path))
    return json.loads(text), digest.hex(), -(-(_HEAD.size + size) // PAGE) * PAGE, seal


def _checked(index: Any) -> tuple[tuple[StoredChunk, ...], dict[int, list[int]], list[list[str]]]:
    """The chunks of an index, the sizes of their blobs and the checksums of these.

    Raises:
      ValueError: it is not an index, or its parts are inconsistent.
    """
    _require("fields", isinstance(index, dict) and index.keys() == {"chunks", "blob_bytes", "checksums"})
    chunks, sizes, checksums = index["chunks"], index["blob_bytes"], index["checksums"]
    _require("chunks", isinstance(chunks, list) and 0 < len(chunks) <= _MAX_CHUNKS)
    for each in chunks:
        _require("chunks", isinstance(each, list) and list(map(type, each)) == [int, int, str])
        _require("chunks", 0 <= each[0] < _MAX_CHUNKS and each[1] in (RAW, STATE, *WIDTHS))
    _require("chunks", all(a[0] < b[0] for a, b in itertools.pairwise(chunks)))
    widths = {str(bits) for _, bits, _ in chunks}
    _require("blob_bytes", isinstance(sizes, dict) and sizes.keys() == widths)
    _require("checksums", isinstance(checksums, list) and 0 < len(checksums) <= _MAX_LAYERS)
    for of in sizes.values():
        _require("blob_bytes", isinstance(of, list) and len(of) == len(checksums))
        _require("blob_bytes", all(type(size) is int and 0 < size <= _MAX_BLOB_BYTES for size in of))
    for of in checksums:
        _require("checksums", isinstance(of, list) and len(of) == len(chunks))
        _require("checksums", all(type(each) is str for each in of))
    stored = tuple(StoredChunk(*each) for each in chunks)
    return stored, {int(bits): of for bits, of in sizes.items()}, checksums


def _require(name: str, valid: bool) -> None:
    if not valid:
        raise ValueError(name)


def _bytes(blob: np.ndarray) -> memoryview:
    return np.ascontiguousarray(blob).reshape(-1).view(np.uint8).data


def _pad(file: BinaryIO) -> None:
    file.write(b"\0" * (-file.tell() % PAGE))
