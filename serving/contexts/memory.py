"""Keeps chunks in memory within a limit of bytes: Claim, Load, Reclaim and Fault (LLMS, 3.1 and 3.4).

    claim     a context is about to run: locks its chunks; the missing ones are its faults
    load      a missing chunk has been read or computed: makes room for it, and stores it
    reclaim   makes room: evicts the chunks that the policy names, unless they are locked
    release   the context has run: its chunks may be evicted again

Eviction removes a chunk from memory only: it was written to storage after its call; otherwise `leaving` is
called with it. Chunks of several contexts may share their blobs, whose bytes count once. `Claims` tracks the
running calls, `ChunkAccess` is the way of chunks into the caches of a model of any kind, and `Delays` are the
costs of restoring them. Imports no JAX.
"""

import abc
import collections
import dataclasses
import functools
import logging
import os
import statistics
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxllm.contexts.codecs import STATE
from jaxllm.contexts.eviction import POLICIES, Policy, Resident
from jaxllm.contexts.recompute import Delay
from jaxllm.contexts.tolerance import KEPT
from jaxllm.errors import BudgetExceeded, CheckpointError, one_line
from jaxllm.files.atomic import temporary_file
from jaxllm.serving.contexts.record import Origin, Record
from jaxllm.serving.ground.plan import Restoration
from jaxllm.serving.host.direct_io import PieceReader, aligned
from jaxllm.serving.host.storage import Storage

if TYPE_CHECKING:
    from jaxllm.kernels.native import ChunkTable
    from jaxllm.serving.engine.request import Session
    from jaxllm.serving.engine.run import Run

# Size of a cache line: attention reads rows of heads, which then span no additional line.
_LINE_BYTES = 64
# A chunk's width, and its blob of each layer.
Stored = tuple[int, Sequence[np.ndarray]]
# Width and blob of some chunks in one layer, by number.
LayerBlobs = Mapping[int, tuple[int, np.ndarray]]
_SIZES_BYTES = (1 << 14, 1 << 18, 1 << 20)
_REPEATS = 5
_TIMED = "timed"
# Per byte: the slowest storage of phones, eMMC 5.1 (250 MB/s, 11,000 reads per second: Samsung's press
# release of the 512 GB eUFS 3.1, 17 March 2020).
UNMEASURED_READ = Delay(fixed_ms=1000 / 11_000, per_unit_ms=1e3 / 250e6)
_NEVER_MS = 1e9


class Blobs(tuple[np.ndarray, ...]):
    """A chunk's blobs, one per layer, uint8. Caches their addresses: getting these from NumPy takes as long
    as decoding the blobs."""

    @functools.cached_property
    def extents(self) -> np.ndarray:
        """`[L, 3]` uint32: the low and high half of each blob's address, and its bytes."""
        places = np.array([blob.__array_interface__["data"][0] for blob in self], np.uint64)
        sizes = np.array([blob.nbytes for blob in self], np.uint32)
        return np.concatenate([places.view(np.uint32).reshape(-1, 2), sizes[:, None]], axis=1)


def blob_memory(size_bytes: int) -> np.ndarray:
    """Allocates memory for a blob, uint8, aligned to a cache line."""
    memory = np.empty(size_bytes + _LINE_BYTES, np.uint8)
    start = -memory.__array_interface__["data"][0] % _LINE_BYTES
    return memory[start : start + size_bytes]


def copied_blob(blob: np.ndarray | bytes) -> np.ndarray:
    """Copies a blob into its own memory."""
    copy = blob_memory(len(blob))
    copy[:] = np.frombuffer(blob, np.uint8)
    return copy


