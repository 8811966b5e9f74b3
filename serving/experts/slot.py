"""Memory of the planes of experts that are resident or being read, and the weights in it."""

import collections
import dataclasses
import mmap

import numpy as np

from jaxllm.kernels.native import WeightTable
from jaxllm.quant import BlockedArray, Weight
from jaxllm.serving.buckets.parts import EXPERT_PARTS
from jaxllm.serving.experts.store import ExpertStore, Key, PlaneKey


class Region:
    """Address space of one plane, never reused for another; it has memory while the plane is resident.

    So the same JAX arrays, made once, are valid whenever the plane is resident.

    Attributes:
      memory: uint8, page-aligned.
    """

    def __init__(self, size: int) -> None:
        self._mapping = mmap.mmap(-1, size)
        self.memory = np.frombuffer(self._mapping, np.uint8)

    @property
    def lasting(self) -> bool:
        """Whether the system can free the memory and keep the address space."""
        return hasattr(mmap, "MADV_DONTNEED")

    def free(self) -> None:
        """Frees the memory."""
        if self.lasting:
            self._mapping.madvise(mmap.MADV_DONTNEED)


class Regions:
    """The regions of all planes.

    Attributes:
      weight_table: weight table of all experts, a row per sparse layer (see `native_experts.stored_visits`);
        None if native kernels do not read them in place.
    """

    def __init__(self, store: ExpertStore) -> None:
        """Reserves address space if there is a weight table; memory is committed when planes are read."""
        self._store = store
        self._regions: dict[PlaneKey, Region] = {}
        self._weights: dict[tuple[Key, int], dict[str, Weight]] = {}
        self.weight_table: WeightTable | None = None
        # The kernel that finds experts by address supports gated ones without biases.
        gated, biased = store.bundle.cfg.gated_ffn, store.bundle.cfg.expert_bias
        if gated and not biased and store.in_blocks and hasattr(mmap, "MADV_DONTNEED"):
            self.weight_table = WeightTable([self._row(layer) for layer in range(len(store.sparse))])

    def memory(self, key: PlaneKey) -> np.ndarray:
        """The memory of a plane, uint8."""
        if key not in self._regions:
            self._regions[key] = Region(self._store.plane(key).memory_bytes)
        return self._regions[key].memory

    def free(self, key: PlaneKey) -> None:
        """Frees the memory of a plane."""
        region = self._regions[key]
        region.free()
        if not region.lasting:
            del self._regions[key]
            self._weights = {known: each for known, each in self._weights.items() if known[0] != key[:2]}

    def weights(self, key: Key, planes: int) -> dict[str, Weight]:
        """An expert's weights by its first `planes` planes, which are resident."""
        planes = min(planes, len(self._store[key].planes))
        known = self._weights.get((key, planes))
        if known is not None:
            return known
        memory = (self.memory((*key, plane)) for plane in range(planes))
        found = self._store.weights(key, *memory)
        if self._store.bundle.read_in_place:
            self._weights[key, planes] = found
        return found

    def _row(self, layer: int) -> list[np.ndarray | None]:
        """The arrays of all experts of a sparse layer."""
        row: list[np.ndarray | None] = []
        for expert in range(self._store.experts):
            key = layer, expert
            memory = (self.memory(plane) for plane in self._store.planes_of(key, 2))
            weights = self._store.weights(key, *memory)
            for part in EXPERT_PARTS:
                weight = weights[part]
                assert isinstance(weight, BlockedArray)
                row += [np.asarray(weight.data), np.asarray(weight.scale)]
                row.append(None if weight.low is None else np.asarray(weight.low))
        return row


@dataclasses.dataclass(eq=False)
class Slot:
    """A plane that is resident or being read.

    Attributes:
      memory: memory of its region.
      unread: (start, size) of blocks that no thread has started to read.
      in_flight: number of blocks being read.
      attempts: number of completed reads with a wrong checksum.
      ready: whether it is complete and checked.
      error: error of the read.
      guessed: whether it was prefetched and not visited yet.
      pinned: whether it is being computed.
    """

    memory: np.ndarray
    unread: collections.deque[tuple[int, int]]
    in_flight: int = 0
    attempts: int = 0
    ready: bool = False
    error: Exception | None = None
    guessed: bool = False
    pinned: bool = False

    @property
    def there(self) -> bool:
        """Whether it can be computed with."""
        return self.ready and self.error is None
