"""Keeps planes of experts within a memory limit, the expert buffer; threads read missing planes.

A plane is the unit of loading and eviction: the high or the low plane of a nested expert, else the whole
expert. The planes requested by a layer are read first, one after another. Predicted ones are read when no
requested one is missing, block by block, so that a wrong prediction delays a request by at most the blocks
in flight (EdgeMoE, section 3.3). All decisions are made under one lock, which is free during reads.
"""

import collections
import dataclasses
import itertools
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import xxhash

from jaxllm.errors import BudgetExceeded, BundleError
from jaxllm.experts.prediction import Policy, Residents
from jaxllm.serving.experts.store import ExpertStore, PlaneKey, Regions, Slot, memory_bytes
from jaxllm.serving.host.direct_io import PAGE, PieceReader

# Below every score of a policy.
_LEAVES_FIRST = -1e18


class Usage:
    """Counts and times of the visits that needed each plane. A tick passes with each visit of a layer.

    A source visits an encoder's experts once, so that their visits predict no later ones: they are evicted
    before all others, the most recently computed layer's last (EdgeMoE, section 3.3).
    """

    def __init__(self, frequency: np.ndarray, planes: int, of_encoder: int = 0) -> None:
        """See the class; starts with visits `[L_sparse, E]` of all `planes` planes; the first `of_encoder`
        layers are an encoder's."""
        self._of_encoder = of_encoder
        self._frequency = np.repeat(frequency.astype(np.float64)[..., None], planes, axis=-1)
        self._used, self._loaded = (np.zeros(self._frequency.shape, np.int64) for _ in range(2))
        self._tick = self._layer = 0

    def visited(self, layer: int, planes: Iterable[Sequence[PlaneKey]]) -> None:
        """A layer needs planes."""
        self._tick, self._layer = self._tick + 1, layer
        at = tuple(np.array([key for own in planes for key in own], np.int64).reshape(-1, 3).T)
        self._frequency[at] += 1
        self._used[at] = self._tick

    def loaded(self, key: PlaneKey) -> None:
        """A plane was read."""
        self._loaded[key] = self._tick

    def scores(self, keys: Sequence[PlaneKey], policy: Policy) -> np.ndarray:
        """The scores `[N]` of planes; the lowest is evicted."""
        at = tuple(np.array(keys).T)
        first = self._of_encoder
        residents = Residents(at[0] - first, self._frequency[at], self._loaded[at], self._used[at])
        # While a source is read, the decoder's first layer comes next.
        layer, layers = max(self._layer - first, -1), len(self._frequency) - first
        scores = policy(residents, layer, layers, self._tick)
        return np.where(at[0] < first, _LEAVES_FIRST + self._used[at], scores)


@dataclasses.dataclass
class ExpertCounts:
    """Counts of an expert buffer.

    Attributes:
      visits: number of requested experts.
      hits: visits of experts with all required planes resident.
      foreseen: hits of experts of which a plane was prefetched and not visited before.
      guesses: planes whose prefetch began.
      read_bytes: bytes read from storage.
      low_bytes: the part for low planes of nested experts.
      high_alone: visits that only needed the high plane of a nested expert.
      waited_s: time that layers waited.
      layers: visits and hits by the index of the sparse layer, an encoder's first.
      loads: number of reads of each plane, by its layer, expert and plane.
    """

    visits: int = 0
    hits: int = 0
    foreseen: int = 0
    guesses: int = 0
    read_bytes: int = 0
    low_bytes: int = 0
    high_alone: int = 0
    waited_s: float = 0.0
    layers: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)
    loads: collections.Counter[tuple[int, int, int]] = dataclasses.field(default_factory=collections.Counter)

    def visited(self, layer: int, visits: int, hits: int) -> None:
        """Counts visits of a layer's experts, of which `hits` were resident."""
        before, found = self.layers.get(layer, (0, 0))
        self.layers[layer] = before + visits, found + hits
        self.visits += visits
        self.hits += hits

    def hit_rates(self, layers: range) -> list[float]:
        """The hit rate of each of some sparse layers."""
        pairs = (self.layers.get(layer, (0, 0)) for layer in layers)
        return [round(hits / max(1, visits), 4) for visits, hits in pairs]


