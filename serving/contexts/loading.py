"""Loads the chunks of a context into a cache and into memory: read from storage, computed from its tokens, or
shared with a context that begins alike.

Exact chunks (`raw`) are not computed again: a new context whose first prompt begins as another one does uses
that one's, with the attention that they got. Chunks at fewer bits would change its answer: it computes its
own, and shares those that come to the same width from the end of its first call on. On storage its folder has
links to the same segments (`ContextStore.link`), and in memory both have the same blobs; a chunk that one of
them stores at fewer bits later is a new one of its own.
"""

import concurrent.futures
import contextlib
import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from jaxllm.contexts.eviction import Resident
from jaxllm.contexts.recompute import LOST
from jaxllm.errors import CheckpointError, JaxllmError
from jaxllm.kernels.native import ChunkTable
from jaxllm.kv.cache import KVCache
from jaxllm.serving.contexts.chunk_io import ChunkIO
from jaxllm.serving.contexts.memory import ChunkMemory, Stored
from jaxllm.serving.contexts.options import ContextOptions
from jaxllm.serving.contexts.record import Record
from jaxllm.serving.contexts.restore import Delays, NewTokens, Reader, Restored, restore
from jaxllm.serving.contexts.store import ContextStore
from jaxllm.serving.contexts.turn import Turn
from jaxllm.serving.engine.request import Session, common_prefix
from jaxllm.serving.ground.plan import Restoration
from jaxllm.serving.runners.level_runner import LevelRunner

# Two reads at a time keep the device busy.
_READERS = 2
# Tokens of a cache behind coded chunks, beyond which a context's next call begins with an empty one.
_TAIL_TOKENS = 256


