"""Decodes stored chunks into caches, and encodes chunks of caches, at one level of a model.

On a CPU buckets read stored chunks in place by address; on other devices by value.

A model with state layers (`StateChunkIO`) stores keys and values of its attention layers raw, and a last
chunk with the recurrent states. A state covers all tokens so far. The last chunk has the states after the
context's last call, and the rows of the attention layers after the last whole chunk, to continue exactly
there. All layers of a chunk are one blob, copied from and to a cache on the host, because chunks are not
recomputed between others.
"""

import dataclasses
import logging
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxllm.bundle.calibrations import read_contexts
from jaxllm.contexts.codecs import RAW, STATE, ChunkShape
from jaxllm.contexts.recompute import LOST, Delay
from jaxllm.contexts.tolerance import KEPT
from jaxllm.errors import CheckpointError, one_line
from jaxllm.files.atomic import temporary_file
from jaxllm.kernels.native import NO_CHUNKS, ChunkTable
from jaxllm.kv.cache import KVCache, TokenPositions
from jaxllm.kv.chunks import LayerChunks, chunk_shapes, reads_addresses
from jaxllm.kv.states import states_bytes
from jaxllm.serving.buckets.layer import ENCODED_CHUNKS, source_shape
from jaxllm.serving.contexts.memory import Blobs, Stored, blob_memory
from jaxllm.serving.contexts.record import Origin
from jaxllm.serving.engine.engine import Engine
from jaxllm.serving.host.direct_io import PieceReader, Storage, aligned
from jaxllm.serving.runners.level_runner import LevelRunner
from jaxllm.serving.runners.runner import PrefillChunk, placed_chunks

# Width and blob of some chunks in one layer, by number.
LayerBlobs = Mapping[int, tuple[int, np.ndarray]]
_SIZES_BYTES = (1 << 14, 1 << 18, 1 << 20)
_REPEATS = 5
_TIMED = "timed"
_NEVER_MS = 1e9
# Per byte: the slowest storage of phones, eMMC 5.1 (250 MB/s, 11,000 reads per second: Samsung's press
# release of the 512 GB eUFS 3.1, 17 March 2020).
UNMEASURED_READ = Delay(fixed_ms=1000 / 11_000, per_unit_ms=1e3 / 250e6)


