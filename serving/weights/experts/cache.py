"""Keeps experts in a memory budget, the expert buffer; threads read missing experts.

The experts that a layer asked for are read first, one after another. Predicted experts are read when no
requested one is missing, block by block, so that a wrong prediction delays a request by at most the blocks in
flight (EdgeMoE, section 3.3). All decisions are made under one lock, which is free during reads.
"""

import collections
import dataclasses
import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np
import xxhash

from jaxllm.errors import BudgetExceeded, BundleError
from jaxllm.experts.eviction import Policy, Residents
from jaxllm.quant import Weight
from serving.host.direct_io import PAGE, PieceReader
from serving.weights.experts.slot import Region, Slot
from serving.weights.experts.store import ExpertStore, Key

_THREADS = 4
_LEAST_BLOCK_BYTES, _MOST_BLOCK_BYTES = 256 << 10, 4 << 20
# Reads of an expert with a wrong checksum: the error may be one of the transfer.
_ATTEMPTS = 2


@dataclasses.dataclass
class ExpertCounts:
    """Counts of an expert buffer.

    Attributes:
      visits: experts that layers asked for.
      hits: visits of resident experts.
      foreseen: hits of experts that were prefetched and not visited before.
      late: visits of experts whose read had begun.
      guesses: experts whose prefetch began.
      read_bytes: from storage.
      waited_s: time for which layers waited.
    """

    visits: int = 0
    hits: int = 0
    foreseen: int = 0
    late: int = 0
    guesses: int = 0
    read_bytes: int = 0
    waited_s: float = 0.0


