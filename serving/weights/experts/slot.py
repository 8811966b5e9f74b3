"""Memory of one expert that is resident or being read."""

import collections
import dataclasses
import mmap

import numpy as np

from jaxllm.quant import Weight


class Region:
    """Address space of one expert, never reused for another; it has memory while the expert is resident.

    So the same JAX arrays are valid whenever the expert is resident, and are made once.

    Attributes:
      memory: uint8, begins at a page.
      weights: the arrays over the memory, once they were asked for; None if weights are not read in place.
    """

    def __init__(self, size: int) -> None:
        self._mapping = mmap.mmap(-1, size)
        self.memory = np.frombuffer(self._mapping, np.uint8)
        self.weights: dict[str, Weight] | None = None

    @property
    def lasting(self) -> bool:
        """Whether the system can free the memory and keep the address space."""
        return hasattr(mmap, "MADV_DONTNEED")

    def free(self) -> None:
        """Frees the memory."""
        if self.lasting:
            self._mapping.madvise(mmap.MADV_DONTNEED)


@dataclasses.dataclass(eq=False)
class Slot:
    """An expert that is resident or being read.

    Attributes:
      region: its memory.
      unread: (start, size) of blocks that no thread has begun.
      in_flight: number of blocks that threads read now.
      attempts: number of completed reads with a wrong checksum.
      ready: whether it is complete and checked.
      error: why it cannot be read.
      guessed: whether it was prefetched and not visited yet.
      pinned: whether it is being computed.
    """

    region: Region
    unread: collections.deque[tuple[int, int]]
    in_flight: int = 0
    attempts: int = 0
    ready: bool = False
    error: Exception | None = None
    guessed: bool = False
    pinned: bool = False
