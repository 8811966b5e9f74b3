"""Reads weights: the file once from end to end when it is opened, then piece by piece ahead of their use.

The first pass checks each segment against the manifest, copies the resident parts to memory, and computes
checksums of the parts that will be read again. Later reads are compared with these, so that bytes of a file
that was changed in place are never used as weights. Mismatching bytes are read once more before they are
refused: transient storage errors rarely repeat.

Each pass over the model uses all pieces in the same order, so the next piece is always known, also across
the end of a pass. Resident pieces are read once. The others share a few slots: when a piece is released,
the next piece is read into its slot. Two pieces are read at a time, so that storage has the next one's
reads before the last of a piece has ended.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import xxhash

from jaxllm.bundle import Bundle
from jaxllm.bundle.layout import PAGE
from jaxllm.errors import BundleError, ConfigError
from jaxllm.serving.host.direct_io import PieceReader, aligned
from jaxllm.serving.weights.pieces import READERS, Piece, Range, read_blocks

_READ_BYTES = 4 << 20
# Number of attempts to read matching bytes.
READS = 2
# Number of pieces read concurrently, in the order of a pass.
_AT_A_TIME = 2
# Does a little other work while weights are loaded: receives the seconds for which storage is probably busy,
# and returns whether it did any work.
Meanwhile = Callable[[float], bool]


class FirstRead:
    """Plans and runs the first pass over a file, with which later reads are compared."""

    def __init__(self, bundle: Bundle, reader: PieceReader) -> None:
        self._bundle, self._reader = bundle, reader
        # Offsets in the file, and the memory to which the bytes from there on are copied.
        self._kept: list[tuple[int, np.ndarray]] = []
        self._again: set[tuple[int, int]] = set()
        # Checksums of the parts that will be read again, by offset and size; for segments that are read by
        # pages, one uint64 per page: an embedding has hundreds of thousands.
        self._blocks: dict[tuple[int, int], int] = {}
        self._pages: dict[str, np.ndarray] = {}

    def keep(self, ranges: Sequence[Range], memory: np.ndarray) -> None:
        """Plans to copy ranges to their destinations in `memory`."""
        for each in ranges:
            self._kept.append((each.offset, memory[each.place : each.place + each.size_bytes]))

    def watch(self, ranges: Sequence[Range]) -> None:
        """Plans checksums of ranges, one per block of later reads."""
        self._again |= {(offset, size) for offset, _, size in read_blocks(ranges)}

    def watch_pages(self, segment: str) -> None:
        """Plans checksums of a segment, one per page."""
        size = self._bundle.layout.segments[segment].size_bytes
        self._pages[segment] = np.empty(-(-size // PAGE), np.uint64)

    def run(self, on_bytes: Callable[[int], None]) -> None:
        """Runs the pass; calls `on_bytes` with the number of bytes of each part.

        Raises:
          CheckpointError: the file is damaged or cannot be read.
        """
        layout = self._bundle.layout
        names = {name for each in layout.tensors.values() for name in each.segments}
        for name in sorted(names, key=lambda name: layout.segments[name].offset):
            try:
                self._bundle.require_checksum(name, self._read(name, on_bytes))
            except BundleError:
                self._bundle.require_checksum(name, self._read(name, lambda _: None))
        # Else memory that is released later would stay.
        self._kept.clear()
        self._again.clear()

    def same(self, offset: int, data: np.ndarray) -> bool:
        """Whether `data`, uint8, read at `offset`, equals the first read."""
        return xxhash.xxh3_64_intdigest(data.data) == self._blocks[offset, len(data)]

    def same_pages(self, segment: str, offset: int, data: np.ndarray) -> bool:
        """Whether whole pages, or the last ones, of a segment of `watch_pages` equal the first read."""
        return np.array_equal(self._pages_of(segment, offset, len(data)), _page_digests(data))

    def changed(self, offset: int, size: int) -> BundleError:
        """The error of bytes that differ from the first read, even after another read."""
        segments = self._bundle.layout.segments.items()
        name = next(name for name, each in segments if 0 <= offset - each.offset < each.size_bytes)
        return BundleError(
            f"{self._bundle.path} was changed in place while it was open: {size} bytes at {offset}, of "
            f"segment {name!r}, are not what they were, also when they are read again; open it again, and "
            "replace such a file by renaming another one over it"
        )

    def _read(self, name: str, on_bytes: Callable[[int], None]) -> xxhash.xxh3_128:
        """Reads a segment, copies its resident parts, and computes the checksums of its blocks. Returns the
        digest of all of it."""
        segment, digest = self._bundle.layout.segments[name], xxhash.xxh3_128()
        end = segment.offset + segment.size_bytes
        waiting = sorted((each for each in self._again if segment.offset <= each[0] < end), reverse=True)
        kept = [each for each in self._kept if segment.offset <= each[0] < end]
        # Partly read blocks.
        begun: list[tuple[int, int, xxhash.xxh3_64]] = []
        for at in range(segment.offset, end, _READ_BYTES):
            data = self._reader.read(at, min(_READ_BYTES, end - at))
            digest.update(data.data)
            if name in self._pages:
                self._pages_of(name, at, len(data))[:] = _page_digests(data)
            for offset, memory in kept:
                begin, last = max(offset, at), min(offset + len(memory), at + len(data))
                if begin < last:
                    memory[begin - offset : last - offset] = data[begin - at : last - at]
            while waiting and waiting[-1][0] < at + len(data):
                begun.append((*waiting.pop(), xxhash.xxh3_64()))
            blocks, begun = begun, []
            for offset, size, block in blocks:
                block.update(data[max(0, offset - at) : max(0, offset + size - at)].data)
                if offset + size > at + len(data):
                    begun.append((offset, size, block))
                else:
                    self._blocks[offset, size] = block.intdigest()
            on_bytes(len(data))
        return digest

    def _pages_of(self, segment: str, offset: int, size: int) -> np.ndarray:
        first = (offset - self._bundle.layout.segments[segment].offset) // PAGE
        return self._pages[segment][first : first - (-size // PAGE)]


def _page_digests(data: np.ndarray) -> np.ndarray:
    pages = (data[at : at + PAGE].data for at in range(0, len(data), PAGE))
    return np.fromiter(map(xxhash.xxh3_64_intdigest, pages), np.uint64)


@dataclasses.dataclass
class StreamCounts:
    """Counts of a stream.

    Attributes:
      read_bytes: bytes of pieces, without resident ones.
      read_s: time in which pieces were read, one or several.
    """

    read_bytes: int = 0
    read_s: float = 0.0


@dataclasses.dataclass(eq=False)
class Slot:
    """Memory for one piece.

    Attributes:
      memory: uint8, page-aligned.
      piece: number of the piece that is in it or is read into it; -1 for none.
      ready: whether the read has ended or failed.
    """

    memory: np.ndarray
    piece: int = -1
    ready: bool = False
    error: Exception | None = None


class WeightStream:
    """The pieces of one model, or of one of its levels. One pass at a time."""

    def __init__(
        self,
        reader: PieceReader,
        pieces: Sequence[Piece],
        *,
        resident: Sequence[int],
        slots: int,
        slot_bytes: int,
        read_ahead: bool = True,
        first_read: FirstRead | None = None,
    ) -> None:
        """Allocates all memory; reads nothing yet.

        Args:
          reader: reader of the bundle's file.
          pieces: pieces in the order of a pass.
          resident: numbers of resident pieces.
          slots: number of slots for all others, at least 2 if there are any.
          slot_bytes: bytes of a slot.
          read_ahead: whether the next piece is read while one is computed, or only on demand.
          first_read: has the checksums of all blocks that will be read; None for no checks.
        """
        self.counts = StreamCounts()
        self._reader, self._pieces, self._kept = reader, list(pieces), {}
        self._whole = list(pieces)
        self._first_read = first_read
        self._staying = {each: Slot(aligned(pieces[each].memory_bytes)) for each in resident}
        self._plan_reads()
        # The pieces of the pass after this one, if different.
        self._then: list[Piece] | None = None
        # First in, first out: a piece usually gets the slot in which its arrays are cached.
        self._slots = slots
        self._free = collections.deque(Slot(aligned(slot_bytes)) for _ in range(slots))
        # Slots whose pieces are read or being read, in the order of passes.
        self._ahead: collections.deque[Slot] = collections.deque()
        self._next, self._read_ahead, self._wanted = 0, read_ahead, False
        # The last piece used, and the waiting times of this pass and the last one.
        self._taken, self._idle_s, self._idle_before_s = -1, 0.0, 0.0
        self._lock = threading.Lock()
        # Readers wait for free slots, the computing thread for ends of reads: separate conditions avoid
        # spurious wake-ups.
        self._freed, self._ended = threading.Condition(self._lock), threading.Condition(self._lock)
        self._closed = False
        self._threads: list[threading.Thread] = []
        # Reads that are underway, the time up to which `read_s` counts, and when they are expected to end.
        self._underway, self._counted_at, self._ends_at = 0, 0.0, 0.0
        self._pool = concurrent.futures.ThreadPoolExecutor(READERS)

    @property
    def idle_read_s(self) -> float:
        """Time by which a pass can start later without ending later: until all slots are full, or the waiting
        time of the last whole pass."""
        return min(self._slots * self._piece_s, self._idle_before_s) if self._read_ahead else 0.0

    @property
    def pass_bytes(self) -> int:
        """Bytes read in each pass."""
        return round(self._piece_bytes * len(self._coming))

    def staying(self) -> dict[int, np.ndarray]:
        """Number of a resident piece -> its memory."""
        return {number: slot.memory for number, slot in self._staying.items()}

    def offload(self, number: int) -> Slot:
        """Releases the memory of a resident piece, which is read in each pass from now on; returns its slot.
        Requires slots for it, and its blocks in `first_read`."""
        with self._lock:
            slot = self._staying.pop(number)
            self._renumber()
        return slot

    def hold(self, number: int) -> None:
        """Reads a whole piece and makes it resident. At least one other piece must not be.

        Raises:
          CheckpointError: it cannot be read; nothing has changed.
          ConfigError: the stream is closed.
        """
        self._require_open()
        slot = Slot(aligned(self._whole[number].memory_bytes))
        self._read(self._whole[number].ranges, slot.memory)
        with self._lock:
            self._staying[number] = slot
            self._renumber()

    def _renumber(self) -> None:
        """Drops read-ahead data, after resident pieces have changed; under the lock."""
        self._drop_all()
        self._plan_reads()
        self._next, self._wanted = 0, False

    def _plan_reads(self) -> None:
        """Sets the numbers of the pieces to read in each pass, and their mean size."""
        self._coming = [
            number
            for number, piece in enumerate(self._pieces)
            if piece.ranges and number not in self._staying
        ]
        sizes = [self._pieces[number].read_bytes for number in self._coming]
        self._piece_bytes = sum(sizes) / max(1, len(sizes))

    def keep(self, kept: Mapping[int, np.ndarray]) -> None:
        """Sets the memory of the `LayerPiece.kept` ranges of pieces that are read, by their numbers."""
        self._kept = dict(kept)

    def use(self, pieces: Sequence[Piece], then: Sequence[Piece] | None = None) -> None:
        """Reads other ranges of the same pieces from now on: those of another level, or those of a source.

        Resident pieces stay whole. Pieces without ranges are not read.

        Args:
          pieces: pieces of each pass.
          then: pieces of the passes after the next one; None for the same.

        Raises:
          ConfigError: the stream is closed.
        """
        with self._lock:
            self._require_open()
            self._then = None if then is None else list(then)
            if [each.ranges for each in pieces] == [each.ranges for each in self._pieces]:
                return
            # Under one lock: else a slot filled by the old ranges could be used for a new piece.
            self._drop_all()
            self._pieces = list(pieces)
            self._renumber()

    @contextlib.contextmanager
    def piece(self, number: int, meanwhile: Meanwhile | None = None) -> Iterator[Slot]:
        """The slot of a piece, valid until the context ends (see `pieces`)."""
        with self.pieces(number, 1, meanwhile) as (slot,):
            yield slot

    @contextlib.contextmanager
    def pieces(self, number: int, most: int, meanwhile: Meanwhile | None = None) -> Iterator[list[Slot]]:
        """The slots of a piece and of those after it that are in memory by then, until the context ends.

        Reads continue: at most half of the slots that are read into are among them, and no resident piece
        after those, for which a slot would be free later.

        Args:
          number: number of the first piece; ascending in a pass.
          most: maximum number of pieces.
          meanwhile: called repeatedly while the first piece is read, until it returns False.

        Raises:
          CheckpointError: the first cannot be read. The next pass tries again.
          ConfigError: the stream is closed.
        """
        slots, taken, room, last = list[Slot](), 0, max(1, self._slots // 2), 0
        if number <= self._taken:
            self._idle_before_s, self._idle_s = self._idle_s, 0.0
        for each in range(number, number + most):
            slot = self._staying.get(each)
            if slot is None:
                if not slots:
                    slot = self._take(each, meanwhile)
                elif taken == room or (slot := self._ready_at(taken, each)) is None:
                    break
                taken, last = taken + 1, len(slots) + 1
            slots.append(slot)
        slots = slots[: last or most]
        self._taken = number + len(slots) - 1
        try:
            yield slots
        finally:
            with self._lock:
                for slot in [self._ahead.popleft() for _ in range(taken)]:
                    slot.piece, slot.ready = -1, False
                    self._free.append(slot)
                self._freed.notify(taken)

    def close(self) -> None:
        """Stops the threads and closes the file."""
        with self._lock:
            self._closed = True
            self._freed.notify_all()
            self._ended.notify_all()
        for each in self._threads:
            each.join()
        self._pool.shutdown()
        self._reader.close()

    def _take(self, number: int, meanwhile: Meanwhile | None) -> Slot:
        self._require_open()
        if (slot := self._ready_at(0, number)) is not None:
            return slot
        slot, asked = self._coming_slot(number), time.perf_counter()
        while not slot.ready and meanwhile is not None and meanwhile(self._busy_s):
            pass
        with self._lock:
            self._ended.wait_for(lambda: slot.ready)
            self._idle_s += time.perf_counter() - asked
            if slot.error is not None:
                error = slot.error
                self._drop_all()
                raise error
        return slot

    def _ready_at(self, index: int, number: int) -> Slot | None:
        """The slot `index` places ahead if it has piece `number`, read without an error; else None.

        Without the lock: readers only add slots, and set `ready` last.
        """
        if index >= len(self._ahead):
            return None
        slot = self._ahead[index]
        return slot if slot.piece == number and slot.ready and slot.error is None else None

    def _coming_slot(self, number: int) -> Slot:
        """The slot of the next piece, into which it is read by now."""
        with self._lock:
            self._require_open()
            if not self._threads:
                self._threads = [
                    threading.Thread(target=self._run, name="weights", daemon=True) for _ in range(_AT_A_TIME)
                ]
                for each in self._threads:
                    each.start()
            if not (self._ahead and self._ahead[0].piece == number):
                # The pass before ended early: the pieces read for it are not needed now.
                self._drop_all()
                self._next, self._wanted = self._coming.index(number), True
                self._freed.notify_all()
                self._ended.wait_for(lambda: bool(self._ahead) or self._closed)
                self._require_open()
            return self._ahead[0]

    def _require_open(self) -> None:
        if self._closed:
            raise ConfigError("the engine of these weights is closed; open another one")

    @property
    def _busy_s(self) -> float:
        """Expected seconds until storage is idle: the pieces being read, plus one for each free slot."""
        further = len(self._free) * self._piece_s if self._read_ahead else 0.0
        return max(0.0, self._ends_at - time.perf_counter()) + further

    @property
    def _piece_s(self) -> float:
        """Expected seconds of the read of a piece; 0 before the first."""
        counts = self.counts
        return self._piece_bytes * counts.read_s / counts.read_bytes if counts.read_bytes else 0.0

    def _drop_all(self) -> None:
        dropped = []
        while self._ahead:
            slot = self._ahead.popleft()
            self._ended.wait_for(lambda slot=slot: slot.ready)
            slot.piece, slot.ready, slot.error = -1, False, None
            dropped.append(slot)
        # All at once, so that no read begins before.
        self._free += dropped
        self._freed.notify_all()

    def _run(self) -> None:
        while True:
            with self._lock:
                self._freed.wait_for(
                    lambda: (
                        self._closed
                        or (bool(self._free and self._coming) and (self._read_ahead or self._wanted))
                    )
                )
                if self._closed:
                    return
                slot, number = self._free.popleft(), self._coming[self._next]
                self._next, self._wanted = (self._next + 1) % len(self._coming), False
                slot.piece = number
                self._ahead.append(slot)
                piece = self._pieces[number]
                if not self._next and self._then is not None:
                    self._pieces, self._then = self._then, None
                    self._plan_reads()
                self._count_time()
                self._underway += 1
                self._ends_at = max(self._ends_at, self._counted_at) + self._piece_s
                if len(self._ahead) == 1:
                    self._ended.notify_all()
            try:
                self._read(piece.ranges, slot.memory)
                # Resident ranges of a piece go next to those that were read, because buckets need the whole
                # piece; a copy in memory takes far less time than a read.
                for each in piece.kept if number in self._kept else ():
                    part = slice(each.place, each.place + each.size_bytes)
                    slot.memory[part] = self._kept[number][part]
            except Exception as error:  # Raised by the thread that waits.
                slot.error = error
            with self._lock:
                self._count_time()
                self._underway -= 1
                if not self._underway:
                    self._ends_at = self._counted_at
                self.counts.read_bytes += piece.read_bytes
                slot.ready = True
                self._ended.notify_all()

    def _count_time(self) -> None:
        """Counts the time since the last count, if something was read in it; under the lock."""
        now = time.perf_counter()
        self.counts.read_s += now - self._counted_at if self._underway else 0.0
        self._counted_at = now

    def _read(self, ranges: Sequence[Range], memory: np.ndarray) -> None:
        first = self._first_read

        def read(block: tuple[int, int, int]) -> None:
            offset, place, size = block
            for _ in range(READS):
                self._reader.read_into(memory, place, offset, size)
                if first is None or first.same(offset, memory[place : place + size]):
                    return
            assert first is not None
            raise first.changed(offset, size)

        blocks = read_blocks(ranges)
        # Handing over one of two blocks takes longer than the latency of its read.
        list(map(read, blocks) if len(blocks) <= _AT_A_TIME else self._pool.map(read, blocks))
