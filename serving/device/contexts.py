"""Keeps contexts of apps over exported programs: in the store of the live service, in raw chunks.

    begin     the chunks of the context, from memory or from storage, become the beginning of a cache
    finish    the rows of new whole chunks go to storage and to memory, which stays within its budget

Programs give no attention density, so all chunks have one width. They are the floats of the cache
(`codecs.RAW`), and a restored context is the cache that was stored, to the bit; or, where a width is asked
for, what the folder's programs make of it at 8, 4 or 2 bits, which are the bytes of the live service's codec.
Tokens after the last whole chunk, and those from the first chunk on that storage lost, are computed again
from the record's tokens. A chunk may leave memory at any time, because it is on storage when its call has
ended.
"""

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.errors import BudgetExceeded, CheckpointError, ConfigError, ContextGone, Unreadable
from jaxllm.kv.codecs import RAW
from jaxllm.kv.eviction import find_policy
from jaxllm.kv.recompute import LOST
from jaxllm.models.rooms import require_decoder_alone, require_room
from jaxllm.program_folder.arrays import KEYS, VALUES
from jaxllm.program_folder.codecs import CHUNK_TOKENS
from serving.contexts.blobs import Stored
from serving.contexts.memory import ChunkMemory
from serving.contexts.record import Origin, Record
from serving.contexts.store import ContextStore
from serving.engine import Engine
from serving.programs.codecs import encoded, loaded, require_codec_programs
from serving.programs.model import ProgramModel
from serving.request import Session
from serving.server.facts import ContextFacts

_CODEC = "raw"


@dataclasses.dataclass
class Restored:
    """How a context was restored for a call: numbers of its tokens.

    Attributes:
      resident: whose chunks were in memory.
      read: whose chunks were read from storage.
      computed: that are computed again, before those of the prompt.
    """

    resident: int = 0
    read: int = 0
    computed: int = 0


