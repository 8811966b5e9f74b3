"""A chunk in memory as it is stored: bytes of each layer."""

import functools
from collections.abc import Sequence

import numpy as np

# Of a chunk: its width, and of each layer its blob.
Stored = tuple[int, Sequence[np.ndarray]]


class Blobs(tuple[np.ndarray, ...]):
    """A chunk's blobs, one of each layer, uint8: asked once where they are, for asking takes as long as
    decoding them."""

    @functools.cached_property
    def extents(self) -> np.ndarray:
        """`[L, 3]` uint32: the halves of each one's address, the lower first, and its bytes."""
        places = np.array([blob.__array_interface__["data"][0] for blob in self], np.uint64)
        sizes = np.array([blob.nbytes for blob in self], np.uint32)
        return np.concatenate([places.view(np.uint32).reshape(-1, 2), sizes[:, None]], axis=1)
