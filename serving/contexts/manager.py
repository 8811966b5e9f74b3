"""The life of contexts: they are made, come back for a call, are stored when it ends, and go.

    begin     Claim, then Fault: what of the context is not in memory is read or computed (`restore`)
    finish    new chunks are compressed by how much they were attended to, written ahead of time, and loaded
    delete    memory and storage forget

What leaves memory in between is `ChunkMemory`'s business: nothing needs to be written by then. The cache of
the context that ran last stays as it is until another one runs. Options make of this the systems that it is
compared with: those that write when chunks leave, or never, or that compute nothing that can be read.
"""

import concurrent.futures
import contextlib
import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxllm.errors import BudgetExceeded, CheckpointError, ConfigError, ContextGone
from jaxllm.kv.cache import KVCache
from jaxllm.kv.recompute import LOST
from serving.contexts.blobs import Stored
from serving.contexts.delays import Delays, measure_computing, measure_reading
from serving.contexts.eviction import Resident, find_policy
from serving.contexts.graphs import ContextGraphs
from serving.contexts.growth import grown, most_bytes, sinking
from serving.contexts.memory import ChunkMemory
from serving.contexts.options import ContextOptions
from serving.contexts.record import Origin, Record
from serving.contexts.restore import Restoration, restore
from serving.contexts.store import ContextStore
from serving.engine import Engine
from serving.generation import Session
from serving.graph_table import GraphTable
from serving.sliding import kept_tokens, slid

# A device that is asked for two things at a time is not idle in between.
_READERS = 2


