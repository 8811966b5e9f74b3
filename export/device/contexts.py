"""Stores contexts of apps over exported programs: in the store of the live service, in raw chunks.

    begin     the chunks of the context, from memory or from storage, become the beginning of a cache
    finish    the rows of new full chunks go to storage and to memory, which stays within its budget

Programs compute no attention density, so all chunks have one width. They are the floats of the cache
(`codecs.RAW`), and a restored context is the cache that was stored, to the bit; or, with a requested width,
the results of the folder's programs at 8, 4 or 2 bits, which are the bytes of the live service's codec.
Tokens after the last full chunk, and those from the first chunk on that storage lost, are recomputed from
the record's tokens; so are all tokens of a context of other programs, as after an update of the model, if
the tokenizer is the same. A chunk may leave memory at any time, because it is on storage when its call has
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

from jaxllm.contexts.codecs import RAW
from jaxllm.contexts.eviction import find_policy
from jaxllm.contexts.recompute import LOST
from jaxllm.errors import BudgetExceeded, CheckpointError, ConfigError, ContextGone, Unreadable
from jaxllm.export.folder_format.signature import (
    CHUNK_TOKENS,
    CHUNKS,
    KEYS,
    VALUES,
    Kind,
    Signature,
    blobs_of,
    coded_of,
    coded_shapes,
)
from jaxllm.export.programs.model import ProgramModel
from jaxllm.export.programs.runner import ProgramCache, ProgramRunner
from jaxllm.models.features import require_decoder_alone, require_room
from jaxllm.serving.contexts.memory import ChunkMemory, Stored
from jaxllm.serving.contexts.record import Origin, Record
from jaxllm.serving.contexts.store import ContextStore
from jaxllm.serving.engine.engine import Engine
from jaxllm.serving.engine.request import Session
from jaxllm.serving.ground.plan import Restoration

_CODEC = "raw"


class ProgramContexts:
    """Contexts of all apps (see `jaxllm.serving.server.context_turns.TurnContexts`). Not thread-safe.

    Attributes:
      engine: engine that answers in them.
      store: contexts on storage.
      memory: chunks in memory.
      running: names of contexts with a running answer.
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
          engine: engine that answers.
          folder: folder of the store, created if missing; for one process at a time.
          budget_bytes: maximum bytes of all chunks in memory; the cache of the running context comes on top.
          policy: eviction policy, by its name in `jaxllm.contexts.eviction.POLICIES`.
          quota_bytes: maximum bytes of all files of the store; 0 for no limit.
          bits: bits of stored values that the folder has programs for; `RAW` for the floats of the cache.

        Raises:
          ConfigError: the store is in use or cannot be created, or an argument is out of range.
        """
        require_room(engine.cfg, "contexts")
        require_decoder_alone(engine.cfg, "contexts of programs", "run its bundle by jaxllm itself")
        self.engine, self.bits, codec = engine, bits, _CODEC
        if bits != RAW:
            (codec,) = {require_codec_programs(engine.runner_at(each), bits) for each in engine.levels}
        self.memory = ChunkMemory(budget_bytes, find_policy(policy))
        self.store = ContextStore(folder, quota_bytes=quota_bytes)
        self._tokenizer = engine.tokenizer.digest
        self._origins = {level: _origin(engine, level, codec) for level in engine.levels}
        self.running: set[str] = set()

    def close(self) -> None:
        """Releases the store for other processes."""
        self.store.close()

    def create(
        self, app: str, *, level: int | None = None, pinned: bool = False, adapter: str | None = None
    ) -> Record:
        """Creates an empty context.

        Args:
          app: app that owns it; no other app can open it.
          level: sub-model that answers in it, in percent; None for the engine's own.
          pinned: whether its chunks never leave memory for those of another context.
          adapter: name of the low-rank adapter that answers in it; empty for none, None for the current one.

        Raises:
          ConfigError: the level or the adapter was not exported, or the app's name is not valid.
          BudgetExceeded: there is no room on storage.
        """
        adapters = self.engine.model.executor.adapters
        adapter = adapters.used if adapter is None else adapter
        adapters.require(adapter)
        origin = self._origins[int(self.engine.runner_at(level).level)]
        origin = dataclasses.replace(origin, adapter=adapters.digest(adapter))
        return self.store.create(app, origin, pinned=pinned, tokenizer=self._tokenizer)

    def record(self, app: str, name: str) -> Record:
        """Returns the record of an app's context. If the context is of other programs, a level that was not
        exported or another codec, only its tokens remain, as it moves to those of this folder with its next
        call.

        Raises:
          ContextGone: the app has no context of this name, or its tokens are of another tokenizer, or it is
            of an adapter that was not exported.
        """
        record = self.store.record(name, app)
        if record.tokens and record.tokenizer != self._tokenizer:
            raise ContextGone(
                f"the tokens of the context {name} are of another tokenizer: run the programs that it was "
                "made with, or delete it"
            )
        if self.engine.model.executor.adapters.name_of(record.origin.adapter) is None:
            raise ContextGone(
                f"the context {name} was made with an adapter that is not among these programs "
                f"({record.origin.adapter}): run those that have it, or delete it"
            )
        level = record.origin.level if record.origin.level in self._origins else self.engine.runner.level
        here = dataclasses.replace(self._origins[int(level)], adapter=record.origin.adapter)
        record = dataclasses.replace(record, tokenizer=self._tokenizer)
        return record if record.origin == here else record.moved(here)

    def pin(self, name: str, pinned: bool) -> Record:
        """Keeps a context's chunks in memory once they are loaded, or lets them be evicted.

        Raises:
          ContextGone: see `record`.
          BudgetExceeded: its chunks do not fit in addition to those of other pinned contexts.
        """
        record = dataclasses.replace(self.record(self.store.record(name).app, name), pinned=pinned)
        if pinned:
            self.memory.require(name, self.chunk_bytes(record))
        record = self.store.commit(record)
        self.memory.pin(name, pinned)
        return record

    def adapter_of(self, record: Record) -> str:
        """Returns the name of the adapter that answers in a context; empty for none."""
        return self.engine.model.executor.adapters.name_of(record.origin.adapter) or ""

    def delete(self, name: str) -> None:
        """Deletes a context from memory and storage.

        Raises:
          ContextGone: there is no such context.
          ConfigError: it is answering.
        """
        if name in self.running:
            raise ConfigError(f"the context {name} is answering; close its answer first")
        # Memory first: chunks in memory must never outlive those on storage.
        self.memory.forget(name)
        self.store.delete(name)

    def begin(self, record: Record, session: Session, *, most_tokens: int) -> Restoration:
        """Restores a context into a session, and locks its chunks.

        Raises:
          ConfigError: another call runs in the context.
          BudgetExceeded: the context's chunks do not fit into memory after any eviction.
          CheckpointError: the context moves to these programs, and storing that failed.
        """
        name = record.name
        if name in self.running:
            raise ConfigError(f"the context {name} is answering; close its answer first")
        if moved := self.store.record(name).origin.differing(record.origin):
            record = self.store.commit(record)
        self.memory.pin(name, record.pinned)
        self.memory.require(name, self.chunk_bytes(record, most_tokens))
        faults = self.memory.claim(name, len(record.bits), pinned=record.pinned)
        self.running.add(name)
        try:
            read = self._read(record, faults)
            resident = {number: (each.bits, each.blobs) for number, each in self.memory.chunks(name).items()}
            there = {**resident, **read}
            # A cache has no gaps: chunks after the first lost one are recomputed, too.
            count = next((each for each in range(len(record.bits)) if each not in there), len(record.bits))
            self._fill(record, session, [there[each] for each in range(count)])
        except BaseException:
            self.end(record)
            raise
        found = tuple(each for each in range(count) if each in read)
        computed = tuple(range(count, len(record.tokens) // CHUNK_TOKENS))
        return Restoration(resident=count - len(found), read=found, computed=computed, moved=moved)

    def finish(self, record: Record, session: Session, sequence: Sequence[int]) -> None:
        """Stores a context when its call has ended, and unlocks it. If an error lost the cache, the tokens
        are stored with the earlier chunks.

        Raises:
          BudgetExceeded, CheckpointError: see `ContextStore.commit`.
        """
        try:
            # Damage that its restoration found is in the store's record.
            record = self.store.record(record.name)
            known, cached = len(record.bits), 0
            fresh: dict[int, tuple[np.ndarray, ...]] = {}
            if session.cache is not None:
                # The session's tokens are a prefix of the sequence.
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
                # Chunks that do not fit in addition to pinned ones stay on storage only.
                with contextlib.suppress(BudgetExceeded):
                    self.memory.load(record.name, number, self.bits, blobs)
        finally:
            self.end(record)

    def end(self, record: Record) -> None:
        """Unlocks a context whose call has ended."""
        self.running.discard(record.name)
        self.memory.release(record.name)

    def chunk_bytes(self, record: Record, tokens: int | None = None, level: int | None = None) -> int:
        """Maximum bytes of the chunks of a context, or of one of `tokens` tokens, at a level, None for its
        own: of this service's width, or of a width of an earlier one."""
        if level is not None and level != record.origin.level:
            record = self.at_level(record, level)
        sizes = record.origin.layer_bytes
        count = len(record.bits)
        if tokens is not None:
            count = min(tokens, self.engine.options.context_tokens) // CHUNK_TOKENS
        return count * max(sum(sizes[bits]) for bits in {self.bits, *record.bits} - {LOST})

    def at_level(self, record: Record, level: int) -> Record:
        """Returns a context as it moves to another level with its next call: with only its tokens."""
        origin = dataclasses.replace(self._origins[level], adapter=record.origin.adapter)
        return record if record.origin == origin else record.moved(origin)

    def ready(self, name: str) -> None:
        """Does nothing: errors of storing an answer are raised by the answer."""
        del name

    def rows_before(self, record: Record, tokens: int) -> None:
        """None: programs accept no prompt embeddings."""
        del record, tokens

    def _read(self, record: Record, faults: Sequence[int]) -> dict[int, Stored]:
        """Returns the missing chunks that are undamaged on storage; those that fit are in memory from now
        on."""
        try:
            found = self._blobs_of(record, faults)
        except (CheckpointError, Unreadable):
            # Damaged chunks are marked as lost, and their tokens are recomputed.
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
        """Returns the rows of a cache from the raw chunks that it begins with."""
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
    files = json.dumps(engine.model.program_files)
    return Origin(
        model=hashlib.sha256(files.encode()).hexdigest(),
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


def require_codec_programs(runner: ProgramRunner, bits: int) -> str:
    """Returns the codec of a folder's programs.

    Raises:
      ConfigError: there are none at `bits` bits.
    """
    manifest = runner.executor.manifest
    for room in manifest.cache_tokens(runner.level):
        for kind in ("encode_chunks", "load_chunks"):
            if manifest.coding(kind, bits, runner.level, room) is None:
                raise ConfigError(
                    f"{manifest.name} has no programs of contexts at {bits} bits over {room} tokens; "
                    "export the model with --codec, or keep contexts raw"
                )
    return manifest.codec


def encoded(
    runner: ProgramRunner, cache: ProgramCache, chunks: Sequence[int], bits: int
) -> dict[int, tuple[np.ndarray, ...]]:
    """Blobs of each layer of some chunks of a cache, by their numbers."""
    signature, found = _program(runner, "encode_chunks", bits, cache), {}
    for part in _parts(chunks, signature):
        coded, _ = runner.executor.run(signature, {CHUNKS: _numbers(part, signature)}, cache.caches)
        coded = {name: np.asarray(each) for name, each in coded.items()}
        found |= zip(part, blobs_of(coded, runner.cfg.layers, len(part)), strict=True)
    return found


def loaded(
    runner: ProgramRunner, cache: ProgramCache, chunks: Sequence[tuple[int, int, Sequence[np.ndarray]]]
) -> ProgramCache:
    """A cache with chunks in their places: number, bits and blobs of each."""
    caches = cache.caches
    for bits in dict.fromkeys(bits for _, bits, _ in chunks):
        signature = _program(runner, "load_chunks", bits, cache)
        own = {number: blobs for number, width, blobs in chunks if width == bits}
        shapes = coded_shapes(runner.cfg, signature.codec, bits, signature.tokens // CHUNK_TOKENS)
        for part in _parts(list(own), signature):
            coded = coded_of([own[number] for number in part], shapes, runner.cfg.layers)
            inputs = {CHUNKS: _numbers(part, signature), **coded}
            _, caches = runner.executor.run(signature, inputs, caches)
    return cache.after(caches, cache.length)


def _program(runner: ProgramRunner, kind: Kind, bits: int, cache: ProgramCache) -> Signature:
    found = runner.executor.manifest.coding(kind, bits, runner.level, cache.capacity_tokens)
    if found is None:
        raise ConfigError(f"there is no program that codes {bits} bits; export the model with --codec")
    return found


def _parts(chunks: Sequence[int], signature: Signature) -> list[list[int]]:
    most = signature.tokens // CHUNK_TOKENS
    return [list(chunks[at : at + most]) for at in range(0, len(chunks), most)]


def _numbers(part: Sequence[int], signature: Signature) -> np.ndarray:
    """Numbers of chunks, the last repeated up to as many as the program requires."""
    missing = signature.tokens // CHUNK_TOKENS - len(part)
    return np.array([*part, *[part[-1]] * missing], np.int32)