class ChunkMemory:
    """The chunks in memory. Not thread-safe.

    Attributes:
      budget_bytes: memory limit of all chunks.
      resident_bytes: current size of all chunks.
      evicted: number of chunks evicted so far.
    """

    def __init__(
        self,
        budget_bytes: int,
        policy: Policy = POLICIES["lctru"],
        leaving: Callable[[list[Resident]], None] | None = None,
    ) -> None:
        """See the class; `leaving` is called with evicted chunks, in order."""
        self.budget_bytes, self._policy, self._leaving = budget_bytes, policy, leaving
        self.resident_bytes = 0
        self.evicted = 0
        self._chunks: dict[str, dict[int, Resident]] = {}
        self._locked: set[str] = set()
        self._pinned: set[str] = set()
        self._chunk_tables: dict[str, ChunkTable] = {}
        # Bytes of each context's chunks; shared blobs count in each.
        self._own_bytes: collections.Counter[str] = collections.Counter()
        # Last uses of contexts that their chunks do not have yet: a claim accesses no chunk.
        self._claimed: dict[str, int] = {}
        # Reference counts of blobs, by their identity.
        self._sharing: collections.Counter[int] = collections.Counter()
        # Counts of uses of contexts, and of loaded chunks.
        self._uses = self._arrivals = 0

    @property
    def kept_bytes(self) -> int:
        """Size of chunks that cannot be evicted now: those of running or pinned contexts."""
        return self._bytes_of(self._locked | self._pinned)

    def resize(self, budget_bytes: int) -> list[Resident]:
        """Sets the memory limit of all chunks, evicts chunks beyond it, and returns these in order.

        Raises:
          BudgetExceeded: locked and pinned chunks need more; the limit is unchanged.
        """
        if budget_bytes < max(1, self.kept_bytes):
            raise BudgetExceeded(
                f"chunks cannot do with {budget_bytes:,} bytes of memory: contexts that run or are pinned "
                f"take {self.kept_bytes:,}; unpin some"
            )
        self.budget_bytes = budget_bytes
        return self.reclaim(0)

    def chunks(self, context: str) -> dict[int, Resident]:
        """The resident chunks of a context, by number."""
        return dict(self._chunks.get(context, {}))

    def own_bytes(self, context: str) -> int:
        """Size of a context's resident chunks, including shared ones."""
        return self._own_bytes[context]

    def contexts(self) -> list[str]:
        """Names of the contexts with chunks in memory."""
        return list(self._chunks)

    def share(self, context: str, resident: Resident) -> None:
        """Adds another context's chunk with its blobs, replacing one with the same number."""
        self._drop(context, resident.chunk)
        self._arrivals += 1
        self._put(dataclasses.replace(resident, context=context, came=self._arrivals, used=self._uses))

    def chunk_table(self, context: str, make: "Callable[[list[Resident]], ChunkTable]") -> "ChunkTable":
        """The chunk table of a context whose chunks are all resident: cached until one of them changes."""
        if context not in self._chunk_tables:
            there = self._chunks[context]
            assert set(there) == set(range(len(there))), f"chunks of {context} are missing"
            self._chunk_tables[context] = make([each for _, each in sorted(there.items())])
        return self._chunk_tables[context]

    def made_chunk_table(self, context: str, count: int) -> "ChunkTable | None":
        """The cached chunk table of a context, if it has `count` chunks or more; accesses no chunk."""
        found = self._chunk_tables.get(context)
        return found if found is not None and found.chunks >= count else None

    def claim(self, context: str, count: int = 0, *, pinned: bool = False) -> list[int]:
        """Locks a context that is about to run, and pins or unpins it. Returns the numbers of those of its
        first `count` chunks that are missing, ascending."""
        self._locked.add(context)
        self.pin(context, pinned)
        self._uses += 1
        self._claimed[context] = self._uses
        there = self._chunks.get(context, {})
        return [chunk for chunk in range(count) if chunk not in there]

    def pin(self, context: str, pinned: bool) -> None:
        """Sets whether a context's chunks are never evicted for others."""
        if pinned:
            self._pinned.add(context)
        else:
            self._pinned.discard(context)

    def require(self, context: str, size_bytes: int) -> None:
        """Checks that a context may grow to `size_bytes`.

        Raises:
          BudgetExceeded: all of its chunks would not fit besides locked and pinned ones.
        """
        kept = (self._locked | self._pinned) - {context}
        others = sum(self._own_bytes[name] for name in kept)
        if others + size_bytes > self.budget_bytes:
            # Shared blobs count once.
            others = self._bytes_of(kept)
        if others + size_bytes > self.budget_bytes:
            raise BudgetExceeded(
                f"chunks may take {self.budget_bytes:,} bytes of memory; the context may come to need "
                f"{size_bytes:,} besides {others:,} of others that run or are pinned: raise the budget, ask "
                "for fewer tokens, or unpin some"
            )

    def load(
        self, context: str, chunk: int, bits: int, blobs: Sequence[np.ndarray], *, restore_ms: float = 0.0
    ) -> Resident:
        """Adds a chunk, replacing one with the same number.

        Raises:
          BudgetExceeded: it does not fit besides locked and pinned chunks; memory is unchanged except for
            evicted chunks.
        """
        before = self._drop(context, chunk)
        size = sum(blob.nbytes for blob in blobs)
        try:
            self.reclaim(size)
        except BudgetExceeded:
            if before is not None:
                self._put(before)
            raise
        self._arrivals += 1
        resident = Resident(
            context=context, chunk=chunk, bits=bits, blobs=Blobs(blobs), size_bytes=size,
            came=self._arrivals, used=self._uses, restore_ms=restore_ms,
        )  # fmt: skip
        self._put(resident)
        return resident

    def reclaim(self, room_bytes: int) -> list[Resident]:
        """Makes room for `room_bytes` by evicting chunks, and returns these in order.

        Raises:
          BudgetExceeded: locked and pinned chunks leave less.
        """
        if self.resident_bytes + room_bytes <= self.budget_bytes:
            return []
        kept = self._locked | self._pinned
        for name in list(self._claimed):
            use = self._claimed.pop(name, 0)
            for each in self._chunks.get(name, {}).values():
                each.used = max(each.used, use)
        free = [each for name, own in self._chunks.items() if name not in kept for each in own.values()]
        needed = self.resident_bytes + room_bytes - self.budget_bytes
        freed = collections.Counter(id(each.blobs) for each in free)
        sizes = {id(each.blobs): each.size_bytes for each in free}
        if sum(sizes[of] for of, count in freed.items() if count == self._sharing[of]) < needed:
            raise BudgetExceeded(
                f"chunks may take {self.budget_bytes:,} bytes of memory; {room_bytes:,} more do not fit "
                "besides the contexts that run or are pinned: raise the budget, or unpin some"
            )
        left: list[Resident] = []
        for each in self._policy.order(free):
            along = self._policy.whole and bool(left) and each.context == left[-1].context
            if needed <= 0 and not along:
                break
            before = self.resident_bytes
            self._drop(each.context, each.chunk)
            needed -= before - self.resident_bytes
            left.append(each)
        self.evicted += len(left)
        if self._leaving is not None:
            self._leaving(left)
        return left

    def release(self, context: str) -> None:
        """Unlocks a context: its chunks may be evicted again, however its call has ended."""
        self._locked.discard(context)
        # Recompute the sums: an interrupt may have come between a change of chunks and of their sums.
        every = [each for chunks in self._chunks.values() for each in chunks.values()]
        self._sharing = collections.Counter(id(each.blobs) for each in every)
        self.resident_bytes = self._bytes_of(self._chunks)
        self._own_bytes = collections.Counter()
        for each in every:
            self._own_bytes[each.context] += each.size_bytes

    def cut(self, context: str, count: int) -> None:
        """Drops all chunks of a context except its first `count`."""
        for chunk in [chunk for chunk in self._chunks.get(context, {}) if chunk >= count]:
            self._drop(context, chunk)

    def forget(self, context: str) -> None:
        """Drops all chunks of a context, its lock and its pin."""
        self.cut(context, 0)
        self._locked.discard(context)
        self._pinned.discard(context)
        self._claimed.pop(context, None)

    def _bytes_of(self, contexts: Iterable[str]) -> int:
        """Size of some contexts' chunks; shared blobs count once."""
        sizes = {
            id(each.blobs): each.size_bytes
            for name in contexts
            for each in self._chunks.get(name, {}).values()
        }
        return sum(sizes.values())

    def _put(self, resident: Resident) -> None:
        self._chunk_tables.pop(resident.context, None)
        self._chunks.setdefault(resident.context, {})[resident.chunk] = resident
        self._own_bytes[resident.context] += resident.size_bytes
        self._sharing[id(resident.blobs)] += 1
        if self._sharing[id(resident.blobs)] == 1:
            self.resident_bytes += resident.size_bytes

    def _drop(self, context: str, chunk: int) -> Resident | None:
        found = self._chunks.get(context, {}).pop(chunk, None)
        if found is None:
            return None
        self._chunk_tables.pop(context, None)
        self._own_bytes[context] -= found.size_bytes
        self._sharing[id(found.blobs)] -= 1
        if not self._sharing[id(found.blobs)]:
            del self._sharing[id(found.blobs)]
            self.resident_bytes -= found.size_bytes
        if not self._chunks[context]:
            del self._chunks[context], self._own_bytes[context]
        return found


