"""Reads the chunks of stored contexts from their segments.

Segments stay open from call to call, because to open one takes as long as to read one of its chunks.
"""

import collections
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from jaxllm.errors import CheckpointError
from serving.contexts.encryption import Vault
from serving.contexts.record import Record
from serving.contexts.segment import Segment
from serving.host.direct_io import ScratchMemory, Storage

# Each takes one file descriptor.
_MOST_OPEN = 128


class OpenSegments:
    """The segments that were opened last. For one thread, but for `forget`, which any may call."""

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
        """Closes a segment that is about to be removed, or all in a folder, before others are opened."""
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
      record: of the context.
      layers: number of layers of its chunks; 0 where there are none.
    """

    def __init__(self, record: Record, segments: Mapping[str, Segment]) -> None:
        """Takes a context's open segments.

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
        """The way segments are read: "direct" or "buffered"; empty where nothing is stored."""
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


def mismatched_chunks(record: Record, name: str, segment: Segment) -> set[int]:
    """The chunks that a record has in a segment, but that the segment lacks, or has with another width, other
    bytes per layer than the record's origin gives, or computed from another origin or other tokens."""
    own = {chunk for chunk, file in enumerate(record.files) if file == name}
    if segment.checksum != record.checksums.get(name):
        return own
    wanted = {chunk: (record.bits[chunk], record.sources[chunk]) for chunk in own}
    sizes = {bits: tuple(of) for bits, of in segment.blob_bytes.items()}
    right = {bits for bits, of in sizes.items() if record.origin.layer_bytes.get(bits) == of}
    there = {each.chunk for each in segment.chunks if wanted.get(each.chunk) == (each.bits, each.source)}
    return {chunk for chunk in own if chunk not in there or record.bits[chunk] not in right}
