"""Stored chunks in memory: the bytes of each layer, and their addresses."""

import functools
from collections.abc import Sequence

import numpy as np

# Lines of a processor's caches: attention reads rows of heads, which then never stand in one line more.
_LINE_BYTES = 64
# A chunk's width, and its blob of each layer.
Stored = tuple[int, Sequence[np.ndarray]]


class Blobs(tuple[np.ndarray, ...]):
    """A chunk's blobs, one of each layer, uint8. Caches their addresses: asking NumPy for them takes as long
    as decoding them."""

    @functools.cached_property
    def extents(self) -> np.ndarray:
        """`[L, 3]` uint32: the low and high half of each blob's address, and its bytes."""
        places = np.array([blob.__array_interface__["data"][0] for blob in self], np.uint64)
        sizes = np.array([blob.nbytes for blob in self], np.uint32)
        return np.concatenate([places.view(np.uint32).reshape(-1, 2), sizes[:, None]], axis=1)


def blob_memory(size_bytes: int) -> np.ndarray:
    """Memory of its own for a blob, uint8, where a line of the processor's caches begins."""
    memory = np.empty(size_bytes + _LINE_BYTES, np.uint8)
    start = -memory.__array_interface__["data"][0] % _LINE_BYTES
    return memory[start : start + size_bytes]


def copied_blob(blob: np.ndarray | bytes) -> np.ndarray:
    """A copy of a blob in memory of its own."""
    copy = blob_memory(len(blob))
    copy[:] = np.frombuffer(blob, np.uint8)
    return copy
