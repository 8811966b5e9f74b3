"""Brings the chunks of a context back: from storage or from its tokens, into a cache and into memory."""

import concurrent.futures
from collections.abc import Mapping, Sequence

import numpy as np

from jaxllm.errors import CheckpointError
from jaxllm.kv.cache import KVCache
from jaxllm.kv.recompute import LOST
from serving.contexts.blobs import Stored
from serving.contexts.chunk_io import ChunkIO
from serving.contexts.delays import Delays
from serving.contexts.memory import ChunkMemory
from serving.contexts.restore import Restoration, restore
from serving.contexts.store import ContextStore
from serving.contexts.turn import Turn
from serving.request import Session
from serving.runners.level_runner import LevelRunner

# A device that is asked for two things at a time is not idle in between.
_READERS = 2


class ChunkLoader:
    """Restores contexts at the beginning of a call, and repairs what is damaged on storage.

    Args:
      store: where chunks are read.
      memory: gets what is read.
      delays: of this device, by level.
      recompute: see `ContextOptions`.
    """

    def __init__(
        self, store: ContextStore, memory: ChunkMemory, delays: Mapping[int, Delays], *, recompute: bool
    ) -> None:
        self._store, self._memory, self._delays, self._recompute = store, memory, delays, recompute
        self._pool = concurrent.futures.ThreadPoolExecutor(_READERS)

    def close(self, *, wait: bool = True) -> None:
        """Ends its threads."""
        self._pool.shutdown(wait=wait)

    def bring_back(self, turn: Turn, chunk_io: ChunkIO, cache: KVCache, tokens: int) -> Restoration:
        """Gives a call's session all whole chunks of its context.

        Args:
          turn: the call.
          chunk_io: of its level.
          cache: has room for `tokens`; donated.
          tokens: that there must be room for.

        Raises:
          CheckpointError: chunks can neither be read nor be given up.
        """
        name, runner, session = turn.record.name, chunk_io.runner, turn.session
        for attempt in range(2):
            base = turn.base
            resident = {n: each for n, each in self._memory.chunks(name).items() if n < len(base.bits)}
            wanted = {n for n, bits in enumerate(base.bits) if bits != LOST} - set(resident)
            try:
                cache, read, how = restore(
                    chunk_io,
                    runner.start(tokens) if attempt else cache,
                    tokens=base.tokens,
                    bits=base.bits,
                    resident={chunk: (each.bits, each.blobs) for chunk, each in resident.items()},
                    read=self._store.open(name, wanted).read if wanted else _nothing,
                    delays=self._delays[runner.level] if self._recompute else None,
                    pool=self._pool,
                )
            except CheckpointError:
                if attempt:
                    raise
                # What is damaged is lost, and to this call what storage refuses: both are computed.
                there = self._store.repair(name)
                turn.record = self._store.record(name)
                turn.base = base.lose({n for n, bits in enumerate(there.bits) if bits == LOST})
                continue
            self.load(chunk_io, name, read)
            session.cache, session.weights_version = cache, runner.weights_version
            session.tokens = list(base.tokens[: len(base.bits) * chunk_io.chunk_tokens])
            return how
        raise AssertionError("either of two attempts returns or raises")

    def load(self, chunk_io: ChunkIO, name: str, chunks: Mapping[int, Stored]) -> None:
        """Puts chunks of a context into memory.

        Raises:
          BudgetExceeded: one does not fit, and those after it are left out.
        """
        delays = self._delays[chunk_io.runner.level]
        computing_ms = chunk_io.layers * delays.computing.per_unit_ms
        for chunk, (bits, blobs) in sorted(chunks.items()):
            reading_ms = chunk_io.chunk_bytes(bits) * delays.reading.per_unit_ms
            self._memory.load(name, chunk, bits, blobs, restore_ms=min(reading_ms, computing_ms))


def _nothing(layer: int, chunks: Sequence[int]) -> list[np.ndarray]:
    """What is read where all is in memory or lost."""
    raise AssertionError(f"chunks {list(chunks)} of layer {layer} are not missing")


def roomy_cache(levels: Mapping[int, ChunkIO], runner: LevelRunner, spare: Session, tokens: int) -> KVCache:
    """A cache with room for `tokens`: the one of the context before, if its form fits.

    Clearing new memory takes as long as decoding chunks into it.

    Args:
      levels: all of the model.
      runner: of the level that is about to answer.
      spare: of the context before, which loses its cache.
      tokens: that there must be room for.
    """
    _, cache = spare.take()
    if cache is not None and spare.weights_version is not None:
        form = levels[spare.weights_version[0]].runner.model.bucket_level
        if form == runner.model.bucket_level and cache.capacity_tokens == runner.capacity_for(tokens):
            # What another context left in it is out of sight until it is written over.
            return cache
    # Its memory, before that of another.
    del cache
    return runner.start(tokens)
