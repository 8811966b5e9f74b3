"""Opens contexts on an engine, and creates, finds, pins and deletes them."""

import contextlib
import dataclasses
import os
from pathlib import Path

from jaxllm.errors import BudgetExceeded, ConfigError, ContextGone, JaxllmError
from jaxllm.kv.eviction import find_policy
from serving.contexts.at_exit import close_at_exit, forget_at_exit
from serving.contexts.chunk_io import ChunkIO, kept_by, origin_of
from serving.contexts.claims import Claims
from serving.contexts.delays import Delays, measure_compute, measure_read
from serving.contexts.encoding import ChunkEncoder
from serving.contexts.growth import most_bytes, require_ratio
from serving.contexts.loading import ChunkLoader
from serving.contexts.memory import ChunkMemory
from serving.contexts.options import ContextOptions
from serving.contexts.pending_errors import PendingErrors
from serving.contexts.pins import require_share
from serving.contexts.record import Record
from serving.contexts.state_chunks import chunk_io_of
from serving.contexts.store import ContextStore
from serving.contexts.writing import ChunkWriter
from serving.engine import Engine
from serving.prompt_rows import PromptRows
from serving.request import Session


class ContextRegistry:
    """The contexts of all apps. Not thread-safe.

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
          ConfigError: the engine was opened without a codec, chunks cannot take as little as the options'
            ratio, or the store is in use or cannot be made.
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
            self.pending_errors = PendingErrors()
            self._tokenizer = engine.tokenizer.digest
            self._encoder = ChunkEncoder()
            if options.writing == "background":
                self._encoder.start()
            self._writer = ChunkWriter(self.store, options.writing, self.pending_errors.note_unwritten)
            self.memory = ChunkMemory(options.budget_bytes, find_policy(options.policy), self._writer.left)
            self._claims = Claims(self._let_go)
            # The context whose call ended last, and its session with the cache.
            self._last: tuple[str, Session] = ("", Session())
            self._process = os.getpid()
            self._delays: dict[int, Delays] = {}
            self._loader = ChunkLoader(self.store, self.memory, self._delays, options)
            kept = kept_by(engine)
            self._chunk_io = {level: chunk_io_of(engine.runner_at(level), kept) for level in engine.levels}
            read_delay = measure_read(self.store.root, options.storage)
            for level, chunk_io in self._chunk_io.items():
                require_ratio(chunk_io, options)
                chunk_io.rehearse()
                self._delays[level] = Delays(read=read_delay, compute=measure_compute(chunk_io))
            self.store.sweep()
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
                self.store.wait()
                self.pending_errors.raise_first()
        finally:
            self._last = ("", Session())
            try:
                self.store.close()
            finally:
                # After the store, whose thread waits for it.
                self._encoder.close()
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
                stack.callback(self._claims.end, turn)
                if (stop := turn.stop()) is not None:
                    stack.callback(stop)

    def resize(self, budget_bytes: int) -> None:
        """Sets the memory of chunks from now on, and evicts what is beyond it. Shares of pinned contexts are
        of the new budget.

        Args:
          budget_bytes: see `ContextOptions`.

        Raises:
          ConfigError: it is not a whole number from 1 up.
          BudgetExceeded: contexts that run may come to take more, beside those that are pinned; the budget is
            as it was.
        """
        options = dataclasses.replace(self.options, budget_bytes=budget_bytes)
        running = {each.record.name: each.most_bytes for each in self._claims.running()}
        pinned = {each.name: self.memory.own_bytes(each.name) for each in self.store.records() if each.pinned}
        if (taken := sum({**pinned, **running}.values())) > budget_bytes:
            raise BudgetExceeded(
                f"chunks cannot do with {budget_bytes:,} bytes of memory: contexts that run or are pinned "
                f"may take {taken:,}; close their answers, unpin some, or give more"
            )
        left = self.memory.resize(budget_bytes)
        name, session = self._last
        if session.chunks is not None and any(each.context == name for each in left):
            # Its chunk table keeps their memory.
            self._last = ("", Session())
            session.take()
            session.chunks = None
        self.options = options

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
        origin = origin_of(self.engine, chunk_io)
        return self.store.create(app, origin, pinned=pinned, tokenizer=self._tokenizer)

    def record(self, app: str, name: str) -> Record:
        """The record of an app's context; where the context is of another model, level, codec, dtype or
        adapter, as it moves to this engine's with its next call: its tokens alone.

        Raises:
          ContextGone: the app has no context of this name, or its tokens are of another tokenizer, or its
            rows of another model.
        """
        return self.served(self.store.record(name, app))

    def served(self, record: Record) -> Record:
        """A stored record as `record` gives it.

        Raises:
          ContextGone: see `record`.
        """
        name = record.name
        level = record.origin.level if record.origin.level in self._chunk_io else self.engine.runner.level
        origin = origin_of(self.engine, self._chunk_io[level])
        same = record.origin.model == origin.model
        if not same and record.tokens and record.tokenizer != self._tokenizer:
            whose = "another tokenizer" if record.tokenizer else "a tokenizer that its record does not name"
            raise ContextGone(
                f"the context {name} is of another model, and its tokens are of {whose}: open it with the "
                "model that it was made with, or delete it"
            )
        if not same and record.rows:
            raise ContextGone(
                f"the context {name} has images, whose rows are of another model: open it with the model "
                "that it was made with, or send the images in a new context"
            )
        if record.tokenizer != self._tokenizer:
            record = dataclasses.replace(record, tokenizer=self._tokenizer)
        return record if record.origin == origin else record.moved(origin)

    def rows_before(self, record: Record, tokens: int | None = None) -> PromptRows | None:
        """The stored rows of a context's first tokens, or of all; None for none.

        Raises:
          CheckpointError: they are damaged.
        """
        rows = self.store.rows(record.name) if record.rows else None
        return rows and rows.before(len(record.tokens) if tokens is None else tokens)

    def moving(self, app: str, name: str, level: int | None = None) -> tuple[str, ...]:
        """What of a context's origin another takes the place of in its next call, by its names in `Origin`;
        empty where its chunks stay.

        Args:
          app, name: of the context.
          level: that answers, in percent; None for that of `record`.

        Raises:
          ContextGone: see `record`.
        """
        coming = self.record(app, name).origin
        if level is not None:
            coming = origin_of(self.engine, self._chunk_io[self.engine.runner_at(level).level])
        return self.store.record(name, app).origin.differing(coming)

    def at_level(self, app: str, name: str, level: int) -> Record:
        """Sets the level of an app's context. Its tokens stay, and the next call computes its chunks.

        Raises:
          ConfigError: the level is not served, or a call runs in it.
          ContextGone, BudgetExceeded, CheckpointError: see `record`, `ContextStore.commit`.
        """
        record = self.record(app, name)
        origin = origin_of(self.engine, self._chunk_io[self.engine.runner_at(level).level])
        if self.store.record(name).origin == origin:
            return record
        self._require_idle(name)
        # Memory first: chunks in memory must never outlive those on storage.
        self.memory.cut(name, 0)
        self._forget_cache(name)
        return self.store.commit(record.moved(origin))

    def chunk_io(self, level: int) -> ChunkIO:
        """What chunks of a level that is served are read and written by."""
        return self._chunk_io[level]

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

    def ready(self, name: str) -> None:
        """Waits until a context's last call is on storage, and raises the error of storing it, once.

        Raises:
          BudgetExceeded, CheckpointError: see `PendingErrors`.
        """
        self.store.wait(name)
        if self.pending_errors.has(name) and self._claims.of(name) is None:
            # What memory has may be more than storage.
            self.memory.forget(name)
            self._forget_cache(name)
        self.pending_errors.raise_for(name)

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
        self.forgotten(name)

    def forgotten(self, name: str) -> None:
        """Called when a context has been deleted."""

    def _let_go(self, claimed: Record) -> None:
        """Unlocks a context whose call has ended, and drops its chunks from memory where an interrupt or an
        error left a record in the store that memory does not know. May be interrupted, and repeated."""
        name, known = claimed.name, False
        with contextlib.suppress(JaxllmError):
            known = self.store.record(name).agrees(claimed)
        if not known:
            self.memory.forget(name)
            self._forget_cache(name)
        else:
            # Those of another context that the call began with.
            self.memory.cut(name, len(claimed.bits))
        self.memory.release(name)

    def _encoded(self, name: str = "") -> None:
        """Waits until the chunks of a context's last call are encoded, or those of all contexts."""
        for each in self._encoder.wait(name):
            # What it has in memory was not filled. Its next call is told why.
            self.memory.forget(each)
            self._forget_cache(each)

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
