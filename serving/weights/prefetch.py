"""Prefetches weights piece by piece: a thread reads the next ones while one is computed.

A pass over the model takes all pieces in the same order, so what comes next is always known, across the end
of a pass as well. Pieces that stay are read once. The others share a few slots: as soon as a piece is given
back, the piece that is next to be read takes its slot.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from jaxllm.errors import ConfigError
from serving.host.direct_io import PieceReader, aligned
from serving.weights.first_read import Checksums
from serving.weights.pieces import READERS, LayerPiece, Piece, Range, read_blocks, read_bytes

# Other work while weights are waited for: told how long that should take, in seconds, it does a little and
# says whether it did.
Meanwhile = Callable[[float], bool]


@dataclasses.dataclass
class StreamCounts:
    """Counts of a stream.

    Attributes:
      read_bytes: of pieces, those that stay left aside.
      reading_s: time in which something was being read.
      waited_s: time for which whoever computes had to wait.
    """

    read_bytes: int = 0
    reading_s: float = 0.0
    waited_s: float = 0.0


@dataclasses.dataclass(eq=False)
class Slot:
    """Memory for one piece.

    Attributes:
      memory: uint8, begins at a page.
      piece: the number of the one that is in it or is read into it, -1 for none.
      ready: whether all of it is there, or failed to come.
      error: why it did not come.
      began: when reading it began, as `time.perf_counter` counts.
    """

    memory: np.ndarray
    piece: int = -1
    ready: bool = False
    error: Exception | None = None
    began: float = 0.0


class WeightStream:
    """The pieces of one model, or of one of its levels. One pass at a time.

    Attributes:
      counts: see `StreamCounts`.
    """

    def __init__(
        self,
        reader: PieceReader,
        pieces: Sequence[Piece],
        *,
        resident: Sequence[int],
        slots: int,
        slot_bytes: int,
        read_ahead: bool = True,
        checksums: Checksums | None = None,
    ) -> None:
        """Takes all memory that there will be; reads nothing yet.

        Args:
          reader: of the bundle's file.
          pieces: in the order of a pass.
          resident: numbers of those that stay.
          slots: for all others, at least 2 if there are any.
          slot_bytes: of a slot.
          read_ahead: whether the next piece is read while one is computed, or only when it is waited for.
          checksums: of all blocks that will be read; None believes what it reads.
        """
        self.counts = StreamCounts()
        self._reader, self._pieces, self._kept = reader, list(pieces), {}
        self._checksums = checksums
        self._staying = {each: Slot(aligned(pieces[each].memory_bytes)) for each in resident}
        self._coming = [each for each in range(len(pieces)) if each not in self._staying]
        self._free = [Slot(aligned(slot_bytes)) for _ in range(slots)]
        # Those that are read or being read, in the order of passes.
        self._ahead: collections.deque[Slot] = collections.deque()
        self._next, self._read_ahead, self._wanted = 0, read_ahead, False
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._pool = concurrent.futures.ThreadPoolExecutor(READERS)

    def staying(self) -> dict[int, np.ndarray]:
        """Memory of what stays, by the pieces' numbers."""
        return {number: slot.memory for number, slot in self._staying.items()}

    def keep(self, kept: Mapping[int, np.ndarray]) -> None:
        """By the numbers of pieces that are read, memory where `LayerPiece.kept` already is in its place."""
        self._kept = dict(kept)

    def use(self, pieces: Sequence[Piece]) -> None:
        """Other ranges of the same pieces from now on: those of another level.

        What stays in memory stays whole.

        Raises:
          ConfigError: the stream is closed.
        """
        with self._changed:
            self._require_open()
            if [each.ranges for each in pieces] == [each.ranges for each in self._pieces]:
                return
            # In one step for the thread that reads: a slot filled by the old ranges would be taken for a new
            # piece.
            self._drop_all()
            self._next, self._pieces = 0, list(pieces)

    @contextlib.contextmanager
    def piece(self, number: int, meanwhile: Meanwhile | None = None) -> Iterator[Slot]:
        """A piece in its slot, which stays what it is until the context ends.

        Args:
          number: of the piece; in a pass they ascend.
          meanwhile: called again and again while the piece is waited for, until it has nothing to do.

        Raises:
          CheckpointError: it cannot be read. The next pass tries again.
          ConfigError: the stream is closed.
        """
        if (slot := self._staying.get(number)) is not None:
            yield slot
            return
        slot = self._take(number, meanwhile)
        try:
            yield slot
        finally:
            with self._changed:
                self._release(slot)

    def close(self) -> None:
        """Ends reading."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self._pool.shutdown()
        self._reader.close()

    def _take(self, number: int, meanwhile: Meanwhile | None) -> Slot:
        with self._changed:
            self._require_open()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="weights", daemon=True)
                self._thread.start()
            if not (self._ahead and self._ahead[0].piece == number):
                # The pass before ended early: what was read for it is of no use now.
                self._drop_all()
                self._next, self._wanted = self._coming.index(number), True
                self._changed.notify_all()
                self._changed.wait_for(lambda: bool(self._ahead) or self._closed)
                self._require_open()
            slot = self._ahead[0]
        while not slot.ready and meanwhile is not None and meanwhile(self._wait_s(slot)):
            pass
        began = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: slot.ready)
            self.counts.waited_s += time.perf_counter() - began
            if slot.error is not None:
                error = slot.error
                self._drop_all()
                raise error
        return slot

    def _require_open(self) -> None:
        if self._closed:
            raise ConfigError("the engine of these weights is closed; open another one")

    def _wait_s(self, slot: Slot) -> float:
        """How long it should take until a piece is there that is being read."""
        counts = self.counts
        if not counts.read_bytes:
            return 0.0
        takes = read_bytes(self._pieces[slot.piece]) * counts.reading_s / counts.read_bytes
        return max(0.0, slot.began + takes - time.perf_counter())

    def _drop_all(self) -> None:
        """Gives all slots back, once nothing is read into them any more."""
        dropped = []
        while self._ahead:
            slot = self._ahead.popleft()
            self._changed.wait_for(lambda slot=slot: slot.ready)
            slot.piece, slot.ready, slot.error = -1, False, None
            dropped.append(slot)
        # All at once: as long as none is free, nothing new is read.
        self._free += dropped
        self._changed.notify_all()

    def _release(self, slot: Slot) -> None:
        self._ahead.popleft()
        slot.piece, slot.ready = -1, False
        self._free.append(slot)
        self._changed.notify_all()

    def _run(self) -> None:
        """The thread that reads ahead."""
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._closed or (bool(self._free) and (self._read_ahead or self._wanted))
                )
                if self._closed:
                    return
                slot, number = self._free.pop(), self._coming[self._next]
                self._next, self._wanted = (self._next + 1) % len(self._coming), False
                slot.piece = number
                self._ahead.append(slot)
                piece = self._pieces[number]
                slot.began = began = time.perf_counter()
                self._changed.notify_all()
            try:
                self._read(piece.ranges, slot.memory)
                self._copy_kept(number, slot.memory)
            except Exception as error:  # Whatever it is, it is for the one who waits.
                slot.error = error
            with self._changed:
                self.counts.reading_s += time.perf_counter() - began
                self.counts.read_bytes += read_bytes(piece)
                slot.ready = True
                self._changed.notify_all()

    def _read(self, ranges: Sequence[Range], memory: np.ndarray) -> None:
        def read(block: tuple[int, int, int]) -> None:
            offset, place, size = block
            self._reader.read_into(memory, place, offset, size)
            if self._checksums is not None:
                self._checksums.require_same(offset, memory[place : place + size])

        blocks = read_blocks(ranges)
        if len(blocks) == 1:
            read(blocks[0])
        else:
            list(self._pool.map(read, blocks))

    def _copy_kept(self, number: int, memory: np.ndarray) -> None:
        """Puts what stays of a piece beside what was read: a copy within memory takes far less than reading,
        and the piece is one as the bucket takes it."""
        piece = self._pieces[number]
        if isinstance(piece, LayerPiece) and number in self._kept:
            for each in piece.kept:
                part = slice(each.place, each.place + each.size_bytes)
                memory[part] = self._kept[number][part]
