"""Manages the lifecycle of contexts: creates them, restores them for a call, stores them after it, deletes
them.

    begin     Claim, then Fault: reads or computes the chunks that are not in memory (`restore`)
    grow      makes room for the chunks of new tokens
    finish    compresses new chunks by density, writes them ahead of time, and loads them into memory
    delete    removes a context from memory and storage

Calls of different contexts may run in turns, each with its own cache. `ChunkMemory` evicts chunks, which are
on storage already, of those that do not run. The last one's cache stays until another call begins.
Options turn this into the baselines: write at eviction, or never, or compute only lost chunks.

An interrupt may come anywhere. The store decides what a context is; chunks in memory are valid only while the
store's record is the one that memory knows (`_let_go`), which the next call checks.
"""

import contextlib
import dataclasses
import os
import time
from collections.abc import Sequence
from pathlib import Path

from jaxllm.errors import BudgetExceeded, ConfigError, ContextGone, JaxllmError
from jaxllm.kv.eviction import find_policy
from serving.contexts.at_exit import close_at_exit, forget_at_exit
from serving.contexts.blobs import Stored
from serving.contexts.chunk_io import ChunkIO, origin_of
from serving.contexts.claims import Claims
from serving.contexts.delays import Delays, measure_compute, measure_read
from serving.contexts.growth import ended_record, most_bytes, position_mass, sink_record
from serving.contexts.loading import ChunkLoader
from serving.contexts.memory import ChunkMemory
from serving.contexts.options import ContextOptions
from serving.contexts.pending_errors import PendingErrors
from serving.contexts.pins import require_share
from serving.contexts.record import Record
from serving.contexts.store import ContextStore
from serving.contexts.turn import Turn
from serving.contexts.writing import ChunkWriter
from serving.engine import Engine
from serving.request import Session


