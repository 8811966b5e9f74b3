"""Restores a context: reads the next layer's chunks while this layer's are computed (LLMS, section 3.3).

Chunks in memory are decoded in place. A plan divides the missing ones into chunks to read and chunks to
recompute from their tokens, layer by layer, at their positions. The new prompt's tokens pass through each
layer as soon as it is restored. If neither is computed, one dispatch decodes all layers. The plan uses this
device's delays, which are measured when contexts are opened.
"""

import concurrent.futures
import contextlib
import dataclasses
import logging
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxllm.contexts.recompute import LOST, Delay, Restore, plan_restore
from jaxllm.errors import CheckpointError, one_line
from jaxllm.files.atomic import temporary_file
from jaxllm.kernels.native import ChunkTable
from jaxllm.kv.cache import KVCache, TokenPositions
from jaxllm.serving.contexts.chunk_io import ChunkIO, LayerBlobs, require_sizes
from jaxllm.serving.contexts.memory import Stored
from jaxllm.serving.engine.request import Fed
from jaxllm.serving.ground.plan import Restoration
from jaxllm.serving.host.direct_io import PieceReader, Storage, aligned
from jaxllm.serving.runners.chunks import placed_chunks
from jaxllm.serving.runners.runner import PrefillChunk

# A layer and chunks to read -> their blobs.
Read = Callable[[int, Sequence[int]], list[np.ndarray]]
# A layer -> its chunks to load. Called once per layer, in order; may wait for storage.
Arriving = Callable[[int], LayerBlobs]
_SIZES_BYTES = (1 << 14, 1 << 18, 1 << 20)
_REPEATS = 5
_TIMED = "timed"
_NEVER_MS = 1e9
# Per byte: the slowest storage of phones, eMMC 5.1 (250 MB/s, 11,000 reads per second: Samsung's press
# release of the 512 GB eUFS 3.1, 17 March 2020).
UNMEASURED_READ = Delay(fixed_ms=1000 / 11_000, per_unit_ms=1e3 / 250e6)


@dataclasses.dataclass(frozen=True)
class Reader:
    """Reads the chunks of a context from storage.

    Attributes:
      read: function that is called in `pool`.
      pool: reader threads.
    """

    read: Read
    pool: concurrent.futures.Executor


@dataclasses.dataclass(frozen=True)
class Restored:
    """A restored context.

    Attributes:
      cache: cache whose length includes the chunks and the tokens that were fed.
      read: the chunks that were read.
      how: facts of the restoration.
      chunk_table: chunk table that the cache attends to, if it was made before the chunks were read.
      fed: first chunk of the call's prompt, if it was fed; else None.
    """

    cache: KVCache
    read: dict[int, Stored]
    how: Restoration
    chunk_table: ChunkTable | None = None
    fed: Fed | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class NewTokens:
    """Tokens of a call after the whole chunks of its context.

    Attributes:
      tokens: all tokens after the chunks.
      chunks: their prefill chunks, of which a pass feeds the first.
    """

    tokens: Sequence[int]
    chunks: Sequence[PrefillChunk]

    @property
    def fed(self) -> Sequence[int]:
        """Tokens of the first chunk."""
        return self.tokens[: self.chunks[0].tokens]


class InPlace:
    """Memory of chunks that are read layer by layer, so that a chunk table can have their addresses before
    they arrive.

    Attributes:
      chunks: chunks by number.
    """

    def __init__(self, chunk_io: ChunkIO, bits: Mapping[int, int]) -> None:
        self.chunks: dict[int, Stored] = chunk_io.room(bits)

    def filled(self, arriving: Arriving) -> Arriving:
        """Copies each layer's blobs as they arrive; returns nothing to load.

        Raises:
          CheckpointError: a blob's size does not fit its width.
        """

        def fill(layer: int) -> LayerBlobs:
            there = arriving(layer)
            sizes = [self.chunks[chunk][1][layer].size for chunk in there]
            require_sizes(layer, list(there), [blob.size for _, blob in there.values()], sizes)
            for chunk, (_, blob) in there.items():
                self.chunks[chunk][1][layer][:] = blob
            return {}

        return fill


@dataclasses.dataclass(frozen=True, kw_only=True)
class Delays:
    """Delays of one layer of a context.

    Attributes:
      read: delay of chunks read from storage, per byte.
      compute: delay of recomputing chunks, per chunk.
    """

    read: Delay
    compute: Delay


