"""A stored context's chunks, whichever segments they are in, open to be read."""

import contextlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from serving.contexts.record import Record
from serving.contexts.segment import Segment
from serving.direct_io import Storage


class StoredContext:
    """A context's chunks, open to be read. Threads may read together.

    Attributes:
      record: of the context.
      layers: of its chunks; 0 where there are none.
    """

    def __init__(self, folder: Path, record: Record, storage: Storage) -> None:
        self.record = record
        with contextlib.ExitStack() as stack:
            self._segments = {
                name: stack.enter_context(Segment(folder / name, storage)) for name in record.segments
            }
            self._stack = stack.pop_all()
        self.layers = next((each.layers for each in self._segments.values()), 0)

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

    def close(self) -> None:
        """Closes the files."""
        self._stack.close()

    def __enter__(self) -> "StoredContext":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