class ChunkLoader:
    """Restores contexts at the beginning of a call, and repairs what is damaged on storage.

    Args:
      store: has the chunks on storage.
      memory: gets the chunks that were read.
      delays: of this device, by level.
      options: see `ContextOptions`.
    """

    def __init__(
        self, store: ContextStore, memory: ChunkMemory, delays: Mapping[int, Delays], options: ContextOptions
    ) -> None:
        self._store, self._memory, self._delays = store, memory, delays
        self._recompute, self._share = options.recompute, options.share_beginnings
        self._overlap = options.overlap_prompt
        self._pool = concurrent.futures.ThreadPoolExecutor(_READERS)

    def close(self, *, wait: bool = True) -> None:
        """Ends its threads."""
        self._pool.shutdown(wait=wait)

    def resume(
        self, levels: Mapping[int, ChunkIO], turn: Turn, last: tuple[str, Session], tokens: int
    ) -> Restoration:
        """Gives a call's session all whole chunks of its context, or the cache of the call that ended last,
        if that was in the same context.

        Args:
          levels: of the model.
          turn: the call.
          last: the context whose call ended last, and its session, which loses its cache.
          tokens: most tokens of the cache.
        """
        chunk_io, (name, there), session = levels[turn.base.origin.level], last, turn.session
        same = name == turn.record.name and there.weights_version == chunk_io.runner.weights_version
        same = same and turn.base.source == (there.source or ())
        # States that have gone beyond the tokens are of no use; those on storage may be.
        same = same and there.state_tokens in (None, len(there.tokens))
        if same and not _outgrown(chunk_io, turn, there):
            session.tokens, session.cache = there.take()
            session.state_tokens = there.state_tokens
            session.weights_version, session.chunks = there.weights_version, there.chunks
            session.source = there.source
            return Restoration(resident=len(turn.base.bits), cached=True)
        if chunk_io.coded and _behind_tokens(there) > _TAIL_TOKENS:
            # Its memory was taken as it filled: a new cache takes none.
            there.take()
        cache = cache_with_room(levels, chunk_io.runner, there, tokens)
        return self.bring_back(turn, chunk_io, cache, tokens)

    def bring_back(self, turn: Turn, chunk_io: ChunkIO, cache: KVCache, tokens: int) -> Restoration:
        """Gives a call's session all whole chunks of its context.

        Args:
          turn: the call.
          chunk_io: of its level.
          cache: has room for `tokens`; donated.
          tokens: most tokens of the cache.

        Raises:
          CheckpointError: chunks can neither be read nor recorded as lost.
        """
        name, runner = turn.record.name, chunk_io.runner
        source = turn.source or name
        if chunk_io.coded:
            made = None if turn.source else self._memory.made_chunk_table(name, len(turn.base.bits))
            if made is not None:
                return _swapped(turn, chunk_io, _sourced(runner, cache, turn.base), made)
            cache = chunk_io.behind(cache, None, 0)
        for attempt in range(2):
            base = turn.base = turn.base.restorable(runner.cfg.vocab_size)
            # Chunks that are computed again attend to the source.
            cache = _sourced(runner, runner.start(tokens) if attempt else cache, base)
            resident = self._resident(name, base)
            wanted = {n for n, bits in enumerate(base.bits) if bits != LOST} - set(resident)
            if wanted and self._share and not turn.source:
                share_resident(self._store, self._memory, name, wanted)
                resident = self._resident(name, base)
                wanted -= set(resident)
            try:
                back = restore(
                    chunk_io,
                    cache,
                    tokens=base.tokens,
                    bits=base.bits,
                    resident={chunk: (each.bits, each.blobs) for chunk, each in resident.items()},
                    reader=Reader(self._store.open(source, wanted).read if wanted else _nothing, self._pool),
                    # Chunks with rows are read: rows are no tokens, to be computed from.
                    delays=self._delays[runner.level] if self._recomputes(chunk_io, base) else None,
                    new=self._new_tokens(turn, chunk_io),
                )
            except CheckpointError:
                if attempt:
                    raise
                # Damaged chunks are lost, and to this call those that storage refuses: both are computed.
                there = self._store.repair(source)
                turn.record = self._store.record(name)
                turn.base = base.lose({n for n, bits in enumerate(there.bits) if bits == LOST})
                continue
            self._take(turn, chunk_io, back)
            return back.how
        raise AssertionError("either of two attempts returns or raises")

    def _recomputes(self, chunk_io: ChunkIO, base: Record) -> bool:
        """Whether chunks that are on storage may be computed instead."""
        return self._recompute and chunk_io.computes and not base.rows

    def _take(self, turn: Turn, chunk_io: ChunkIO, back: Restored) -> None:
        """Gives a restored context to a call's session, and to memory what was read."""
        name, base, session, cache = turn.record.name, turn.base, turn.session, back.cache
        self.load(chunk_io, name, back.read)
        if back.chunk_table is not None:
            made = back.chunk_table
            session.chunks = self._memory.chunk_table(name, lambda _: made)
        elif chunk_io.coded and base.bits and not back.how.computed:
            session.chunks = self.chunk_table(chunk_io, name)
            cache = chunk_io.behind(cache, session.chunks, len(base.bits))
        session.cache, session.weights_version = cache, chunk_io.runner.weights_version
        session.source = base.source or None
        session.tokens = list(base.tokens[: base.cached_tokens])
        if cache.states is not None:
            session.state_tokens = base.cached_tokens
            session.cache = dataclasses.replace(cache, length=np.int32(base.cached_tokens))  # pyright: ignore
        if back.fed is not None:
            session.tokens += turn.sequence[len(session.tokens) :][: back.how.fed_tokens]
            session.fed = back.fed

    def _new_tokens(self, turn: Turn, chunk_io: ChunkIO) -> NewTokens | None:
        """The tokens of a call behind the chunks of its context; None where they are not fed before these
        are restored."""
        base, sequence = turn.base, turn.sequence
        count = len(base.bits) * chunk_io.chunk_tokens
        if not self._overlap or len(sequence) <= count or tuple(sequence[:count]) != base.tokens[:count]:
            return None
        new = sequence[count:]
        if base.rows or max(new) >= chunk_io.runner.cfg.vocab_size:
            # Rows in place of tokens are fed by the prefill alone.
            return None
        chunks = chunk_io.runner.prefill_chunks(len(new))
        return NewTokens(tokens=new, chunks=chunks) if chunk_io.feeds(chunks[0]) else None

    def _resident(self, name: str, base: Record) -> dict[int, Resident]:
        return {n: each for n, each in self._memory.chunks(name).items() if n < len(base.bits)}

    def chunk_table(self, chunk_io: ChunkIO, name: str) -> ChunkTable:
        """The chunk table of a context, all of which are in memory (see `ChunkMemory`)."""

        def made(there: list[Resident]) -> ChunkTable:
            return chunk_io.chunk_table([(each.bits, each.blobs) for each in there])

        return self._memory.chunk_table(name, made)

    def load(self, chunk_io: ChunkIO, name: str, chunks: Mapping[int, Stored]) -> None:
        """Puts chunks of a context into memory.

        Raises:
          BudgetExceeded: one does not fit; those after it are left out.
        """
        delays = self._delays[chunk_io.runner.level]
        compute_ms = chunk_io.layers * delays.compute.per_unit_ms
        for chunk, (bits, blobs) in sorted(chunks.items()):
            read_ms = chunk_io.chunk_bytes(bits) * delays.read.per_unit_ms
            self._memory.load(name, chunk, bits, blobs, restore_ms=min(read_ms, compute_ms))


