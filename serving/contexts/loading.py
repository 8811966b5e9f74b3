"""Loads the chunks of a context into a cache and into memory: read from storage, recomputed from tokens, or
shared with a context that has a common prefix.

Exact chunks (`raw`) are not recomputed: a new context with a common prefix uses the other's chunks, with
their attention. Chunks of fewer bits would change its answer: it computes its own, and shares those of
equal width after its first call. On storage its folder has links to the same segments
(`ContextStore.link`), and in memory both have the same blobs; a chunk that one of them later stores at
fewer bits is a new one.
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

# Two concurrent reads keep the device busy.
_READERS = 2
# Number of cached tokens after coded chunks beyond which a context's next call starts with an empty cache.
_TAIL_TOKENS = 256


class ChunkLoader:
    """Restores contexts at the beginning of a call, and repairs damage on storage.

    Args:
      store: store of the chunks.
      memory: memory for the chunks that were read.
      delays: delays of this device, by level.
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
        """Gives a call's session all whole chunks of its context, or the cache of the last ended call if that
        was in the same context.

        Args:
          levels: levels of the model.
          turn: the call.
          last: the context of the last ended call, and its session, which loses its cache.
          tokens: maximum number of tokens of the cache.
        """
        chunk_io, (name, there), session = levels[turn.base.origin.level], last, turn.session
        same = name == turn.record.name and there.weights_version == chunk_io.runner.weights_version
        same = same and turn.base.source == (there.source or ())
        # States beyond the tokens are useless; the stored ones may be usable.
        same = same and there.state_tokens in (None, len(there.tokens))
        if same and not _outgrown(chunk_io, turn, there):
            session.tokens, session.cache = there.take()
            session.state_tokens = there.state_tokens
            session.weights_version, session.chunks = there.weights_version, there.chunks
            session.source = there.source
            return Restoration(resident=len(turn.base.bits), cached=True)
        if chunk_io.coded and _behind_tokens(there) > _TAIL_TOKENS:
            # Its memory was committed as it filled: a new cache has none.
            there.take()
        cache = cache_with_room(levels, chunk_io.runner, there, tokens)
        return self.bring_back(turn, chunk_io, cache, tokens)

    def bring_back(self, turn: Turn, chunk_io: ChunkIO, cache: KVCache, tokens: int) -> Restoration:
        """Gives a call's session all whole chunks of its context.

        Args:
          turn: the call.
          chunk_io: `ChunkIO` of its level.
          cache: cache with room for `tokens`; donated.
          tokens: maximum number of tokens of the cache.

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
            # Recomputed chunks attend to the source.
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
                    # Chunks with prompt embeddings must be read: they cannot be recomputed from tokens.
                    delays=self._delays[runner.level] if self._recomputes(chunk_io, base) else None,
                    new=self._new_tokens(turn, chunk_io),
                )
            except CheckpointError:
                if attempt:
                    raise
                # Damaged chunks are lost, and for this call unreadable ones, too: both are recomputed.
                there = self._store.repair(source)
                turn.record = self._store.record(name)
                turn.base = base.lose({n for n, bits in enumerate(there.bits) if bits == LOST})
                continue
            self._take(turn, chunk_io, back)
            return back.how
        raise AssertionError("either of two attempts returns or raises")

    def _recomputes(self, chunk_io: ChunkIO, base: Record) -> bool:
        """Whether stored chunks may be recomputed instead."""
        return self._recompute and chunk_io.computes and not base.rows

    def _take(self, turn: Turn, chunk_io: ChunkIO, back: Restored) -> None:
        """Gives a restored context to a call's session, and the chunks that were read to memory."""
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
        """The tokens of a call after the chunks of its context; None if they are not fed during the
        restore."""
        base, sequence = turn.base, turn.sequence
        count = len(base.bits) * chunk_io.chunk_tokens
        if not self._overlap or len(sequence) <= count or tuple(sequence[:count]) != base.tokens[:count]:
            return None
        new = sequence[count:]
        if base.rows or max(new) >= chunk_io.runner.cfg.vocab_size:
            # Prompt embeddings are only fed by the prefill.
            return None
        chunks = chunk_io.runner.prefill_chunks(len(new))
        return NewTokens(tokens=new, chunks=chunks) if chunk_io.feeds(chunks[0]) else None

    def _resident(self, name: str, base: Record) -> dict[int, Resident]:
        return {n: each for n, each in self._memory.chunks(name).items() if n < len(base.bits)}

    def chunk_table(self, chunk_io: ChunkIO, name: str) -> ChunkTable:
        """The chunk table of a context whose chunks are all in memory (see `ChunkMemory`)."""

        def made(there: list[Resident]) -> ChunkTable:
            return chunk_io.chunk_table([(each.bits, each.blobs) for each in there])

        return self._memory.chunk_table(name, made)

    def load(self, chunk_io: ChunkIO, name: str, chunks: Mapping[int, Stored]) -> None:
        """Adds chunks of a context to memory.

        Raises:
          BudgetExceeded: one does not fit; later ones are left out.
        """
        delays = self._delays[chunk_io.runner.level]
        compute_ms = chunk_io.layers * delays.compute.per_unit_ms
        for chunk, (bits, blobs) in sorted(chunks.items()):
            read_ms = chunk_io.chunk_bytes(bits) * delays.read.per_unit_ms
            self._memory.load(name, chunk, bits, blobs, restore_ms=min(read_ms, compute_ms))


