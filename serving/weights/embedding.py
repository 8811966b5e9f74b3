"""Gathers rows of the embedding for tokens, from storage, or from memory if a resident part of the model has
the whole embedding."""

import concurrent.futures
from collections.abc import Callable, Sequence

import numpy as np

from jaxllm.bundle import Bundle
from jaxllm.bundle.layout import PAGE, Extent, row_step, rows_alone, rows_at
from jaxllm.quant import Weight
from jaxllm.serving.host.direct_io import PieceReader
from jaxllm.serving.weights.first_read import READS, Checksums

_PARAMETER = "embed.tokens"
_THREADS = 4


class EmbeddingRows:
    """The rows of a bundle's embedding.

    Prompts mostly repeat a few tokens, so the most recently used rows are cached if they are read from
    storage.

    Attributes:
      segment: segment of the file with the embedding.
    """

    def __init__(
        self,
        bundle: Bundle,
        reader: PieceReader,
        checksums: Checksums,
        *,
        kept_bytes: int,
        resident: Callable[[Extent], np.ndarray] | None = None,
    ) -> None:
        """See the class; reads nothing yet.

        Args:
          bundle: an open bundle.
          reader: reader of its file.
          checksums: checksums of the pages of `segment` (see `FirstRead.watch_pages`).
          kept_bytes: size limit of cached rows.
          resident: returns a view of an extent of the embedding; None if it is not in memory.
        """
        self._bundle, self._reader, self._checksums = bundle, reader, checksums
        self._resident = resident
        self._tensor = bundle.layout.tensors[_PARAMETER]
        self.segment = self._tensor.segment
        self._whole = bundle.layout.segments[self.segment]
        self._step = row_step(self._tensor)
        row_bytes = sum(each.size_bytes for each in rows_at(self._tensor, 0, self._step))
        self._room = max(1, kept_bytes // row_bytes)
        self._kept: dict[int, list[np.ndarray]] = {}
        self._pool = concurrent.futures.ThreadPoolExecutor(_THREADS)

    def rows_of(self, tokens: Sequence[int]) -> tuple[Weight, np.ndarray]:
        """A weight with the rows of some tokens, and the index of each token's row in it.

        Args:
          tokens: valid ids.

        Returns:
          Rows `[T·step, D]` for T tokens, since rows are stored in groups of `step`; and indices `[1, T]`
          int32.

        Raises:
          CheckpointError: the file cannot be read.
        """
        ids = np.asarray(tokens, np.int64)
        firsts = [int(each) for each in ids // self._step * self._step]
        found = self._panels(set(firsts))
        extents = rows_at(self._tensor, 0, self._step * len(firsts))
        # Per extent the rows of all tokens one after another, as in the whole embedding.
        arrays = {
            each: np.concatenate([found[first][part] for first in firsts]).reshape(each.shape)
            for part, each in enumerate(extents)
        }
        shape = (self._step * len(firsts), self._bundle.cfg.hidden_size)
        rows = self._bundle.place(rows_alone(self._tensor, extents), shape, arrays.__getitem__)
        indices = np.arange(len(ids)) * self._step + ids % self._step
        return rows, indices.astype(np.int32)[None]

    def close(self) -> None:
        """Stops the reader threads."""
        self._pool.shutdown()

    def _panels(self, firsts: set[int]) -> dict[int, list[np.ndarray]]:
        """First row of a panel -> its parts."""
        if (resident := self._resident) is not None:
            return {
                first: [resident(each) for each in rows_at(self._tensor, first, self._step)]
                for first in firsts
            }
        missing = sorted(firsts - self._kept.keys())
        self._kept.update(zip(missing, self._pool.map(self._read, missing), strict=True))
        found = {first: self._kept.pop(first) for first in firsts}
        # In the order of last use.
        self._kept.update(found)
        while len(self._kept) > max(self._room, len(firsts)):
            del self._kept[next(iter(self._kept))]
        return found

    def _read(self, first: int) -> list[np.ndarray]:
        return [self._checked(each) for each in rows_at(self._tensor, first, self._step)]

    def _checked(self, extent: Extent) -> np.ndarray:
        """Reads an array of the embedding with all of the pages that it touches, and checks these."""
        start = self._whole.offset
        begin = (extent.offset - start) // PAGE * PAGE
        end = -(-(extent.offset + extent.size_bytes - start) // PAGE) * PAGE
        end = min(end, self._whole.size_bytes)
        at = extent.offset - start - begin
        for _ in range(READS):
            data = self._reader.read(start + begin, end - begin)
            if self._checksums.same_pages(start + begin, data):
                return extent.array(data[at : at + extent.size_bytes].copy())
        raise self._checksums.changed(start + begin, end - begin)


def read_array(reader: PieceReader, extent: Extent) -> np.ndarray:
    """Reads an array of a bundle's file and copies it, so that the rest of its pages is freed."""
    return extent.array(reader.read(extent.offset, extent.size_bytes).copy())
