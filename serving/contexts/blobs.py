"""Stored chunks in memory: the bytes of each layer, and their addresses."""

import functools
from collections.abc import Sequence

import numpy as np

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