class ChunkIO:
    """Loads, computes and encodes chunks of contexts.

    Attributes:
      runner: runner of the level.
      kept: bits -> share of information that chunks retain.
      chunk_tokens: tokens of a chunk (C).
      widths: allowed widths of chunks in bits, descending.
      layers: number of blobs of a chunk, one per layer.
      heads: number of kv heads in stored chunks of each layer.
      head_width: size of each head (H).
      layer_bytes: bytes of one chunk in each layer `[L]`, by width.
      reference_bytes: bytes of one chunk that ratios refer to (see `ChunkShape`).
      state_bytes: bytes of a context besides its whole chunks.
      computes: whether a chunk can be recomputed between others that are loaded.
      coded: whether answers attend to chunks in place (see `EngineOptions.attend_coded`).
    """

    computes = True

    def __init__(self, runner: LevelRunner, kept: Mapping[int, float] = KEPT) -> None:
        """See the class; the runner's options must have a codec, and `kept` be measured for its model.

        Raises:
          ConfigError: the options have no codec.
        """
        self.runner, self._form, self.kept = runner, runner.options.chunk_format, kept
        self.chunk_tokens, self.widths = self._form.tokens, self._form.widths
        self.coded, self.state_bytes = runner.options.attend_coded, 0
        dtype = runner.options.cache_dtype
        # If all levels share buckets, caches have the heads of the whole model.
        self._cfg = runner.model.bucket_cfg
        self.layers = self._cfg.layers
        self._by_address = reads_addresses(np.dtype(dtype))
        self._shapes = chunk_shapes(self._cfg, tokens=self.chunk_tokens, dtype=dtype)
        used = runner.cfg if self._by_address else self._cfg
        self._hold(chunk_shapes(used, tokens=self.chunk_tokens, dtype=dtype))

    def _hold(self, shapes: Sequence[ChunkShape]) -> None:
        """Sets the sizes of stored chunks, which have these shapes."""
        self.heads, self.head_width = tuple(shape.heads for shape in shapes), shapes[0].width
        self.reference_bytes = sum(shape.reference_bytes for shape in shapes)
        sizes = [self._form.sizes(shape) for shape in shapes]
        self.layer_bytes = {bits: [each[bits] for each in sizes] for bits in self._form.widths}

    def chunk_table(self, chunks: Sequence[Stored]) -> ChunkTable:
        """A chunk table of a context's first chunks, in order, for native attention.

        Raises:
          CheckpointError: a blob's size does not fit its width.
        """
        codec = self._form.codec
        try:
            return ChunkTable(
                chunks,
                heads=self.heads,
                tokens=self.chunk_tokens,
                width=self.head_width,
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

    def chunk_bytes(self, bits: int) -> int:
        """Bytes of one chunk over all layers."""
        return sum(self.layer_bytes[bits])

    def load(self, cache: KVCache, chunks: Mapping[int, Stored]) -> KVCache:
        """Decodes stored chunks into a cache, at their positions, in one dispatch.

        Args:
          cache: cache; donated.
          chunks: stored chunks by number. Their blobs must not change until the result is ready.

        Raises:
          CheckpointError: a blob's size does not fit its width.
        """
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
        """Whether `prefill_layer` supports a chunk of a prompt."""
        return self.runner.prefills_restored and chunk.mode == "float"

    def prefill_layer(
        self, layer: int, x: jax.Array, at: TokenPositions, cache: KVCache, chunks: LayerBlobs
    ) -> tuple[jax.Array, KVCache]:
        """Loads some chunks of one layer, and runs new tokens through it at consecutive positions, counting
        attention. For arguments, result and errors see `restore_layer`."""
        return self.runner.prefill_restored(layer, x, at, cache, self._layer_chunks(cache, layer, chunks))

    def _layer_chunks(self, cache: KVCache, layer: int, chunks: LayerBlobs) -> LayerChunks:
        bits = self._bits(cache, {chunk: width for chunk, (width, _) in chunks.items()})
        return LayerChunks(self._source(cache, layer, chunks), bits, self._form)

    def room(self, chunks: Mapping[int, int]) -> dict[int, Stored]:
        """Allocates memory for chunks to be encoded, of these widths by number, each blob separately."""
        return {
            chunk: (bits, Blobs(blob_memory(size) for size in self.layer_bytes[bits]))
            for chunk, bits in chunks.items()
        }

    def encode(
        self,
        cache: KVCache,
        chunks: Mapping[int, int],
        stored: Mapping[int, Stored] | None = None,
        *,
        into: Mapping[int, Stored] | None = None,
    ) -> Mapping[int, Stored]:
        """Encodes chunks of a context.

        Args:
          cache: cache; unchanged.
          chunks: width of each chunk to encode, by number.
          stored: current stored chunks that the cache attends to in place.
          into: memory for the chunks (see `room`); None allocates it.

        Returns:
          The stored chunks, by number.
        """
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
                shape, heads = self._shapes[layer], self.heads[layer]
                runs = [numbers[i : i + ENCODED_CHUNKS] for i in range(0, len(numbers), ENCODED_CHUNKS)]
                coded = [self.runner.encode_chunks(cache, layer, bits, run) for run in runs]
                for run, out in zip(runs, coded, strict=True):
                    blobs = self._form.first_heads(np.asarray(out)[: len(run)], shape, bits, heads)
                    for chunk, blob in zip(run, blobs, strict=True):
                        into[chunk][1][layer][:] = blob

    def rehearse(self) -> None:
        """Runs all of its buckets once (see `LevelRunner.rehearse`)."""
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

    def __init__(self, runner: LevelRunner, kept: Mapping[int, float] = KEPT) -> None:
        """See `ChunkIO`."""
        super().__init__(runner, kept)
        cfg, self.layers, self.coded = runner.cfg, 1, False
        self._hold(chunk_shapes(cfg, tokens=self.chunk_tokens, dtype=runner.options.cache_dtype))
        rows = sum(self.layer_bytes[RAW])
        self.state_bytes = rows + states_bytes(cfg)
        self.layer_bytes = {RAW: [rows], STATE: [self.state_bytes]}

    def feeds(self, chunk: PrefillChunk) -> bool:
        """See `ChunkIO`."""
        del chunk
        return False

    def load(self, cache: KVCache, chunks: Mapping[int, Stored]) -> KVCache:
        """Copies chunks into a cache at their positions, and its states (see `ChunkIO`).

        Raises:
          CheckpointError: a blob's size does not fit its width.
        """
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
        """Copies chunks of a context from a cache (see `ChunkIO`)."""
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

    def rehearse(self) -> None:
        """Does nothing: it has no buckets."""

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


def origin_of(engine: Engine, chunks: ChunkIO) -> Origin:
    """The origin of contexts of an engine at a level."""
    options = chunks.runner.options
    return Origin(
        model=engine.model.bundle.fingerprint,
        level=chunks.runner.level,
        adapter=engine.model.adapter_digest,
        codec=options.kv_codec,
        chunk_tokens=options.kv_chunk_tokens,
        dtype=options.cache_dtype,
        heads=chunks.heads,
        head_width=chunks.head_width,
        state_bytes=states_bytes(chunks.runner.cfg),
    )


def kept_by(engine: Engine) -> Mapping[int, float]:
    """Share of information that widths of chunks retain: measured by the bundle's calibration for the
    engine's codec and chunk length, else the default for values."""
    options, calibration = engine.options, read_contexts(engine.model.bundle)
    kept = None if calibration is None else calibration.kept(options.kv_codec, options.kv_chunk_tokens)
    return KEPT if kept is None else kept


def require_sizes(layer: int, chunks: Sequence[int], found: Sequence[int], wanted: Sequence[int]) -> None:
    """Checks the sizes of chunks' blobs in a layer.

    Raises:
      CheckpointError: one does not fit its width.
    """
    for chunk, size, right in zip(chunks, found, wanted, strict=True):
        if size != right:
            raise CheckpointError(
                f"chunk {chunk} has {size} bytes in layer {layer}, and its width requires {right}: it is not "
                "of this model and codec"
            )


def chunk_io_of(runner: LevelRunner, kept: Mapping[int, float] = KEPT) -> ChunkIO:
    """Makes the `ChunkIO` of a level."""
    return (ChunkIO if runner.cfg.states is None else StateChunkIO)(runner, kept)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Delays:
    """Delays of one layer of a context: of chunks read from storage, per byte, and of recomputing chunks, per
    chunk."""

    read: Delay
    compute: Delay


def measure_read(folder: Path, storage: Storage) -> Delay:
    """Times reads from a temporary file of random bytes in `folder`.

    If there is no space for the file, or the device fails, logs a warning and returns `UNMEASURED_READ`: a
    full device must not prevent opening a store and deleting contexts.
    """
    try:
        with temporary_file(folder / _TIMED) as (path, file):
            file.write(np.random.default_rng(0).bytes(_SIZES_BYTES[-1]))
            file.flush()
            os.fsync(file.fileno())
            with PieceReader(path, storage) as reader:
                # Like chunks, into allocated memory.
                memory = aligned(_SIZES_BYTES[-1])

                def once(size: int) -> None:
                    reader.read_into(memory, 0, 0, size)

                times = [_median_ms(once, lambda size=size: size) for size in _SIZES_BYTES]
    except (OSError, CheckpointError) as error:
        logging.getLogger("jaxllm").warning(
            "%s: reads cannot be timed (%s); %.0f MB/s and %.1f ms each are assumed",
            folder, one_line(error), 1e-3 / UNMEASURED_READ.per_unit_ms, UNMEASURED_READ.fixed_ms,
        )  # fmt: skip
        return UNMEASURED_READ
    return Delay.fit(_SIZES_BYTES, times)


def measure_compute(chunk_io: ChunkIO) -> Delay:
    """Times one layer over each number of chunks that has a bucket, and over fewer if a bucket's time
    depends on its chunks. If chunks cannot be recomputed between others, the time is `_NEVER_MS`."""
    if not chunk_io.computes:
        return Delay(fixed_ms=0.0, per_unit_ms=_NEVER_MS)
    options, counts = chunk_io.runner.options, chunk_io.runner.options.recomputed_chunks
    if options.exact_chunks:
        counts = tuple(sorted({1, *counts, max(1, counts[-1] // 4)}))
    cache, times = chunk_io.runner.start(options.context_tokens), []
    # The last chunks attend to the most tokens.
    end = options.context_tokens // chunk_io.chunk_tokens
    for count in counts:
        at = chunk_io.positions(range(max(0, end - count), end), chunk_io.bucket(count))

        def embed(at: Any = at) -> jax.Array:
            return jax.block_until_ready(chunk_io.embed([0] * options.context_tokens, at))

        def once(x: jax.Array, at: Any = at) -> None:
            nonlocal cache
            x, cache = chunk_io.restore_layer(0, x, at, cache, {})
            jax.block_until_ready(x)

        times.append(_median_ms(once, embed))
    if len(counts) == 1:
        return Delay(fixed_ms=0.0, per_unit_ms=times[0] / counts[0])
    return Delay.fit(counts, times)


def _median_ms(run: Callable[[Any], object], prepare: Callable[[], Any]) -> float:
    """The median time of `run(prepare())`, without `prepare`, after a warm-up run."""
    times = []
    for _ in range(1 + _REPEATS):
        given = prepare()
        began = time.perf_counter()
        run(given)
        times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times[1:])


def _rows_of(cache: KVCache) -> list[jax.Array]:
    """Keys and values of all attention layers, in stacks `[n, 1, K, S, H]`."""
    assert cache.places is not None
    return [*cache.keys, *cache.values]
