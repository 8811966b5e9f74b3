"""Keeps experts in a memory budget; threads read those that are missing.

What a layer needs is read first, expert by expert; what it may need soon is read when nothing else is, block
by block, so that a wrong guess holds up a right demand by no more than the blocks that are being read
(EdgeMoE, section 3.3). All decisions are made under one lock, which nobody holds while bytes move.
"""

import collections
import dataclasses
import mmap
import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np
import xxhash

from jaxllm.errors import BundleError
from jaxllm.experts.eviction import Policy, Residents
from jaxllm.quant import Weight
from serving.host.direct_io import PAGE, PieceReader
from serving.weights.experts.store import ExpertStore, Key

_THREADS = 4
_LEAST_BLOCK_BYTES, _MOST_BLOCK_BYTES = 256 << 10, 4 << 20
# A corrupt expert is read once more: not every wrong byte is on the disk.
_ATTEMPTS = 2


@dataclasses.dataclass
class ExpertCounts:
    """Counts of a cache.

    Attributes:
      visits: experts that layers asked for.
      hits: of them those that were there.
      foreseen: of the hits those that came because they were foreseen, and were not asked for before.
      late: those that were foreseen, and still being read.
      guesses: experts that were begun because they were foreseen.
      read_bytes: from storage.
      waited_s: for which layers waited.
    """

    visits: int = 0
    hits: int = 0
    foreseen: int = 0
    late: int = 0
    guesses: int = 0
    read_bytes: int = 0
    waited_s: float = 0.0


class _Region:
    """Address space for one expert, for good: it has memory as long as the expert is there.

    So an expert is the same weights whenever it is there, and none need be handed to JAX again.

    Attributes:
      memory: uint8, begins at a page.
      weights: what the memory is, where weights are read in place and it was asked for.
    """

    def __init__(self, size: int) -> None:
        self._mapping = mmap.mmap(-1, size)
        self.memory = np.frombuffer(self._mapping, np.uint8)
        self.weights: dict[str, Weight] | None = None

    @property
    def lasting(self) -> bool:
        """Whether memory can be given back and the address space kept."""
        return hasattr(mmap, "MADV_DONTNEED")

    def give_back(self) -> None:
        """Gives the memory back."""
        if self.lasting:
            self._mapping.madvise(mmap.MADV_DONTNEED)


@dataclasses.dataclass(eq=False)
class _Slot:
    """An expert that is in memory, or on its way.

    Attributes:
      unread: blocks that no thread has begun: where they begin, and their sizes.
      reading: blocks that threads are reading.
      attempts: how often all of it was read.
      guessed: came because it was foreseen, and was not asked for yet.
      pinned: is being computed.
    """

    region: _Region
    unread: collections.deque[tuple[int, int]]
    reading: int = 0
    attempts: int = 0
    ready: bool = False
    error: Exception | None = None
    guessed: bool = False
    pinned: bool = False