def cache_with_room(
    levels: Mapping[int, ChunkIO], runner: LevelRunner, spare: Session, tokens: int
) -> KVCache:
    """A cache with room for `tokens`: that of the context before, if its shape fits.

    Clearing new memory takes as long as decoding chunks into it.

    Args:
      levels: of the model.
      runner: of the level that is about to answer.
      spare: the session of the context before, which loses its cache.
      tokens: most tokens of the cache.
    """
    _, cache = spare.take()
    if cache is not None and spare.weights_version is not None:
        form = levels[spare.weights_version[0]].runner.model.bucket_level
        if form == runner.model.bucket_level and cache.capacity_tokens == runner.capacity_for(tokens):
            # Another context's keys and values are masked until they are overwritten.
            return cache
    # Frees the old cache before a new one is made.
    del cache
    return runner.start(tokens)


def alike(
    store: ContextStore, record: Record, tokens: Sequence[int], *, across_apps: bool
) -> tuple[Record | None, int]:
    """The context that has the longest beginning of some tokens in whole chunks, and how many these are; the
    chunk of the last token is left out.

    Args:
      store: of the contexts.
      record: of the context whose tokens they are.
      tokens: of it.
      across_apps: whether other apps' contexts count, too.
    """
    best, count = None, 0
    for each in store.records(None if across_apps else record.app):
        same = (each.origin, each.source) == (record.origin, record.source)
        if same and each.name != record.name:
            common = _common_chunks(each, tokens)
            if common > count:
                best, count = each, common
    return best, count


def shared_beginning(
    store: ContextStore, memory: ChunkMemory, record: Record, prompt: Sequence[int], *, across_apps: bool
) -> tuple[Record, str]:
    """Takes the beginning of a new context from another one, whose chunks are not computed then.

    Args:
      store: of the contexts.
      memory: gets the chunks that are in memory.
      record: of the new context, without tokens.
      prompt: its first.
      across_apps: see `alike`.

    Returns:
      The record with the beginning, and the name of the other one; the record as it is and "" where there is
      none.
    """
    best, count = alike(store, record, prompt, across_apps=across_apps)
    if best is None:
        return record, ""
    there = memory.chunks(best.name)
    if any(n not in there for n in range(count)):
        # They are read, so that they must be written.
        store.wait(best.name)
        best = store.record(best.name)
        count = min(count, _common_chunks(best, prompt))
    for n in range(count):
        if n in there and there[n].bits == best.bits[n]:
            memory.share(record.name, there[n])
    first = {field: getattr(best, field)[:count] for field in ("bits", "mass", "seen")}
    tokens = tuple(prompt[: count * record.origin.chunk_tokens])
    return dataclasses.replace(record, tokens=tokens, files=("",) * count, **first), best.name