class ExpertCache:
    """The resident experts of one model. One layer at a time visits its experts.

    Attributes:
      counts: see `ExpertCounts`.
    """

    def __init__(
        self,
        store: ExpertStore,
        reader: PieceReader,
        *,
        budget_bytes: int,
        policy: Policy,
        frequency: np.ndarray,
    ) -> None:
        """Allocates no memory yet.

        Args:
          store: locates experts in the file.
          reader: of the bundle's file.
          budget_bytes: for experts, at least `ExpertStore.least_bytes`.
          policy: of eviction.
          frequency: `[L_sparse, E]`, visits in a text of calibration.
        """
        self.counts = ExpertCounts()
        self._store, self._reader, self._budget, self._policy = store, reader, budget_bytes, policy
        self._frequency = frequency.astype(np.float64)
        self._used, self._loaded = (np.zeros(frequency.shape, np.int64) for _ in range(2))
        self._slots: dict[Key, Slot] = {}
        self._regions: dict[Key, Region] = {}
        self._taken_bytes = self._tick = self._layer = 0
        self._wanted: list[Key] = []
        self._guesses: list[Key] = []
        self._lock = threading.RLock()
        # Notified when there is something to read; when a read ended or memory was freed.
        self._work, self._came = threading.Condition(self._lock), threading.Condition(self._lock)
        self._closed = False
        self._threads: list[threading.Thread] = []

    def visit(
        self, layer: int, experts: Sequence[int], guesses: Sequence[Key] = ()
    ) -> Iterator[tuple[int, dict[str, Weight]]]:
        """Yields the experts of a layer with their weights: resident ones first, then each when it is read.

        The weights are valid until the next expert is asked for: dispatches that take them must have ended.

        Args:
          layer: index among the sparse layers.
          experts: each once.
          guesses: predicted experts, the most probable first; they replace former guesses.

        Raises:
          CheckpointError: an expert cannot be read, or is corrupt.
        """
        waiting, there = self._ask(layer, experts, guesses)
        try:
            for expert in there:
                yield expert, self._weights((layer, expert))
                self._release((layer, expert))
            while waiting:
                expert = self._await(layer, waiting)
                waiting.remove(expert)
                yield expert, self._weights((layer, expert))
                self._release((layer, expert))
        finally:
            with self._lock:
                self._wanted = []
                for expert in experts:
                    slot = self._slots.get((layer, expert))
                    if slot is None:
                        continue
                    slot.pinned = False
                    if slot.error is not None and not slot.in_flight:
                        # One of several errors was raised: the next visit reads all again.
                        self._drop((layer, expert))
                self._wake()

    def expect(self, guesses: Sequence[Key]) -> None:
        """Replaces the guesses: predicted experts, the most probable first."""
        with self._lock:
            self._guesses = list(guesses)
            self._wake()

    @property
    def budget_bytes(self) -> int:
        """Most bytes of experts that are resident or being read."""
        return self._budget

    @property
    def taken_bytes(self) -> int:
        """Bytes of experts that are resident or being read."""
        return self._taken_bytes

    def resize(self, budget_bytes: int) -> None:
        """Sets the budget, and evicts experts beyond it. Those that are being read or computed stay until
        they are replaced.

        Raises:
          BudgetExceeded: it is less than the experts of one layer need.
        """
        least = self._store.least_bytes()
        if budget_bytes < least:
            raise BudgetExceeded(
                f"experts cannot do with {budget_bytes:,} bytes of memory: those that a token visits at one "
                f"layer take {least:,}"
            )
        with self._lock:
            self._budget = budget_bytes
            while self._taken_bytes > budget_bytes:
                victim = self._victim(demanded=True)
                if victim is None:
                    return
                self._drop(victim)
            # There may be room for predicted ones that had none.
            self._wake()

    def close(self) -> None:
        """Stops the threads and closes the file."""
        with self._lock:
            self._closed = True
            self._work.notify_all()
        for thread in self._threads:
            thread.join()
        self._reader.close()

    # -- layers ----------------------------------------------------------------------------------

    def _ask(self, layer: int, experts: Sequence[int], guesses: Sequence[Key]) -> tuple[list[int], list[int]]:
        """Requests experts: the missing ones and the resident ones."""
        with self._lock:
            if not self._threads:
                self._threads = [
                    threading.Thread(target=self._run, name="experts", daemon=True) for _ in range(_THREADS)
                ]
                for thread in self._threads:
                    thread.start()
            self._tick, self._layer = self._tick + 1, layer
            chosen = list(experts)
            self._frequency[layer, chosen] += 1
            self._used[layer, chosen] = self._tick
            there, coming = [], []
            for expert in chosen:
                slot = self._slots.get((layer, expert))
                if slot is not None and slot.ready and slot.error is None:
                    slot.pinned = True
                    there.append(expert)
                    self.counts.foreseen += slot.guessed
                else:
                    coming.append(expert)
                    self.counts.late += slot is not None
                if slot is not None:
                    slot.guessed = False
            self.counts.visits += len(chosen)
            self.counts.hits += len(there)
            # Those whose read has begun will be ready first.
            coming.sort(key=lambda expert: (layer, expert) not in self._slots)
            self._wanted = [(layer, expert) for expert in coming]
            self._guesses = list(guesses)
            self._wake()
        return coming, there

    def _wake(self) -> None:
        """Wakes threads if there may be something to read."""
        if any(key not in self._slots or self._slots[key].unread for key in (*self._wanted, *self._guesses)):
            self._work.notify(_THREADS)

    def _await(self, layer: int, experts: Sequence[int]) -> int:
        """Waits for any of some experts and pins it."""
        began = time.perf_counter()

        def arrived() -> int | None:
            for expert in experts:
                slot = self._slots.get((layer, expert))
                if slot is not None and not slot.in_flight and (slot.ready or slot.error is not None):
                    return expert
            return None

        with self._lock:
            self._came.wait_for(lambda: arrived() is not None)
            self.counts.waited_s += time.perf_counter() - began
            expert = arrived()
            assert expert is not None
            slot = self._slots[layer, expert]
            if slot.error is not None:
                error = slot.error
                # The next visit reads it again.
                self._drop((layer, expert))
                raise error
            slot.pinned = True
            self._wanted.remove((layer, expert))
            return expert

    def _release(self, key: Key) -> None:
        with self._lock:
            self._slots[key].pinned = False
            self._wake()

    def _weights(self, key: Key) -> dict[str, Weight]:
        region = self._slots[key].region
        if not self._store.bundle.read_in_place:
            return self._store.weights(key, region.memory)
        if region.weights is None:
            region.weights = self._store.weights(key, region.memory)
        return region.weights

    # -- threads ---------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._lock:
                block = None
                while not self._closed and (block := self._next_block()) is None:
                    self._work.wait()
                if block is None:
                    return
            key, slot, at, size = block
            error = None
            try:
                offset = self._store[key].segment.offset
                self._reader.read_into(slot.region.memory, at, offset + at, size)
            except Exception as caught:  # Raised by the layer that waits.
                error = caught
            self._finish_block(key, slot, size, error)

    def _next_block(self) -> tuple[Key, Slot, int, int] | None:
        """The next block to read, or None; the caller has the lock."""
        if any(key not in self._slots or not self._slots[key].ready for key in self._wanted):
            # A layer waits: no prefetch.
            return self._block_of(self._wanted, demanded=True)
        return self._block_of(self._guesses, demanded=False)

    def _block_of(self, keys: Sequence[Key], *, demanded: bool) -> tuple[Key, Slot, int, int] | None:
        """The first block of some experts, in their order, that no thread has begun."""
        for key in keys:
            slot = self._slots.get(key) or self._make_slot(key, demanded=demanded)
            if slot is None:
                # There is no room, so later ones wait, too.
                return None
            if slot.unread:
                at, size = slot.unread.popleft()
                slot.in_flight += 1
                return key, slot, at, size
        return None

    def _finish_block(self, key: Key, slot: Slot, size: int, error: Exception | None) -> None:
        with self._lock:
            slot.in_flight -= 1
            self.counts.read_bytes += size
            if error is not None:
                slot.error = slot.error or error
                slot.unread.clear()
            if slot.unread or slot.in_flight:
                return
            # Not idle until its checksum is compared.
            slot.in_flight = 1
        wrong = None if slot.error is not None else self._wrong_checksum(key, slot)
        with self._lock:
            slot.in_flight = 0
            if wrong is not None:
                slot.attempts += 1
                if slot.attempts < _ATTEMPTS:
                    slot.unread.extend(_blocks(self._store[key].segment.size_bytes))
                else:
                    slot.error = BundleError(wrong)
            elif slot.error is None:
                slot.ready, self._loaded[key] = True, self._tick
            if slot.error is not None and key not in self._wanted:
                # No layer asked for it, so no error is raised; it is not prefetched again.
                self._drop(key)
                self._guesses = [other for other in self._guesses if other != key]
            self._came.notify_all()
            self._wake()

    def _wrong_checksum(self, key: Key, slot: Slot) -> str | None:
        """A message if the checksum of an expert is wrong, else None."""
        stored = self._store[key].segment
        digest = xxhash.xxh3_128_hexdigest(slot.region.memory[: stored.size_bytes].data)
        if digest == stored.xxh3_128:
            return None
        return (
            f"{self._store.bundle.path}: expert {key[1]} of layer {self._store.sparse[key[0]]} is corrupt "
            f"(checksum {digest}, expected {stored.xxh3_128}), also when it is read again; copy the file "
            "again or make it again"
        )

    # -- memory ----------------------------------------------------------------------------------

    def _make_slot(self, key: Key, *, demanded: bool) -> Slot | None:
        """Allocates memory for an expert, evicting others; None if there is no room."""
        stored = self._store[key]
        while self._taken_bytes + stored.memory_bytes > self._budget:
            victim = self._victim(demanded=demanded)
            if victim is None:
                return None
            self._drop(victim)
        self._taken_bytes += stored.memory_bytes
        if key not in self._regions:
            self._regions[key] = Region(stored.memory_bytes)
        blocks = collections.deque(_blocks(stored.segment.size_bytes))
        slot = self._slots[key] = Slot(self._regions[key], blocks, guessed=not demanded)
        self.counts.guesses += not demanded
        return slot

    def _victim(self, *, demanded: bool) -> Key | None:
        """The expert to evict next; None if none may be evicted."""
        needed = {*self._wanted, *(() if demanded else self._guesses)}
        idle = [other for other, slot in self._slots.items() if not slot.in_flight and not slot.pinned]
        # First incomplete experts that are no longer predicted, then those of the lowest score.
        for other in idle:
            if not self._slots[other].ready and other not in (*needed, *self._guesses):
                return other
        evictable = [other for other in idle if self._slots[other].ready and other not in needed]
        if evictable:
            at = tuple(np.array(evictable).T)
            residents = Residents(at[0], self._frequency[at], self._loaded[at], self._used[at])
            scores = self._policy(residents, self._layer, len(self._frequency), self._tick)
            return evictable[int(np.argmin(scores))]
        begun = [other for other in idle if not self._slots[other].ready and other not in needed]
        return begun[-1] if demanded and begun else None

    def _drop(self, key: Key) -> None:
        region = self._slots.pop(key).region
        self._taken_bytes -= len(region.memory)
        region.free()
        if not region.lasting:
            del self._regions[key]


def _blocks(size: int) -> list[tuple[int, int]]:
    """(start, size) of the blocks of an expert, each read by one call."""
    step = min(_MOST_BLOCK_BYTES, max(_LEAST_BLOCK_BYTES, -(-size // _THREADS)))
    step = -(-step // PAGE) * PAGE
    return [(at, min(step, size - at)) for at in range(0, size, step)]