_THREADS = 4
_LEAST_BLOCK_BYTES, _MOST_BLOCK_BYTES = 256 << 10, 4 << 20
# Reads of a plane with a wrong checksum: the error may be one of the transfer.
_ATTEMPTS = 2


@dataclasses.dataclass(frozen=True)
class Arrived:
    """Experts of a layer that can be computed now.

    Attributes:
      ready: experts with all required planes.
      begun: experts with only their high plane, whose low one is being read.
    """

    ready: list[int]
    begun: list[int]


class ExpertCache:
    """The resident planes of one model. One layer at a time visits its experts.

    Attributes:
      counts: see `ExpertCounts`.
      regions: the memory of all planes.
      budget_bytes: memory limit of planes that are resident or being read.
      taken_bytes: bytes of planes that are resident or being read.
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
          store: locations of planes in the file.
          reader: reader of the bundle's file.
          budget_bytes: memory limit of planes, at least `ExpertStore.least_bytes`.
          policy: eviction policy.
          frequency: `[L_sparse, E]`, visits in a calibration text.
        """
        self.counts, self.regions = ExpertCounts(), Regions(store)
        self.budget_bytes, self.taken_bytes = budget_bytes, 0
        self._store, self._reader, self._policy = store, reader, policy
        self._usage = Usage(frequency, store.planes, store.of_encoder)
        self._slots: dict[PlaneKey, Slot] = {}
        # Planes in the order in which they are read.
        self._wanted, self._guesses = list[PlaneKey](), list[PlaneKey]()
        self._lock = threading.RLock()
        # Notified when there is something to read; when a read ended or memory was freed.
        self._work, self._came = threading.Condition(self._lock), threading.Condition(self._lock)
        self._closed = False
        self._threads: list[threading.Thread] = []

    def visit(
        self,
        layer: int,
        needs: Mapping[int, int],
        guesses: Sequence[PlaneKey] = (),
        *,
        together: bool = False,
    ) -> Iterator[Arrived]:
        """Yields the experts of a layer when they can be computed: first all resident ones, then arriving
        ones, some or all at each wait.

        Their planes are valid until the next iteration: dispatches that use them must have ended.

        Args:
          layer: index among the sparse layers.
          needs: number of required planes by expert, high plane first.
          guesses: planes that later layers are predicted to need, in the order of reads; they replace
            former guesses.
          together: whether late experts are yielded all at once, and as begun with the resident ones if
            their high plane is resident. They must fit into the budget together, as a token's at one layer
            do.

        Raises:
          CheckpointError: a plane cannot be read, or is corrupt.
        """
        planes = {expert: self._store.planes_of((layer, expert), count) for expert, count in needs.items()}
        waiting = self._ask(layer, planes, guesses, together=together)
        ready = [expert for expert in planes if expert not in waiting]
        begun = self._pin_high(waiting) if together else []
        try:
            while True:
                high = [(layer, expert, 0) for expert in begun]
                if ready or begun:
                    yield Arrived(ready, begun)
                    with self._lock:
                        for key in (*(key for expert in ready for key in planes[expert]), *high):
                            if key in self._slots:
                                self._slots[key].pinned = False
                        self._wake()
                if not waiting:
                    return
                ready, begun = self._await(waiting, together=together), []
        finally:
            with self._lock:
                self._wanted = []
                for key in itertools.chain(*planes.values()):
                    slot = self._slots.get(key)
                    if slot is None:
                        continue
                    slot.pinned = False
                    if slot.error is not None and not slot.in_flight:
                        # One of several errors was raised: the next visit reads all again.
                        self._drop(key)
                self._wake()

    def expect(self, guesses: Sequence[PlaneKey]) -> None:
        """Replaces the guesses: predicted planes, in the order in which they are read."""
        with self._lock:
            self._guesses = list(guesses)
            self._wake()

    def resize(self, budget_bytes: int) -> None:
        """Sets the memory limit, and evicts planes beyond it. Planes being read or computed stay until they
        are replaced.

        Raises:
          BudgetExceeded: it is less than one layer's experts need.
        """
        least = self._store.least_bytes()
        if budget_bytes < least:
            raise BudgetExceeded(
                f"experts cannot do with {budget_bytes:,} bytes of memory: those that a token visits at one "
                f"layer take {least:,}; give more"
            )
        with self._lock:
            self.budget_bytes = budget_bytes
            while self.taken_bytes > budget_bytes:
                evicted = self._victim(None, demanded=True)
                if evicted is None:
                    return
                self._drop(evicted)
            # There may be room for predicted planes now.
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

    def _ask(
        self,
        layer: int,
        planes: Mapping[int, list[PlaneKey]],
        guesses: Sequence[PlaneKey],
        *,
        together: bool,
    ) -> dict[int, list[PlaneKey]]:
        """Requests experts by their required planes, and pins resident ones; returns those with missing
        planes."""
        with self._lock:
            if not self._threads:
                self._threads = [
                    threading.Thread(target=self._run, name="experts", daemon=True) for _ in range(_THREADS)
                ]
                for thread in self._threads:
                    thread.start()
            coming: dict[int, list[PlaneKey]] = {}
            self._usage.visited(layer, planes.values())
            for expert, own in planes.items():
                slots = [self._slots.get(key) for key in own]
                if all(slot is not None and slot.usable for slot in slots):
                    self.counts.foreseen += any(slot is not None and slot.guessed for slot in slots)
                    for slot in filter(None, slots):
                        slot.pinned = True
                else:
                    coming[expert] = own
                for slot in filter(None, slots):
                    slot.guessed = False
                self.counts.high_alone += len(own) < len(self._store[layer, expert].planes)
            self.counts.visited(layer, len(planes), len(planes) - len(coming))
            # Experts whose read has begun will be ready first.
            order = sorted(coming, key=lambda expert: -sum(key in self._slots for key in coming[expert]))
            wanted = [key for expert in order for key in coming[expert]]
            self._wanted = sorted(wanted, key=lambda key: key[2]) if together else wanted
            self._guesses = list(guesses)
            self._wake()
        return {expert: coming[expert] for expert in order}

    def _wake(self) -> None:
        """Wakes threads if there may be something to read."""
        if any(key not in self._slots or self._slots[key].unread for key in (*self._wanted, *self._guesses)):
            self._work.notify(_THREADS)

    def _pin_high(self, waiting: Mapping[int, list[PlaneKey]]) -> list[int]:
        """Pins the high planes of experts that only wait for their low one."""
        found = []
        with self._lock:
            for expert, planes in waiting.items():
                high = self._slots.get(planes[0])
                if len(planes) > 1 and high is not None and high.usable:
                    high.pinned = True
                    found.append(expert)
        return found

    def _await(self, waiting: dict[int, list[PlaneKey]], *, together: bool) -> list[int]:
        """Waits for some experts, any or all; removes complete ones from `waiting` and pins them."""
        began = time.perf_counter()

        def failed() -> Iterator[PlaneKey]:
            for key in itertools.chain(*waiting.values()):
                slot = self._slots.get(key)
                if slot is not None and slot.error is not None and not slot.in_flight:
                    yield key

        def complete(planes: list[PlaneKey]) -> bool:
            slots = [self._slots.get(key) for key in planes]
            return all(slot is not None and slot.usable and not slot.in_flight for slot in slots)

        def came() -> bool:
            return any(failed()) or (all if together else any)(map(complete, waiting.values()))

        with self._lock:
            self._came.wait_for(came)
            self.counts.waited_s += time.perf_counter() - began
            for key in failed():
                error = self._slots[key].error
                assert error is not None
                # The next visit reads it again.
                self._drop(key)
                raise error
            ready = [expert for expert, planes in waiting.items() if complete(planes)]
            for key in [key for expert in ready for key in waiting.pop(expert)]:
                self._slots[key].pinned = True
                self._wanted.remove(key)
        return ready

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
                offset = self._store.plane(key).offset
                self._reader.read_into(slot.memory, at, offset + at, size)
            except Exception as caught:  # Raised by the layer that waits.
                error = caught
            self._finish_block(key, slot, size, error)

    def _next_block(self) -> tuple[PlaneKey, Slot, int, int] | None:
        """The first block of the requested planes, in their order, that no thread has started to read; of the
        predicted ones if no layer waits. None without one; the caller has the lock."""
        demanded = any(key not in self._slots or not self._slots[key].ready for key in self._wanted)
        for key in self._wanted if demanded else self._guesses:
            slot = self._slots.get(key) or self._make_slot(key, demanded=demanded)
            if slot is None:
                # There is no room, so later ones wait, too.
                return None
            if slot.unread:
                at, size = slot.unread.popleft()
                slot.in_flight += 1
                return key, slot, at, size
        return None

    def _finish_block(self, key: PlaneKey, slot: Slot, size: int, error: Exception | None) -> None:
        with self._lock:
            slot.in_flight -= 1
            self.counts.read_bytes += size
            self.counts.low_bytes += size if key[2] else 0
            if error is not None:
                slot.error = slot.error or error
                slot.unread.clear()
            if slot.unread or slot.in_flight:
                return
            # Not idle until its checksum is compared.
            slot.in_flight = 1
        stored, digest = self._store.plane(key), ""
        if slot.error is None:
            digest = xxhash.xxh3_128_hexdigest(slot.memory[: stored.size_bytes].data)
        with self._lock:
            slot.in_flight = 0
            if digest not in ("", stored.xxh3_128):
                slot.attempts += 1
                if slot.attempts < _ATTEMPTS:
                    slot.unread.extend(_blocks(stored.size_bytes))
                else:
                    slot.error = BundleError(
                        f"{self._store.bundle.path}: {self._store.named(key)} is corrupt (checksum {digest}, "
                        f"expected {stored.xxh3_128}), also when it is read again; copy the file again or "
                        "make it again"
                    )
            elif slot.error is None:
                slot.ready = True
                self._usage.loaded(key)
                self.counts.loads[key] += 1
            if slot.error is not None and key not in self._wanted:
                # No layer requested it, so no error is raised; it is not prefetched again.
                self._drop(key)
                self._guesses = [other for other in self._guesses if other != key]
            self._came.notify_all()
            self._wake()

    # -- memory ----------------------------------------------------------------------------------

    def _make_slot(self, key: PlaneKey, *, demanded: bool) -> Slot | None:
        """Allocates memory for a plane, evicting others; None if there is no room."""
        stored = self._store.plane(key)
        while self.taken_bytes + memory_bytes(stored) > self.budget_bytes:
            evicted = self._victim(key, demanded=demanded)
            if evicted is None:
                return None
            self._drop(evicted)
        self.taken_bytes += memory_bytes(stored)
        blocks = collections.deque(_blocks(stored.size_bytes))
        slot = self._slots[key] = Slot(self.regions.memory(key), blocks, guessed=not demanded)
        self.counts.guesses += not demanded
        return slot

    def _victim(self, wanted: PlaneKey | None, *, demanded: bool) -> PlaneKey | None:
        """The plane to evict next for another, which a layer waits for if `demanded`; None if none may be
        evicted. A high plane is evicted after its low plane."""
        slots = self._slots
        # Predicted planes are not evicted for other predicted ones.
        guesses = () if demanded else self._guesses
        needed = {*guesses, *self._wanted}
        idle = [key for key, slot in slots.items() if not slot.in_flight and not slot.pinned]
        # First incomplete planes that are no longer predicted, then those of the lowest score.
        for key in idle:
            if not slots[key].ready and key not in needed and key not in self._guesses:
                return key
        evictable = [
            key
            for key in idle
            if slots[key].ready and key not in needed and (key[2] or (*key[:2], 1) not in slots)
        ]
        if evictable:
            return evictable[int(np.argmin(self._usage.scores(evictable, self._policy)))]
        if not demanded:
            return None
        begun = [key for key in idle if not slots[key].ready and key not in needed]
        # In a prompt a layer may request more than fits: the last requests need not stay.
        before = self._wanted if wanted not in self._wanted else self._wanted[: self._wanted.index(wanted)]
        first = {*before, *(() if wanted is None else self._store.planes_of(wanted[:2], 2))}
        later = [key for key in idle if key not in first]
        return next(reversed(begun or later), None)

    def _drop(self, key: PlaneKey) -> None:
        del self._slots[key]
        self.taken_bytes -= memory_bytes(self._store.plane(key))
        self.regions.free(key)


def _blocks(size: int) -> list[tuple[int, int]]:
    """(start, size) of the blocks of a plane, each read by one call."""
    step = min(_MOST_BLOCK_BYTES, max(_LEAST_BLOCK_BYTES, -(-size // _THREADS)))
    step = -(-step // PAGE) * PAGE
    return [(at, min(step, size - at)) for at in range(0, size, step)]
