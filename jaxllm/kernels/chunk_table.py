"""Chunks by address: a table of the coded chunks of a context, which native attention finds by a handle.

A table checks once, when it opens, that each blob has the bytes of its width, and holds their memory until it
closes. A handle of no open table is an error before a kernel runs.
"""

import weakref
from collections.abc import Sequence

import numpy as np

from jaxllm.kernels import native

# XLA on a CPU uses memory of this alignment without a copy.
_ALIGN_BYTES = 64
# The handle of no table.
NO_CHUNKS = np.zeros(2, np.uint32)


class ChunkTable:
    """An open table of chunks.

    Attributes:
      operand: `[2]` uint32, the handle as compiled steps take it.
      chunks: number of its chunks.
    """

    def __init__(
        self,
        chunks: Sequence[tuple[int, Sequence[np.ndarray]]],
        *,
        heads: Sequence[int],
        tokens: int,
        width: int,
        half: bool,
        keys_by_token: bool,
        values_by_token: bool,
        rotated: bool,
    ) -> None:
        """Opens a table.

        Args:
          chunks: bits and each layer's blob (`jaxllm.kv.codecs`), in the order of their tokens. Not copied;
            they must not change.
          heads: per layer, kv heads in the blobs.
          tokens: of a chunk (C).
          width: of a head (H).
          half: whether the cache that follows them is of float16, else of float32.
          keys_by_token, values_by_token, rotated: see `jaxllm.kv.codecs.Codec`.

        Raises:
          ValueError: a blob has not the bytes of its width, or too many tables are open.
        """
        form = (tokens, width, half, keys_by_token, values_by_token, rotated)
        bits, blobs = [each for each, _ in chunks], [each for _, each in chunks]
        handle = native.open_chunks(form, heads, bits, blobs)
        memory = np.zeros(2 * _ALIGN_BYTES, np.uint8)
        start = -memory.ctypes.data % _ALIGN_BYTES
        self.operand = memory[start : start + 8].view(np.uint32)
        self.operand[:] = handle & 0xFFFFFFFF, handle >> 32
        self.chunks = len(bits)
        self._finalizer = weakref.finalize(self, native.close_chunks, handle)

    def close(self) -> None:
        """Closes the table when no kernel reads it any more: later kernels fail, and the blobs are
        released."""
        self._finalizer()
