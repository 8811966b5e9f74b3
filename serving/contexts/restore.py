"""Restores a context: reads the next layer's chunks while this layer's are computed (LLMS, section 3.3).

Chunks in memory are decoded in place. A plan divides the missing ones into those that are read and those that
are computed from their tokens, layer by layer, at their positions. The new prompt's tokens go through each
layer as soon as it is restored. Where neither is computed, one dispatch decodes all layers.
"""

import concurrent.futures
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from jaxllm.kernels.chunk_table import ChunkTable
from jaxllm.kv.cache import KVCache
from jaxllm.kv.recompute import LOST, Restore, plan_restore
from serving.contexts.blobs import Stored
from serving.contexts.chunk_io import ChunkIO, LayerBlobs
from serving.contexts.delays import Delays
from serving.contexts.layer_pass import Arriving, InPlace, NewTokens, layer_pass
from serving.request import Fed

# A layer and chunks to read -> their blobs.
Read = Callable[[int, Sequence[int]], list[np.ndarray]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restoration:
    """How a context was restored.

    Attributes:
      resident: number of chunks that were in memory.
      read: chunks that were read from storage.
      computed: chunks that were computed from their tokens.
      expected_ms: time that the plan expected; 0 where there was no plan.
      took_ms: time from the beginning of the call to the restored cache.
      moved: what of the context was of another model or of other settings (see `Origin`), so that all of its
        tokens were computed again by this one's.
      shared: number of its chunks that were taken from another context, which begins with the same tokens.
      cached: whether the context ran last and its cache was still there: nothing had to be restored.
      fed_tokens: tokens of the prompt that were computed meanwhile.
      fed_ms: the part of `took_ms` after the last chunk had been read, where tokens were fed; else 0.
    """

    resident: int = 0
    read: tuple[int, ...] = ()
    computed: tuple[int, ...] = ()
    expected_ms: float = 0.0
    took_ms: float = 0.0
    cached: bool = False
    moved: tuple[str, ...] = ()
    shared: int = 0
    fed_tokens: int = 0
    fed_ms: float = 0.0


@dataclasses.dataclass(frozen=True)
class Reader:
    """Reads the chunks of a context from storage.

    Attributes:
      read: called in `pool`.
      pool: threads that read.
    """

    read: Read
    pool: concurrent.futures.Executor


@dataclasses.dataclass(frozen=True)
class Restored:
    """A restored context.

    Attributes:
      cache: its length is that of the chunks, and of the tokens that were fed.
      read: the chunks that were read.
      how: it was restored.
      chunk_table: of the chunks that the cache attends to, if it was made before they were read.
      fed: what was fed of the call; None for nothing.
    """

    cache: KVCache
    read: dict[int, Stored]
    how: Restoration
    chunk_table: ChunkTable | None = None
    fed: Fed | None = None


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
    """Puts all whole chunks of a context into a cache. Where answers attend to chunks where they lie, and
    nothing of the context is computed, they are only read.

    Args:
      chunk_io: of the context's level.
      cache: has room for them, and for what is fed; donated.
      tokens: of the context, at least those of all chunks.
      bits: the stored width of each chunk, or `LOST`.
      resident: the chunks in memory, by number.
      reader: of the other chunks.
      delays: of this device; None computes only lost chunks.
      new: tokens of the call, of which the first chunk is fed if chunks are read; None feeds nothing.

    Raises:
      CheckpointError: a chunk on storage is not what was written. The cache is then donated and lost.
    """
    missing = {chunk: width for chunk, width in enumerate(bits) if chunk not in resident}
    plan, later = _plan(chunk_io, missing, delays, new)
    if later or not plan.read:
        # Later passes compute what new tokens attend to; where nothing is read, one dispatch of all layers
        # is faster.
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


def _plan(
    chunk_io: ChunkIO, missing: Mapping[int, int], delays: Delays | None, new: NewTokens | None
) -> tuple[Restore, list[tuple[int, ...]]]:
    """The first pass, which reads and computes, and the chunks that each further pass computes."""
    lost = sorted(chunk for chunk, width in missing.items() if width == LOST)
    counts = chunk_io.runner.options.recomputed_chunks
    most = counts[-1]
    there = tuple(sorted(set(missing) - set(lost)))
    if len(lost) > most or (lost and delays is None):
        # More than the largest bucket takes: several passes, the earlier chunks first, because later ones
        # attend to them. All chunks that can be read are there from the first pass on.
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
    """How many chunks of a context take as long to compute as the tokens that are fed."""
    exact = chunk_io.runner.options.exact_chunks
    return -(-(len(new.fed) if exact else new.chunks[0].tokens) // chunk_io.chunk_tokens)


def _beside(resident: Mapping[int, Stored], arriving: Arriving) -> Arriving:
    """Chunks in memory beside those that arrive."""

    def of(layer: int) -> LayerBlobs:
        there = {chunk: (width, blobs[layer]) for chunk, (width, blobs) in resident.items()}
        return {**there, **arriving(layer)}

    return of


def _arriving(
    chunks: Sequence[int], bits: Sequence[int], coming: Sequence[concurrent.futures.Future]
) -> Arriving:
    """A function that waits for a layer's blobs, and gives each chunk's width and blob."""

    def of(layer: int) -> LayerBlobs:
        blobs = coming[layer].result() if coming else []
        return {chunk: (bits[chunk], blob) for chunk, blob in zip(chunks, blobs, strict=True)}

    return of


def _arrived(
    chunks: Sequence[int], bits: Sequence[int], coming: Sequence[concurrent.futures.Future]
) -> dict[int, Stored]:
    """Waits for all reads, and gives the chunks as they are stored."""
    layers = [each.result() for each in coming]
    return {chunk: (bits[chunk], [blobs[place] for blobs in layers]) for place, chunk in enumerate(chunks)}


def _bucket(chunk_io: ChunkIO, count: int) -> int:
    """The number of chunks of the smallest bucket that computes `count`."""
    return next(each for each in chunk_io.runner.options.recomputed_chunks if each >= count)
