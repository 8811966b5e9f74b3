"""Restores a context: reads the next layer's chunks while this layer's are computed (LLMS, section 3.3).

Chunks in memory are decoded in place. A plan divides the missing ones into those that are read and those that
are computed from their tokens, layer by layer, at their positions. Where nothing is computed, one dispatch
decodes all layers.
"""

import concurrent.futures
import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from jaxllm.kv.cache import KVCache
from jaxllm.kv.recompute import LOST, Restore, plan_restore
from serving.contexts.blobs import Stored
from serving.contexts.chunk_io import ChunkIO
from serving.contexts.delays import Delays

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
    """

    resident: int = 0
    read: tuple[int, ...] = ()
    computed: tuple[int, ...] = ()
    expected_ms: float = 0.0
    took_ms: float = 0.0
    cached: bool = False
    moved: tuple[str, ...] = ()
    shared: int = 0


def restore(
    chunk_io: ChunkIO,
    cache: KVCache,
    *,
    tokens: Sequence[int],
    bits: Sequence[int],
    resident: Mapping[int, Stored],
    read: Read,
    delays: Delays | None,
    pool: concurrent.futures.Executor,
) -> tuple[KVCache, dict[int, Stored], Restoration]:
    """Puts all whole chunks of a context into a cache. Where answers attend to chunks where they lie, and
    nothing is computed, they are only read.

    Args:
      chunk_io: of the context's level.
      cache: has room for them; donated.
      tokens: of the context, at least those of all chunks.
      bits: the stored width of each chunk, or `LOST`.
      resident: the chunks in memory, by number.
      read: reads chunks from storage; called in `pool`.
      delays: of this device; None computes only lost chunks.
      pool: threads that read.

    Returns:
      The cache, whose length is that of the chunks; the chunks that were read; how the context was restored.

    Raises:
      CheckpointError: a chunk on storage is not what was written. The cache is then donated and lost.
    """
    missing = {chunk: width for chunk, width in enumerate(bits) if chunk not in resident}
    plan, later = _plan(chunk_io, missing, delays)
    coming = [pool.submit(read, layer, plan.read) for layer in range(chunk_io.layers) if plan.read]
    try:
        if plan.computed:
            there = _arriving(plan.read, bits, coming)
            cache = _pass(chunk_io, cache, tokens, plan, resident, there)
        elif not chunk_io.coded:
            cache = chunk_io.load(cache, {**resident, **_arrived(plan.read, bits, coming)})
        for computed in later:
            bucket = _bucket(chunk_io, len(computed))
            further = Restore(read=(), computed=computed, bucket=bucket, expected_ms=0.0)
            cache = _pass(chunk_io, cache, tokens, further, {}, lambda _: {})
        arrived = _arrived(plan.read, bits, coming)
    finally:
        for each in coming:
            each.cancel()
        concurrent.futures.wait(coming)
    # Until now buckets may read blobs in place.
    jax.block_until_ready((cache.keys, cache.values))
    how = Restoration(
        resident=len(resident),
        read=plan.read,
        computed=tuple(sorted([*plan.computed, *(chunk for each in later for chunk in each)])),
        expected_ms=plan.expected_ms,
    )
    length = np.int32(len(bits) * chunk_io.chunk_tokens)
    return dataclasses.replace(cache, length=length), arrived, how


def _plan(
    chunk_io: ChunkIO, missing: Mapping[int, int], delays: Delays | None
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
    )
    return plan, []


def _pass(
    chunk_io: ChunkIO,
    cache: KVCache,
    tokens: Sequence[int],
    plan: Restore,
    resident: Mapping[int, Stored],
    arriving: Callable[[int], dict[int, tuple[int, np.ndarray]]],
) -> KVCache:
    """Restores the layers one by one, each as soon as its chunks have been read."""
    at = chunk_io.positions(plan.computed, plan.bucket)
    # Another thread's answer must not evict the weights of layers meanwhile.
    with chunk_io.runner.lock:
        x = chunk_io.embed(tokens, at)
        try:
            for layer in range(chunk_io.layers):
                there = {chunk: (width, blobs[layer]) for chunk, (width, blobs) in resident.items()}
                there |= arriving(layer)
                x, cache = chunk_io.restore_layer(layer, x, at, cache, there)
        except BaseException:
            # Buckets that were dispatched still read blobs in place, and the blobs end with this call.
            with contextlib.suppress(Exception):
                jax.block_until_ready(x)
            raise
    return cache


def _arriving(
    chunks: Sequence[int], bits: Sequence[int], coming: Sequence[concurrent.futures.Future]
) -> Callable[[int], dict[int, tuple[int, np.ndarray]]]:
    """A function that waits for a layer's blobs, and gives each chunk's width and blob."""

    def of(layer: int) -> dict[int, tuple[int, np.ndarray]]:
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
