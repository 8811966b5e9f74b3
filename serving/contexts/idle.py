"""Works for contexts while nothing runs: prefetches the one that is likely called next, and widens chunks.

A piece of work is short, because a call that comes waits for it. Prefetching takes memory that is free and
evicts nothing. Widening computes chunks again that are stored at fewer bits than their attention asks for by
now, of contexts that are called often.
"""

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Protocol

from jaxllm.errors import BudgetExceeded, CheckpointError, ContextGone, one_line
from jaxllm.kv.recompute import LOST
from serving.contexts.blobs import Stored, copied_blob
from serving.contexts.chunk_io import ChunkIO
from serving.contexts.memory import ChunkMemory
from serving.contexts.options import ContextOptions
from serving.contexts.pending_errors import PendingErrors
from serving.contexts.prediction import CallPredictor
from serving.contexts.record import Record
from serving.contexts.store import ContextStore
from serving.host.power import on_battery

_LOG = logging.getLogger("jaxllm")
# Chunks that are read, and those that are computed again, in one piece of work.
_READ, WIDENED = 16, 4
# Contexts that are less likely called next are not prefetched.
_LIKELY = 0.05
# Recent calls of a context that is called often.
_OFTEN = 3.0
_POWER_S = 30.0


class Kept(Protocol):
    """What is known of the contexts of all apps, and done for them (see `Contexts`)."""

    options: ContextOptions
    store: ContextStore
    memory: ChunkMemory
    pending_errors: PendingErrors

    def record(self, app: str, name: str) -> Record: ...  # noqa: D102

    def chunk_io(self, level: int) -> ChunkIO: ...  # noqa: D102

    def take_idle(self, chunk_io: ChunkIO, name: str, chunks: Mapping[int, Stored]) -> None: ...  # noqa: D102

    def widen(self, record: Record, *, most: int) -> int: ...  # noqa: D102


@dataclasses.dataclass
class IdleFigures:
    """What was done.

    Attributes:
      prefetched: chunks that were read before they were asked for.
      widened: chunks that were computed again at more bits.
    """

    prefetched: int = 0
    widened: int = 0


class IdleContexts:
    """The work that is left to do for contexts, in the order of its use.

    Args:
      contexts: of all apps.
      battery: whether the machine runs on one.
      clock: in seconds.
      hour: of the day.

    Attributes:
      figures: what was done so far.
    """

    def __init__(
        self,
        contexts: Kept,
        *,
        battery: Callable[[], bool] = on_battery,
        clock: Callable[[], float] = time.monotonic,
        hour: Callable[[], int] = lambda: datetime.now().hour,
    ) -> None:
        self._contexts, self._battery, self._clock, self._hour = contexts, battery, clock, hour
        self._predictor, self.figures = CallPredictor(), IdleFigures()
        # Contexts for which nothing more is done until they are called.
        self._read: set[str] = set()
        self._widened: set[str] = set()
        self._looked_s, self._on_battery = -_POWER_S, False

    def begin(self) -> None:
        """Learns in which order the store's contexts were last called."""
        there = [each for each in self._contexts.store.records() if each.tokens]
        for each in sorted(there, key=lambda each: each.used):
            self._predictor.called(each.name, None)

    def called(self, name: str) -> None:
        """Learns of a call."""
        self._predictor.called(name, self._hour())
        self._read.discard(name)
        self._widened.discard(name)

    def deleted(self, name: str) -> None:
        """Forgets a context."""
        self._predictor.forget(name)
        self._read.discard(name)
        self._widened.discard(name)

    def step(self) -> bool:
        """Does a piece of work.

        Returns:
          Whether it did any.
        """
        return self._allowed() and (self._prefetch() or self._widen())

    def _allowed(self) -> bool:
        when = self._contexts.options.idle_work
        if when == "on-mains" and self._clock() - self._looked_s >= _POWER_S:
            self._looked_s, self._on_battery = self._clock(), self._battery()
        return when == "always" or (when == "on-mains" and not self._on_battery)

    def _prefetch(self) -> bool:
        for name, probability in self._predictor.likely(self._hour()).items():
            if probability < _LIKELY:
                break
            if name in self._read:
                continue
            try:
                count = self._read_some(name)
            except ContextGone:
                self.deleted(name)
                continue
            except CheckpointError as error:
                # The context's next call repairs what is damaged.
                _LOG.debug("the context %s is not prefetched: %s", name, one_line(error))
                count = 0
            if count:
                self.figures.prefetched += count
                return True
            self._read.add(name)
        return False

    def _read_some(self, name: str) -> int:
        """Reads some chunks of a context into free memory; returns how many."""
        contexts = self._contexts
        memory, found = contexts.memory, self._settled(name)
        if found is None:
            return 0
        record, chunk_io = found
        free, there = memory.budget_bytes - memory.resident_bytes, memory.chunks(name)
        chunks: list[int] = []
        for n, bits in enumerate(record.bits):
            if n in there or bits == LOST or not record.files[n]:
                continue
            free -= chunk_io.chunk_bytes(bits)
            if free < 0 or len(chunks) == _READ:
                break
            chunks.append(n)
        if not chunks:
            return 0
        stored = contexts.store.open(name, chunks)
        layers = [stored.read(layer, chunks) for layer in range(chunk_io.layers)]
        found_chunks: dict[int, Stored] = {
            n: (record.bits[n], [copied_blob(blobs[place]) for blobs in layers])
            for place, n in enumerate(chunks)
        }
        contexts.take_idle(chunk_io, name, found_chunks)
        return len(chunks)

    def _widen(self) -> bool:
        often = [
            name for name in self._predictor.likely(self._hour()) if self._predictor.calls(name) >= _OFTEN
        ]
        for name in often:
            if name in self._widened:
                continue
            try:
                found = self._settled(name)
                count = 0 if found is None else self._contexts.widen(found[0], most=WIDENED)
            except ContextGone:
                self.deleted(name)
                continue
            except (BudgetExceeded, CheckpointError) as error:
                _LOG.debug("the context %s is not widened: %s", name, one_line(error))
                count = 0
            if count:
                self.figures.widened += count
                return True
            self._widened.add(name)
        return False

    def _settled(self, name: str) -> tuple[Record, ChunkIO] | None:
        """The record of a context that is as its last call left it, and what its chunks are read by; None of
        others: that is written, moves to another model, or has an error to tell."""
        contexts = self._contexts
        stored = contexts.store.record(name)
        if contexts.store.writing(name) or contexts.pending_errors.has(name):
            return None
        record = contexts.record(stored.app, name)
        chunk_io = contexts.chunk_io(record.origin.level)
        return (record, chunk_io) if stored.origin == record.origin else None