@dataclasses.dataclass(kw_only=True, eq=False)
class Turn:
    """A running call in a context, from its restore until it is stored or abandoned. The answer has the only
    strong reference, so that a call whose answer is gone is over, wherever it was interrupted.

    Attributes:
      record: record of the context, as stored while the call runs.
      base: record that the call continues: `record`, or its rest after sliding.
      session: the call's cache, and the tokens in it.
      restoration: restoration of the context.
      counted_from: position from which the cache counts attention, if it is not the first token that the
        call fed.
      over: whether the call has ended.
      sequence: initial tokens of the context and its prompt; empty if they come later.
      most_bytes: maximum memory of the context's chunks.
      run: weak reference to the answer's run; returns None if the caller of `begin` ends the call.
    """

    record: Record
    base: Record
    session: "Session"
    restoration: Restoration = dataclasses.field(default_factory=Restoration)
    counted_from: int | None = None
    over: bool = False
    most_bytes: int = 0
    sequence: Sequence[int] = ()
    run: "Callable[[], Run | None]" = lambda: None


class Claims:
    """The running calls, at most one per context.

    An interrupt may come anywhere, and all methods are idempotent: a call whose turn is over or gone is
    ended at the next look.

    Args:
      let_go: called when a call has ended, with the record by which memory knows its context.
    """

    def __init__(self, let_go: Callable[[Record], None]) -> None:
        self._let_go = let_go
        self._claims: dict[str, tuple[Record, weakref.ref[Turn]]] = {}

    def put(self, turn: Turn, record: Record) -> None:
        """Adds a running call, or replaces the record by which memory knows its context."""
        self._claims[turn.record.name] = (record, weakref.ref(turn))

    def end(self, turn: Turn) -> None:
        """Ends a call; does nothing if it has ended, or another runs in its context."""
        turn.over, name = True, turn.record.name
        if name in self._claims and self._claims[name][1]() in (turn, None):
            self._tidy(name)

    def runs(self, turn: Turn) -> bool:
        """Whether a call has not ended."""
        claim = self._claims.get(turn.record.name)
        return claim is not None and claim[1]() is turn

    def running(self) -> list[Turn]:
        """The running calls; ends those that are over."""
        found = []
        for name, (_, turn_ref) in list(self._claims.items()):
            if (turn := turn_ref()) is not None and not turn.over:
                found.append(turn)
            else:
                self._tidy(name)
        return found

    def of(self, name: str) -> Turn | None:
        """The running call of a context, if any."""
        return next((each for each in self.running() if each.record.name == name), None)

    def _tidy(self, name: str) -> None:
        if (claim := self._claims.get(name)) is not None:
            self._let_go(claim[0])
            self._claims.pop(name, None)


