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

from jaxllm.contexts.codecs import RAW, STATE, WIDTHS
from jaxllm.errors import CheckpointError, ConfigError, Unreadable
from jaxllm.files.atomic import atomic_file
from jaxllm.serving.contexts.encryption import ID_DIGITS, SALT_BYTES, TAG_BYTES, Seal, Vault, require_form
from jaxllm.serving.contexts.memory import copied_blob
from jaxllm.serving.contexts.record import Record
from jaxllm.serving.ground.prompt_rows import PromptRows
from jaxllm.serving.host.direct_io import PAGE, PieceReader, ScratchMemory, Storage, pages_bytes

MAGIC, SUFFIX = b"JXLKVSEG", ".kv"
VERSION, SEALED_VERSION = 2, 3
_HEAD = struct.Struct("<8sIQ16s")
# Maximum size of an index; a length from a file is not trusted.
_MOST_INDEX_BYTES = 1 << 26
_MOST_CHUNKS = 1 << 20
_DIGEST_DIGITS = 16
_TAG_DIGITS = 2 * TAG_BYTES
_BEFORE_INDEX = ID_DIGITS + SALT_BYTES
_MOST_LAYERS = 1 << 12
_MOST_BLOB_BYTES = 1 << 31
# Blobs that are closer than this are read together.
_GAP_BYTES = 1 << 16
# Chunk number -> its bits, and its blob of each layer.
Chunks = Mapping[int, tuple[int, Sequence[np.ndarray]]]
# Each needs one file descriptor.
_MOST_OPEN = 128
_PLACE, _ROW = np.dtype("<i8"), np.dtype("<f4")