class Contexts:
    """The contexts of all apps. Not thread-safe: one call at a time.

    Attributes:
      engine: answers.
      options: of the contexts.
      store: what is on storage.
      memory: what is in memory.
    """

    def __init__(self, engine: Engine, options: ContextOptions) -> None:
        """Opens the store and times this device.

        Args:
          engine: warmed up.
          options: of the contexts.

        Raises:
          ConfigError: the engine was opened without a codec, or the store is in use or cannot be made.
        """
        if not engine.options.kv_codec:
            raise ConfigError("this engine keeps no contexts; open it with EngineOptions(kv_codec=...)")
        self.engine, self.options = engine, options
        self.memory = ChunkMemory(options.budget_bytes, find_policy(options.policy), self._left)
        self.store = ContextStore(
            Path(options.folder),
            storage=options.storage,
            quota_bytes=options.quota_bytes,
            app_quota_bytes=options.app_quota_bytes,
        )
        self._running = ""
        # The context that answers as it will go on, where it has forgotten its middle meanwhile.
        self._slid: Record | None = None
        # Whose cache is still there, and the cache.
        self._last: tuple[str, Session] = ("", Session())
        self._pool = concurrent.futures.ThreadPoolExecutor(_READERS)
        try:
            tables = [engine.table.at(level) for level in engine.table.levels]
            self._graphs = {table.level: ContextGraphs(table) for table in tables}
            reading = measure_reading(self.store.root, options.storage)
            self._delays: dict[int, Delays] = {}
            for level, graphs in self._graphs.items():
                graphs.rehearse()
                self._delays[level] = Delays(reading=reading, computing=measure_computing(graphs))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Lets another process have the store."""
        self._pool.shutdown()
        self.store.close()

    def create(self, app: str, *, level: int | None = None, pinned: bool = False) -> Record:
        """A new, empty context.

        Args:
          app: whose it is.
          level: the sub-model that answers in it, in percent; None for the engine's own.
          pinned: its chunks never leave memory for those of another context.

        Raises:
          ConfigError: the level is not served, or the app has no name, or too long a one.
          BudgetExceeded: the app may own no more contexts, or there is no room.
        """
        level = self.engine.table.level if level is None else level
        most, there = self.options.contexts_per_app, len(self.store.records(app))
        if most and there >= most:
            raise BudgetExceeded(f"{app} owns {there} contexts of at most {most}; delete one first")
        return self.store.create(app, self._origin(level), pinned=pinned)

    def record(self, app: str, name: str) -> Record:
        """An app's context.

        Raises:
          ContextGone: there is none of this name, or it is of another app, model, level, codec or adapter.
        """
        record = self.store.record(name)
        if record.app != app:
            # Not a word about whose it is.
            raise ContextGone(f"{app!r:.80} has no context {name!r:.80}; it was deleted, or never made")
        if record.origin.level not in self.engine.table.levels:
            raise ContextGone(
                f"the context {name} is of level {record.origin.level}, which is not served; open the engine "
                "for it, or delete the context"
            )
        record.origin.require(self._origin(record.origin.level), name)
        return record

    def pin(self, name: str, pinned: bool) -> Record:
        """Keeps a context's chunks in memory once they are there, or lets them leave.

        Raises:
          ContextGone: there is no such context.
        """
        record = self.store.commit(dataclasses.replace(self.store.record(name), pinned=pinned))
        self.memory.pin(name, pinned)
        return record

    def slide(self, app: str, name: str, room_tokens: int) -> Record:
        """Forgets the middle of a context that has more than `room_tokens` tokens.

        Its first chunk stays, and its newest tokens, which are computed again where they stand then (see
        `serving.sliding`).

        Raises:
          ContextGone: see `record`.
          ConfigError: it is answering.
        """
        record, size = self.record(app, name), self.engine.options.kv_chunk_tokens
        if len(record.tokens) <= room_tokens:
            return record
        self._require_quiet(name)
        most = min(room_tokens, kept_tokens(self.engine.options.context_tokens))
        tokens = slid(record.tokens, sink_tokens=size, most=most)
        first = {field: getattr(record, field)[:1] for field in ("bits", "mass", "seen")}
        record = self.store.commit(dataclasses.replace(record, tokens=tuple(tokens), **first))
        self.memory.cut(name, 1)
        self._forget_cache(name)
        return record

    def leaving(self, name: str, session: Session, first: int) -> None:
        """Notes that the context that answers is about to forget its middle: of its chunks the first one
        stays, with the attention that it got, and what follows will be others.

        Storage and memory are as they were until `finish`.

        Args:
          name: of the context.
          session: its cache, and the tokens that this holds; what was attended to is counted anew from here.
          first: the position of the first token that the call fed.
        """
        before = self._slid or self.store.record(name)
        cache, graphs = session.cache, self._graphs[before.origin.level]
        assert cache is not None
        first = graphs.chunk_tokens if self._slid else first
        mass = np.asarray(cache.mass)[0]
        self._slid = sinking(before, graphs, mass=mass, first=first, held=len(session.tokens))
        session.cache = cache.uncounted()

    def delete(self, name: str) -> None:
        """Forgets a context.

        Raises:
          ContextGone: there is no such context.
          ConfigError: it is answering.
        """
        self._require_quiet(name)
        self.store.delete(name)
        self.memory.forget(name)
        self._forget_cache(name)

    def begin(
        self, app: str, name: str, session: Session, *, prompt_tokens: int, most_tokens: int
    ) -> Restoration:
        """Brings a context back for a call, and locks it.

        Args:
          app, name: of the context.
          session: gets its tokens and cache: those of all whole chunks, or all where it ran last.
          prompt_tokens: of the context and what is said now, together.
          most_tokens: that the context may have when the call ends.

        Raises:
          ContextGone: see `record`.
          ConfigError: another call runs.
          BudgetExceeded: its chunks would not fit into memory.
        """
        began = time.perf_counter()
        if self._running:
            raise ConfigError(
                f"the context {self._running} is answering, and one call runs at a time: finish or close it"
            )
        record = self.record(app, name)
        graphs = self._graphs[record.origin.level]
        most = min(most_tokens, graphs.table.options.context_tokens)
        size = most_bytes(graphs, self.options, most // graphs.chunk_tokens)
        self.memory.pin(name, record.pinned)
        self.memory.require(name, size)
        last, there = self._last
        self._last = ("", Session())
        self._running = name
        self.memory.claim(name, len(record.bits), pinned=record.pinned)
        try:
            self.memory.reserve(name, size)
            if last == name and there.weights_version == graphs.table.weights_version:
                session.tokens, session.cache = there.take()
                session.weights_version = there.weights_version
                how = Restoration(resident=len(record.bits), cached=True)
                return dataclasses.replace(how, took_ms=1000 * (time.perf_counter() - began))
            cache = self._room(graphs.table, there, prompt_tokens)
            del there
            how = self._restored(record, graphs, session, cache, prompt_tokens)
            return dataclasses.replace(how, took_ms=1000 * (time.perf_counter() - began))
        except BaseException:
            self.abandon(name)
            raise

    def finish(self, name: str, session: Session, tokens: Sequence[int], first: int) -> Record:
        """Stores a context when its call has ended, unlocks it, and returns its record.

        Args:
          name: of the context.
          session: its cache, and the tokens that this holds.
          tokens: all of the context's now.
          first: the position of the first token that the call fed; of no matter where it has slid since.

        Raises:
          BudgetExceeded: a quota or the device has no room; the context is as it was before the call.
        """
        try:
            before = self.store.record(name)
            if session.cache is None:
                raise ContextGone(f"the context {name} lost its cache to an error; it is as it was before")
            graphs, resident = self._graphs[before.origin.level], self.memory.chunks(name)
            if self._slid is not None:
                before, first = self._slid, graphs.chunk_tokens
                resident = {chunk: each for chunk, each in resident.items() if chunk == 0}
            record = grown(
                before.beside({chunk: each.bits for chunk, each in resident.items()}),
                graphs,
                self.options,
                tokens=tokens,
                mass=np.asarray(session.cache.mass)[0],
                first=first,
                held=len(session.tokens),
            )
            # What was computed again and not changed is on storage already.
            coded = graphs.encode(
                session.cache,
                {
                    chunk: bits
                    for chunk, bits in enumerate(record.bits)
                    if chunk not in resident or resident[chunk].bits != bits
                },
            )
            changed = {n for n, bits in enumerate(record.bits) if before.bits[n : n + 1] != (bits,)}
            if self.options.writing == "ahead":
                record = self._written(record, {n: coded[n] for n in coded if n in changed})
            else:
                record = self._written(record.lose(changed), {})
            self.memory.cut(name, len(record.bits) if self._slid is None else 1)
            self._load(graphs, name, coded)
            session.cache = session.cache.uncounted()
            self._last = (name, session)
            return record
        finally:
            self.abandon(name)

    def abandon(self, name: str) -> None:
        """Unlocks a context whose call has ended without anything to store."""
        self.memory.own(name)
        self.memory.release(name)
        if self._running == name:
            self._running, self._slid = "", None

    def _require_quiet(self, name: str) -> None:
        if name == self._running:
            raise ConfigError(f"the context {name} is answering; close its answer first")

    def _forget_cache(self, name: str) -> None:
        if self._last[0] == name:
            self._last = ("", Session())

    def _room(self, table: GraphTable, spare: Session, tokens: int) -> KVCache:
        """A cache with room for `tokens`: the one of the context before, if its form fits.

        Clearing new memory takes as long as decoding chunks into it.
        """
        _, cache = spare.take()
        if cache is not None and spare.weights_version is not None:
            form = self.engine.table.at(spare.weights_version[0]).graphs_level
            if form == table.graphs_level and cache.capacity_tokens == table.capacity_for(tokens):
                # What another context left in it is out of sight until it is written over.
                return cache
        # Its memory, before that of another.
        del cache
        return table.start(tokens)

    def _restored(
        self, record: Record, graphs: ContextGraphs, session: Session, cache: KVCache, tokens: int
    ) -> Restoration:
        for attempt in range(2):
            table, resident = graphs.table, self.memory.chunks(record.name)
            wanted = {n for n, bits in enumerate(record.bits) if bits != LOST} - set(resident)
            try:
                cache, read, how = restore(
                    graphs,
                    table.start(tokens) if attempt else cache,
                    tokens=record.tokens,
                    bits=record.bits,
                    resident={chunk: (each.bits, each.blobs) for chunk, each in resident.items()},
                    read=self.store.open(record.name).read if wanted else _nothing,
                    delays=self._delays[table.level] if self.options.recompute else None,
                    pool=self._pool,
                )
            except CheckpointError:
                if attempt:
                    raise
                # What is damaged is lost; then the rest comes back, and that is computed.
                record = self.store.repair(record.name)
                continue
            self._load(graphs, record.name, read)
            session.cache, session.weights_version = cache, table.weights_version
            session.tokens = list(record.tokens[: len(record.bits) * graphs.chunk_tokens])
            return how
        raise AssertionError("either of two attempts returns or raises")

    def _written(self, record: Record, chunks: dict[int, Stored]) -> Record:
        record = self.store.commit(record, chunks)
        try:
            return self.store.compact(record.name)
        except CheckpointError:
            # An older chunk is damaged, which is no fault of this call.
            return self.store.repair(record.name)

    def _left(self, chunks: list[Resident]) -> None:
        """Chunks left memory: what was to be written by then is written."""
        if self.options.writing != "at-eviction":
            return
        for name in dict.fromkeys(each.context for each in chunks):
            record = self.store.record(name)
            # What is lost on storage was in memory alone.
            fresh = {
                each.chunk: (each.bits, each.blobs)
                for each in chunks
                if each.context == name and record.bits[each.chunk : each.chunk + 1] == (LOST,)
            }
            if not fresh:
                continue
            bits = tuple(fresh[n][0] if n in fresh else width for n, width in enumerate(record.bits))
            # What there is no room for stays lost, and is computed again.
            with contextlib.suppress(BudgetExceeded):
                self.store.commit(dataclasses.replace(record, bits=bits), fresh)

    def _load(self, graphs: ContextGraphs, name: str, chunks: dict[int, Stored]) -> None:
        delays = self._delays[graphs.table.level]
        computing_ms = graphs.layers * delays.computing.per_unit_ms
        for chunk, (bits, blobs) in sorted(chunks.items()):
            reading_ms = graphs.chunk_bytes(bits) * delays.reading.per_unit_ms
            self.memory.load(name, chunk, bits, blobs, restore_ms=min(reading_ms, computing_ms))

    def _origin(self, level: int) -> Origin:
        options = self.engine.table.at(level).options
        return Origin(
            model=self.engine.bundle.fingerprint,
            level=level,
            adapter=self.engine.adapter_digest,
            codec=options.kv_codec,
            chunk_tokens=options.kv_chunk_tokens,
            dtype=options.cache_dtype,
        )


def _nothing(layer: int, chunks: Sequence[int]) -> list[np.ndarray]:
    """What is read where all is in memory or lost."""
    raise AssertionError(f"chunks {list(chunks)} of layer {layer} are not missing")