class ChunkAccess(abc.ABC):
    """Loads chunks of contexts into caches of one level, and encodes those of caches. Here are the defaults
    of a model whose chunks are only loaded, all at once, and have one width.

    Attributes:
      runner: runner of the level.
      origin: origin of contexts at the level; its model and adapter are left out.
      chunk_tokens: tokens of a chunk (C).
      widths: allowed widths of chunks in bits, descending.
      layer_bytes: bytes of one chunk in each layer `[L]`, by width.
      layers: number of blobs of a chunk, one per layer.
      reference_bytes: bytes of one chunk that ratios refer to (see `ChunkShape`).
      state_bytes: bytes of a context besides its whole chunks.
      kept: bits -> share of information that chunks retain.
      computes: whether a chunk can be recomputed between others that are loaded.
      coded: whether answers attend to chunks in place (see `EngineOptions.attend_quantized_kv`).
      stays: whether the cache of the last call stays in memory for the next one.
    """

    computes = coded = stays = False
    reference_bytes = 0
    kept: Mapping[int, float] = KEPT

    def __init__(self, runner: Any, origin: Origin, widths: tuple[int, ...]) -> None:
        self.runner, self.origin, self.widths = runner, origin, widths
        self.chunk_tokens, self.layer_bytes = origin.chunk_tokens, origin.layer_bytes
        self.layers = len(self.layer_bytes[widths[0]])
        self.state_bytes = sum(self.layer_bytes.get(STATE, ()))

    @abc.abstractmethod
    def load(self, cache: Any, chunks: Mapping[int, Stored]) -> Any:
        """Decodes stored chunks into a cache (donated), at their positions.

        Raises:
          CheckpointError: a blob's size does not fit its width.
        """

    @abc.abstractmethod
    def encode(
        self,
        cache: Any,
        chunks: Mapping[int, int],
        stored: Mapping[int, Stored] | None = None,
        *,
        into: Mapping[int, Stored] | None = None,
    ) -> Mapping[int, Stored]:
        """Encodes chunks of a context.

        Args:
          cache: cache; unchanged.
          chunks: width of each chunk to encode, by number.
          stored: current stored chunks that the cache attends to in place.
          into: memory for the chunks (see `room`); None allocates it.

        Returns:
          The stored chunks, by number.
        """

    @abc.abstractmethod
    def mass(self, cache: Any) -> np.ndarray:
        """The attention mass of each position, `[>= tokens]`."""

    @abc.abstractmethod
    def loaded(self, cache: Any, length: int) -> Any:
        """A cache with `length` tokens, once nothing reads the blobs that it was loaded from."""

    def start(self, tokens: int) -> Any:
        """An empty cache with room for `tokens` tokens."""
        return self.runner.start(tokens)

    def slid(self, cache: Any, chunks: Any) -> Any:
        """A cache after its first chunk, in which no attention is counted yet; `chunks` are the chunks that
        it attends to in place."""
        del chunks
        return cache

    def feeds(self, chunk: Any) -> bool:
        """Whether a chunk of a prompt can be fed during a restore."""
        del chunk
        return False

    def rehearse(self) -> Delay:
        """Runs all of its buckets once, and times recomputing chunks of one layer."""
        return Delay(fixed_ms=0.0, per_unit_ms=_NEVER_MS)

    def chunk_bytes(self, bits: int) -> int:
        """Bytes of one chunk over all layers."""
        return sum(self.layer_bytes[bits])

    def room(self, chunks: Mapping[int, int]) -> dict[int, Stored]:
        """Allocates memory for chunks to be encoded, of these widths by number, each blob separately."""
        return {
            chunk: (bits, Blobs(blob_memory(size) for size in self.layer_bytes[bits]))
            for chunk, bits in chunks.items()
        }