def restore(
    chunk_io: ChunkIO,
    cache: KVCache,
    *,
    tokens: Sequence[int],
    bits: Sequence[int],
    resident: Mapping[int, Stored],
    reader: Reader,
    delays: Delays | None,
    new: NewTokens | None = None,
) -> Restored:
    """Loads all whole chunks of a context into a cache. If answers attend to chunks in place, and nothing of
    the context is computed, they are only read.

    Args:
      chunk_io: `ChunkIO` of the context's level.
      cache: cache with room for them, and for fed tokens; donated.
      tokens: tokens of the context, at least those of all chunks.
      bits: stored width of each chunk, or `LOST`.
      resident: chunks in memory, by number.
      reader: reader of the other chunks.
      delays: delays of this device; None recomputes only lost chunks.
      new: tokens of the call, of which the first chunk is fed if chunks are read; None feeds nothing.

    Raises:
      CheckpointError: a chunk on storage has changed. The cache is then lost.
    """
    missing = {chunk: width for chunk, width in enumerate(bits) if chunk not in resident}
    plan, later = _plan(chunk_io, missing, delays, new)
    if later or not plan.read:
        # Later passes compute what new tokens attend to; without reads, one dispatch of all layers is faster.
        new = None
    ends: list[float] = []

    def timed(layer: int, chunks: Sequence[int]) -> list[np.ndarray]:
        blobs = reader.read(layer, chunks)
        ends.append(time.perf_counter())
        return blobs

    coming = [reader.pool.submit(timed, layer, plan.read) for layer in range(chunk_io.layers) if plan.read]
    arriving, in_front, fed = _arriving(plan.read, bits, coming), None, None
    length = len(bits) * chunk_io.chunk_tokens
    in_place: dict[int, Stored] = {}
    try:
        if new is not None and chunk_io.coded and not plan.computed:
            memory = InPlace(chunk_io, {chunk: bits[chunk] for chunk in plan.read})
            in_place, arriving = memory.chunks, memory.filled(arriving)
            in_front = chunk_io.chunk_table([each for _, each in sorted({**resident, **in_place}.items())])
            cache = chunk_io.behind(cache, in_front, len(bits))
        else:
            arriving = _beside(resident, arriving)
        if plan.computed or new is not None:
            cache, fed = layer_pass(chunk_io, cache, tokens, plan, arriving, new, first=length)
        elif not chunk_io.coded:
            cache = chunk_io.load(cache, {**resident, **_arrived(plan.read, bits, coming)})
        for computed in later:
            bucket = _bucket(chunk_io, len(computed))
            further = Restore(read=(), computed=computed, bucket=bucket, expected_ms=0.0)
            cache, _ = layer_pass(chunk_io, cache, tokens, further, lambda _: {})
        arrived = in_place or _arrived(plan.read, bits, coming)
    finally:
        for each in coming:
            each.cancel()
        concurrent.futures.wait(coming)
    # Until now buckets may read blobs in place.
    jax.block_until_ready((cache.keys, cache.values))
    count = 0 if new is None else len(new.fed)
    how = Restoration(
        resident=len(resident),
        read=plan.read,
        computed=tuple(sorted([*plan.computed, *(chunk for each in later for chunk in each)])),
        expected_ms=plan.expected_ms,
        fed_tokens=count,
        fed_ms=1000 * (time.perf_counter() - max(ends)) if count else 0.0,
    )
    cache = dataclasses.replace(cache, length=np.int32(length + count))  # pyright: ignore
    return Restored(cache, arrived, how, in_front, fed)


def layer_pass(
    chunk_io: ChunkIO,
    cache: KVCache,
    tokens: Sequence[int],
    plan: Restore,
    arriving: Arriving,
    new: NewTokens | None = None,
    *,
    first: int = 0,
) -> tuple[KVCache, Fed | None]:
    """Restores all layers.

    Args:
      chunk_io: `ChunkIO` of the context's level.
      cache: cache; donated.
      tokens: tokens of the context.
      plan: plan with the chunks to compute.
      arriving: returns the other chunks.
      new: tokens to feed; None for none.
      first: position of the first of these.

    Returns:
      The cache, and the fed chunk.
    """
    runner = chunk_io.runner
    at = chunk_io.positions(plan.computed, plan.bucket) if plan.computed else None
    # Another thread's answer must not evict the weights of layers meanwhile.
    with runner.lock:
        x = None if at is None else chunk_io.embed(tokens, at)
        of_new = row = None
        if new is not None:
            ((ids, row),) = placed_chunks(new.fed, [new.chunks[0].tokens], first)
            of_new = runner.begin_layers(ids, row)
        try:
            for layer in range(chunk_io.layers):
                there = arriving(layer)
                if x is not None and at is not None:
                    x, cache = chunk_io.restore_layer(layer, x, at, cache, there)
                    there = {}
                if of_new is not None and row is not None:
                    of_new, cache = chunk_io.prefill_layer(layer, of_new, row, cache, there)
        except BaseException:
            # Dispatched buckets still read blobs in place, which are freed after this call.
            with contextlib.suppress(Exception):
                jax.block_until_ready((x, of_new))
            raise
        if new is None or of_new is None:
            return cache, None
        chunk = new.chunks[0]
        logits = runner.restored_logits(of_new, len(new.fed) - 1) if chunk.last else None
    return cache, Fed(first=first, chunk=chunk, rest=tuple(new.chunks[1:]), logits=logits)