def cache_with_room(
    levels: Mapping[int, ChunkIO], runner: LevelRunner, spare: Session, tokens: int
) -> KVCache:
    """A cache with room for `tokens`: that of the previous context, if its shape fits.

    Clearing new memory costs as much as decoding chunks into it.

    Args:
      levels: levels of the model.
      runner: runner of the level that answers next.
      spare: session of the previous context, which loses its cache.
      tokens: maximum number of tokens of the cache.
    """
    _, cache = spare.take()
    if cache is not None and spare.weights_version is not None:
        form = levels[spare.weights_version[0]].runner.model.bucket_level
        if form == runner.model.bucket_level and cache.capacity_tokens == runner.capacity_for(tokens):
            # Another context's keys and values are masked until they are overwritten.
            return cache
    # Free the old cache before making a new one.
    del cache
    return runner.start(tokens)


def alike(
    store: ContextStore, record: Record, tokens: Sequence[int], *, across_apps: bool
) -> tuple[Record | None, int]:
    """The context with the longest common prefix with some tokens in whole chunks, and the number of these
    chunks; the chunk of the last token is left out.

    Args:
      store: store of the contexts.
      record: record of the context of the tokens.
      tokens: tokens of the context.
      across_apps: whether to include other apps' contexts.
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
    """Shares the prefix of another context with a new one, so that its chunks are not computed.

    Args:
      store: store of the contexts.
      memory: memory for the chunks that are resident.
      record: record of the new context, without tokens.
      prompt: its first prompt.
      across_apps: see `alike`.

    Returns:
      The record with the prefix, and the name of the other context; the unchanged record and "" if there is
      none.
    """
    best, count = alike(store, record, prompt, across_apps=across_apps)
    if best is None:
        return record, ""
    there = memory.chunks(best.name)
    if any(n not in there for n in range(count)):
        # They are read, so they must be written first.
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
    """Shares chunks of a context with others that have them in memory and the same segment on storage.

    Args:
      store: store of the contexts.
      memory: memory of the chunks.
      name: name of the context.
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
    """The cache with the keys and values of a context's source; unchanged without one."""
    if not base.source:
        return cache
    with runner.lock:
        return runner.read_source(cache, base.source)


def _swapped(turn: Turn, chunk_io: ChunkIO, cache: KVCache, chunks: ChunkTable) -> Restoration:
    """Gives a call's session a context whose chunks are all in memory and in a chunk table, in place of the
    one that a cache belonged to. Accesses no chunk, and dispatches nothing."""
    base, session = turn.base, turn.session
    session.source = base.source or None
    count = len(base.bits)
    session.chunks, session.cache = chunks, chunk_io.behind(cache, chunks, count)
    session.weights_version = chunk_io.runner.weights_version
    session.tokens = list(base.tokens[: count * chunk_io.chunk_tokens])
    return Restoration(resident=count)


def _behind_tokens(session: Session) -> int:
    """Number of tokens in a session's cache after its coded chunks."""
    return 0 if session.cache is None else len(session.tokens) - session.cache.coded_tokens


def _outgrown(chunk_io: ChunkIO, turn: Turn, there: Session) -> bool:
    """Whether a call cannot continue the cache of the last one in its context: too many of its tokens are in
    floats that are chunks by now, or the context has lost tokens that are chunks before the cache."""
    if not chunk_io.coded or there.cache is None:
        return False
    front = there.cache.coded_tokens
    kept = there.tokens[:front] == list(turn.base.tokens[:front])
    return _behind_tokens(there) > _TAIL_TOKENS or not kept


def _nothing(layer: int, chunks: Sequence[int]) -> list[np.ndarray]:
    """Reads nothing: every chunk is in memory or lost."""
    raise AssertionError(f"chunks {list(chunks)} of layer {layer} are not missing")


def _common_chunks(record: Record, prompt: Sequence[int]) -> int:
    """The number of whole chunks in the common prefix of a context and a prompt without its last token."""
    size = record.origin.chunk_tokens
    if record.state_tokens:
        # Its chunks are unusable without its states, which cover all its tokens.
        return 0
    kept = record.bits.index(LOST) if LOST in record.bits else len(record.bits)
    most = size * min(kept, (len(prompt) - 1) // size)
    if most == 0 or list(record.tokens[:size]) != list(prompt[:size]):
        return 0
    return common_prefix(record.tokens[:most], prompt[:most]) // size
