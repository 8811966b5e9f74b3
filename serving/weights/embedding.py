"""Reads rows of the embedding table from the file as tokens need them: the table is never in memory."""

import concurrent.futures
from collections.abc import Sequence

import numpy as np

from jaxllm.bundle import Bundle
from jaxllm.bundle.layout import PAGE, Extent
from jaxllm.bundle.rows import row_step, rows_alone, rows_at
from jaxllm.quant import Weight
from serving.host.direct_io import PieceReader
from serving.weights.first_read import Checksums

_TABLE = "embed.tokens"
_THREADS = 4


class EmbeddingRows:
    """The rows of a bundle's embedding table.

    A prompt's tokens are mostly the same few: what was read last is kept.

    Attributes:
      segment: of the file, that holds the table.
    """

    def __init__(self, bundle: Bundle, reader: PieceReader, checksums: Checksums, *, kept_bytes: int) -> None:
        """Reads nothing yet.

        Args:
          bundle: an open one.
          reader: of its file.
          checksums: of the pages of `segment` (see `FirstReading.watch_pages`).
          kept_bytes: most of rows that are kept.
        """
        self._bundle, self._reader, self._checksums = bundle, reader, checksums
        self._tensor = bundle.layout.tensors[_TABLE]
        self.segment = self._tensor.segment
        self._whole = bundle.layout.segments[self.segment]
        self._step = row_step(self._tensor)
        row_bytes = sum(each.size_bytes for each in rows_at(self._tensor, 0, self._step))
        self._room = max(1, kept_bytes // row_bytes)
        self._kept: dict[int, list[np.ndarray]] = {}
        self._pool = concurrent.futures.ThreadPoolExecutor(_THREADS)

    def table(self, tokens: Sequence[int]) -> tuple[Weight, np.ndarray]:
        """A table of the rows that some tokens need, and where in it each one's is.

        Args:
          tokens: ids, in range.

        Returns:
          `[T·step, D]` for T tokens, and `[1, T]` int32.

        Raises:
          CheckpointError: the file cannot be read.
        """
        ids = np.asarray(tokens, np.int64)
        firsts = [int(each) for each in ids // self._step * self._step]
        found = self._panels(set(firsts))
        extents = rows_at(self._tensor, 0, self._step * len(firsts))
        # Of each extent the rows of all tokens, one behind the other, as a table's would be.
        arrays = {
            each: np.concatenate([found[first][part] for first in firsts]).reshape(each.shape)
            for part, each in enumerate(extents)
        }
        shape = (self._step * len(firsts), self._bundle.cfg.hidden_size)
        table = self._bundle.place(rows_alone(self._tensor, extents), shape, arrays.__getitem__)
        places = np.arange(len(ids)) * self._step + ids % self._step
        return table, places.astype(np.int32)[None]

    def close(self) -> None:
        """Ends reading."""
        self._pool.shutdown()

    def _panels(self, firsts: set[int]) -> dict[int, list[np.ndarray]]:
        """Of each panel of rows, by its first, the parts."""
        missing = sorted(firsts - self._kept.keys())
        self._kept.update(zip(missing, self._pool.map(self._read, missing), strict=True))
        found = {first: self._kept.pop(first) for first in firsts}
        # What was needed last lies last.
        self._kept.update(found)
        while len(self._kept) > max(self._room, len(firsts)):
            del self._kept[next(iter(self._kept))]
        return found

    def _read(self, first: int) -> list[np.ndarray]:
        return [self._checked(each) for each in rows_at(self._tensor, first, self._step)]

    def _checked(self, extent: Extent) -> np.ndarray:
        """An array of the table, read with the whole pages that it touches, which are what they were."""
        start = self._whole.offset
        begin = (extent.offset - start) // PAGE * PAGE
        end = -(-(extent.offset + extent.size_bytes - start) // PAGE) * PAGE
        end = min(end, self._whole.size_bytes)
        data = self._reader.read(start + begin, end - begin)
        self._checksums.require_same_pages(start + begin, data)
        at = extent.offset - start - begin
        return extent.array(data[at : at + extent.size_bytes].copy())


def read_array(reader: PieceReader, extent: Extent) -> np.ndarray:
    """An array of a bundle's file, in memory of its own: what is read comes with the rest of its pages."""
    return extent.array(reader.read(extent.offset, extent.size_bytes).copy())