class ExpertCache:
    """The experts of one model. One layer at a time asks for its own.

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
        """Takes no memory yet.

        Args:
          store: says where they are.
          reader: of the bundle's file.
          budget_bytes: for experts, at least `ExpertStore.least_bytes`.
          policy: who leaves.
          frequency: `[L_sparse, E]`, visits so far, of some other text.
        """
        self.counts = ExpertCounts()
        self._store, self._reader, self._budget, self._policy = store, reader, budget_bytes, policy
        self._frequency = frequency.astype(np.float64)
        self._used, self._loaded = (np.zeros(frequency.shape, np.int64) for _ in range(2))
        self._slots: dict[Key, _Slot] = {}
        self._regions: dict[Key, _Region] = {}
        self._taken_bytes = self._tick = self._layer = 0
        self._wanted: list[Key] = []
        self._guesses: list[Key] = []
        self._lock = threading.RLock()
        # There is something to read; something has been read, or room was made.
        self._work, self._came = threading.Condition(self._lock), threading.Condition(self._lock)
        self._closed = False
        self._threads: list[threading.Thread] = []

    def visit(
        self, layer: int, experts: Sequence[int], guesses: Sequence[Key] = ()
    ) -> Iterator[tuple[int, dict[str, Weight]]]:
        """The experts of a layer one after the other, those in memory first, then each as it comes.

        An expert stays what it is until the next one is asked for: what computes it must be done by then.

        Args:
          layer: the sparse layer, from 0.
          experts: each once.
          guesses: who may be needed next, the most probable first, instead of all guesses before.

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
                    if slot.error is not None and not slot.reading:
                        # Of several that could not be read one was raised: the next visit tries all again.
                        self._drop((layer, expert))
                self._wake()

    def expect(self, guesses: Sequence[Key]) -> None:
        """Who may be needed next, the most probable first, instead of all guesses before."""
        with self._lock:
            self._guesses = list(guesses)
            self._wake()

    def close(self) -> None:
        """Ends reading."""
        with self._lock:
            self._closed = True
            self._work.notify_all()
        for thread in self._threads:
            thread.join()
        self._reader.close()

    # -- what a layer does -----------------------------------------------------------------------

    def _ask(self, layer: int, experts: Sequence[int], guesses: Sequence[Key]) -> tuple[list[int], list[int]]:
        """Says what is needed: who is waited for, and who is there."""
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
            # What is on its way already is there first.
            coming.sort(key=lambda expert: (layer, expert) not in self._slots)
            self._wanted = [(layer, expert) for expert in coming]
            self._guesses = list(guesses)
            self._wake()
        return coming, there

    def _wake(self) -> None:
        """Wakes threads if there is something to read, and may be room for it."""
        if any(key not in self._slots or self._slots[key].unread for key in (*self._wanted, *self._guesses)):
            self._work.notify(_THREADS)

    def _await(self, layer: int, experts: Sequence[int]) -> int:
        """Waits for any of some experts, and pins it."""
        began = time.perf_counter()

        def arrived() -> int | None:
            for expert in experts:
                slot = self._slots.get((layer, expert))
                if slot is not None and not slot.reading and (slot.ready or slot.error is not None):
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
                # The next visit tries again.
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

    # -- what threads do -------------------------------------------------------------------------

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
            except Exception as caught:  # Whatever it is, it is for the one who waits.
                error = caught
            self._finish_block(key, slot, size, error)

    def _next_block(self) -> tuple[Key, _Slot, int, int] | None:
        """What is to be read next, if anything can be: under the lock."""
        if any(key not in self._slots or not self._slots[key].ready for key in self._wanted):
            # Storage is for what is waited for.
            return self._block_of(self._wanted, demanded=True)
        return self._block_of(self._guesses, demanded=False)

    def _block_of(self, keys: Sequence[Key], *, demanded: bool) -> tuple[Key, _Slot, int, int] | None:
        """The first block that nobody reads yet of some experts in their order."""
        for key in keys:
            slot = self._slots.get(key) or self._make_slot(key, demanded=demanded)
            if slot is None:
                # There is no room: what comes later must wait, too.
                return None
            if slot.unread:
                at, size = slot.unread.popleft()
                slot.reading += 1
                return key, slot, at, size
        return None

    def _finish_block(self, key: Key, slot: _Slot, size: int, error: Exception | None) -> None:
        with self._lock:
            slot.reading -= 1
            self.counts.read_bytes += size
            if error is not None:
                slot.error = slot.error or error
                slot.unread.clear()
            if slot.unread or slot.reading:
                return
            # Until it is judged nobody else touches it.
            slot.reading = 1
        wrong = None if slot.error is not None else self._wrong_checksum(key, slot)
        with self._lock:
            slot.reading = 0
            if wrong is not None:
                slot.attempts += 1
                if slot.attempts < _ATTEMPTS:
                    slot.unread.extend(_blocks(self._store[key].segment.size_bytes))
                else:
                    slot.error = BundleError(wrong)
            elif slot.error is None:
                slot.ready, self._loaded[key] = True, self._tick
            if slot.error is not None and key not in self._wanted:
                # Nobody asked for it: whoever does will see. To guess it again would be to fail again.
                self._drop(key)
                self._guesses = [other for other in self._guesses if other != key]
            self._came.notify_all()
            self._wake()

    def _wrong_checksum(self, key: Key, slot: _Slot) -> str | None:
        """What is wrong with an expert that was read, if anything is."""
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

    def _make_slot(self, key: Key, *, demanded: bool) -> _Slot | None:
        """Memory for an expert, if there is any."""
        stored = self._store[key]
        while self._taken_bytes + stored.memory_bytes > self._budget:
            victim = self._victim(demanded=demanded)
            if victim is None:
                return None
            self._drop(victim)
        self._taken_bytes += stored.memory_bytes
        if key not in self._regions:
            self._regions[key] = _Region(stored.memory_bytes)
        blocks = collections.deque(_blocks(stored.segment.size_bytes))
        slot = self._slots[key] = _Slot(self._regions[key], blocks, guessed=not demanded)
        self.counts.guesses += not demanded
        return slot

    def _victim(self, *, demanded: bool) -> Key | None:
        """Who makes room for an expert."""
        needed = {*self._wanted, *(() if demanded else self._guesses)}
        idle = [other for other, slot in self._slots.items() if not slot.reading and not slot.pinned]
        # Guesses that were wrong before they came, then who is worth least.
        for other in idle:
            if not self._slots[other].ready and other not in (*needed, *self._guesses):
                return other
        those = [other for other in idle if self._slots[other].ready and other not in needed]
        if those:
            at = tuple(np.array(those).T)
            residents = Residents(at[0], self._frequency[at], self._loaded[at], self._used[at])
            scores = self._policy(residents, self._layer, len(self._frequency), self._tick)
            return those[int(np.argmin(scores))]
        begun = [other for other in idle if not self._slots[other].ready and other not in needed]
        return begun[-1] if demanded and begun else None

    def _drop(self, key: Key) -> None:
        region = self._slots.pop(key).region
        self._taken_bytes -= len(region.memory)
        region.give_back()
        if not region.lasting:
            del self._regions[key]


def _blocks(size: int) -> list[tuple[int, int]]:
    """The parts of an expert that are read by a call each: where they begin, and their sizes."""
    step = min(_MOST_BLOCK_BYTES, max(_LEAST_BLOCK_BYTES, -(-size // _THREADS)))
    step = -(-step // PAGE) * PAGE
    return [(at, min(step, size - at)) for at in range(0, size, step)]
