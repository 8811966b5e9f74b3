"""Runs calls in contexts: restores a context for a call, and stores it after it.

    begin     Claim, then Fault: reads or computes the chunks that are not in memory (`restore`)
    grow      makes room for the chunks of new tokens
    finish    compresses new chunks by density, loads them into memory, and has them written ahead of time;
              where they are written in the background, they are encoded there, too (`encoding`)

Calls of different contexts may run in turns, each with its own cache. `ChunkMemory` evicts chunks, which are
on storage already, of those that do not run. The last one's cache stays until another call begins.
Options turn this into the baselines: write at eviction, or never, or compute only lost chunks.

An interrupt may come anywhere. The store decides what a context is; chunks in memory are valid only while the
store's record is the one that memory knows (`_let_go`), which the next call checks.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

from jaxllm.errors import BudgetExceeded, ConfigError
from jaxllm.kv.codecs import RAW
from serving.contexts.blobs import Stored
from serving.contexts.chunk_io import ChunkIO
from serving.contexts.growth import ended_record, most_bytes, position_mass, sink_record, widened_bits
from serving.contexts.idle import IdleContexts, IdleFigures
from serving.contexts.options import ContextOptions
from serving.contexts.record import Record
from serving.contexts.registry import ContextRegistry
from serving.contexts.sharing import alike, shared_beginning
from serving.contexts.store import Linked
from serving.contexts.turn import Turn
from serving.engine import Engine
from serving.prompt_rows import PromptRows
from serving.request import Session


class Contexts(ContextRegistry):
    """The contexts of all apps (see `ContextRegistry`), and calls in them, one at a time in each."""

    def __init__(self, engine: Engine, options: ContextOptions) -> None:
        """See `ContextRegistry`."""
        self._idle = IdleContexts(self)
        super().__init__(engine, options)
        self._idle.begin()

    def forgotten(self, name: str) -> None:
        """See `ContextRegistry`."""
        self._idle.deleted(name)

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
        if cache.states is not None:
            # They begin anew, and with them all chunks.
            turn.base = turn.base.cut(0)
            return
        chunk_io = self._chunk_io[turn.base.origin.level]
        first = first if turn.counted_from is None else turn.counted_from
        mass = position_mass(cache, chunk_io.chunk_tokens)
        base = sink_record(turn.base, chunk_io, mass=mass, first=first, cached_tokens=len(session.tokens))
        if cache.coded_tokens:
            # The first chunk stays in front; rows behind it are written anew.
            cache = chunk_io.behind(cache, session.chunks, 1)
        session.cache = cache.uncounted()
        turn.base, turn.counted_from = base, chunk_io.chunk_tokens

    def begin(
        self,
        app: str,
        name: str,
        session: Session,
        *,
        prompt_tokens: int,
        most_tokens: int,
        base: Record | None = None,
        prompt: Sequence[int] = (),
        rows: PromptRows | None = None,
    ) -> Turn:
        """Restores a context for a call, and locks it.

        Args:
          app, name: of the context.
          session: gets its tokens and cache: those of all whole chunks, or all where it ran last.
          prompt_tokens: tokens of the context and the prompt together.
          most_tokens: most tokens of the context when the call ends; no room is made for them yet.
          base: the record after sliding, where the context slides before the call; None for all of it.
          prompt: tokens of the context and the prompt: what is not in the context may be computed while it is
            restored, and a context's first may begin as another context does.
          rows: all that stand in place of tokens of the context and the prompt; new ones are on storage
            before the call begins.

        Returns:
          The call, which ends with `finish` or `abandon`, or when its last strong reference is gone.

        Raises:
          ContextGone: see `record`.
          ConfigError: another call runs in the context.
          BudgetExceeded: its chunks could not fit into memory, whatever is evicted.
        """
        began = time.perf_counter()
        self._require_idle(name)
        # Other contexts' chunks are encoded beside answers that need no cache of theirs.
        self._encoded(name if self.engine.options.attend_coded else "")
        stored, moved = self.store.record(name, app), ()
        record = self.served(stored)
        if stored.origin != record.origin:
            moved = stored.origin.differing(record.origin)
            record = self.at_level(app, name, record.origin.level)
            base = base and base.moved(record.origin)
        if rows is not None and rows.at[-1] >= len(record.tokens):
            # The context does not run, so that nobody else changes its record.
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
        self._claims.begin(turn)
        try:
            self.memory.claim(name, pinned=record.pinned)
            shared = self._begin_shared(turn, prompt) if base is None else 0
            last, self._last = self._last, ("", Session())
            if last[0] != name:
                # It keeps the memory of chunks that may leave now.
                last[1].chunks = None
            self.grow(turn, prompt_tokens)
            if self._encoder.busy(last[0]):
                # It reads this cache; a new one takes its memory as it fills.
                last = ("", Session())
            how = self._loader.resume(self._chunk_io, turn, last, prompt_tokens)
            # The restore may have marked damaged chunks as lost in the store's record.
            self._claims.changed(turn, turn.record)
            turn.restoration = dataclasses.replace(
                how, moved=moved, shared=shared, took_ms=1000 * (time.perf_counter() - began)
            )
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

    def idle(self) -> bool:
        """Does a short piece of work for calls to come (see `serving.contexts.idle`), for whoever has time
        while nothing runs.

        Returns:
          Whether it did any: then there may be more.
        """
        return not self._claims.running() and self._idle.step()

    @property
    def idle_figures(self) -> IdleFigures:
        """What `idle` did so far."""
        return self._idle.figures

    def take_idle(self, chunk_io: ChunkIO, name: str, chunks: Mapping[int, Stored]) -> None:
        """Takes stored chunks of a context into free memory. Nobody has asked for them: they leave first."""
        self._loader.load(chunk_io, name, chunks)
        self.memory.unasked(name, chunks)

    def widen(self, record: Record, *, most: int) -> int:
        """Computes chunks of a context again that are stored at fewer bits than they would be given now, and
        stores them at these. Evicts nothing.

        Args:
          record: of the context, which does not run and is of this model; with rows nothing is widened.
          most: chunks.

        Returns:
          How many were widened.

        Raises:
          BudgetExceeded, CheckpointError: see `begin` and `finish`.
        """
        name, chunk_io, written = record.name, self._chunk_io[record.origin.level], self.options.writing
        if record.rows:
            return 0
        wanted = widened_bits(record, chunk_io, self.options, most)
        more = self.chunk_bytes(record) - self.memory.own_bytes(name)
        full = self.memory.resident_bytes + more > self.memory.budget_bytes
        if not wanted or full or written not in ("background", "ahead"):
            return 0
        # They are on storage.
        self.memory.drop(name, wanted)
        # Of the last call's cache the memory alone: its values may be those of narrow chunks.
        self._last = ("", self._last[1])
        session, count = Session(), len(record.bits) * chunk_io.chunk_tokens
        turn = self.begin(
            record.app, name, session, prompt_tokens=count, most_tokens=count, base=record.lose(set(wanted))
        )
        try:
            if session.cache is None:
                return 0
            coded = chunk_io.encode(session.cache, wanted)
            bits = tuple(wanted.get(n, each) for n, each in enumerate(record.bits))
            kept = self._writer.keep(dataclasses.replace(record, bits=bits), set(wanted), coded, {})
            self._loader.load(chunk_io, name, coded)
            self._claims.changed(turn, kept)
            self._last = (name, session)
        finally:
            self.abandon(turn)
        return len(wanted)

    def abandon(self, turn: Turn) -> None:
        """Unlocks a context whose call has ended, without storing anything."""
        # Only then is there time for calls to come: a switch does not wait for what they may be.
        if turn.sequence and self._claims.runs(turn):
            self._idle.called(turn.record.name)
        self._claims.end(turn)

    def _begin_shared(self, turn: Turn, prompt: Sequence[int]) -> int:
        """Has the first call of a context begin with chunks of another one; returns how many."""
        exact = self._chunk_io[turn.record.origin.level].widths == (RAW,)
        if not exact or not self._shares(turn):
            return 0
        self._encoded()
        turn.base, turn.source = shared_beginning(
            self.store, self.memory, turn.record, prompt, across_apps=self.options.share_across_apps
        )
        return len(turn.base.bits)

    def _shares(self, turn: Turn) -> bool:
        """Whether a call is the first of its context, which may have its beginning in common with others."""
        written = self.options.writing in ("background", "ahead")
        return written and self.options.share_beginnings and not turn.record.tokens

    def _share(self, name: str, source: str, linked: Linked) -> None:
        """Has a context use another one's blobs in memory, of chunks that both have on storage."""
        own = self.memory.chunks(name)
        for n, each in self.memory.chunks(source).items():
            if n in linked and n in own and own[n].bits == each.bits:
                self.memory.share(name, each)

    def _kept(self, turn: Turn, tokens: Sequence[int], first: int) -> Record:
        name, chunk_io, session = turn.record.name, self._chunk_io[turn.record.origin.level], turn.session
        # The pin may have changed during the call.
        before = dataclasses.replace(turn.base, pinned=self.store.record(name).pinned)
        resident = {n: each.bits for n, each in self.memory.chunks(name).items() if n < len(before.bits)}
        first = first if turn.counted_from is None else turn.counted_from
        record = ended_record(
            before, resident, chunk_io, self.options, session=session, tokens=tokens, first=first
        )
        coded: Mapping[int, Stored] = {}
        ready: Callable[[], object] | None = None
        there = {n: (each.bits, each.blobs) for n, each in self.memory.chunks(name).items()}
        # Other states take the place of those that are there.
        states = {len(record.bits) - 1} if record.state_tokens != before.state_tokens else set()
        stale = bool(record.state_tokens) and not states
        if session.cache is not None and not stale:
            # Chunks that were computed again at the same width are on storage already.
            wanted = {n: bits for n, bits in enumerate(record.bits) if resident.get(n) != bits or n in states}
            if wanted and self.options.writing == "background":
                encoding = self._encoder.later(chunk_io, name, session.cache, wanted, there)
                coded, ready = encoding.chunks, encoding.require
            elif wanted:
                coded = chunk_io.encode(session.cache, wanted, there)
        changed = {n for n, bits in enumerate(record.bits) if before.bits[n : n + 1] != (bits,)} | states
        source, linked = turn.source, {}
        if source:
            same = {n: bits for n, bits in enumerate(record.bits) if n not in changed}
            linked = self.store.link(record, source, same)
            # The other one has changed since, or cannot be shared: what memory has is written.
            left = same.keys() - linked.keys()
            own = {n: there[n] for n in left - coded.keys() if resident.get(n) == same[n]}
            coded = {**own, **coded}
            record = record.lose(left - coded.keys())
            changed |= left & coded.keys()
        elif self._shares(turn):
            across = self.options.share_across_apps
            best, count = alike(self.store, record, record.tokens, across_apps=across)
            if best is not None:
                source = best.name
                linked = self.store.link(record, source, dict(enumerate(record.bits[:count])))
                changed -= linked.keys()
        record = self._writer.keep(record, changed, coded, linked, ready)
        self.memory.cut(name, min(len(record.bits), len(before.bits)))
        # Chunks that do not fit are on storage, or computed again.
        with contextlib.suppress(BudgetExceeded):
            self._loader.load(chunk_io, name, coded)
            self._share(name, source, linked)
            if chunk_io.coded and record.bits and session.cache is not None:
                # The next call begins with it.
                self._loader.chunk_table(chunk_io, name)
        # From here on memory agrees with the store.
        self._claims.changed(turn, record)
        if session.cache is not None:
            session.cache = session.cache.at_rest()
            self._last = (name, session)
        return record

    def _require_running(self, turn: Turn) -> None:
        if not self._claims.runs(turn):
            raise ConfigError(f"the call in the context {turn.record.name} has ended; begin another")
