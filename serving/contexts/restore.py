"""Restores a context: reads the next layer's chunks while this layer's are computed (LLMS, section 3.3).

Chunks in memory are decoded in place. A plan divides the missing ones into chunks to read and chunks to
recompute from their tokens, layer by layer, at their positions. The new prompt's tokens pass through each
layer as soon as it is restored. If neither is computed, one dispatch decodes all layers. The plan uses this
device's delays, which are measured when contexts are opened.

Chunks may also be shared with a context that has a common prefix. Exact chunks (`raw`) are not recomputed: a
new context uses the other's chunks, with their attention. Chunks of fewer bits would change its answer: it
computes its own, and shares those of equal width after its first call. On storage its folder has links to
the same segments (`ContextStore.link`), and in memory both have the same blobs; a chunk that one of them
later stores at fewer bits is a new one.
"""

import concurrent.futures
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxllm.contexts.eviction import Resident
from jaxllm.contexts.recompute import LOST, Restore, plan_restore
from jaxllm.errors import CheckpointError, JaxllmError
from jaxllm.serving.contexts.chunks import Delays, LayerBlobs, require_sizes
from jaxllm.serving.contexts.memory import ChunkMemory, Stored, Turn
from jaxllm.serving.contexts.options import ContextOptions
from jaxllm.serving.contexts.record import Record
from jaxllm.serving.contexts.store import ContextStore
from jaxllm.serving.engine.request import Fed, Session, common_prefix
from jaxllm.serving.ground.plan import Restoration
from jaxllm.serving.runners.runner import PrefillChunk, placed_chunks

if TYPE_CHECKING:
    # Devices that only run exported programs have no JAX.
    from jaxllm.kernels.native import ChunkTable
    from jaxllm.kv.cache import KVCache
    from jaxllm.serving.contexts.chunk_io import ChunkIO
    from jaxllm.serving.runners.level_runner import LevelRunner

# A layer and chunks to read -> their blobs. Called in reader threads.
Read = Callable[[int, Sequence[int]], list[np.ndarray]]
# A layer -> its chunks to load. Called once per layer, in order; may wait for storage.
Arriving = Callable[[int], LayerBlobs]
# Two concurrent reads keep the device busy.
_READERS = 2
# Number of cached tokens after coded chunks beyond which a context's next call starts with an empty cache.
_TAIL_TOKENS = 256


@dataclasses.dataclass(frozen=True)
class Restored:
    """A restored context: its cache, whose length includes the chunks and the tokens that were fed; the
    chunks that were read; the chunk table that the cache attends to, if it was made before they were read;
    and the first chunk of the call's prompt, if it was fed."""

    cache: "KVCache"
    read: Mapping[int, Stored]
    how: Restoration
    chunk_table: "ChunkTable | None" = None
    fed: Fed | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class NewTokens:
    """All tokens of a call after the whole chunks of its context, and their prefill chunks, of which a pass
    feeds the first."""

    tokens: Sequence[int]
    chunks: Sequence[PrefillChunk]

    @property
    def fed(self) -> Sequence[int]:
        """Tokens of the first chunk."""
        return self.tokens[: self.chunks[0].tokens]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredChunks:
    """The whole chunks of a context.

    Attributes:
      tokens: tokens of the context, at least those of all chunks.
      bits: stored width of each chunk, or `LOST`.
      resident: chunks in memory, by number.
      read: reads the other chunks, in threads of `pool`.
      pool: reader threads.
    """

    tokens: Sequence[int]
    bits: Sequence[int]
    resident: Mapping[int, Stored]
    read: Read
    pool: concurrent.futures.Executor


