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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from jaxllm.contexts import CHUNK_TOKENS, ROW_BYTES
from jaxllm.contexts.codecs import RAW
from jaxllm.errors import ConfigError
from jaxllm.export.folder_format.signature import (
    CHUNKS,
    CODED_KINDS,
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
from jaxllm.models.features import require_decoder_alone, require_feature
from jaxllm.serving.contexts.manager import Contexts
from jaxllm.serving.contexts.memory import ChunkAccess, Stored
from jaxllm.serving.contexts.options import ContextOptions
from jaxllm.serving.contexts.record import Origin, Record
from jaxllm.serving.engine.engine import Engine


class ProgramContexts(Contexts):
    """Contexts of all apps over programs (see `Contexts`)."""

    def __init__(
        self, engine: Engine[ProgramModel], folder: Path, *, budget_bytes: int, bits: int = RAW
    ) -> None:
        """Opens the store.

        Args:
          folder: folder of the store, created if missing; for one process at a time.
          budget_bytes: maximum bytes of all chunks in memory; the cache of the running context comes on top.
          bits: bits of stored values that the folder has programs for; `RAW` for the floats of the cache.

        Raises:
          ConfigError: the store is in use or cannot be created, or an argument is out of range.
        """
        require_feature(engine.cfg, "contexts")
        require_decoder_alone(engine.cfg, "contexts of programs", "run its bundle by jaxllm itself")
        # Of these very programs, because others round differently.
        facts = json.dumps([engine.model.program_files, engine.tokenizer.digest])
        self._model, self._adapters = (
            hashlib.sha256(facts.encode()).hexdigest(),
            engine.model.executor.adapters,
        )
        options = ContextOptions(
            folder=folder, budget_bytes=budget_bytes, writing="ahead", share_beginnings=False,
            pinned_share=1.0, app_pinned_share=1.0,
        )  # fmt: skip
        chunk_ios = {level: ProgramChunks(engine.runner_at(level), bits) for level in engine.levels}
        super().__init__(engine, options, chunk_ios)

    @property
    def chunk_ios(self) -> list[ChunkAccess]:
        """The chunks of each level."""
        return [*self._chunk_io.values()]

    def _origin(self, level: int | None, record: Record | None = None) -> Origin:
        del record
        origin = self._chunk_io[self.engine.runner_at(level).level].origin
        adapter = self._adapters.digest(self._adapters.used)
        return dataclasses.replace(origin, model=self._model, adapter=adapter)


class ProgramChunks(ChunkAccess):
    """Chunks in the caches of programs, at one level (see `ChunkAccess`): raw, or at the `bits` that a
    folder has programs for. No cache stays between calls: a device's memory is for those that run."""

    def __init__(self, runner: ProgramRunner, bits: int) -> None:
        """See the class.

        Raises:
          ConfigError: the folder has no programs at `bits` bits.
        """
        cfg, manifest, self.runner = runner.cfg, runner.executor.manifest, runner
        rooms = manifest.cache_tokens(runner.level)
        coding = (
            [] if bits == RAW else [self._program(kind, bits, at) for at in rooms for kind in CODED_KINDS]
        )
        origin = Origin(
            model="",
            level=runner.level,
            adapter="",
            codec=coding[0].codec if coding else "raw",
            chunk_tokens=CHUNK_TOKENS,
            dtype=manifest.cache_dtype,
            heads=tuple(cfg.units(layer).kv_heads for layer in range(cfg.layers)),
            head_width=cfg.head_dim + (ROW_BYTES if manifest.cache_dtype == "int8" else 0),
        )
        super().__init__(runner, origin, (bits,))

    def start(self, tokens: int) -> ProgramCache:
        """See `ChunkAccess`; `load` allocates its memory."""
        return ProgramCache(None, tokens)

    def load(self, cache: ProgramCache, chunks: Mapping[int, Stored]) -> ProgramCache:
        """See `ChunkAccess`."""
        runner, ordered = self.runner, sorted(chunks.items())
        with runner.lock:
            if self.widths == (RAW,):
                rows = self._rows([blobs for _, (_, blobs) in ordered]) if chunks else {}
                return runner.restored(rows, cache.capacity_tokens)
            whole = runner.restored({}, cache.capacity_tokens)
            caches = whole.caches
            for bits in {bits for bits, _ in chunks.values()}:
                signature = self._program("load_chunks", bits, whole.capacity_tokens)
                own = {number: blobs for number, (width, blobs) in ordered if width == bits}
                shapes = coded_shapes(runner.cfg, signature.codec, bits, signature.tokens // CHUNK_TOKENS)
                for part, numbers in _parts(list(own), signature):
                    coded = coded_of([own[number] for number in part], shapes, runner.cfg.layers)
                    _, caches = runner.executor.run(signature, {CHUNKS: numbers, **coded}, caches)
            return whole.after(caches, whole.length)

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
        runner, found = self.runner, dict[int, Stored]()
        with runner.lock:
            if self.widths == (RAW,):
                rows = runner.rows(cache, CHUNK_TOKENS * (1 + max(chunks)))
                return {number: (RAW, _raw_blobs(rows, number)) for number in chunks}
            for bits in set(chunks.values()):
                signature = self._program("encode_chunks", bits, cache.capacity_tokens)
                own = [number for number, width in chunks.items() if width == bits]
                for part, numbers in _parts(own, signature):
                    coded, _ = runner.executor.run(signature, {CHUNKS: numbers}, cache.caches)
                    arrays = {name: np.asarray(each) for name, each in coded.items()}
                    blobs = blobs_of(arrays, runner.cfg.layers, len(part))
                    found |= {number: (bits, each) for number, each in zip(part, blobs, strict=True)}
            return found

    def mass(self, cache: ProgramCache) -> np.ndarray:
        """See `ChunkAccess`: programs count none."""
        return np.zeros(cache.capacity_tokens)

    def loaded(self, cache: ProgramCache, length: int) -> ProgramCache:
        """See `ChunkAccess`."""
        return cache.after(cache.caches, length)

    def _program(self, kind: Kind, bits: int, room: int) -> Signature:
        manifest = self.runner.executor.manifest
        found = manifest.coding(kind, bits, self.runner.level, room)
        if found is None:
            raise ConfigError(
                f"{manifest.name} has no programs of contexts at {bits} bits over {room} tokens; "
                "export the model with --codec, or keep contexts raw"
            )
        return found

    def _rows(self, chunks: Sequence[Sequence[np.ndarray]]) -> dict[str, np.ndarray]:
        """The rows of a cache from the raw chunks that it begins with."""
        rows, origin = dict[str, np.ndarray](), self.origin
        for layer, heads in enumerate(origin.heads):
            shape = (2, heads, CHUNK_TOKENS, origin.head_width)
            sides = np.concatenate([each[layer].view(origin.dtype).reshape(shape) for each in chunks], axis=2)
            rows[KEYS.format(layer)], rows[VALUES.format(layer)] = sides[:1], sides[1:]
        return rows


def _raw_blobs(rows: dict[str, np.ndarray], chunk: int) -> tuple[np.ndarray, ...]:
    """A chunk's raw blob of each layer: its keys, then its values."""
    part = slice(chunk * CHUNK_TOKENS, (chunk + 1) * CHUNK_TOKENS)
    return tuple(
        np.concatenate([rows[side.format(layer)][0, :, part] for side in (KEYS, VALUES)])
        .reshape(-1)
        .view(np.uint8)
        for layer in range(len(rows) // 2)
    )


def _parts(chunks: Sequence[int], signature: Signature) -> Iterator[tuple[Sequence[int], np.ndarray]]:
    """Yields as many chunks as a program codes at once, and their numbers as its input: the last is
    repeated."""
    most = signature.tokens // CHUNK_TOKENS
    for at in range(0, len(chunks), most):
        part = list(chunks[at : at + most])
        yield part, np.array([*part, *part[-1:] * (most - len(part))], np.int32)
