"""Runs calls in contexts: restores a context before a call, and stores it afterwards.

    begin     Claim, then Fault: reads or recomputes the chunks that are not in memory (`restore`)
    grow      makes room for the chunks of new tokens
    finish    compresses new chunks by density, loads them into memory, and writes them ahead of time; with
              background writing, they are encoded in the background, too (`saving`)

Calls of different contexts may take turns, each with its own cache. `ChunkMemory` evicts chunks, already on
storage, of contexts that do not run. The last call's cache stays until another call begins. Options turn
this into the baselines: write at eviction, or never, or recompute only lost chunks.

An interrupt may come anywhere. The store is authoritative; chunks in memory are valid only while the
store's record is the one that memory knows (`_let_go`), which the next call checks.
"""

import atexit
import contextlib
import dataclasses
import functools
import logging
import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxllm.contexts.codecs import RAW, WIDTHS
from jaxllm.contexts.eviction import find_policy
from jaxllm.errors import BudgetExceeded, ConfigError, ContextGone, JaxllmError, one_line
from jaxllm.serving.contexts.memory import (
    UNMEASURED_READ,
    ChunkMemory,
    Claims,
    Delays,
    Stored,
    Turn,
    measure_read,
)
from jaxllm.serving.contexts.options import ContextOptions
from jaxllm.serving.contexts.record import Linked, Origin, Record
from jaxllm.serving.contexts.restore import ChunkLoader
from jaxllm.serving.contexts.saving import (
    ROUNDING,
    ChunkEncoder,
    ChunkWriter,
    ended_record,
    least_ratio,
    most_bytes,
    seal,
    sink_record,
)
from jaxllm.serving.contexts.store import ContextStore
from jaxllm.serving.engine.engine import Engine
from jaxllm.serving.engine.request import Session
from jaxllm.serving.engine.step import close
from jaxllm.serving.ground.prompt_embeddings import PromptEmbeddings

_LOG = logging.getLogger("jaxllm")


