"""Restores a context: reads the next layer's chunks while this layer's are computed (LLMS, section 3.3).

Chunks in memory are decoded in place. A plan divides the missing ones into chunks to read and chunks to
recompute from their tokens, layer by layer, at their positions. The new prompt's tokens pass through each
layer as soon as it is restored. If neither is computed, one dispatch decodes all layers. The plan uses this
device's delays, which are measured when contexts are opened.

Chunks may also be shared with a context that has a common prefix. After a context's first call its folder
has links to the other's segments (`ContextStore.link`), and in memory both have the same blobs of equal
segments (`share_resident`); a chunk that one of them later stores at fewer bits is a new one. Chunks of
fewer bits would change the first answer; exact ones (`raw`) do not, and are also computed once: the new
context begins with the other's chunks in memory, with their attention (`borrow`).
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxllm.contexts.recompute import LOST, Restore, plan_restore
from jaxllm.errors import CheckpointError, JaxllmError
from jaxllm.serving.contexts.memory import ChunkMemory, Delays, LayerBlobs, Stored, Turn, require_sizes
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

# A layer and chunks to read -> their coming blobs.
Read = Callable[[int, Sequence[int]], concurrent.futures.Future[list[np.ndarray]]]
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


def restore(
    chunk_io: "ChunkIO",
    cache: "KVCache",
    tokens: Sequence[int],
    bits: Sequence[int],
    resident: Mapping[int, Stored],
    read: Read,
    *,
    delays: Delays | None,
    prefill: Sequence[PrefillChunk] = (),
) -> Restored:
    """Loads all whole chunks of a context into a cache. If answers attend to chunks in place, and nothing of
    the context is computed, they are only read.

    Args:
      chunk_io: `ChunkIO` of the context's level.
      cache: cache with room for them, and for fed tokens; donated.
      tokens: tokens of the context, at least those of all chunks; then of the prompt, if some are fed.
      bits: stored width of each chunk, or `LOST`.
      resident: chunks in memory, by number.
      read: begins to read the other chunks.
      delays: delays of this device; None recomputes only lost chunks.
      prefill: prefill chunks of the tokens after all whole chunks, of which the first is fed if chunks are
        read; empty to feed nothing.

    Raises:
      CheckpointError: a chunk on storage has changed. The cache is then lost.
    """
    missing = {chunk: width for chunk, width in enumerate(bits) if chunk not in resident}
    length = len(bits) * chunk_io.chunk_tokens
    new = tokens[length:][: prefill[0].tokens] if prefill else ()
    plan, later = _plan(chunk_io, missing, delays, prefill[:1], len(new))
    if later or not plan.read:
        # Later passes compute what new tokens attend to; without reads, one dispatch of all layers is faster.
        prefill, new = (), ()
    coming = [read(layer, plan.read) for layer in range(chunk_io.layers) if plan.read]
    ends: list[float] = []
    for each in coming:
        each.add_done_callback(lambda _: ends.append(time.perf_counter()))

    def arriving(layer: int) -> LayerBlobs:
        blobs = coming[layer].result() if coming else []
        return {chunk: (bits[chunk], blob) for chunk, blob in zip(plan.read, blobs, strict=True)}

    def with_resident(layer: int) -> LayerBlobs:
        current = {chunk: (width, blobs[layer]) for chunk, (width, blobs) in resident.items()}
        return {**current, **arriving(layer)}

    def arrived() -> Mapping[int, Stored]:
        layers = [each.result() for each in coming]
        return {chunk: (bits[chunk], [blobs[at] for blobs in layers]) for at, chunk in enumerate(plan.read)}

    def fill(layer: int) -> LayerBlobs:
        blobs = arriving(layer)
        sizes = [in_place[chunk][1][layer].size for chunk in blobs]
        require_sizes(layer, list(blobs), [blob.size for _, blob in blobs.values()], sizes)
        for chunk, (_, blob) in blobs.items():
            in_place[chunk][1][layer][:] = blob
        return {}

    chunk_table = fed = None
    in_place: Mapping[int, Stored] = {}
    try:
        load = with_resident
        if prefill and chunk_io.coded and not plan.computed:
            # Chunks are read into memory whose addresses are in a chunk table before they arrive.
            in_place = chunk_io.room({chunk: bits[chunk] for chunk in plan.read})
            load = fill
            chunk_table = chunk_io.chunk_table([each for _, each in sorted({**resident, **in_place}.items())])
            cache = chunk_io.behind(cache, chunk_table, len(bits))
        if plan.computed or prefill:
            cache, fed = _layer_pass(chunk_io, cache, tokens, plan, load, prefill, first=length)
        elif not chunk_io.coded:
            cache = chunk_io.load(cache, {**resident, **arrived()})
        for computed in later:
            further = dataclasses.replace(plan, computed=computed, bucket=chunk_io.bucket(len(computed)))
            cache, _ = _layer_pass(chunk_io, cache, tokens, further, lambda _: {})
        chunks = in_place or arrived()
    finally:
        for each in coming:
            each.cancel()
        concurrent.futures.wait(coming)
    cache, now = chunk_io.loaded(cache, length + len(new)), time.perf_counter()
    how = Restoration(
        resident=len(resident),
        read=plan.read,
        computed=tuple(sorted([*plan.computed, *(chunk for each in later for chunk in each)])),
        expected_ms=plan.expected_ms,
        fed_tokens=len(new),
        fed_ms=1000 * (now - max(ends, default=now)) if new else 0.0,
    )
    return Restored(cache, chunks, how, chunk_table, fed)


def _layer_pass(
    chunk_io: "ChunkIO",
    cache: "KVCache",
    tokens: Sequence[int],
    plan: Restore,
    arriving: Arriving,
    prefill: Sequence[PrefillChunk] = (),
    *,
    first: int = 0,
) -> "tuple[KVCache, Fed | None]":
    """Restores all layers of a donated cache: computes the chunks of the plan, and loads the others. Feeds
    the first prefill chunk of the tokens from `first` on. Returns the cache, and the fed chunk."""
    runner = chunk_io.runner
    at = chunk_io.positions(plan.computed, plan.bucket) if plan.computed else None
    # Another thread's answer must not evict the weights of layers meanwhile.
    with runner.lock:
        x = None if at is None else chunk_io.embed(tokens, at)
        of_new = row = None
        if prefill:
            new = tokens[first:][: prefill[0].tokens]
            ((ids, row),) = placed_chunks(new, [prefill[0].tokens], first)
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
        if of_new is None:
            return cache, None
        chunk, *rest = prefill
        logits = (
            runner.restored_logits(of_new, len(tokens[first:][: chunk.tokens]) - 1) if chunk.last else None
        )
    return cache, Fed(first=first, chunk=chunk, rest=tuple(rest), logits=logits)


def _plan(
    chunk_io: "ChunkIO",
    missing: Mapping[int, int],
    delays: Delays | None,
    fed: Sequence[PrefillChunk],
    fed_tokens: int,
) -> tuple[Restore, list[tuple[int, ...]]]:
    """The first pass, which reads and computes, and the chunks that each further pass computes."""
    lost = sorted(chunk for chunk, width in missing.items() if width == LOST)
    if not missing or not (lost or delays):
        return Restore(read=tuple(sorted(missing)), computed=(), bucket=0, expected_ms=0.0), []
    options = chunk_io.runner.options
    counts, most = options.recomputed_chunks, options.recomputed_chunks[-1]
    if len(lost) <= most and delays is not None:
        # The tokens that are fed cost as much as so many chunks.
        cost = fed_tokens if options.exact_chunks else sum(each.tokens for each in fed)
        plan = plan_restore(
            missing,
            {width: chunk_io.chunk_bytes(width) // chunk_io.layers for width in chunk_io.widths},
            read_delay=delays.read,
            compute_delay=delays.compute,
            buckets=counts,
            layers=chunk_io.layers,
            exact=options.exact_chunks,
            beside_ms=delays.compute.ms(-(-cost // chunk_io.chunk_tokens)),
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
        front = 0 if spare.cache is None else spare.cache.coded_tokens
        # The memory of a long tail, whose tokens are chunks by now, was committed as it filled: a new cache
        # has none.
        keep = not chunk_io.coded or spare.cache is None or len(spare.tokens) - front <= _TAIL_TOKENS
        # The context may have lost tokens that are chunks before the cache.
        if same and keep and spare.tokens[:front] == list(turn.base.tokens[:front]):
            session.tokens, session.cache = spare.take()
            session.state_tokens = spare.state_tokens
            session.weights_version, session.chunks = spare.weights_version, spare.chunks
            session.source = spare.source
            return Restoration(resident=len(turn.base.bits), cached=True)
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
        if chunk_io.coded:
            count = len(turn.base.bits)
            made = self._memory.made_chunk_table(name, count)
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
            stored = {n for n, bits in enumerate(base.bits) if bits != LOST}
            if self._options.share_beginnings and (away := stored - self._memory.chunks(name).keys()):
                self.share_resident(name, away)
            there = self._memory.chunks(name)
            resident = {n: (each.bits, each.blobs) for n, each in there.items() if n < len(base.bits)}
            wanted = stored - resident.keys()
            # Chunks with prompt embeddings must be read: they cannot be recomputed from tokens.
            computes = self._options.recompute and chunk_io.computes and not base.rows
            try:
                read = self._store.open(name, wanted).read if wanted else lambda layer, chunks: []
                prefill = self._prefill(turn, chunk_io)
                back = restore(
                    chunk_io,
                    cache,
                    turn.sequence if prefill else base.tokens,
                    base.bits,
                    resident,
                    functools.partial(self._pool.submit, read),
                    delays=self._delays[runner.level] if computes else None,
                    prefill=prefill,
                )
                break
            except CheckpointError:
                if attempt:
                    raise
                # Damaged chunks are lost, and for this call unreadable ones, too: both are recomputed.
                repaired = self._store.repair(name)
                turn.record = self._store.record(name)
                turn.base = base.lose({n for n, bits in enumerate(repaired.bits) if bits == LOST})
        else:
            raise AssertionError("either of two attempts returns or raises")
        cache = back.cache
        self.load(chunk_io, name, back.read)
        if (made := back.chunk_table) is not None:
            session.chunks = self._memory.chunk_table(name, lambda _: made)
        elif chunk_io.coded and base.bits and not back.how.computed:
            session.chunks = self.chunk_table(chunk_io, name)
            cache = chunk_io.behind(cache, session.chunks, len(base.bits))
        session.cache, session.weights_version = cache, runner.weights_version
        session.source = base.source or None
        session.tokens = list(base.tokens[: base.cached_tokens])
        if chunk_io.state_bytes:
            session.state_tokens = base.cached_tokens
            session.cache = chunk_io.loaded(cache, base.cached_tokens)
        if back.fed is not None:
            session.tokens += turn.sequence[len(session.tokens) :][: back.how.fed_tokens]
            session.fed = back.fed
        return back.how

    def _prefill(self, turn: Turn, chunk_io: "ChunkIO") -> Sequence[PrefillChunk]:
        """The prefill chunks of a call's tokens after the chunks of its context; empty if they are not fed
        during the restore."""
        base, sequence, runner = turn.base, turn.sequence, chunk_io.runner
        count = len(base.bits) * chunk_io.chunk_tokens
        new = sequence[count:]
        if not self._options.overlap_prompt or not new or tuple(sequence[:count]) != base.tokens[:count]:
            return ()
        if base.rows or max(new) >= runner.cfg.vocab_size:
            # Prompt embeddings are only fed by the prefill.
            return ()
        chunks = runner.prefill_chunks(len(new))
        return chunks if chunk_io.feeds(chunks[0]) else ()

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

    def alike(self, record: Record, tokens: Sequence[int]) -> tuple[Record | None, int]:
        """The context with the longest common prefix with `tokens` of a record's context in whole chunks,
        without the chunk of the last token, and the number of these chunks."""
        best, count = None, 0
        for each in self._store.records(None if self._options.share_across_apps else record.app):
            same = (each.origin, each.source) == (record.origin, record.source)
            if same and each.name != record.name and (common := _common_chunks(each, tokens)) > count:
                best, count = each, common
        return best, count

    def borrow(self, chunk_io: "ChunkIO", record: Record, prompt: Sequence[int]) -> Record:
        """Gives a new context the chunks of another one with the prefix of its first prompt (see `alike`), in
        memory, so that they are not computed. Returns the record with the prefix, up to the first chunk that
        cannot be read."""
        best, count = self.alike(record, prompt)
        if best is None:
            return record
        name, theirs = record.name, self._memory.chunks(best.name)
        missing = [n for n in range(count) if n not in theirs]
        for n in set(range(count)).difference(missing):
            self._memory.share(name, theirs[n])
        if missing:
            # They are read, so they must be written first.
            self._store.wait(best.name)
            best = self._store.record(best.name)
            count = min(count, _common_chunks(best, prompt))
            try:
                read = self._store.read_chunks(best.name, [n for n in missing if n < count])
                self.load(chunk_io, name, read)
            except CheckpointError:
                # Damaged chunks must not be linked after the call.
                self._store.repair(best.name)
        own = self._memory.chunks(name)
        count = next((n for n in range(count) if n not in own), count)
        self._memory.cut(name, count)
        first = {field: getattr(best, field)[:count] for field in ("bits", "mass", "seen")}
        tokens = tuple(prompt[: count * record.origin.chunk_tokens])
        return dataclasses.replace(record, tokens=tokens, files=("",) * count, **first)

    def share_resident(self, name: str, wanted: Iterable[int]) -> None:
        """Shares wanted chunks of a context with others that have them in memory and the same segment on
        storage."""
        record = self._store.record(name)
        missing = {n: record.checksums.get(record.files[n]) for n in wanted if n < len(record.files)}
        for other in self._memory.contexts():
            if other == name or not missing:
                continue
            with contextlib.suppress(JaxllmError):
                theirs = self._store.record(other)
                if not set(theirs.checksums.values()) & set(missing.values()):
                    continue
                for n, each in self._memory.chunks(other).items():
                    if missing.get(n) is None or n >= len(theirs.files):
                        continue
                    stored = theirs.checksums.get(theirs.files[n]) == missing[n]
                    if stored and each.bits == theirs.bits[n] == record.bits[n]:
                        self._memory.share(name, each)
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