def restore(
    chunk_io: "ChunkIO",
    cache: "KVCache",
    stored: StoredChunks,
    *,
    delays: Delays | None,
    new: NewTokens | None = None,
) -> Restored:
    """Loads all whole chunks of a context into a cache. If answers attend to chunks in place, and nothing of
    the context is computed, they are only read.

    Args:
      chunk_io: `ChunkIO` of the context's level.
      cache: cache with room for them, and for fed tokens; donated.
      stored: the chunks.
      delays: delays of this device; None recomputes only lost chunks.
      new: tokens of the call, of which the first chunk is fed if chunks are read; None feeds nothing.

    Raises:
      CheckpointError: a chunk on storage has changed. The cache is then lost.
    """
    bits, resident = stored.bits, stored.resident
    missing = {chunk: width for chunk, width in enumerate(bits) if chunk not in resident}
    plan, later = _plan(chunk_io, missing, delays, new)
    if later or not plan.read:
        # Later passes compute what new tokens attend to; without reads, one dispatch of all layers is faster.
        new = None
    ends: list[float] = []

    def timed(layer: int) -> list[np.ndarray]:
        blobs = stored.read(layer, plan.read)
        ends.append(time.perf_counter())
        return blobs

    coming = [stored.pool.submit(timed, layer) for layer in range(chunk_io.layers) if plan.read]

    def arriving(layer: int) -> LayerBlobs:
        blobs = coming[layer].result() if coming else []
        return {chunk: (bits[chunk], blob) for chunk, blob in zip(plan.read, blobs, strict=True)}

    def with_resident(layer: int) -> LayerBlobs:
        current = {chunk: (width, blobs[layer]) for chunk, (width, blobs) in resident.items()}
        return {**current, **arriving(layer)}

    def arrived() -> Mapping[int, Stored]:
        layers = [each.result() for each in coming]
        return {chunk: (bits[chunk], [blobs[at] for blobs in layers]) for at, chunk in enumerate(plan.read)}

    length, chunk_table, fed = len(bits) * chunk_io.chunk_tokens, None, None
    in_place: Mapping[int, Stored] = {}
    try:
        load = with_resident
        if new is not None and chunk_io.coded and not plan.computed:
            # Chunks are read into memory whose addresses are in a chunk table before they arrive.
            in_place = chunk_io.room({chunk: bits[chunk] for chunk in plan.read})
            load = filling(in_place, arriving)
            chunk_table = chunk_io.chunk_table([each for _, each in sorted({**resident, **in_place}.items())])
            cache = chunk_io.behind(cache, chunk_table, len(bits))
        if plan.computed or new is not None:
            cache, fed = _layer_pass(chunk_io, cache, stored.tokens, plan, load, new, first=length)
        elif not chunk_io.coded:
            cache = chunk_io.load(cache, {**resident, **arrived()})
        for computed in later:
            further = dataclasses.replace(plan, computed=computed, bucket=chunk_io.bucket(len(computed)))
            cache, _ = _layer_pass(chunk_io, cache, stored.tokens, further, lambda _: {})
        chunks = in_place or arrived()
    finally:
        for each in coming:
            each.cancel()
        concurrent.futures.wait(coming)
    count = 0 if new is None else len(new.fed)
    cache = chunk_io.loaded(cache, length + count)
    how = Restoration(
        resident=len(resident),
        read=plan.read,
        computed=tuple(sorted([*plan.computed, *(chunk for each in later for chunk in each)])),
        expected_ms=plan.expected_ms,
        fed_tokens=count,
        fed_ms=1000 * (time.perf_counter() - max(ends)) if count else 0.0,
    )
    return Restored(cache, chunks, how, chunk_table, fed)


def filling(chunks: Mapping[int, Stored], arriving: Arriving) -> Arriving:
    """Copies each layer's blobs into the memory of chunks as they arrive; nothing is left to load. The
    function raises CheckpointError if a blob's size does not fit its width."""

    def fill(layer: int) -> LayerBlobs:
        blobs = arriving(layer)
        sizes = [chunks[chunk][1][layer].size for chunk in blobs]
        require_sizes(layer, list(blobs), [blob.size for _, blob in blobs.values()], sizes)
        for chunk, (_, blob) in blobs.items():
            chunks[chunk][1][layer][:] = blob
        return {}

    return fill


def _layer_pass(
    chunk_io: "ChunkIO",
    cache: "KVCache",
    tokens: Sequence[int],
    plan: Restore,
    arriving: Arriving,
    new: NewTokens | None = None,
    *,
    first: int = 0,
) -> "tuple[KVCache, Fed | None]":
    """Restores all layers of a donated cache: computes the chunks of the plan, and loads the others. Feeds
    new tokens, of which the first is at position `first`. Returns the cache, and the fed chunk."""
    runner = chunk_io.runner
    at = chunk_io.positions(plan.computed, plan.bucket) if plan.computed else None
    # Another thread's answer must not evict the weights of layers meanwhile.
    with runner.lock:
        x = None if at is None else chunk_io.embed(tokens, at)
        of_new = row = None
        if new is not None:
            ((ids, row),) = placed_chunks(new.fed, [new.chunks[0].tokens], first)
            of_new = runner.begin_layers(ids, row)
        try:
            for layer in range(chunk_io.layers):
                blobs = arriving(layer)
                if x is not None and at is not None:
                    x, cache = chunk_io.restore_layer(layer, x, at, cache, blobs)
                    blobs = {}
                if of_new is not None and row is not None:
                    of_new, cache = chunk_io.prefill_layer(layer, of_new, row, cache, blobs)
        except BaseException:
            import jax

            # Dispatched buckets still read blobs in place, which are freed after this call.
            with contextlib.suppress(Exception):
                jax.block_until_ready((x, of_new))
            raise
        if new is None or of_new is None:
            return cache, None
        chunk = new.chunks[0]
        logits = runner.restored_logits(of_new, len(new.fed) - 1) if chunk.last else None
    return cache, Fed(first=first, chunk=chunk, rest=tuple(new.chunks[1:]), logits=logits)


