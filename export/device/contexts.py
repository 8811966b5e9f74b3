"""Contexts of apps over exported programs: those of the live service, over other caches.

Programs compute no attention density, so all chunks have one width. They are the floats of the cache
(`codecs.RAW`), and a restored context is the cache that was stored, to the bit; or, with a requested width,
the results of the folder's programs at 8, 4 or 2 bits, which are the bytes of the live service's codec.
Chunks are written before an answer ends. Tokens after the last full chunk, and those from the first chunk on
that storage lost, are computed as a prompt; so are all tokens of a context of other programs, as after an
update of the model, if the tokenizer is the same.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from jaxllm.contexts.codecs import RAW
from jaxllm.errors import ConfigError, ContextGone
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
from jaxllm.export.programs.executor import FolderAdapters
from jaxllm.export.programs.model import ProgramModel
from jaxllm.export.programs.runner import ProgramCache, ProgramRunner
from jaxllm.models.features import require_decoder_alone, require_room
from jaxllm.serving.contexts.context import Context, ContextCall
from jaxllm.serving.contexts.manager import Contexts
from jaxllm.serving.contexts.memory import ChunkAccess, Stored
from jaxllm.serving.contexts.options import ContextOptions
from jaxllm.serving.contexts.record import Origin, Record
from jaxllm.serving.engine.engine import Engine
from jaxllm.serving.engine.run import Run


class ProgramContexts(Contexts):
    """Contexts of all apps (see `Contexts`). Each has the adapter that it was made with."""

    def __init__(
        self, engine: Engine[ProgramModel], folder: Path, *, budget_bytes: int, bits: int = RAW
    ) -> None:
        """Opens the store.

        Args:
          engine: engine that answers.
          folder: folder of the store, created if missing; for one process at a time.
          budget_bytes: maximum bytes of all chunks in memory; the cache of the running context comes on top.
          bits: bits of stored values that the folder has programs for; `RAW` for the floats of the cache.

        Raises:
          ConfigError: the store is in use or cannot be created, or an argument is out of range.
        """
        require_room(engine.cfg, "contexts")
        require_decoder_alone(engine.cfg, "contexts of programs", "run its bundle by jaxllm itself")
        # Of these very programs, because others round differently.
        facts = json.dumps([engine.model.program_files, engine.tokenizer.digest])
        self._model = hashlib.sha256(facts.encode()).hexdigest()
        options = ContextOptions(
            folder=folder, budget_bytes=budget_bytes, writing="ahead", share_beginnings=False,
            pinned_share=1.0, app_pinned_share=1.0,
        )  # fmt: skip
        chunk_ios = {level: ProgramChunks(engine.runner_at(level), bits) for level in engine.levels}
        super().__init__(engine, options, chunk_ios)

    @property
    def adapters(self) -> FolderAdapters:
        """Adapters of the programs."""
        return self.engine.model.executor.adapters

    def create(
        self, app: str, *, level: int | None = None, pinned: bool = False, adapter: str | None = None
    ) -> Record:
        """Creates an empty context (see `Contexts.create`); `adapter` is the name of the low-rank adapter
        that answers in it, empty for none, None for the current one.

        Raises:
          ConfigError: the level or the adapter was not exported, or the app's name is not valid.
          BudgetExceeded: there is no room on storage.
        """
        before = self.adapters.used
        self.adapters.use(before if adapter is None else adapter)
        try:
            return super().create(app, level=level, pinned=pinned)
        finally:
            self.adapters.use(before)

    def adapter_of(self, record: Record) -> str:
        """Returns the name of the adapter that answers in a context; empty for none.

        Raises:
          ContextGone: it was not exported.
        """
        return name_of_context(self.adapters, record.origin.adapter, record.name)

    def _origin(self, level: int | None, record: Record | None = None) -> Origin:
        digest = self.adapters.digest(self.adapters.used if record is None else self.adapter_of(record))
        origin = self._chunk_io[self.engine.runner_at(level).level].origin
        return dataclasses.replace(origin, model=self._model, adapter=digest)


def name_of_context(adapters: FolderAdapters, digest: str, context: str) -> str:
    """Returns the name of a context's adapter, which has this digest; empty for none.

    Raises:
      ContextGone: it was not exported.
    """
    name = adapters.name_of(digest)
    if name is None:
        raise ContextGone(
            f"the context {context} was made with an adapter that is not among these programs ({digest}): "
            "run those that have it, or delete it"
        )
    return name


class ProgramContextCall(ContextCall):
    """Restores a context before an answer, with its adapter, and stores it afterwards."""

    _contexts: ProgramContexts
    _before: str | None = None

    def begin(self, run: Run) -> None:
        """See `Lifecycle`."""
        adapters = self._contexts.adapters
        self._before = adapters.used
        adapters.use(self._contexts.adapter_of(self.record))
        super().begin(run)

    def finish(self, run: Run) -> None:
        """See `Lifecycle`."""
        before, self._before = self._before, None
        if before is not None:
            self._contexts.adapters.use(before)
        super().finish(run)


class ProgramContext(Context):
    """Context of an app (see `Context`)."""

    _contexts: ProgramContexts
    _call = ProgramContextCall

    @property
    def adapter(self) -> str:
        """Name of the low-rank adapter that answers in it; empty for none."""
        return self._contexts.adapter_of(self.record)


class ProgramChunks(ChunkAccess):
    """Chunks in the caches of programs, at one level (see `ChunkAccess`): raw, or at the `bits` that a
    folder has programs for. No cache stays between calls: a device's memory is for those that run."""

    def __init__(self, runner: ProgramRunner, bits: int) -> None:
        cfg = runner.cfg
        origin = Origin(
            model="",
            level=runner.level,
            adapter="",
            codec="raw" if bits == RAW else require_codec_programs(runner, bits),
            chunk_tokens=CHUNK_TOKENS,
            dtype=runner.executor.manifest.cache_dtype,
            heads=tuple(cfg.units(layer).kv_heads for layer in range(cfg.layers)),
            head_width=cfg.head_dim,
        )
        super().__init__(runner, origin, (bits,))

    def start(self, tokens: int) -> ProgramCache:
        """See `ChunkAccess`; `load` allocates its memory."""
        return ProgramCache(None, tokens)

    def load(self, cache: ProgramCache, chunks: Mapping[int, Stored]) -> ProgramCache:
        """See `ChunkAccess`."""
        raw = self.widths == (RAW,)
        rows = self._rows([chunks[n][1] for n in sorted(chunks)]) if raw and chunks else {}
        with self.runner.lock:
            whole = self.runner.restored(rows, cache.capacity_tokens)
            return whole if raw else loaded(self.runner, whole, chunks)

    def encode(
        self,
        cache: ProgramCache,
        chunks: Mapping[int, int],
        stored: Mapping[int, Stored] | None = None,
        *,
        into: Mapping[int, Stored] | None = None,
    ) -> Mapping[int, Stored]:
        """See `ChunkAccess`."""
        del stored, into
        with self.runner.lock:
            if self.widths == (RAW,):
                rows = self.runner.rows(cache, CHUNK_TOKENS * (1 + max(chunks)))
                return {n: (RAW, _blobs(rows, n)) for n in chunks}
            found: dict[int, Stored] = {}
            for bits in set(chunks.values()):
                own = [n for n, each in chunks.items() if each == bits]
                found |= {n: (bits, each) for n, each in encoded(self.runner, cache, own, bits).items()}
            return found

    def mass(self, cache: ProgramCache) -> np.ndarray:
        """See `ChunkAccess`: programs count none."""
        return np.zeros(cache.capacity_tokens)

    def loaded(self, cache: ProgramCache, length: int) -> ProgramCache:
        """See `ChunkAccess`."""
        return cache.after(cache.caches, length)

    def _rows(self, chunks: Sequence[Sequence[np.ndarray]]) -> dict[str, np.ndarray]:
        """The rows of a cache from the raw chunks that it begins with."""
        rows, origin = dict[str, np.ndarray](), self.origin
        for layer, heads in enumerate(origin.heads):
            shape = (2, heads, CHUNK_TOKENS, origin.head_width)
            sides = np.concatenate([each[layer].view(origin.dtype).reshape(shape) for each in chunks], axis=2)
            rows[KEYS.format(layer)], rows[VALUES.format(layer)] = sides[:1], sides[1:]
        return rows


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


def loaded(runner: ProgramRunner, cache: ProgramCache, chunks: Mapping[int, Stored]) -> ProgramCache:
    """A cache with chunks in their places."""
    caches = cache.caches
    for bits in {bits for bits, _ in chunks.values()}:
        signature = _program(runner, "load_chunks", bits, cache)
        own = {number: blobs for number, (width, blobs) in sorted(chunks.items()) if width == bits}
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
