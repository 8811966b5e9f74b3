"""Rows of the embedding table, read from the file as tokens need them: the table is never in memory."""

import concurrent.futures
from collections.abc import Sequence

import numpy as np

from jaxllm.bundle import Bundle
from jaxllm.bundle.layout import Extent
from jaxllm.bundle.rows import row_step, rows_alone, rows_at
from jaxllm.quant import Weight
from serving.direct_io import PieceReader

_TABLE = "embed.tokens"
_THREADS = 4


class EmbeddingRows:
    """The rows of a bundle's embedding table.

    A prompt's tokens are mostly the same few: what was read last is kept.
    """

    def __init__(self, bundle: Bundle, reader: PieceReader, *, kept_bytes: int) -> None:
        """Reads nothing yet; of rows at most `kept_bytes` are kept."""
        self._bundle, self._reader = bundle, reader
        self._tensor = bundle.layout.tensors[_TABLE]
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
        return [read_array(self._reader, each) for each in rows_at(self._tensor, first, self._step)]


def read_array(reader: PieceReader, extent: Extent) -> np.ndarray:
    """An array of a bundle's file, in memory of its own: what is read comes with the rest of its pages."""
    return extent.array(reader.read(extent.offset, extent.size_bytes).copy())