def _plan(
    chunk_io: "ChunkIO", missing: Mapping[int, int], delays: Delays | None, new: NewTokens | None
) -> tuple[Restore, list[tuple[int, ...]]]:
    """The first pass, which reads and computes, and the chunks that each further pass computes."""
    lost = sorted(chunk for chunk, width in missing.items() if width == LOST)
    if not missing or not (lost or delays):
        return Restore(read=tuple(sorted(missing)), computed=(), bucket=0, expected_ms=0.0), []
    options = chunk_io.runner.options
    counts, most = options.recomputed_chunks, options.recomputed_chunks[-1]
    if len(lost) <= most and delays is not None:
        # The tokens that are fed cost as much as so many chunks.
        fed = 0 if new is None else len(new.fed) if options.exact_chunks else new.chunks[0].tokens
        plan = plan_restore(
            missing,
            {width: chunk_io.chunk_bytes(width) // chunk_io.layers for width in chunk_io.widths},
            read_delay=delays.read,
            compute_delay=delays.compute,
            buckets=counts,
            layers=chunk_io.layers,
            exact=options.exact_chunks,
            beside_ms=delays.compute.ms(-(-fed // chunk_io.chunk_tokens)),
        )
        return plan, []
    # More than fit the largest bucket: several passes, earlier chunks first, because later ones attend to
    # them. All stored chunks are there from the first pass on.
    first, *later = [tuple(lost[i : i + most]) for i in range(0, len(lost), most)]
    read, bucket = tuple(sorted(set(missing) - set(lost))), chunk_io.bucket(len(first))
    return Restore(read=read, computed=first, bucket=bucket, expected_ms=0.0), later


class ChunkLoader:
    """Restores contexts at the beginning of a call, and repairs damage on storage. `delays` are this
    device's, by level."""

    def __init__(
        self, store: ContextStore, memory: ChunkMemory, delays: Mapping[int, Delays], options: ContextOptions
    ) -> None:
        self._store, self._memory, self._delays, self._options = store, memory, delays, options
        self._pool = concurrent.futures.ThreadPoolExecutor(_READERS)

    def close(self, *, wait: bool = True) -> None:
        """Ends its threads."""
        self._pool.shutdown(wait=wait)

    def resume(
        self, levels: "Mapping[int, ChunkIO]", turn: Turn, last: tuple[str, Session], tokens: int
    ) -> Restoration:
        """Gives a call's session all whole chunks of its context, or the cache of the last ended call if that
        was in the same context: `last` is its name and session, which loses its cache. `tokens` is the
        maximum number of tokens of the cache.

        Raises:
          CheckpointError: chunks can neither be read nor recorded as lost.
        """
        chunk_io, (name, spare), session = levels[turn.base.origin.level], last, turn.session
        runner = chunk_io.runner
        same = name == turn.record.name and spare.weights_version == runner.weights_version
        same = same and turn.base.source == (spare.source or ())
        # States beyond the tokens are useless; the stored ones may be usable.
        same = same and spare.state_tokens in (None, len(spare.tokens))
        if same and not _outgrown(chunk_io, turn, spare):
            session.tokens, session.cache = spare.take()
            session.state_tokens = spare.state_tokens
            session.weights_version, session.chunks = spare.weights_version, spare.chunks
            session.source = spare.source
            return Restoration(resident=len(turn.base.bits), cached=True)
        # The memory of a long tail was committed as it filled: a new cache has none.
        keep = not (chunk_io.coded and _tail_tokens(spare) > _TAIL_TOKENS)
        _, cache = spare.take()
        if cache is not None and spare.weights_version is not None:
            form = levels[spare.weights_version[0]].runner.model.bucket_level
            keep = keep and cache.capacity_tokens == runner.capacity_for(tokens)
            if keep and form == runner.model.bucket_level:
                # Clearing new memory costs as much as decoding chunks into it. Another context's keys and
                # values are masked until they are overwritten.
                return self._bring_back(turn, chunk_io, cache, tokens)
        # Free the old cache before making a new one.
        del cache
        return self._bring_back(turn, chunk_io, chunk_io.start(tokens), tokens)

    def _bring_back(self, turn: Turn, chunk_io: "ChunkIO", cache: "KVCache", tokens: int) -> Restoration:
        """Gives a call's session all whole chunks of its context, in a donated cache with room for
        `tokens`."""
        name, runner, session = turn.record.name, chunk_io.runner, turn.session
        source = turn.source or name
        if chunk_io.coded:
            count = len(turn.base.bits)
            made = None if turn.source else self._memory.made_chunk_table(name, count)
            if made is not None:
                # All chunks are in memory and in a chunk table: accesses none, and dispatches nothing.
                cache = _with_source(runner, cache, turn.base)
                session.chunks, session.cache = made, chunk_io.behind(cache, made, count)
                session.weights_version, session.source = runner.weights_version, turn.base.source or None
                session.tokens = list(turn.base.tokens[: count * chunk_io.chunk_tokens])
                return Restoration(resident=count)
            cache = chunk_io.behind(cache, None, 0)
        for attempt in range(2):
            base = turn.base = turn.base.restorable(runner.cfg.vocab_size, computes=chunk_io.computes)
            # Recomputed chunks attend to the source.
            cache = _with_source(runner, chunk_io.start(tokens) if attempt else cache, base)
            resident = self._resident(name, base)
            wanted = {n for n, bits in enumerate(base.bits) if bits != LOST} - set(resident)
            if wanted and self._options.share_beginnings and not turn.source:
                _share_resident(self._store, self._memory, name, wanted)
                resident = self._resident(name, base)
                wanted -= set(resident)
            # Chunks with prompt embeddings must be read: they cannot be recomputed from tokens.
            computes = self._options.recompute and chunk_io.computes and not base.rows
            try:
                stored = StoredChunks(
                    tokens=base.tokens,
                    bits=base.bits,
                    resident={chunk: (each.bits, each.blobs) for chunk, each in resident.items()},
                    read=self._store.open(source, wanted).read if wanted else lambda *_: [],
                    pool=self._pool,
                )
                delays, new = (
                    self._delays[runner.level] if computes else None,
                    self._new_tokens(turn, chunk_io),
                )
                back = restore(chunk_io, cache, stored, delays=delays, new=new)
            except CheckpointError:
                if attempt:
                    raise
                # Damaged chunks are lost, and for this call unreadable ones, too: both are recomputed.
                repaired = self._store.repair(source)
                turn.record = self._store.record(name)
                turn.base = base.lose({n for n, bits in enumerate(repaired.bits) if bits == LOST})
                continue
            self._take(turn, chunk_io, back)
            return back.how
        raise AssertionError("either of two attempts returns or raises")

    def _take(self, turn: Turn, chunk_io: "ChunkIO", back: Restored) -> None:
        """Gives a restored context to a call's session, and the chunks that were read to memory."""
        name, base, session, cache = turn.record.name, turn.base, turn.session, back.cache
        self.load(chunk_io, name, back.read)
        if (made := back.chunk_table) is not None:
            session.chunks = self._memory.chunk_table(name, lambda _: made)
        elif chunk_io.coded and base.bits and not back.how.computed:
            session.chunks = self.chunk_table(chunk_io, name)
            cache = chunk_io.behind(cache, session.chunks, len(base.bits))
        session.cache, session.weights_version = cache, chunk_io.runner.weights_version
        session.source = base.source or None
        session.tokens = list(base.tokens[: base.cached_tokens])
        if chunk_io.state_bytes:
            session.state_tokens = base.cached_tokens
            session.cache = chunk_io.loaded(cache, base.cached_tokens)
        if back.fed is not None:
            session.tokens += turn.sequence[len(session.tokens) :][: back.how.fed_tokens]
            session.fed = back.fed

    def _new_tokens(self, turn: Turn, chunk_io: "ChunkIO") -> NewTokens | None:
        """The tokens of a call after the chunks of its context; None if they are not fed during the
        restore."""
        base, sequence, runner = turn.base, turn.sequence, chunk_io.runner
        count = len(base.bits) * chunk_io.chunk_tokens
        new = sequence[count:]
        if not self._options.overlap_prompt or not new or tuple(sequence[:count]) != base.tokens[:count]:
            return None
        if base.rows or max(new) >= runner.cfg.vocab_size:
            # Prompt embeddings are only fed by the prefill.
            return None
        chunks = runner.prefill_chunks(len(new))
        return NewTokens(tokens=new, chunks=chunks) if chunk_io.feeds(chunks[0]) else None

    def _resident(self, name: str, base: Record) -> dict[int, Resident]:
        return {n: each for n, each in self._memory.chunks(name).items() if n < len(base.bits)}

    def chunk_table(self, chunk_io: "ChunkIO", name: str) -> "ChunkTable":
        """The chunk table of a context whose chunks are all in memory (see `ChunkMemory`)."""
        return self._memory.chunk_table(
            name, lambda chunks: chunk_io.chunk_table([(each.bits, each.blobs) for each in chunks])
        )

    def load(self, chunk_io: "ChunkIO", name: str, chunks: Mapping[int, Stored]) -> None:
        """Adds chunks of a context to memory.

        Raises:
          BudgetExceeded: one does not fit; later ones are left out.
        """
        delays = self._delays[chunk_io.runner.level]
        compute_ms = chunk_io.layers * delays.compute.per_unit_ms
        for chunk, (bits, blobs) in sorted(chunks.items()):
            read_ms = chunk_io.chunk_bytes(bits) * delays.read.per_unit_ms
            self._memory.load(name, chunk, bits, blobs, restore_ms=min(read_ms, compute_ms))


def alike(
    store: ContextStore, record: Record, tokens: Sequence[int], *, across_apps: bool
) -> tuple[Record | None, int]:
    """The context with the longest common prefix with `tokens` of a record's context in whole chunks, without
    the chunk of the last token, and the number of these chunks; `across_apps` includes other apps'."""
    best, count = None, 0
    for each in store.records(None if across_apps else record.app):
        same = (each.origin, each.source) == (record.origin, record.source)
        if same and each.name != record.name and (common := _common_chunks(each, tokens)) > count:
            best, count = each, common
    return best, count


def shared_beginning(
    store: ContextStore, memory: ChunkMemory, record: Record, prompt: Sequence[int], *, across_apps: bool
) -> tuple[Record, str]:
    """Shares the prefix of another context (see `alike`) with a new one and its first prompt, so that its
    chunks are not computed. Returns the record with the prefix, and the name of the other context; the
    unchanged record and "" if there is none."""
    best, count = alike(store, record, prompt, across_apps=across_apps)
    if best is None:
        return record, ""
    chunks = memory.chunks(best.name)
    if any(n not in chunks for n in range(count)):
        # They are read, so they must be written first.
        store.wait(best.name)
        best = store.record(best.name)
        count = min(count, _common_chunks(best, prompt))
    for n in range(count):
        if n in chunks and chunks[n].bits == best.bits[n]:
            memory.share(record.name, chunks[n])
    first = {field: getattr(best, field)[:count] for field in ("bits", "mass", "seen")}
    tokens = tuple(prompt[: count * record.origin.chunk_tokens])
    return dataclasses.replace(record, tokens=tokens, files=("",) * count, **first), best.name


def _share_resident(store: ContextStore, memory: ChunkMemory, name: str, wanted: Iterable[int]) -> None:
    """Shares wanted chunks of a context with others that have them in memory and the same segment on
    storage."""
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


def _with_source(runner: "LevelRunner", cache: "KVCache", base: Record) -> "KVCache":
    """The cache with the keys and values of a context's source; unchanged without one."""
    if not base.source:
        return cache
    with runner.lock:
        return runner.read_source(cache, base.source)


def _tail_tokens(session: Session) -> int:
    """Number of tokens in a session's cache after its coded chunks."""
    return 0 if session.cache is None else len(session.tokens) - session.cache.coded_tokens


def _outgrown(chunk_io: "ChunkIO", turn: Turn, spare: Session) -> bool:
    """Whether a call cannot continue the cache of the last one in its context: too many of its tokens are in
    floats that are chunks by now, or the context has lost tokens that are chunks before the cache."""
    if not chunk_io.coded or spare.cache is None:
        return False
    front = spare.cache.coded_tokens
    kept = spare.tokens[:front] == list(turn.base.tokens[:front])
    return _tail_tokens(spare) > _TAIL_TOKENS or not kept