class Contexts:
    """The contexts of all apps, and calls in them, at most one per context. Not thread-safe.

    Attributes:
      engine: engine of the answers.
      options, store: options and store of the contexts.
      memory: memory of the chunks.
      pending_errors: errors of storing dropped answers, and of writing in the background, by context. They
        are logged at once, and raised by the context's next call, or when all contexts are closed.
    """

    def __init__(
        self, engine: Engine, options: ContextOptions, chunk_ios: Mapping[int, Any] | None = None
    ) -> None:
        """Opens the store for a warm engine, and measures this device's delays. `chunk_ios` are the accesses
        to chunks by level (see `ChunkAccess`); None for those of a live engine.

        Raises:
          ConfigError: the engine was opened without a codec, chunks cannot be as small as the options' ratio,
            or the store is in use or cannot be made.
        """
        if chunk_ios is None:
            # Imported here: devices that only run exported programs have no JAX.
            from jaxllm.serving.contexts.chunk_io import chunk_ios_of

            chunk_ios = chunk_ios_of(engine)
        self.engine, self.options, self._chunk_io = engine, options, chunk_ios
        self.store = ContextStore(
            Path(options.folder),
            storage=options.storage,
            quota_bytes=options.quota_bytes,
            app_quota_bytes=options.app_quota_bytes,
            keys=None if options.encryption is None else Path(options.encryption),
        )
        try:
            self.pending_errors: dict[str, JaxllmError] = {}
            self._tokenizer = engine.tokenizer.digest
            self._encoder = ChunkEncoder()
            if options.writing == "background":
                self._encoder.start()
            self._writer = ChunkWriter(self.store, options.writing, self._unwritten)
            self.memory = ChunkMemory(options.budget_bytes, find_policy(options.policy), self._writer.left)
            self._claims = Claims(self._let_go)
            # The context of the last ended call, and its session with the cache.
            self._last: tuple[str, Session] = ("", Session())
            self._process = os.getpid()
            self._delays: dict[int, Delays] = {}
            self._loader = ChunkLoader(self.store, self.memory, self._delays, options)
            read_delay = UNMEASURED_READ
            if any(each.computes for each in chunk_ios.values()):
                read_delay = measure_read(self.store.root, options.storage)
            for level, chunk_io in chunk_ios.items():
                # Ratios have few digits: 0.4 is not exactly two fifths.
                if options.ratio < (least := least_ratio(chunk_io)) - ROUNDING:
                    raise ConfigError(
                        f"a ratio of {options.ratio} is less than {least:.4g}, which chunks take at "
                        f"{min(WIDTHS)} bits with their scales; raise the ratio, take longer chunks "
                        "(EngineOptions.kv_chunk_tokens), whose scales are shared by more tokens, or another "
                        "codec"
                    )
                self._delays[level] = Delays(read=read_delay, compute=chunk_io.rehearse())
            seal(self.store)
            self.store.sweep()
            for each in self.store.damage():
                _LOG.warning("contexts of %s: %s", each.app, each.reason)
            # Runs before what was registered earlier.
            self._at_exit = functools.partial(_close_at_exit, weakref.ref(self))
            atexit.register(self._at_exit)
        except BaseException:
            self.store.close()
            raise

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the one that opened these contexts, and must not use them."""
        return self._process != os.getpid()

    def close(self) -> None:
        """Ends running answers, stores their tokens, and releases the store for other processes. Later calls
        raise ConfigError.

        Raises:
          BudgetExceeded, CheckpointError: an answer could not be stored; the contexts are closed
            nevertheless.
        """
        try:
            if not self.forked:
                self.stop()
                self.store.wait()
                for name in list(self.pending_errors):
                    raise self.pending_errors.pop(name)
        finally:
            self._last = ("", Session())
            try:
                self.store.close()
            finally:
                # After the store, whose thread waits for it.
                self._encoder.close()
                atexit.unregister(self._at_exit)
                # The threads belong to the parent of a forked child.
                self._loader.close(wait=not self.forked)

    def stop(self) -> None:
        """Ends running answers, and stores their tokens so far.

        Raises:
          BudgetExceeded, CheckpointError: tokens of one could not be stored.
        """
        with contextlib.ExitStack() as stack:
            for turn in self._claims.running():
                stack.callback(self._claims.end, turn)
                if (run := turn.run()) is not None:
                    error = ConfigError(
                        f"the answer in the context {turn.record.name} was ended by its service; its tokens "
                        "so far are kept"
                    )
                    stack.callback(close, run, error)

    def resize(self, budget_bytes: int) -> None:
        """Sets the memory limit of chunks (see `ContextOptions`), and evicts chunks beyond it. Pinned shares
        refer to the new limit.

        Raises:
          ConfigError: it is not a positive integer.
          BudgetExceeded: running contexts may need more, besides pinned ones; the limit is unchanged.
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
            # Its chunk table references their memory.
            self._last = ("", Session())
            session.take()
            session.chunks = None
        self.options = options

    def create(self, app: str, *, level: int | None = None, pinned: bool = False) -> Record:
        """Creates an empty context of an app. Calls are answered by a level, in percent, or by the engine's
        own; chunks of a pinned context are never evicted for another one's.

        Raises:
          ConfigError: the level is not served, or the app's name is empty or too long.
          BudgetExceeded: the app has reached its number of contexts, or there is no space.
        """
        most, there = self.options.contexts_per_app, len(self.store.records(app))
        if most and there >= most:
            raise BudgetExceeded(f"{app} owns {there} contexts of at most {most}; delete one first")
        return self.store.create(app, self._origin(level), pinned=pinned, tokenizer=self._tokenizer)

    def record(self, app: str, name: str, level: int | None = None) -> Record:
        """The record of an app's context, as its next call at a level will continue it, by default at its
        own. If the context is of another model, level, codec, dtype or adapter, these are its tokens without
        chunks.

        Raises:
          ConfigError: the level is not served.
          ContextGone: the app has no context of this name, or its tokens are of another tokenizer, or its
            rows of another model.
        """
        return self._served(self.store.record(name, app), level)

    def _served(self, record: Record, level: int | None = None) -> Record:
        """Converts a stored record as `record` does."""
        name = record.name
        if level is None and record.origin.level in self._chunk_io:
            level = record.origin.level
        origin = self._origin(level, record)
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

    def rows_before(self, record: Record, tokens: int | None = None) -> PromptEmbeddings | None:
        """The stored rows of a context's first tokens, or of all; None for none.

        Raises:
          CheckpointError: they are damaged.
        """
        rows = self.store.rows(record.name) if record.rows else None
        return rows and rows.before(len(record.tokens) if tokens is None else tokens)

    def at_level(self, app: str, name: str, level: int) -> Record:
        """Sets the level of an app's context. Its tokens stay, and the next call recomputes its chunks.

        Raises:
          ConfigError: the level is not served, or a call runs in the context.
          ContextGone, BudgetExceeded, CheckpointError: see `record`, `ContextStore.commit`.
        """
        record = self.record(app, name, level)
        if self.store.record(name).origin == record.origin:
            return record
        self._require_idle(name)
        # Memory first: chunks in memory must never outlive those on storage.
        self.memory.cut(name, 0)
        self._forget_cache(name)
        return self.store.commit(record)

    def chunk_bytes(self, record: Record, tokens: int | None = None, level: int | None = None) -> int:
        """The maximum bytes of a context's chunks in memory, optionally with other tokens or at another
        level; 0 if that is not served."""
        chunk_io = self._chunk_io.get(level or record.origin.level)
        window = self.engine.options.context_tokens
        size = record.origin.chunk_tokens
        count = len(record.bits) if tokens is None else min(tokens, window) // size
        return 0 if chunk_io is None else most_bytes(chunk_io, self.options, count)

    def pin(self, name: str, pinned: bool) -> Record:
        """Pins a context's chunks in memory, or unpins them.

        Raises:
          ContextGone: there is no such context.
          BudgetExceeded: pinned contexts would exceed their share of memory (see `ContextOptions`).
        """
        record = dataclasses.replace(self.store.record(name), pinned=pinned)
        if pinned:
            self._require_share(record, self.chunk_bytes(record))
        record = self.store.commit(record)
        self.memory.pin(name, pinned)
        return record

    def note_error(self, name: str, what: str, error: JaxllmError) -> None:
        """Stores and logs an error of a context (see `pending_errors`). For any thread."""
        pending = type(error)(f"{what}: {error}")
        pending.__cause__ = error
        self.pending_errors[name] = pending
        _LOG.warning("%s: %s", what, error)

    def _unwritten(self, name: str, error: JaxllmError) -> None:
        what = f"chunks of the last answer in the context {name} could not be written; its tokens are kept, "
        self.note_error(name, f"{what}and the next call computes its chunks", error)

    def ready(self, name: str) -> None:
        """Waits until a context's last call is on storage, and raises its pending error once.

        Raises:
          BudgetExceeded, CheckpointError: its last answer, or chunks of it, could not be stored.
        """
        self.store.wait(name)
        if name in self.pending_errors:
            if self._claims.of(name) is None:
                # Memory may be ahead of storage.
                self._forget(name)
            raise self.pending_errors.pop(name)

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
        self._forget(name)
        self.store.delete(name)
        self.pending_errors.pop(name, None)

    def leaving(self, session: Session, first: int) -> None:
        """Prepares the running context of a session for dropping its middle: its first chunk stays, with its
        attention; later chunks will be new ones, and the session's cache restarts counting attention. `first`
        is the position of the first token that the call fed. Storage and memory are unchanged until `finish`.
        """
        turn = next(each for each in self._claims.running() if each.session is session)
        cache = session.cache
        assert cache is not None
        chunk_io = self._chunk_io[turn.base.origin.level]
        if chunk_io.state_bytes:
            # States restart, and with them all chunks.
            turn.base = turn.base.cut(0)
            return
        first, mass = first if turn.counted_from is None else turn.counted_from, chunk_io.mass(cache)
        base = sink_record(turn.base, chunk_io, mass=mass, first=first, cached_tokens=len(session.tokens))
        session.cache = chunk_io.slid(cache, session.chunks)
        turn.base, turn.counted_from = base, chunk_io.chunk_tokens

    def begin(
        self,
        record: Record,
        session: Session,
        *,
        prompt_tokens: int,
        most_tokens: int,
        base: Record | None = None,
        prompt: Sequence[int] = (),
        rows: PromptEmbeddings | None = None,
    ) -> Turn:
        """Restores a context for a call, and locks it.

        Args:
          record: record of the context at the level of the call (see `record`).
          session: receives the context's tokens and cache: those of all whole chunks, or all if it ran last.
          prompt_tokens: number of tokens of the context and the prompt together.
          most_tokens: maximum number of tokens of the context after the call; no room is made for them yet.
          base: record after sliding, if the context slides before the call; None for all of it.
          prompt: tokens of the context and the prompt: new ones may be computed during the restore, and a
            new context may share another's prefix; empty to restore only.
          rows: all prompt embeddings of the context and the prompt; new ones are stored before the call
            begins.

        Returns:
          The call, which ends with `finish` or `abandon`, or when its last strong reference is gone.

        Raises:
          ContextGone: see `record`.
          ConfigError: another call runs in the context.
          BudgetExceeded: its chunks could not fit into memory, whatever is evicted.
        """
        began, name, level = time.perf_counter(), record.name, record.origin.level
        self._require_idle(name)
        # Encoding other contexts' chunks may overlap with answers that do not need their caches.
        self._encoded(name if next(iter(self._chunk_io.values())).coded else "")
        stored, moved = self.store.record(name, record.app), ()
        record = self._served(stored, level)
        if stored.origin != record.origin:
            moved = stored.origin.differing(record.origin)
            record = self.at_level(record.app, name, level)
            base = base and base.moved(record.origin)
        if rows is not None and rows.at[-1] >= len(record.tokens):
            # The context does not run, so its record cannot change meanwhile.
            self.store.wait(name)
            stored = self.store.commit(self.store.record(name), rows=rows)
            record = dataclasses.replace(record, rows=stored.rows, checksums=stored.checksums)
            base = base and dataclasses.replace(base, rows=stored.rows)
        size = self.chunk_bytes(record, most_tokens)
        if record.pinned:
            self._require_share(record, size)
        self.memory.pin(name, record.pinned)
        self.memory.require(name, size)
        turn = Turn(record=record, base=base or record, session=session, most_bytes=size, sequence=prompt)
        self._claims.put(turn, record)
        try:
            self.memory.claim(name, pinned=record.pinned)
            chunk_io, shared = self._chunk_io[level], 0
            if base is None and chunk_io.widths == (RAW,) and self._shares(turn):
                self._encoded()
                turn.base = self._loader.borrow(chunk_io, record, prompt)
                shared = len(turn.base.bits)
            last, self._last = self._last, ("", Session())
            if last[0] != name:
                # It references memory of chunks that may be evicted now.
                last[1].chunks = None
            self.grow(turn, prompt_tokens)
            if self._encoder.busy(last[0]):
                # The encoder reads this cache; a new one commits its memory as it fills.
                last = ("", Session())
            how = self._loader.resume(self._chunk_io, turn, last, prompt_tokens)
            # The restore may have marked damaged chunks as lost in the store's record.
            self._claims.put(turn, turn.record)
            turn.restoration = dataclasses.replace(
                how, moved=moved, shared=shared, took_ms=1000 * (time.perf_counter() - began)
            )
        except BaseException:
            self.abandon(turn)
            raise
        return turn

    def grow(self, turn: Turn, tokens: int) -> None:
        """Makes room in memory for the chunks of a running context with `tokens` tokens."""
        size = self.chunk_bytes(turn.record, tokens) - self.memory.own_bytes(turn.record.name)
        # Chunks that do not fit besides newly pinned ones stay on storage only.
        with contextlib.suppress(BudgetExceeded):
            self.memory.reclaim(max(0, size))

    def finish(self, turn: Turn, tokens: Sequence[int], first: int) -> Record:
        """Stores a context after its call, unlocks it, and returns its record.

        If an error or an interrupt lost the cache, the tokens are stored nevertheless, and their chunks
        recomputed when the context is next used.

        Args:
          turn: the call.
          tokens: all tokens of the context now.
          first: position of the first token that the call fed; ignored if the context has slid since.

        Raises:
          BudgetExceeded: a quota is exceeded or the device full; the context is as before the call.
          CheckpointError: the device failed; the context is as before the call, or as after it.
        """
        try:
            if not self._claims.runs(turn):
                raise ConfigError(f"the call in the context {turn.record.name} has ended; begin another")
            return self._kept(turn, tokens, first)
        finally:
            self.abandon(turn)

    def abandon(self, turn: Turn) -> None:
        """Unlocks a context whose call has ended, without storing anything."""
        self._claims.end(turn)

    def _shares(self, turn: Turn) -> bool:
        """Whether a call is the first of its context, and may share a prefix with others."""
        written = self.options.writing in ("background", "ahead")
        return written and self.options.share_beginnings and not turn.record.tokens

    def _kept(self, turn: Turn, tokens: Sequence[int], first: int) -> Record:
        name, chunk_io, session = turn.record.name, self._chunk_io[turn.record.origin.level], turn.session
        # The pin may have changed during the call.
        before = dataclasses.replace(turn.base, pinned=self.store.record(name).pinned)
        there = {n: (each.bits, each.blobs) for n, each in self.memory.chunks(name).items()}
        resident = {n: bits for n, (bits, _) in there.items() if n < len(before.bits)}
        first = first if turn.counted_from is None else turn.counted_from
        record = ended_record(
            before, resident, chunk_io, self.options, session=session, tokens=tokens, first=first
        )
        coded: Mapping[int, Stored] = {}
        ready: Callable[[], object] | None = None
        # New states replace the stored ones.
        states = {len(record.bits) - 1} if record.state_tokens != before.state_tokens else set()
        stale = bool(record.state_tokens) and not states
        if session.cache is not None and not stale:
            # Chunks that were recomputed at the same width are on storage already.
            wanted = {n: bits for n, bits in enumerate(record.bits) if resident.get(n) != bits or n in states}
            if wanted and self.options.writing == "background":
                coded, ready = self._encoder.later(chunk_io, name, session.cache, wanted, there)
            elif wanted:
                coded = chunk_io.encode(session.cache, wanted, there)
        linked: Linked = {}
        if self._shares(turn) and (other := self._loader.alike(record, record.tokens)[0]) is not None:
            linked = self.store.link(record, other.name, dict(enumerate(record.bits)))
        changed = {
            n
            for n, bits in enumerate(record.bits)
            if n in states or before.bits[n : n + 1] != (bits,) or not before.files[n]
        } - linked.keys()
        # Those of a borrowed prefix are in memory only.
        own = {n: there[n] for n in changed - coded.keys() if resident.get(n) == record.bits[n]}
        record = record.lose(changed - coded.keys() - own.keys())
        record = self._writer.keep(record, changed, {**own, **coded}, linked, ready)
        self.memory.cut(name, min(len(record.bits), len(before.bits)))
        # Chunks that do not fit are on storage, or recomputed.
        with contextlib.suppress(BudgetExceeded):
            self._loader.load(chunk_io, name, coded)
            if linked:
                self._loader.share_resident(name, linked)
            if chunk_io.coded and record.bits and session.cache is not None:
                # The next call begins with it.
                self._loader.chunk_table(chunk_io, name)
        # From here on memory agrees with the store.
        self._claims.put(turn, record)
        if session.cache is not None and chunk_io.stays:
            session.cache = session.cache.at_rest()
            self._last = (name, session)
        return record

    def _let_go(self, claimed: Record) -> None:
        """Unlocks a context after its call, and drops its chunks from memory if an interrupt or an error left
        another record in the store. Idempotent under interrupts."""
        name, known = claimed.name, False
        with contextlib.suppress(JaxllmError):
            known = self.store.record(name).agrees(claimed)
        if not known:
            self._forget(name)
        else:
            # Drop chunks of another context that the call began with.
            self.memory.cut(name, len(claimed.bits))
        self.memory.release(name)

    def _encoded(self, name: str = "") -> None:
        """Waits until the chunks of a context's last call are encoded, or those of all contexts."""
        self._encoder.wait(name)
        while self._encoder.failed:
            # Its memory was not filled. Its next call raises the error.
            self._forget(self._encoder.failed.popleft())

    def _require_idle(self, name: str) -> None:
        if self._claims.of(name) is not None:
            raise ConfigError(
                f"the context {name} is answering, and one call at a time runs in it: finish or close its "
                "answer, or let the service end it (`service.contexts.stop()`)"
            )

    def _require_share(self, record: Record, size_bytes: int) -> None:
        """Raises BudgetExceeded if chunks of this size of a context, with those of other pinned contexts of
        its app or of all apps, would exceed the share of memory of pinned contexts."""
        pinned = [each for each in self.store.records() if each.pinned and each.name != record.name]
        own = [each for each in pinned if each.app == record.app]
        for share, those, whose in (
            ("app_pinned_share", own, f"pinned contexts of {record.app}"),
            ("pinned_share", pinned, "pinned contexts of all apps"),
        ):
            most = int(getattr(self.options, share) * self.options.budget_bytes)
            if sum(map(self.chunk_bytes, those)) + size_bytes > most:
                raise BudgetExceeded(
                    f"{whose} may take {most:,} bytes of memory, and {size_bytes:,} more do not fit: unpin "
                    f"some, ask for fewer tokens, or raise ContextOptions.{share}"
                )

    def _origin(self, level: int | None, record: Record | None = None) -> Origin:
        """The origin of a context at a level, by default the engine's own; `record` is None for a new
        context. Contexts use the engine's adapter, whatever they were made with.

        Raises:
          ConfigError: the level is not served.
        """
        del record
        origin, model = self._chunk_io[self.engine.runner_at(level).level].origin, self.engine.model
        return dataclasses.replace(origin, model=model.bundle.fingerprint, adapter=model.adapter_digest)

    def _forget(self, name: str) -> None:
        self.memory.forget(name)
        self._forget_cache(name)

    def _forget_cache(self, name: str) -> None:
        if self._last[0] == name:
            self._last = ("", Session())


def _close_at_exit(contexts_ref: Callable[[], Contexts | None]) -> None:
    """Closes contexts when this process exits, except a forked child's."""
    if (contexts := contexts_ref()) is not None and not contexts.forked:
        try:
            contexts.close()
        except Exception as error:
            _LOG.warning("the last answer could not be kept at exit: %s", one_line(error))