def share_resident(store: ContextStore, memory: ChunkMemory, name: str, wanted: Iterable[int]) -> None:
    """Takes chunks of a context from others that have them in memory and the same segment on storage.

    Args:
      store: of the contexts.
      memory: of the chunks.
      name: of the context.
      wanted: numbers of the chunks.
    """
    record = store.record(name)
    missing = {n: record.checksums.get(record.files[n]) for n in wanted if n < len(record.files)}
    for other in memory.contexts():
        if other == name or not missing:
            continue
        with contextlib.suppress(JaxllmError):
            theirs = store.record(other)
            if not set(theirs.checksums.values()) & set(missing.values()):
                continue
            for n, each in memory.chunks(other).items():
                if missing.get(n) is None or n >= len(theirs.files):
                    continue
                stored = theirs.checksums.get(theirs.files[n]) == missing[n]
                if stored and each.bits == theirs.bits[n] == record.bits[n]:
                    memory.share(name, each)
                    del missing[n]


def _sourced(runner: LevelRunner, cache: KVCache, base: Record) -> KVCache:
    """A cache that has the keys and values of a context's source; as it is where there is none."""
    if not base.source:
        return cache
    with runner.lock:
        return runner.read_source(cache, base.source)


def _swapped(turn: Turn, chunk_io: ChunkIO, cache: KVCache, chunks: ChunkTable) -> Restoration:
    """Gives a call's session a context whose chunks are all in memory and in a chunk table, in place of the
    one that a cache was behind. Looks at no chunk, and dispatches nothing."""
    base, session = turn.base, turn.session
    session.source = base.source or None
    count = len(base.bits)
    session.chunks, session.cache = chunks, chunk_io.behind(cache, chunks, count)
    session.weights_version = chunk_io.runner.weights_version
    session.tokens = list(base.tokens[: count * chunk_io.chunk_tokens])
    return Restoration(resident=count)


def _behind_tokens(session: Session) -> int:
    """Tokens in the rows of a session's cache, behind its coded chunks."""
    return 0 if session.cache is None else len(session.tokens) - session.cache.coded_tokens


def _outgrown(chunk_io: ChunkIO, turn: Turn, there: Session) -> bool:
    """Whether a call does not go on with the cache of the last one in its context: too many tokens are in
    floats that are chunks by now, or the context has lost some that are chunks in front of the cache."""
    if not chunk_io.coded or there.cache is None:
        return False
    front = there.cache.coded_tokens
    kept = there.tokens[:front] == list(turn.base.tokens[:front])
    return _behind_tokens(there) > _TAIL_TOKENS or not kept


def _nothing(layer: int, chunks: Sequence[int]) -> list[np.ndarray]:
    """Reads nothing: every chunk is in memory or lost."""
    raise AssertionError(f"chunks {list(chunks)} of layer {layer} are not missing")


def _common_chunks(record: Record, prompt: Sequence[int]) -> int:
    """The first whole chunks that a context has of a prompt, its last token left out."""
    size = record.origin.chunk_tokens
    if record.state_tokens:
        # Its chunks are of no use without its states, which are of all its tokens.
        return 0
    kept = record.bits.index(LOST) if LOST in record.bits else len(record.bits)
    most = size * min(kept, (len(prompt) - 1) // size)
    if most == 0 or list(record.tokens[:size]) != list(prompt[:size]):
        return 0
    return common_prefix(record.tokens[:most], prompt[:most]) // size
