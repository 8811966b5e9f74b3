"""Encodes the chunks of calls that have ended, so that no answer waits for it.

The chunks get their memory before the answer ends: they count in the budget, and a chunk table has their
addresses. A thread of its own fills it. Whoever reads a context's chunks, or writes into the cache that they
are encoded from, waits first (`wait`); what writes them to storage does, too (`Encoding.require`). A process
that is killed meanwhile has lost what one loses that is killed before chunks are written: they are computed
again from the tokens, which are on storage.
"""

import collections
from collections.abc import Mapping

from jaxllm.errors import CheckpointError, JaxllmError, one_line
from jaxllm.kv.cache import KVCache
from serving.contexts.blobs import Stored
from serving.contexts.chunk_io import ChunkIO
from serving.contexts.write_queue import WriteQueue


class Encoding:
    """Chunks of one call that are being encoded.

    Args:
      queue: of the thread that does it.
      name: of the context.
      chunks: as they will be stored.
    """

    def __init__(self, queue: WriteQueue[None], name: str, chunks: Mapping[int, Stored]) -> None:
        self._queue, self._name, self.chunks = queue, name, chunks
        self.error: Exception | None = None

    def require(self) -> None:
        """Waits until they are encoded.

        Raises:
          JaxllmError: they could not be.
        """
        self._queue.wait(self._name)
        if isinstance(self.error, JaxllmError):
            raise self.error
        if self.error is not None:
            reason = one_line(self.error)
            raise CheckpointError(f"chunks of the context {self._name} cannot be encoded ({reason})")


class ChunkEncoder:
    """Encodes the chunks of one call after another in a thread. One call at most waits, because its cache
    stays in memory meanwhile: the end of the next one waits for it."""

    def __init__(self) -> None:
        self._queue: WriteQueue[None] = WriteQueue(most=0, thread="jaxllm-encoding")
        self._failed: collections.deque[str] = collections.deque()

    def start(self) -> None:
        """Starts the thread."""
        self._queue.start()

    def later(
        self,
        chunk_io: ChunkIO,
        name: str,
        cache: KVCache,
        chunks: Mapping[int, int],
        stored: Mapping[int, Stored],
    ) -> Encoding:
        """Begins to encode chunks of a context; for `cache`, `chunks` and `stored` see `ChunkIO.encode`.

        Args:
          chunk_io: of the context's level.
          name: of the context.
          cache: nobody may write into it until they are encoded.
          chunks: the width of each, by number.
          stored: chunks as they are now.
        """
        coming = Encoding(self._queue, name, chunk_io.room(chunks))

        def encode() -> None:
            try:
                chunk_io.encode(cache, chunks, stored, into=coming.chunks)
            except Exception as error:
                coming.error = error
                self._failed.append(name)

        self._queue.put(name, encode, None)
        return coming

    def busy(self, name: str = "") -> bool:
        """Whether chunks of a context are being encoded, or of any."""
        return self._queue.busy(name)

    def wait(self, name: str = "") -> list[str]:
        """Waits until the chunks of a context are encoded, or all.

        Returns:
          Contexts whose chunks could not be encoded since the last time: those in memory are not valid.
        """
        self._queue.wait(name)
        return [self._failed.popleft() for _ in range(len(self._failed))]

    def close(self) -> None:
        """Waits for all, and ends the thread."""
        self._queue.close()
