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
    def addresses(self) -> np.ndarray:
        """`[L]` uint64."""
        return np.array([blob.__array_interface__["data"][0] for blob in self], np.uint64)
