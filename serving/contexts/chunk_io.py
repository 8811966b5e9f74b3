"""Decodes stored chunks into caches, and encodes chunks of caches, at one level of a model.

On a CPU buckets read stored chunks in place by address; on other devices by value.

A model with state layers (`StateChunkIO`) stores keys and values of its attention layers raw, and a last
chunk with the recurrent states. A state covers all tokens so far. The last chunk has the states after the
context's last call, and the rows of the attention layers after the last whole chunk, to continue exactly
there. All layers of a chunk are one blob, copied from and to a cache on the host, because chunks are not
recomputed between others.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxllm.bundle.calibrations import read_contexts
from jaxllm.contexts.codecs import STATE
from jaxllm.contexts.recompute import LOST, Delay
from jaxllm.contexts.tolerance import KEPT
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.kernels.native import NO_CHUNKS, ChunkTable
from jaxllm.kv.cache import KVCache, TokenPositions
from jaxllm.kv.chunks import LayerChunks, chunk_shapes, reads_addresses
from jaxllm.kv.states import states_bytes
from jaxllm.serving.buckets.layer import ENCODED_CHUNKS, source_shape
from jaxllm.serving.contexts.memory import Blobs, ChunkAccess, LayerBlobs, Stored, median_ms, require_sizes
from jaxllm.serving.contexts.record import Origin
from jaxllm.serving.engine.engine import Engine
from jaxllm.serving.runners.level_runner import LevelRunner
from jaxllm.serving.runners.runner import PrefillChunk, placed_chunks


class ChunkIO(ChunkAccess):
    """Loads, computes and encodes chunks of contexts (see `ChunkAccess`)."""

    computes = stays = True

    def __init__(self, runner: LevelRunner, kept: Mapping[int, float] = KEPT) -> None:
        """See the class; the runner's options must have a codec, and `kept` be measured for its model.

        Raises:
          ConfigError: the options have no codec.
        """
        options, self._form, self.kept = runner.options, runner.options.chunk_format, kept
        self.coded, dtype = options.attend_quantized_kv, options.cache_dtype
        # If all levels share buckets, caches have the heads of the whole model.
        self._cfg = runner.model.bucket_cfg
        self._by_address = reads_addresses(np.dtype(dtype))
        self._shapes = chunk_shapes(self._cfg, tokens=self._form.tokens, dtype=dtype)
        own = self._by_address or runner.cfg.states is not None
        shapes = chunk_shapes(runner.cfg, tokens=self._form.tokens, dtype=dtype) if own else self._shapes
        self.reference_bytes = sum(shape.reference_bytes for shape in shapes)
        origin = Origin(
            model="",
            level=runner.level,
            adapter="",
            codec=options.kv_codec,
            chunk_tokens=options.kv_chunk_tokens,
            dtype=dtype,
            heads=tuple(shape.heads for shape in shapes),
            head_width=shapes[0].width,
            state_bytes=states_bytes(runner.cfg),
        )
        super().__init__(runner, origin, self._form.widths)

    def chunk_table(self, chunks: Sequence[Stored]) -> ChunkTable:
        """A chunk table of a context's first chunks, in order, for native attention.

        Raises:
          CheckpointError: a blob's size does not fit its width.
        """
        codec = self._form.codec
        try:
            return ChunkTable(
                chunks,
                heads=self.origin.heads,
                tokens=self.chunk_tokens,
                width=self.origin.head_width,
                half=self.runner.options.cache_dtype == "float16",
                keys_by_token=codec.keys == "token",
                values_by_token=codec.values == "token",
                rotated=codec.rotated,
            )
        except ValueError as error:
            raise CheckpointError(
                f"chunks of the context are not of this model and codec: {error}"
            ) from error

    def behind(self, cache: KVCache, chunks: ChunkTable | None, count: int) -> KVCache:
        """Turns a cache, perhaps another context's, into one for the tokens after the first `count` of these
        chunks; copies nothing."""
        source = NO_CHUNKS if chunks is None else chunks.operand
        return cache.behind(source, np.int32(count * self.chunk_tokens))

    def mass(self, cache: KVCache) -> np.ndarray:
        """See `ChunkAccess`; the mass of a coded chunk is spread evenly."""
        mass, front = np.asarray(cache.mass)[0], cache.coded_tokens // self.chunk_tokens
        if not front:
            return mass
        assert cache.coded is not None
        chunks = np.asarray(cache.coded.mass)[0, :front] / self.chunk_tokens
        return np.concatenate([np.repeat(chunks, self.chunk_tokens), mass])

    def loaded(self, cache: KVCache, length: int) -> KVCache:
        """See `ChunkAccess`."""
        jax.block_until_ready((cache.keys, cache.values))
        return dataclasses.replace(cache, length=np.int32(length))  # pyright: ignore

    def slid(self, cache: KVCache, chunks: ChunkTable | None) -> KVCache:
        """See `ChunkAccess`."""
        # The first chunk stays; the rows after it are rewritten.
        return (self.behind(cache, chunks, 1) if cache.coded_tokens else cache).uncounted()

    def _compute_delay(self) -> Delay:
        """Times one layer over each number of chunks that has a bucket, and over fewer if a bucket's time
        depends on its chunks."""
        options, counts = self.runner.options, self.runner.options.recomputed_chunks
        if options.exact_chunks:
            counts = tuple(sorted({1, *counts, max(1, counts[-1] // 4)}))
        cache, times = self.runner.start(options.context_tokens), []
        # The last chunks attend to the most tokens.
        end = options.context_tokens // self.chunk_tokens
        for count in counts:
            at = self.positions(range(max(0, end - count), end), self.bucket(count))

            def embed(at: Any = at) -> jax.Array:
                return jax.block_until_ready(self.embed([0] * options.context_tokens, at))

            def once(x: jax.Array, at: Any = at) -> None:
                nonlocal cache
                x, cache = self.restore_layer(0, x, at, cache, {})
                jax.block_until_ready(x)

            times.append(median_ms(once, embed))
        if len(counts) == 1:
            return Delay(fixed_ms=0.0, per_unit_ms=times[0] / counts[0])
        return Delay.fit(counts, times)

    def load(self, cache: KVCache, chunks: Mapping[int, Stored]) -> KVCache:
        """See `ChunkAccess`: in one dispatch. Blobs must not change until the result is ready."""
        bits = self._bits(cache, {chunk: width for chunk, (width, _) in chunks.items()})
        if self._by_address:
            sources = self._addresses(cache, chunks)
        else:
            sources = tuple(
                self._source(cache, layer, {n: (width, blobs[layer]) for n, (width, blobs) in chunks.items()})
                for layer in range(self.layers)
            )
        return self.runner.load_chunks(cache, sources, bits)

    def bucket(self, count: int) -> int:
        """The number of chunks of the smallest bucket that recomputes `count`."""
        return next(each for each in self.runner.options.recomputed_chunks if each >= count)

    def positions(self, chunks: Sequence[int], count: int) -> TokenPositions:
        """The positions of the tokens of ascending chunks, for a bucket that computes `count` chunks."""
        numbers = np.array([*chunks, *[chunks[-1]] * (count - len(chunks))], np.int32)
        positions = numbers[:, None] * self.chunk_tokens + np.arange(self.chunk_tokens, dtype=np.int32)
        if len(chunks) < count:
            # Padding is never written, but positions must not descend.
            positions[len(chunks) :] = positions[len(chunks) - 1, -1]
        return TokenPositions(positions.reshape(-1), np.int32(len(chunks) * self.chunk_tokens))  # pyright: ignore

    def embed(self, tokens: Sequence[int], at: TokenPositions) -> jax.Array:
        """The first layer's input for a context's `tokens` at some positions, `[1, T, D]`."""
        return self.runner.begin_layers(np.asarray(tokens, np.int32)[np.asarray(at.positions)], at)

    def restore_layer(
        self,
        layer: int,
        x: jax.Array,
        at: TokenPositions,
        cache: KVCache,
        chunks: LayerBlobs,
    ) -> tuple[jax.Array, KVCache]:
        """Loads some chunks of one layer, and recomputes others (see `steps.restore_layer`).

        Args:
          layer: index of the layer.
          x: input of the layer `[1, T, D]`; donated.
          at: positions of its tokens.
          cache: cache; donated.
          chunks: width and the layer's blob of each chunk to load; blobs must not change until the result
            is ready.

        Returns:
          The next layer's input, and the cache.

        Raises:
          CheckpointError: a blob's size does not fit its width.
        """
        x, past = self.runner.restore_layer(
            layer, x, at, cache.past(layer), self._layer_chunks(cache, layer, chunks)
        )
        return x, cache.with_past(layer, past)

    def feeds(self, chunk: PrefillChunk) -> bool:
        """See `ChunkAccess`."""
        return self.computes and self.runner.prefills_restored and chunk.mode == "float"

    def prefill_layer(
        self, layer: int, x: jax.Array, at: TokenPositions, cache: KVCache, chunks: LayerBlobs
    ) -> tuple[jax.Array, KVCache]:
        """Loads some chunks of one layer, and runs new tokens through it at consecutive positions, counting
        attention. For arguments, result and errors see `restore_layer`."""
        return self.runner.prefill_restored(layer, x, at, cache, self._layer_chunks(cache, layer, chunks))

    def _layer_chunks(self, cache: KVCache, layer: int, chunks: LayerBlobs) -> LayerChunks:
        bits = self._bits(cache, {chunk: width for chunk, (width, _) in chunks.items()})
        return LayerChunks(self._source(cache, layer, chunks), bits, self._form)

    def encode(
        self,
        cache: KVCache,
        chunks: Mapping[int, int],
        stored: Mapping[int, Stored] | None = None,
        *,
        into: Mapping[int, Stored] | None = None,
    ) -> Mapping[int, Stored]:
        """See `ChunkAccess`."""
        found, front = self.room(chunks) if into is None else into, cache.coded_tokens // self.chunk_tokens
        self._encode(cache, {n - front: found[n] for n in chunks if n >= front})
        again = [n for n in chunks if n < front]
        room = self.runner.options.cache_tokens[0] // self.chunk_tokens
        for run in (again[i : i + room] for i in range(0, len(again), room)):
            empty = self.runner.start(len(run) * self.chunk_tokens)
            decoded = self.load(empty, {at: (stored or {})[n] for at, n in enumerate(run)})
            self._encode(decoded, {at: found[n] for at, n in enumerate(run)})
        return found

    def _encode(self, cache: KVCache, into: Mapping[int, Stored]) -> None:
        """Encodes chunks of a cache, counted from its first row, into their memory."""
        for bits in sorted({width for width, _ in into.values()}):
            numbers = sorted(chunk for chunk, (width, _) in into.items() if width == bits)
            for layer in range(self.layers):
                shape, heads = self._shapes[layer], self.origin.heads[layer]
                runs = [numbers[i : i + ENCODED_CHUNKS] for i in range(0, len(numbers), ENCODED_CHUNKS)]
                coded = [self.runner.encode_chunks(cache, layer, bits, run) for run in runs]
                for run, out in zip(runs, coded, strict=True):
                    blobs = self._form.first_heads(np.asarray(out)[: len(run)], shape, bits, heads)
                    for chunk, blob in zip(run, blobs, strict=True):
                        into[chunk][1][layer][:] = blob

    def rehearse(self) -> Delay:
        """See `ChunkAccess`."""
        if not self.computes:
            return super().rehearse()
        options = self.runner.options
        for capacity in options.cache_tokens:
            room = capacity // self.chunk_tokens
            stored = self.encode(self.runner.start(capacity), dict(enumerate(self.widths[:room])))
            cache = self.load(self.runner.start(capacity), stored)
            for count in options.recomputed_chunks:
                at = self.positions([0], count)
                x = self.embed([0] * self.chunk_tokens, at)
                for layer in range(self.layers):
                    x, cache = self.restore_layer(layer, x, at, cache, {})
            if self.runner.prefills_restored:
                for length in options.chunk_tokens:
                    ((ids, at),) = placed_chunks([0], [length], 0)
                    x = self.runner.begin_layers(ids, at)
                    for layer in range(self.layers):
                        x, cache = self.prefill_layer(layer, x, at, cache, {})
                    jax.block_until_ready(self.runner.restored_logits(x, 0))
            jax.block_until_ready(cache.keys)
        return self._compute_delay()

    def _bits(self, cache: KVCache, widths: Mapping[int, int]) -> np.ndarray:
        bits = np.full(self._empty_source(cache, 0).shape[0], LOST, np.int32)
        bits[list(widths)] = list(widths.values())
        return bits

    def _empty_source(self, cache: KVCache, layer: int) -> np.ndarray:
        return np.zeros(*source_shape(self._cfg, self.runner.options, layer, cache.capacity_tokens))

    def _addresses(self, cache: KVCache, chunks: Mapping[int, Stored]) -> np.ndarray:
        """The sources (see `_source`) of all layers, `[L, N, 3]`."""
        one = self._empty_source(cache, 0)
        extents = np.zeros((self.layers, *one.shape), one.dtype)
        if chunks:
            each = [blobs if isinstance(blobs, Blobs) else Blobs(blobs) for _, blobs in chunks.values()]
            found = np.stack([blobs.extents for blobs in each])
            wanted = np.array([self.layer_bytes[bits] for bits, _ in chunks.values()])
            for layer in np.flatnonzero((found[..., 2] != wanted).any(0)).tolist():
                require_sizes(layer, list(chunks), found[:, layer, 2].tolist(), wanted[:, layer].tolist())
            extents[:, list(chunks)] = found.swapaxes(0, 1)
        return extents

    def _source(self, cache: KVCache, layer: int, chunks: LayerBlobs) -> np.ndarray:
        source = self._empty_source(cache, layer)
        blobs = Blobs(blob for _, blob in chunks.values())
        wanted = [self.layer_bytes[bits][layer] for bits, _ in chunks.values()]
        require_sizes(layer, list(chunks), [blob.size for blob in blobs], wanted)
        if self._by_address:
            if chunks:
                source[list(chunks)] = blobs.extents
            return source
        for chunk, blob in zip(chunks, blobs, strict=True):
            source[chunk, : blob.size] = blob
        return source


class StateChunkIO(ChunkIO):
    """Loads and encodes chunks of contexts of a model with state layers (see `ChunkIO`)."""

    computes = False

    def load(self, cache: KVCache, chunks: Mapping[int, Stored]) -> KVCache:
        """See `ChunkAccess`: copies chunks, and the states."""
        if not chunks:
            return cache
        arrays = [np.zeros(each.shape, each.dtype) for each in _rows_of(cache)]
        states = [np.zeros(each.shape, each.dtype) for each in jax.tree.leaves(cache.states)]
        for number, (bits, (blob,)) in chunks.items():
            if blob.size != self.chunk_bytes(bits):
                raise CheckpointError(
                    f"chunk {number} has {blob.size} bytes, and should have {self.chunk_bytes(bits)}"
                )
            for piece, into in self._pieces(blob, bits, number, arrays, states):
                into[...] = piece.view(into.dtype).reshape(-1, *into.shape[1:])[: len(into)]
        half = len(cache.keys)
        placed = jax.device_put(arrays)
        structure = jax.tree.structure(cache.states)
        return dataclasses.replace(
            cache, keys=tuple(placed[:half]), values=tuple(placed[half:]),
            states=jax.tree.unflatten(structure, jax.device_put(states)),
        )  # fmt: skip

    def encode(
        self,
        cache: KVCache,
        chunks: Mapping[int, int],
        stored: Mapping[int, Stored] | None = None,
        *,
        into: Mapping[int, Stored] | None = None,
    ) -> Mapping[int, Stored]:
        """See `ChunkAccess`: copies chunks."""
        del stored
        found = self.room(chunks) if into is None else into
        arrays = [np.asarray(each) for each in _rows_of(cache)]
        states = [np.asarray(each) for each in jax.tree.leaves(cache.states)]
        for number, bits in chunks.items():
            blob = found[number][1][0]
            for piece, rows in self._pieces(blob, bits, number, arrays, states):
                taken = np.ascontiguousarray(rows).reshape(-1).view(np.uint8)
                piece[: taken.size] = taken
                piece[taken.size :] = 0
        return found

    def _pieces(
        self, blob: np.ndarray, bits: int, number: int, rows: list[np.ndarray], states: list[np.ndarray]
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The parts of a chunk's blob, and their views in the keys and values of a cache, with positions
        first, or in its states. Without parts beyond the cache's end."""
        at, first = 0, number * self.chunk_tokens
        for each in rows:
            view = np.moveaxis(each, -2, 0)[first : first + self.chunk_tokens]
            size = self.chunk_tokens * each.nbytes // each.shape[-2]
            yield blob[at : at + size], view
            at += size
        for each in states if bits == STATE else ():
            yield blob[at : at + each.nbytes], each
            at += each.nbytes
        assert at == blob.size