@dataclasses.dataclass(frozen=True)
class StoredChunk:
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
        except (ValueError, RecursionError) as error:
            self.close()
            raise CheckpointError(f"{path}: its index is malformed ({error!s:.120})") from error
        except BaseException:
            self.close()
            raise
        self.layers = len(self._checksums)
        self._starts = [self._layer_starts(layer) for layer in range(self.layers)]
        self._places = {stored.chunk: place for place, stored in enumerate(self.chunks)}
        offset = end
        self._offsets = []
        for starts in self._starts:
            self._offsets.append(offset)
            offset += -(-starts[-1] // PAGE) * PAGE
        if offset != self._reader.size_bytes:
            self._reader.close()
            raise CheckpointError(
                f"{path} has {self._reader.size_bytes} bytes, its index says {offset}: it is truncated"
            )

    @property
    def size_bytes(self) -> int:
        """Bytes of the file."""
        return self._reader.size_bytes

    @property
    def bytes_read(self) -> int:
        """Bytes read since it was opened."""
        return self._reader.bytes_read

    @property
    def caching(self) -> str:
        """The way of reads: "direct" or "buffered"."""
        return self._reader.caching

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
        found: dict[int, np.ndarray] = {}
        for run in _runs(sorted(set(places)), starts):
            first, size = offset + starts[run[0]], starts[run[-1] + 1] - starts[run[0]]
            with self._scratch.taken(pages_bytes(first, size)) as memory:
                self._reader.read_into(memory, first % PAGE, first, size)
                # Offset of the layer.
                piece = first % PAGE - starts[run[0]]
                for place in run:
                    blob = memory[piece + starts[place] : piece + starts[place + 1]]
                    found[place] = self._checked_blob(blob, layer, place)
        return [found[place] for place in places]

    def verify(self) -> list[int]:
        """Reads all blobs.

        Returns:
          The chunks that are corrupt in some layer, ascending.

        Raises:
          Unreadable: storage refuses.
        """
        corrupt = set()
        for layer, stored in itertools.product(range(self.layers), self.chunks):
            if stored.chunk in corrupt:
                continue
            try:
                self.read(layer, [stored.chunk])
            except Unreadable:
                raise
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

    def _layer_starts(self, layer: int) -> list[int]:
        """Offsets of the blobs in a layer, and of the last one's end."""
        return [0, *itertools.accumulate(self.blob_bytes[stored.bits][layer] for stored in self.chunks)]


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
        self._close_forgotten()
        for path in paths:
            if path not in self._open:
                self._open[path] = Segment(path, self._storage, self._vault, self._scratch)
            self._open.move_to_end(path)
        while len(self._open) > max(_MOST_OPEN, len(paths)):
            self._open.popitem(last=False)[1].close()
        return [self._open[path] for path in paths]

    def forget(self, path: Path) -> None:
        """Closes a segment that is about to be removed, or all in a folder, before the next open."""
        self._forgotten.append(path)

    def _close_forgotten(self) -> None:
        while self._forgotten:
            path = self._forgotten[0]
            for each in [each for each in self._open if path in (each, each.parent)]:
                self._open.pop(each).close()
            self._forgotten.popleft()

    def close(self) -> None:
        """Closes all."""
        while self._open:
            self._open.popitem()[1].close()


class StoredContext:
    """A context's chunks on storage. Thread-safe.

    Attributes:
      record: record of the context.
      layers: number of layers of its chunks; 0 without chunks.
    """

    def __init__(self, record: Record, segments: Mapping[str, Segment]) -> None:
        """See the class; `segments` are the context's open segments.

        Raises:
          CheckpointError: a segment is not the one that the record names.
        """
        for name, segment in segments.items():
            if mismatched := mismatched_chunks(record, name, segment):
                raise CheckpointError(
                    f"{segment.path}: chunk {min(mismatched)} is not the one that the context's record means"
                )
        self.record, self._segments = record, segments
        self.layers = next((each.layers for each in segments.values()), 0)

    @property
    def caching(self) -> str:
        """The way of reads: "direct" or "buffered"; empty if nothing is stored."""
        return next((each.caching for each in self._segments.values()), "")

    def has(self, chunk: int) -> bool:
        """Whether a chunk is stored."""
        return bool(self.record.files[chunk])

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
      chunks: bits of each chunk, and its blob of each layer, uint8 `[bytes]`; all blobs of one width and
        layer have one size.
      sources: checksum of the inputs of each chunk, by number (see `Record.sources`).
      storage: storage of the folder, if it is emulated.
      flush: whether to wait until the device has it (see `atomic_file`).
      vault: keys for encryption; None for no encryption.

    Returns:
      The checksum of its index.

    Raises:
      ConfigError: there are no chunks, or their layers or sizes differ.
      OSError: the file cannot be written, for example because the device is full.
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
    seal = None if vault is None else vault.new_seal(path.parent.parent.name)
    version = VERSION if seal is None else SEALED_VERSION
    if seal is None:
        text = _index(chunks, sources.__getitem__, lambda _, __, blob: xxhash.xxh3_64_hexdigest(_bytes(blob)))
    else:
        chunks, tags = _sealed_chunks(chunks, seal)
        text = _index(chunks, sources.__getitem__, lambda layer, chunk, _: tags[layer, chunk])
        text = seal.key_id.encode() + seal.salt + seal.sealed(0, text, _named(path))
    began = time.perf_counter()
    with atomic_file(path, flush=flush) as file:
        file.write(_HEAD.pack(MAGIC, version, len(text), xxhash.xxh3_128_digest(text)) + text)
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
    digest, checksum = "0" * _DIGEST_DIGITS, "0" * (_TAG_DIGITS if encrypted else _DIGEST_DIGITS)
    around = _BEFORE_INDEX + TAG_BYTES if encrypted else 0
    layers = zip(*(blobs for _, blobs in chunks.values()), strict=True)
    parts = [
        _HEAD.size + around + len(_index(chunks, lambda _: digest, lambda _, __, ___: checksum)),
        *(sum(b.nbytes for b in each) for each in layers),
    ]
    return sum(-(-part // PAGE) * PAGE for part in parts)


def mismatched_chunks(record: Record, name: str, segment: Segment) -> set[int]:
    """The chunks that a record has in a segment, but that the segment lacks or has with another width, other
    bytes per layer than the record's origin requires, or computed from another origin or other tokens."""
    own = {chunk for chunk, file in enumerate(record.files) if file == name}
    if segment.checksum != record.checksums.get(name):
        return own
    wanted = {chunk: (record.bits[chunk], record.sources[chunk]) for chunk in own}
    sizes = {bits: tuple(of) for bits, of in segment.blob_bytes.items()}
    right = {bits for bits, of in sizes.items() if record.origin.layer_bytes.get(bits) == of}
    there = {each.chunk for each in segment.chunks if wanted.get(each.chunk) == (each.bits, each.source)}
    return {chunk for chunk in own if chunk not in there or record.bits[chunk] not in right}


def row_chunks(rows: PromptRows) -> Chunks:
    """Prompt embeddings as the one chunk of a segment."""
    places, wide = rows.at.astype(_PLACE), np.ascontiguousarray(rows.rows, _ROW)
    return {0: (RAW, [each.reshape(-1).view(np.uint8) for each in (places, wide)])}


def write_rows(
    path: Path, rows: PromptRows, storage: Storage, vault: Vault | None, *, flush: bool = True
) -> str:
    """Writes the prompt embeddings of a context atomically; returns the checksum of the file's index.

    Raises:
      OSError: they cannot be written.
    """
    return write_segment(path, row_chunks(rows), ["rows"], storage, flush=flush, vault=vault)


def read_rows(
    folder: Path, record: Record, storage: Storage, vault: Vault | None = None
) -> PromptRows | None:
    """The prompt embeddings of a context for its tokens; None for none.

    Raises:
      CheckpointError: they are damaged, and with them the context.
      Unreadable: storage refuses.
    """
    if not record.rows:
        return None
    path = folder / record.rows
    with Segment(path, storage, vault) as segment:
        known = [(each.chunk, each.bits) for each in segment.chunks] == [(0, RAW)]
        if segment.checksum != record.checksums.get(record.rows) or segment.layers != 2 or not known:
            raise _damaged(path)
        places, wide = (segment.read(layer, [0])[0] for layer in range(2))
    count = places.size // _PLACE.itemsize
    if not count or places.size % _PLACE.itemsize or wide.size % (count * _ROW.itemsize):
        raise _damaged(path)
    try:
        rows = PromptRows(places.copy().view(_PLACE), wide.copy().view(_ROW).reshape(count, -1))
    except ConfigError as error:
        raise _damaged(path) from error
    return rows.before(len(record.tokens))


def _sealed_chunks(chunks: Chunks, seal: Seal) -> tuple[Chunks, dict[tuple[int, int], str]]:
    """Chunks with encrypted blobs of the same sizes, and the blobs' tags by layer and chunk."""
    tags, found = {}, {}
    for chunk, (bits, blobs) in chunks.items():
        coded = [seal.sealed(_number(layer, chunk), _bytes(blob)) for layer, blob in enumerate(blobs)]
        tags |= {(layer, chunk): each[-TAG_BYTES:].hex() for layer, each in enumerate(coded)}
        found[chunk] = (bits, [np.frombuffer(each, np.uint8)[:-TAG_BYTES] for each in coded])
    return found, tags


def _number(layer: int, chunk: int) -> int:
    """The number of a blob under a seal; the index is 0."""
    return 1 + layer * _MOST_CHUNKS + chunk


def _named(path: Path) -> str:
    """The name that an encrypted index is authenticated with."""
    return f"{path.parent.name}/{path.name}"


def _index(
    chunks: Chunks, source: Callable[[int], str], checksum: Callable[[int, int, np.ndarray], str]
) -> bytes:
    order = sorted(chunks)
    sizes = {str(bits): [blob.nbytes for blob in blobs] for bits, blobs in chunks.values()}
    layers = len(chunks[order[0]][1])
    index = {
        "chunks": [[chunk, chunks[chunk][0], source(chunk)] for chunk in order],
        "blob_bytes": sizes,
        "checksums": [
            [checksum(layer, chunk, chunks[chunk][1][layer]) for chunk in order] for layer in range(layers)
        ],
    }
    return json.dumps(index, separators=(",", ":")).encode()


def _read_index(path: Path, reader: PieceReader, vault: Vault | None) -> tuple[Any, str, int, Seal | None]:
    """The index, its checksum, the offset of the first layer, and the seal of an encrypted segment."""
    if reader.size_bytes < PAGE:
        raise CheckpointError(f"{path} has {reader.size_bytes} bytes: it is not a segment of a context")
    magic, version, size, digest = _HEAD.unpack(reader.read(0, _HEAD.size).tobytes())
    if magic != MAGIC:
        raise CheckpointError(f"{path} is not a segment of a context")
    if version not in (VERSION, SEALED_VERSION):
        # Records of this version never name segments of another version.
        raise CheckpointError(f"{path} is of version {version}, this jaxllm reads {VERSION}")
    if size > min(_MOST_INDEX_BYTES, reader.size_bytes - _HEAD.size):
        raise CheckpointError(f"{path}: its index of {size} bytes does not fit the file: it is truncated")
    text = reader.read(_HEAD.size, size).tobytes()
    if xxhash.xxh3_128_digest(text) != digest:
        raise CheckpointError(f"{path}: its index is corrupt")
    end, seal = -(-(_HEAD.size + size) // PAGE) * PAGE, None
    require_form(path, vault, encrypted=version == SEALED_VERSION)
    if version == SEALED_VERSION and vault is not None:
        wanted, salt, sealed = text[:ID_DIGITS], text[ID_DIGITS:_BEFORE_INDEX], text[_BEFORE_INDEX:]
        seal = vault.seal(path.parent.parent.name, wanted.decode("latin-1"), salt)
        text = seal.opened(0, sealed, _named(path))
    return json.loads(text), digest.hex(), end, seal


def _checked(index: Any) -> tuple[tuple[StoredChunk, ...], dict[int, list[int]], list[list[str]]]:
    """The chunks of a index, the sizes of their blobs and the checksums of these.

    Raises:
      ValueError: it is not an index, or its parts are inconsistent.
    """
    _require("fields", isinstance(index, dict) and index.keys() == {"chunks", "blob_bytes", "checksums"})
    chunks, sizes, checksums = index["chunks"], index["blob_bytes"], index["checksums"]
    _require(
        "chunks", isinstance(chunks, list) and 0 < len(chunks) <= _MOST_CHUNKS and all(map(_is_chunk, chunks))
    )
    numbers = [number for number, *_ in chunks]
    _require("chunks", all(a < b for a, b in itertools.pairwise(numbers)))
    widths = {bits for _, bits, _ in chunks}
    _require("blob_bytes", isinstance(sizes, dict) and sizes.keys() == set(map(str, widths)))
    _require("checksums", isinstance(checksums, list) and 0 < len(checksums) <= _MOST_LAYERS)
    for of in sizes.values():
        _require("blob_bytes", isinstance(of, list) and len(of) == len(checksums))
        _require("blob_bytes", all(type(size) is int and 0 < size <= _MOST_BLOB_BYTES for size in of))
    for of in checksums:
        _require("checksums", isinstance(of, list) and len(of) == len(chunks))
        _require("checksums", all(type(each) is str for each in of))
    return (
        tuple(StoredChunk(*each) for each in chunks),
        {int(bits): of for bits, of in sizes.items()},
        checksums,
    )


def _is_chunk(each: Any) -> bool:
    if type(each) is not list or len(each) != 3:
        return False
    number, bits, source = each
    return (
        type(number) is int
        and 0 <= number < _MOST_CHUNKS
        and type(bits) is int
        and bits in (RAW, STATE, *WIDTHS)
        and type(source) is str
    )


def _require(name: str, good: bool) -> None:
    if not good:
        raise ValueError(name)


def _runs(places: Sequence[int], starts: Sequence[int]) -> list[list[int]]:
    """Divides places into runs to read at once, including gaps between them."""
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


def _damaged(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path}: the rows of the context's images are not what was written; make a new context"
    )
