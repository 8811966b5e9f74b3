"""Stored contexts' chunks, whichever segments they are in, open to be read.

Opening a segment takes as long as reading a chunk of it, so that segments stay open from call to call.
"""

import collections
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from serving.contexts.record import Record
from serving.contexts.segment import Segment
from serving.direct_io import Storage

# Each takes a file of those that a process may have open.
_MOST_OPEN = 128


class OpenSegments:
    """Segments that were read lately. Not thread-safe, unlike what it opens."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._open: collections.OrderedDict[Path, Segment] = collections.OrderedDict()

    def open(self, paths: Sequence[Path]) -> list[Segment]:
        """Segments, for as long as no other ones are opened or any is removed.

        Raises:
          CheckpointError: one cannot be read.
        """
        for path in paths:
            if path not in self._open:
                self._open[path] = Segment(path, self._storage)
            self._open.move_to_end(path)
        while len(self._open) > max(_MOST_OPEN, len(paths)):
            self._open.popitem(last=False)[1].close()
        return [self._open[path] for path in paths]

    def forget(self, path: Path) -> None:
        """Closes a segment that is about to be removed, or all in a folder."""
        for each in [each for each in self._open if path in (each, each.parent)]:
            self._open.pop(each).close()

    def close(self) -> None:
        """Closes all."""
        while self._open:
            self._open.popitem()[1].close()


class StoredContext:
    """A context's chunks. Threads may read together.

    Attributes:
      record: of the context.
      layers: of its chunks; 0 where there are none.
    """

    def __init__(self, record: Record, segments: Mapping[str, Segment]) -> None:
        self.record, self._segments = record, segments
        self.layers = next((each.layers for each in segments.values()), 0)

    @property
    def caching(self) -> str:
        """How it is read: "direct" or "buffered"; empty where nothing is stored."""
        return next((each.caching for each in self._segments.values()), "")

    def has(self, chunk: int) -> bool:
        """Whether a chunk is stored."""
        return bool(self.record.files[chunk])

    def read(self, layer: int, chunks: Sequence[int]) -> list[np.ndarray]:
        """The blobs of some chunks in one layer, uint8, in few reads.

        Raises:
          CheckpointError: one is corrupt.
        """
        found: dict[int, np.ndarray] = {}
        for name in {self.record.files[chunk] for chunk in chunks}:
            own = [chunk for chunk in chunks if self.record.files[chunk] == name]
            found |= zip(own, self._segments[name].read(layer, own), strict=True)
        return [found[chunk] for chunk in chunks]