class DeviceContexts:
    """The contexts of all apps. Not thread-safe; one call at a time.

    Attributes:
      store: of the contexts on storage.
      memory: of the chunks in memory.
    """

    def __init__(
        self,
        engine: Engine[ProgramModel],
        folder: Path,
        *,
        budget_bytes: int,
        policy: str = "lctru",
        quota_bytes: int = 0,
        bits: int = RAW,
    ) -> None:
        """Opens the store.

        Args:
          engine: that answers.
          folder: of the store, made if missing; for one process at a time.
          budget_bytes: most bytes of all chunks in memory; the cache of the running context comes on top.
          policy: what leaves memory first, by its name in `jaxllm.kv.eviction.POLICIES`.
          quota_bytes: most bytes of all files of the store; 0 for no limit.
          bits: of stored values, which the folder has programs for; `RAW` for the floats of the cache.

        Raises:
          ConfigError: the store is in use or cannot be made, or an argument is out of its domain.
        """
        require_room(engine.cfg, "contexts")
        require_decoder_alone(engine.cfg, "contexts of programs", "run its bundle by jaxllm itself")
        self.engine, self.bits, codec = engine, bits, _CODEC
        if bits != RAW:
            (codec,) = {require_codec_programs(engine.runner_at(each), bits) for each in engine.levels}
        self.memory = ChunkMemory(budget_bytes, find_policy(policy))
        self.store = ContextStore(folder, quota_bytes=quota_bytes)
        self._origins = {level: _origin(engine, level, codec) for level in engine.levels}
        self.running = ""

    def close(self) -> None:
        """Releases the store for other processes."""
        self.store.close()

    def create(
        self, app: str, *, level: int | None = None, pinned: bool = False, adapter: str = ""
    ) -> Record:
        """Creates an empty context.

        Args:
          app: that owns it; no other app can open it.
          level: the sub-model that answers in it, in percent; None for the engine's own.
          pinned: whether its chunks never leave memory for those of another context.
          adapter: the name of the low-rank adapter that answers in it; empty for none.

        Raises:
          ConfigError: the level or the adapter was not exported, or the app's name is not valid.
          BudgetExceeded: there is no room on storage.
        """
        adapters = self.engine.model.executor.adapters
        adapters.require(adapter)
        origin = self._origins[int(self.engine.runner_at(level).level)]
        origin = dataclasses.replace(origin, adapter=adapters.digest(adapter))
        return self.store.create(app, origin, pinned=pinned)

    def record(self, app: str, name: str) -> Record:
        """The record of an app's context.

        Raises:
          ContextGone: the app has no context of this name, or it is of other programs or another level.
        """
        record = self.store.record(name, app)
        level = record.origin.level
        if level not in self._origins:
            raise ContextGone(f"the context {name} is of level {level}, which was not exported; delete it")
        here = self._origins[level]
        if self.engine.model.executor.adapters.name_of(record.origin.adapter) is not None:
            here = dataclasses.replace(here, adapter=record.origin.adapter)
        if differing := record.origin.differing(here):
            raise ContextGone(
                f"the context {name} is of other programs ({', '.join(differing)} differ); run those, or "
                "delete it"
            )
        return record

    def pin(self, app: str, name: str, pinned: bool) -> Record:
        """Keeps a context's chunks in memory once they are there, or lets them be evicted.

        Raises:
          ContextGone: see `record`.
          BudgetExceeded: its chunks do not fit beside those of other pinned contexts.
        """
        record = dataclasses.replace(self.record(app, name), pinned=pinned)
        if pinned:
            self.memory.require(name, len(record.bits) * self._chunk_bytes(record))
        record = self.store.commit(record)
        self.memory.pin(name, pinned)
        return record

    def adapter_of(self, record: Record) -> str:
        """The name of the adapter that answers in a context; empty for none."""
        return self.engine.model.executor.adapters.name_of(record.origin.adapter) or ""

    def facts(self, record: Record) -> ContextFacts:
        """What apps are told of a context."""
        return ContextFacts(
            name=record.name,
            tokens=len(record.tokens),
            level=record.origin.level,
            pinned=record.pinned,
            stored_bytes=sum(sum(record.origin.layer_bytes[bits]) for bits in record.bits if bits != LOST),
            created_s=record.created_s,
            adapter=self.adapter_of(record),
        )

    def delete(self, name: str) -> None:
        """Deletes a context from memory and storage.

        Raises:
          ContextGone: there is no such context.
          ConfigError: it is answering.
        """
        if name == self.running:
            raise ConfigError(f"the context {name} is answering; close its answer first")
        # Memory first: chunks in memory must never outlive those on storage.
        self.memory.forget(name)
        self.store.delete(name)

    def begin(self, record: Record, session: Session, *, most_tokens: int) -> Restored:
        """Restores a context into a session, and locks its chunks.

        Raises:
          ConfigError: another call runs in a context.
          BudgetExceeded: the context's chunks could not fit into memory, whatever is evicted.
        """
        if self.running:
            raise ConfigError(f"the context {self.running} is answering; one call at a time runs in contexts")
        chunk_bytes, name = self._chunk_bytes(record), record.name
        most = min(most_tokens, self.engine.options.context_tokens) // CHUNK_TOKENS
        self.memory.pin(name, record.pinned)
        self.memory.require(name, most * chunk_bytes)
        faults = self.memory.claim(name, len(record.bits), pinned=record.pinned)
        self.running = name
        try:
            read = self._read(record, faults)
            resident = {number: (each.bits, each.blobs) for number, each in self.memory.chunks(name).items()}
            there = {**resident, **read}
            # A cache has no gaps: what follows the first lost chunk is computed again, too.
            count = next((each for each in range(len(record.bits)) if each not in there), len(record.bits))
            self._fill(record, session, [there[each] for each in range(count)])
        except BaseException:
            self.end(record)
            raise
        found = len([each for each in range(count) if each in read])
        return Restored(
            resident=CHUNK_TOKENS * (count - found),
            read=CHUNK_TOKENS * found,
            computed=len(record.tokens) - CHUNK_TOKENS * count,
        )

    def finish(self, record: Record, session: Session, sequence: Sequence[int]) -> None:
        """Stores a context when its call has ended, and unlocks it. Where an error took the cache, the tokens
        are stored with the chunks of before.

        Raises:
          BudgetExceeded, CheckpointError: see `ContextStore.commit`.
        """
        try:
            # Damage that was found while it was restored is in the store's record.
            record = self.store.record(record.name)
            known, cached = len(record.bits), 0
            fresh: dict[int, tuple[np.ndarray, ...]] = {}
            if session.cache is not None:
                # The session's tokens are a beginning of the sequence.
                cached = min(len(session.tokens), len(sequence)) // CHUNK_TOKENS
                lost = [number for number in range(min(known, cached)) if record.bits[number] == LOST]
                if new := [*lost, *range(known, cached)]:
                    runner = self.engine.runner_at(record.origin.level)
                    if self.bits == RAW:
                        rows = runner.rows(session.cache, CHUNK_TOKENS * cached)
                        fresh = {number: _blobs(rows, number) for number in new}
                    else:
                        cache: Any = session.cache
                        fresh = encoded(runner, cache, new, self.bits)
            count = max(known, cached)
            bits = tuple(self.bits if n in fresh else record.bits[n] for n in range(count))
            zeros = (0.0,) * count
            self.store.commit(
                dataclasses.replace(record, tokens=tuple(sequence), bits=bits, mass=zeros, seen=zeros),
                {number: (self.bits, blobs) for number, blobs in fresh.items()},
            )
            for number, blobs in fresh.items():
                # Chunks that do not fit beside pinned ones stay on storage only.
                with contextlib.suppress(BudgetExceeded):
                    self.memory.load(record.name, number, self.bits, blobs)
        finally:
            self.end(record)

    def end(self, record: Record) -> None:
        """Unlocks a context whose call has ended."""
        self.running = ""
        self.memory.release(record.name)

    def _chunk_bytes(self, record: Record) -> int:
        """Most bytes of a chunk: that of this service's width, or of a width of an earlier one."""
        sizes = record.origin.layer_bytes
        return max(sum(sizes[bits]) for bits in {self.bits, *record.bits} - {LOST})

    def _read(self, record: Record, faults: Sequence[int]) -> dict[int, Stored]:
        """The missing chunks that storage has whole; those that fit are in memory from here on."""
        try:
            found = self._blobs_of(record, faults)
        except (CheckpointError, Unreadable):
            # Damaged chunks are marked as lost, and their tokens are computed again.
            record = self.store.repair(record.name)
            found = self._blobs_of(record, faults)
        coded: dict[int, Stored] = {number: (record.bits[number], blobs) for number, blobs in found.items()}
        for number, (bits, blobs) in coded.items():
            with contextlib.suppress(BudgetExceeded):
                self.memory.load(record.name, number, bits, blobs)
        return coded

    def _blobs_of(self, record: Record, faults: Sequence[int]) -> dict[int, tuple[np.ndarray, ...]]:
        stored = [each for each in faults if record.bits[each] != LOST and record.files[each]]
        if not stored:
            return {}
        opened = self.store.open(record.name, stored)
        layers = [opened.read(layer, stored) for layer in range(opened.layers)]
        return {number: tuple(layer[place] for layer in layers) for place, number in enumerate(stored)}

    def _fill(self, record: Record, session: Session, chunks: Sequence[Stored]) -> None:
        if not chunks:
            return
        runner = self.engine.runner_at(record.origin.level)
        tokens = list(record.tokens[: CHUNK_TOKENS * len(chunks)])
        if self.bits == RAW:
            session.cache = runner.restored(self._rows(record, [blobs for _, blobs in chunks]), len(tokens))
        else:
            numbered = [(number, *each) for number, each in enumerate(chunks)]
            cache: Any = loaded(runner, runner.start(len(tokens)), numbered)
            session.cache = cache.after(cache.caches, len(tokens))
        session.tokens, session.weights_version = tokens, runner.weights_version

    def _rows(self, record: Record, chunks: Sequence[Sequence[np.ndarray]]) -> dict[str, np.ndarray]:
        """The rows of a cache by the raw chunks that it begins with."""
        rows: dict[str, np.ndarray] = {}
        for layer, heads in enumerate(record.origin.heads):
            shape = (2, heads, CHUNK_TOKENS, record.origin.head_width)
            sides = np.concatenate(
                [each[layer].view(record.origin.dtype).reshape(shape) for each in chunks], axis=2
            )
            rows[KEYS.format(layer)], rows[VALUES.format(layer)] = sides[:1], sides[1:]
        return rows