def kept_by(engine: Engine) -> Mapping[int, float]:
    """Share of information that widths of chunks retain: measured by the bundle's calibration for the
    engine's codec and chunk length, else the default for values."""
    options, calibration = engine.options, read_contexts(engine.model.bundle)
    kept = None if calibration is None else calibration.kept(options.kv_codec, options.kv_chunk_tokens)
    return KEPT if kept is None else kept


def chunk_io_of(runner: LevelRunner, kept: Mapping[int, float] = KEPT) -> ChunkIO:
    """Makes the `ChunkIO` of a level."""
    return (ChunkIO if runner.cfg.states is None else StateChunkIO)(runner, kept)


def chunk_ios_of(engine: Engine) -> dict[int, ChunkIO]:
    """Makes the `ChunkIO` of each level of an engine.

    Raises:
      ConfigError: it was opened without a codec.
    """
    if not engine.options.kv_codec:
        raise ConfigError("this engine keeps no contexts; open it with EngineOptions(kv_codec=...)")
    kept = kept_by(engine)
    return {level: chunk_io_of(engine.runner_at(level), kept) for level in engine.levels}


def _rows_of(cache: KVCache) -> list[jax.Array]:
    """Keys and values of all attention layers, in stacks `[n, 1, K, S, H]`."""
    assert cache.places is not None
    return [*cache.keys, *cache.values]