class Contexts:
    """The contexts of all apps. Not thread-safe. One call at a time runs in each.

    Attributes:
      engine: that answers.
      options: of the contexts.
      store: of the contexts on storage.
      memory: of the chunks in memory.
      pending_errors: errors of storing dropped answers.
    """

    def __init__(self, engine: Engine, options: ContextOptions) -> None:
        """Opens the store and measures this device's delays.

        Args:
          engine: warmed up.
          options: of the contexts.

        Raises:
          ConfigError: the engine was opened without a codec, or the store is in use or cannot be made.
        """
        if not engine.options.kv_codec:
            raise ConfigError("this engine keeps no contexts; open it with EngineOptions(kv_codec=...)")
        self.engine, self.options = engine, options
        self.store = ContextStore(
            Path(options.folder),
            storage=options.storage,
            quota_bytes=options.quota_bytes,
            app_quota_bytes=options.app_quota_bytes,
            keys=None if options.encryption is None else Path(options.encryption),
        )
        try:
            self._writer = ChunkWriter(self.store, options.writing)
            self.memory = ChunkMemory(options.budget_bytes, find_policy(options.policy), self._writer.left)
            self._claims = Claims(self._let_go)
            self.pending_errors = PendingErrors()
            # The context whose call ended last, and its session with the cache.
            self._last: tuple[str, Session] = ("", Session())
            self._process = os.getpid()
            self._delays: dict[int, Delays] = {}
            self._loader = ChunkLoader(self.store, self.memory, self._delays, recompute=options.recompute)
            self._chunk_io = {level: ChunkIO(engine.runner_at(level)) for level in engine.levels}
            read_delay = measure_read(self.store.root, options.storage)
            for level, chunk_io in self._chunk_io.items():
                chunk_io.rehearse()
                self._delays[level] = Delays(read=read_delay, compute=measure_compute(chunk_io))
            close_at_exit(self)
        except BaseException:
            self.store.close()
            raise

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the one that opened these contexts; only that one may use
        them."""
        return self._process != os.getpid()

    def close(self) -> None:
        """Ends the answers that run, keeps their tokens, and releases the store for other processes. Every
        later call raises ConfigError.

        Raises:
          BudgetExceeded, CheckpointError: an answer could not be stored; the contexts are closed all the
            same.
        """
        try:
            if not self.forked:
                self.stop()
                self.pending_errors.raise_first()
        finally:
            self._last = ("", Session())
            try:
                self.store.close()
            finally:
                forget_at_exit(self)
                # The threads belong to the parent of a forked child.
                self._loader.close(wait=not self.forked)

    def stop(self) -> None:
        """Ends the answers that run, and keeps their tokens so far.

        Raises:
          BudgetExceeded, CheckpointError: those of one could not be stored.
        """
        with contextlib.ExitStack() as stack:
            for turn in self._claims.running():
                stack.callback(self.abandon, turn)
                if (stop := turn.stop()) is not None:
                    stack.callback(stop)

    def create(self, app: str, *, level: int | None = None, pinned: bool = False) -> Record:
        """Creates an empty context.

        Args:
          app: that owns it.
          level: the sub-model that answers in it, in percent; None for the engine's own.
          pinned: its chunks never leave memory for those of another context.

        Raises:
          ConfigError: the level is not served, or the app has no name, or too long a one.
          BudgetExceeded: the app may own no more contexts, or there is no room.
        """
        level = self.engine.runner.level if level is None else level
        most, there = self.options.contexts_per_app, len(self.store.records(app))
        if most and there >= most:
            raise BudgetExceeded(f"{app} owns {there} contexts of at most {most}; delete one first")
        chunk_io = self._chunk_io[self.engine.runner_at(level).level]
        return self.store.create(app, origin_of(self.engine, chunk_io), pinned=pinned)

    def record(self, app: str, name: str) -> Record:
        """The record of an app's context.

        Raises:
          ContextGone: the app has no context of this name, or it is of another model, level, codec or
            adapter.
        """
        record = self.store.record(name, app)
        if record.origin.level not in self.engine.levels:
            raise ContextGone(
                f"the context {name} is of level {record.origin.level}, which is not served; open the engine "
                "for it, or delete the context"
            )
        record.origin.require(origin_of(self.engine, self._chunk_io[record.origin.level]), name)
        return record

    def at_level(self, app: str, name: str, level: int) -> Record:
        """Sets the level of an app's context. Its tokens stay, and the next call computes its chunks.

        Raises:
          ConfigError: the level is not served, or a call runs in it.
          ContextGone, BudgetExceeded, CheckpointError: see `record`, `ContextStore.commit`.
        """
        record = self.record(app, name)
        origin = origin_of(self.engine, self._chunk_io[self.engine.runner_at(level).level])
        if record.origin == origin:
            return record
        self._require_idle(name)
        # Memory first: chunks in memory must never outlive those on storage.
        self.memory.cut(name, 0)
        self._forget_cache(name)
        return self.store.commit(dataclasses.replace(record, origin=origin, bits=(), mass=(), seen=()))

    def chunk_bytes(self, record: Record, tokens: int | None = None, level: int | None = None) -> int:
        """The most bytes of a context's chunks in memory, perhaps with other tokens or at another level; 0
        where that is not served."""
        chunk_io, window = (
            self._chunk_io.get(level or record.origin.level),
            self.engine.options.context_tokens,
        )
        size = record.origin.chunk_tokens
        count = len(record.bits) if tokens is None else min(tokens, window) // size
        return 0 if chunk_io is None else most_bytes(chunk_io, self.options, count)

    def pin(self, name: str, pinned: bool) -> Record:
        """Keeps a context's chunks in memory once they are there, or lets them be evicted.

        Raises:
          ContextGone: there is no such context.
          BudgetExceeded: pinned contexts would take more than their share of memory (see `ContextOptions`).
        """
        record = dataclasses.replace(self.store.record(name), pinned=pinned)
        if pinned:
            self._require_share(record, self.chunk_bytes(record))
        record = self.store.commit(record)
        self.memory.pin(name, pinned)
        return record

    def leaving(self, session: Session, first: int) -> None:
        """Prepares the context that answers for dropping its middle: its first chunk stays, with the
        attention that it got; later chunks will be new ones.

        Storage and memory are as they were until `finish`.

        Args:
          session: of the call; its cache counts attention from zero from here on.
          first: the position of the first token that the call fed.
        """
        turn = next(each for each in self._claims.running() if each.session is session)
        cache = session.cache
        assert cache is not None
        chunk_io = self._chunk_io[turn.base.origin.level]
        first = first if turn.counted_from is None else turn.counted_from
        mass = position_mass(cache, chunk_io.chunk_tokens)
        base = sink_record(turn.base, chunk_io, mass=mass, first=first, cached_tokens=len(session.tokens))
        if cache.coded_tokens:
            # The first chunk stays in front; rows behind it are written anew.
            cache = chunk_io.behind(cache, session.chunks, 1)
        session.cache = cache.uncounted()
        turn.base, turn.counted_from = base, chunk_io.chunk_tokens

    def delete(self, name: str) -> None:
        """Deletes a context from memory and storage.

        Raises:
          ContextGone: there is no such context.
          ConfigError: it is answering.
          CheckpointError: the device failed (see `ContextStore.delete`).
        """
        if self._claims.of(name) is not None:
            raise ConfigError(f"the context {name} is answering; close its answer first")
        # Memory first: chunks in memory must never outlive those on storage.
        self.memory.forget(name)
        self._forget_cache(name)
        self.store.delete(name)
        self.pending_errors.forget(name)

    def begin(
        self,
        app: str,
        name: str,
        session: Session,
        *,
        prompt_tokens: int,
        most_tokens: int,
        base: Record | None = None,
    ) -> Turn:
        """Restores a context for a call, and locks it.

        Args:
          app, name: of the context.
          session: gets its tokens and cache: those of all whole chunks, or all where it ran last.
          prompt_tokens: tokens of the context and the prompt together.
          most_tokens: most tokens of the context when the call ends; no room is made for them yet.
          base: the record after sliding, where the context slides before the call; None for all of it.

        Returns:
          The call, which ends with `finish` or `abandon`, or when its last strong reference is gone.

        Raises:
          ContextGone: see `record`.
          ConfigError: another call runs in the context.
          BudgetExceeded: its chunks could not fit into memory, whatever is evicted.
        """
        began = time.perf_counter()
        record = self.record(app, name)
        self._require_idle(name)
        size = self.chunk_bytes(record, most_tokens)
        if record.pinned:
            self._require_share(record, size)
        self.memory.pin(name, record.pinned)
        self.memory.require(name, size)
        turn = Turn(record=record, base=base or record, session=session)
        self._claims.begin(turn)
        try:
            self.memory.claim(name, len(turn.base.bits), pinned=record.pinned)
            self.grow(turn, prompt_tokens)
            last, self._last = self._last, ("", Session())
            how = self._loader.resume(self._chunk_io, turn, last, prompt_tokens)
            # The restore may have marked damaged chunks as lost in the store's record.
            self._claims.changed(turn, turn.record)
            turn.restoration = dataclasses.replace(how, took_ms=1000 * (time.perf_counter() - began))
        except BaseException:
            self.abandon(turn)
            raise
        return turn

    def grow(self, turn: Turn, tokens: int) -> None:
        """Makes room in memory for the chunks of a running context that has so many tokens now."""
        chunk_io = self._chunk_io[turn.record.origin.level]
        # Chunks that do not fit beside newly pinned ones stay on storage only.
        with contextlib.suppress(BudgetExceeded):
            count = min(tokens, self.engine.options.context_tokens) // chunk_io.chunk_tokens
            self.memory.reserve(turn.record.name, most_bytes(chunk_io, self.options, count))

    def finish(self, turn: Turn, tokens: Sequence[int], first: int) -> Record:
        """Stores a context when its call has ended, unlocks it, and returns its record.

        Where an error or an interrupt took the cache, the tokens are stored all the same, and their chunks
        are computed when the context is next used.

        Args:
          turn: the call.
          tokens: all tokens of the context now.
          first: the position of the first token that the call fed; ignored where the context has slid since.

        Raises:
          BudgetExceeded: a quota or the device has no room; the context is as it was before the call.
          CheckpointError: the device failed; the context is as it was before the call, or as after it.
        """
        try:
            self._require_running(turn)
            return self._kept(turn, tokens, first)
        finally:
            self.abandon(turn)

    def abandon(self, turn: Turn) -> None:
        """Unlocks a context whose call has ended, without storing anything."""
        self._claims.end(turn)

    def _kept(self, turn: Turn, tokens: Sequence[int], first: int) -> Record:
        name, chunk_io, session = turn.record.name, self._chunk_io[turn.record.origin.level], turn.session
        # The pin may have changed during the call.
        before = dataclasses.replace(turn.base, pinned=self.store.record(name).pinned)
        resident = {n: each.bits for n, each in self.memory.chunks(name).items() if n < len(before.bits)}
        first = first if turn.counted_from is None else turn.counted_from
        record = ended_record(
            before, resident, chunk_io, self.options, session=session, tokens=tokens, first=first
        )
        coded: dict[int, Stored] = {}
        if session.cache is not None:
            # Chunks that were computed again at the same width are on storage already.
            wanted = {n: bits for n, bits in enumerate(record.bits) if resident.get(n) != bits}
            there = {n: (each.bits, each.blobs) for n, each in self.memory.chunks(name).items()}
            coded = chunk_io.encode(session.cache, wanted, there)
        changed = {n for n, bits in enumerate(record.bits) if before.bits[n : n + 1] != (bits,)}
        record = self._writer.keep(record, changed, coded)
        self.memory.cut(name, min(len(record.bits), len(before.bits)))
        # Chunks that do not fit are on storage, or computed again.
        with contextlib.suppress(BudgetExceeded):
            self._loader.load(chunk_io, name, coded)
            if chunk_io.coded and record.bits and session.cache is not None:
                # The next call begins with it.
                self._loader.chunk_table(chunk_io, name)
        # From here on memory agrees with the store.
        self._claims.changed(turn, record)
        if session.cache is not None:
            session.cache = session.cache.uncounted()
            self._last = (name, session)
        return record

    def _let_go(self, claimed: Record) -> None:
        """Unlocks a context whose call has ended, and drops its chunks from memory where an interrupt or an
        error left a record in the store that memory does not know. May be interrupted, and repeated."""
        name, known = claimed.name, False
        with contextlib.suppress(JaxllmError):
            known = self.store.record(name) == claimed
        if not known:
            self.memory.forget(name)
            self._forget_cache(name)
        self.memory.release(name)

    def _require_running(self, turn: Turn) -> None:
        if not self._claims.runs(turn):
            raise ConfigError(f"the call in the context {turn.record.name} has ended; begin another")

    def _require_idle(self, name: str) -> None:
        if self._claims.of(name) is not None:
            raise ConfigError(
                f"the context {name} is answering, and one call at a time runs in it: finish or close its "
                "answer, or let the service end it (`service.contexts.stop()`)"
            )

    def _require_share(self, record: Record, size_bytes: int) -> None:
        require_share(record, size_bytes, self.store.records(), self.options, self.chunk_bytes)

    def _forget_cache(self, name: str) -> None:
        if self._last[0] == name:
            self._last = ("", Session())