def _origin(engine: Engine[ProgramModel], level: int, codec: str) -> Origin:
    """The origin of caches of a level: of these very programs, because others round differently."""
    manifest, cfg = engine.model.executor.manifest, engine.runner_at(level).cfg
    files = {name: each.xxh3_128 for name, each in sorted(manifest.files.items())}
    facts = json.dumps([manifest.model, manifest.format, manifest.precision, files])
    return Origin(
        model=hashlib.sha256(facts.encode()).hexdigest(),
        level=level,
        adapter="",
        codec=codec,
        chunk_tokens=CHUNK_TOKENS,
        dtype=manifest.cache_dtype,
        heads=tuple(cfg.units(layer).kv_heads for layer in range(cfg.layers)),
        head_width=cfg.head_dim,
    )


def _blobs(rows: dict[str, np.ndarray], chunk: int) -> tuple[np.ndarray, ...]:
    """A chunk's raw blob of each layer: its keys, then its values."""
    part = slice(chunk * CHUNK_TOKENS, (chunk + 1) * CHUNK_TOKENS)
    return tuple(
        np.concatenate([rows[side.format(layer)][0, :, part] for side in (KEYS, VALUES)])
        .reshape(-1)
        .view(np.uint8)
        for layer in range(len(rows) // 2)
    )
