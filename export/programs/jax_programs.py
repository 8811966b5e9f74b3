"""Runs programs by JAX: compiled once, cached for later processes, with donated caches."""

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxllm.export.folder_format.arrays import SOURCE_TOKENS, lengthened
from jaxllm.export.folder_format.controls import COUNT, NEXT_TOKENS
from jaxllm.export.folder_format.manifest import Manifest, Signature
from jaxllm.export.programs.adapters import FolderAdapters
from jaxllm.export.programs.exported_bucket import (
    Caches,
    ProgramBucket,
    ProgramGrowBucket,
    ProgramKeepBucket,
    ProgramShapes,
    named_shapes,
)
from jaxllm.serving.buckets.bucket import Bucket
from jaxllm.serving.buckets.bucket_table import BucketTable
from jaxllm.serving.buckets.store import BucketStore, CompiledBucketFolder
from jaxllm.serving.host.progress import Progress


class JaxPrograms:
    """Common part of executors on JAX.

    Args:
      manifest: manifest of the programs.
      weights: function from a level to the weights of its programs.
      step: function `(weights, caches, tokens, input_pos[, mask])` of a signature.
      contents: key of the contents of a signature's program.
      folder: cache of compiled buckets; None caches none.
      tiny_lm: weights of the tiny LM; empty for none.
      adapters: adapters that programs accept; None for none.
    """

    moves_rows = stops_early = True

    def __init__(
        self,
        manifest: Manifest,
        weights: Mapping[int, Mapping[str, Any]],
        step: Callable[[Signature], Callable[..., dict[str, jax.Array]]],
        contents: Callable[[Signature], str],
        folder: CompiledBucketFolder | None,
        *,
        tiny_lm: Mapping[str, Any] | None = None,
        adapters: FolderAdapters | None = None,
    ) -> None:
        self.manifest, self.lock = manifest, threading.RLock()
        self.adapters, self._tiny_lm = adapters or FolderAdapters(manifest), dict(tiny_lm or {})
        self._placed: dict[tuple[str, int], jax.Array] = {}
        self._weights, self._contents = weights, contents
        self._programs: dict[str, ProgramBucket] = {}
        self._buckets, store = BucketTable(), None if folder is None else BucketStore.of_programs(folder)
        for level, each in weights.items():
            shapes = ProgramShapes(manifest, each, step, self._path, self._tiny_lm)
            self._buckets.add_level(level, shapes, store)

    def prepare(self, signatures: Sequence[Signature], progress: Progress | None = None) -> None:
        """See `Executor`; several at a time, from disk if an earlier process stored them."""
        for each in signatures:
            if not self.is_ready(each):
                # Its file may have been replaced since it failed.
                self._programs.pop(each.name, None)
        buckets: list[Bucket] = [self._program_bucket(each) for each in signatures]
        rooms = {(each.level, self.manifest.room(each)) for each in signatures}
        for level in {level for level, _ in rooms}:
            for short, long in itertools.pairwise(self.manifest.cache_tokens(level)):
                if {(level, short), (level, long)} <= rooms:
                    buckets.append(self._grow_bucket(level, short, long))
        buckets += [self._keep_bucket(each) for each in signatures if each.kind == "verify"]
        self._buckets.fill(buckets, progress)

    def is_ready(self, signature: Signature) -> bool:
        """See `Executor`."""
        bucket = self._programs.get(signature.name)
        return bucket is not None and self._buckets.is_ready(bucket)

    def compile(self, signature: Signature) -> None:
        """Gets one program ready, in this thread."""
        self._buckets.fill_here([self._program_bucket(signature)])

    def start(self, level: int, cache_tokens: int) -> Caches:
        """See `Executor`."""
        shapes = self._cache_shapes(level, cache_tokens)
        return {name: jax.device_put(np.zeros(each.shape, each.dtype)) for name, each in shapes.items()}

    def grow(self, level: int, caches: Caches, cache_tokens: int) -> Caches:
        """See `Executor`."""
        short = next(iter(caches.values())).shape[2]
        return self._ready(self._grow_bucket(level, short, cache_tokens))(caches)

    def rows(self, level: int, caches: Caches, tokens: int) -> dict[str, np.ndarray]:
        """See `Executor`."""
        del level
        # Cut on the host: slicing a device's array would compile a computation.
        return {name: np.array(np.asarray(each)[:, :, :tokens]) for name, each in caches.items()}

    def restored(self, level: int, cache_tokens: int, rows: Mapping[str, np.ndarray]) -> Caches:
        """See `Executor`."""
        found = {}
        for name, each in self._cache_shapes(level, cache_tokens).items():
            found[name] = jax.device_put(lengthened(rows[name], each.shape))
        return found

    def encode(self, signature: Signature, tokens: np.ndarray, count: int) -> Caches:
        """See `Executor`."""
        if not self.is_ready(signature):
            self.prepare([signature])
        program = self._buckets.get(self._program_bucket(signature))
        number = np.array([count], np.int32)
        out = program(self._weights[signature.level], {}, tokens, number)
        shapes = self.manifest.source_shapes(signature.level)
        # Padded on the host, once per source: on the device that would require a bucket for each length.
        rows = {name: lengthened(np.asarray(each), shapes[name]) for name, each in out.items()}
        return jax.device_put({**rows, SOURCE_TOKENS: number})

    def run(
        self,
        signature: Signature,
        caches: Caches,
        tokens: np.ndarray,
        input_pos: np.ndarray,
        mask: np.ndarray | None = None,
        source: Caches | None = None,
    ) -> tuple[jax.Array | None, Caches]:
        """See `Executor`."""
        if not self.is_ready(signature):
            self.prepare([signature])
        adapter = self._adapter(signature.level)
        inputs = [each for each in (tokens, input_pos, mask, adapter, source) if each is not None]
        program = self._buckets.get(self._program_bucket(signature))
        out = program(self._weights[signature.level], caches, *inputs)
        return out.pop("logits", None), out

    def run_block(
        self,
        signature: Signature,
        caches: Caches,
        token: int,
        at: int,
        controls: Mapping[str, np.ndarray],
        source: Caches | None = None,
    ) -> tuple[np.ndarray, Caches]:
        """See `Executor`."""
        if not self.is_ready(signature):
            self.prepare([signature])
        program = self._buckets.get(self._program_bucket(signature))
        last, position = np.array([[token]], np.int32), np.array([at], np.int32)
        further = [each for each in (self._adapter(signature.level), source) if each is not None]
        out = program(self._weights[signature.level], caches, last, position, dict(controls), *further)
        tokens, count = np.asarray(out.pop(NEXT_TOKENS)), np.asarray(out.pop(COUNT))
        return tokens[0, : count[0]], out

    def run_tiny_lm(
        self, signature: Signature, tokens: np.ndarray, mask: np.ndarray
    ) -> dict[str, np.ndarray]:
        """See `Executor`."""
        if not self.is_ready(signature):
            self.prepare([signature])
        out = self._buckets.get(self._program_bucket(signature))(self._tiny_lm, {}, tokens, mask)
        return {name: np.asarray(each) for name, each in out.items()}

    def encode_chunks(
        self, signature: Signature, caches: Caches, chunks: np.ndarray
    ) -> dict[str, np.ndarray]:
        """See `Executor`."""
        out = self._ready(self._program_bucket(signature))({}, caches, chunks)
        return {name: np.asarray(each) for name, each in out.items()}

    def load_chunks(
        self, signature: Signature, caches: Caches, chunks: np.ndarray, coded: Mapping[str, np.ndarray]
    ) -> Caches:
        """See `Executor`."""
        return self._ready(self._program_bucket(signature))({}, caches, chunks, dict(coded))

    def _adapter(self, level: int) -> jax.Array | None:
        """The current adapter as an input of a level's programs, on the device; None if they accept none."""
        name = self.adapters.used
        if (name, level) not in self._placed:
            array = self.adapters.array(level, name)
            if array is None:
                return None
            self._placed[name, level] = jax.device_put(array)
        return self._placed[name, level]

    def keep(self, signature: Signature, caches: Caches, at: int, path: np.ndarray) -> Caches:
        """See `Executor`."""
        nodes = np.arange(signature.tokens, dtype=np.int32)
        nodes[: len(path)] = path
        return self._ready(self._keep_bucket(signature))(caches, np.int32(at), nodes)

    def _path(self, signature: Signature) -> str:
        """The path of a program, for messages."""
        return signature.name

    def _ready(self, bucket: Bucket) -> Any:
        if not self._buckets.is_ready(bucket):
            self._buckets.fill([bucket])
        return self._buckets.get(bucket)

    def _program_bucket(self, signature: Signature) -> ProgramBucket:
        if signature.name not in self._programs:
            self._programs[signature.name] = ProgramBucket(
                signature=signature, contents=self._contents(signature), level=signature.level
            )
        return self._programs[signature.name]

    def _grow_bucket(self, level: int, short: int, long: int) -> Bucket:
        shapes = named_shapes(self._cache_shapes(level, short))
        return ProgramGrowBucket(short_tokens=short, long_tokens=long, shapes=shapes, level=level)

    def _keep_bucket(self, signature: Signature) -> Bucket:
        shapes = named_shapes(self._cache_shapes(signature.level, self.manifest.room(signature)))
        return ProgramKeepBucket(nodes=signature.tokens, shapes=shapes, level=signature.level)

    def _cache_shapes(self, level: int, cache_tokens: int) -> dict[str, jax.ShapeDtypeStruct]:
        dtype = jax.numpy.dtype(self.manifest.cache_dtype)
        shapes = self.manifest.cache_shapes(level, cache_tokens)
        return {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}