def measure_read(folder: Path, storage: Storage) -> Delay:
    """Times reads from a temporary file of random bytes in `folder`.

    If there is no space for the file, or the device fails, logs a warning and returns `UNMEASURED_READ`: a
    full device must not prevent opening a store and deleting contexts.

    Args:
      folder: folder on the device to measure.
      storage: options of the reads.
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
        bucket = next(each for each in options.recomputed_chunks if each >= count)
        at = chunk_io.positions(range(max(0, end - count), end), bucket)

        def embed(at: TokenPositions = at) -> jax.Array:
            return jax.block_until_ready(chunk_io.embed([0] * options.context_tokens, at))

        def once(x: jax.Array, at: TokenPositions = at) -> None:
            nonlocal cache
            x, cache = chunk_io.restore_layer(0, x, at, cache, {})
            jax.block_until_ready(x)

        times.append(_median_ms(once, embed))
    if len(counts) == 1:
        return Delay(fixed_ms=0.0, per_unit_ms=times[0] / counts[0])
    return Delay.fit(counts, times)


def _plan(
    chunk_io: ChunkIO, missing: Mapping[int, int], delays: Delays | None, new: NewTokens | None
) -> tuple[Restore, list[tuple[int, ...]]]:
    """The first pass, which reads and computes, and the chunks that each further pass computes."""
    lost = sorted(chunk for chunk, width in missing.items() if width == LOST)
    counts = chunk_io.runner.options.recomputed_chunks
    most = counts[-1]
    there = tuple(sorted(set(missing) - set(lost)))
    if len(lost) > most or (lost and delays is None):
        # More than fit the largest bucket: several passes, earlier chunks first, because later ones attend
        # to them. All stored chunks are there from the first pass on.
        passes = [tuple(lost[i : i + most]) for i in range(0, len(lost), most)]
        bucket = _bucket(chunk_io, len(passes[0]))
        return Restore(read=there, computed=passes[0], bucket=bucket, expected_ms=0.0), passes[1:]
    if not missing or delays is None:
        return Restore(read=there, computed=(), bucket=0, expected_ms=0.0), []
    mean_bytes = {width: chunk_io.chunk_bytes(width) // chunk_io.layers for width in chunk_io.widths}
    plan = plan_restore(
        missing,
        mean_bytes,
        read_delay=delays.read,
        compute_delay=delays.compute,
        buckets=counts,
        layers=chunk_io.layers,
        exact=chunk_io.runner.options.exact_chunks,
        beside_ms=0.0 if new is None else delays.compute.ms(_fed_chunks(chunk_io, new)),
    )
    return plan, []


def _fed_chunks(chunk_io: ChunkIO, new: NewTokens) -> int:
    """The number of a context's chunks whose computation costs as much as the tokens that are fed."""
    exact = chunk_io.runner.options.exact_chunks
    return -(-(len(new.fed) if exact else new.chunks[0].tokens) // chunk_io.chunk_tokens)


def _beside(resident: Mapping[int, Stored], arriving: Arriving) -> Arriving:
    """Combines chunks in memory with those that arrive."""

    def of(layer: int) -> LayerBlobs:
        there = {chunk: (width, blobs[layer]) for chunk, (width, blobs) in resident.items()}
        return {**there, **arriving(layer)}

    return of


def _arriving(
    chunks: Sequence[int], bits: Sequence[int], coming: Sequence[concurrent.futures.Future]
) -> Arriving:
    """Makes a function that waits for a layer's blobs, and returns each chunk's width and blob."""

    def of(layer: int) -> LayerBlobs:
        blobs = coming[layer].result() if coming else []
        return {chunk: (bits[chunk], blob) for chunk, blob in zip(chunks, blobs, strict=True)}

    return of


def _arrived(
    chunks: Sequence[int], bits: Sequence[int], coming: Sequence[concurrent.futures.Future]
) -> dict[int, Stored]:
    """Waits for all reads, and returns the stored chunks."""
    layers = [each.result() for each in coming]
    return {chunk: (bits[chunk], [blobs[place] for blobs in layers]) for place, chunk in enumerate(chunks)}


def _bucket(chunk_io: ChunkIO, count: int) -> int:
    """The number of chunks of the smallest bucket that fits `count`."""
    return next(each for each in chunk_io.runner.options.recomputed_chunks if each >= count)


def _median_ms(run: Callable[[Any], object], prepare: Callable[[], Any] = lambda: None) -> float:
    """The median time of `run(prepare())`, without `prepare`, after a warm-up run."""
    times = []
    for _ in range(1 + _REPEATS):
        given = prepare()
        began = time.perf_counter()
        run(given)
        times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times[1:])