def require_sizes(layer: int, chunks: Sequence[int], found: Sequence[int], wanted: Sequence[int]) -> None:
    """Checks the sizes of chunks' blobs in a layer.

    Raises:
      CheckpointError: one does not fit its width.
    """
    for chunk, size, right in zip(chunks, found, wanted, strict=True):
        if size != right:
            raise CheckpointError(
                f"chunk {chunk} has {size} bytes in layer {layer}, and its width requires {right}: it is not "
                "of this model and codec"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Delays:
    """Delays of one layer of a context: of chunks read from storage, per byte, and of recomputing chunks, per
    chunk."""

    read: Delay
    compute: Delay


def measure_read(folder: Path, storage: Storage) -> Delay:
    """Times reads from a temporary file of random bytes in `folder`.

    If there is no space for the file, or the device fails, logs a warning and returns `UNMEASURED_READ`: a
    full device must not prevent opening a store and deleting contexts.
    """
    try:
        with temporary_file(folder / _TIMED) as (path, file):
            file.write(np.random.default_rng(0).bytes(_SIZES_BYTES[-1]))
            file.flush()
            os.fsync(file.fileno())
            with PieceReader(path, storage) as reader:
                # Like chunks, into allocated memory.
                memory = aligned(_SIZES_BYTES[-1])

                def once(size: int) -> None:
                    reader.read_into(memory, 0, 0, size)

                times = [median_ms(once, lambda size=size: size) for size in _SIZES_BYTES]
    except (OSError, CheckpointError) as error:
        logging.getLogger("jaxllm").warning(
            "%s: reads cannot be timed (%s); %.0f MB/s and %.1f ms each are assumed",
            folder, one_line(error), 1e-3 / UNMEASURED_READ.per_unit_ms, UNMEASURED_READ.fixed_ms,
        )  # fmt: skip
        return UNMEASURED_READ
    return Delay.fit(_SIZES_BYTES, times)


def median_ms(run: Callable[[Any], object], prepare: Callable[[], Any]) -> float:
    """The median time of `run(prepare())`, without `prepare`, after a warm-up run."""
    times = []
    for _ in range(1 + _REPEATS):
        given = prepare()
        began = time.perf_counter()
        run(given)
        times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times[1:])
