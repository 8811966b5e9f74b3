"""Measures the delays of chunk reads and recomputed chunks on this device, which `plan_restore` weighs."""

import dataclasses
import logging
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxllm.errors import CheckpointError, one_line
from jaxllm.files.atomic import temporary_file
from jaxllm.kv.positions import TokenPositions
from jaxllm.kv.recompute import Delay
from serving.contexts.chunk_io import ChunkIO
from serving.host.direct_io import PieceReader, Storage, aligned

_SIZES_BYTES = (1 << 14, 1 << 18, 1 << 20)
_REPEATS = 5
_TIMED = "timed"
_NEVER_MS = 1e9
# Per byte: the slowest storage of phones, eMMC 5.1 (250 MB/s, 11,000 reads per second: Samsung's press
# release of the 512 GB eUFS 3.1, 17 March 2020).
UNMEASURED_READ = Delay(fixed_ms=1000 / 11_000, per_unit_ms=1e3 / 250e6)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Delays:
    """Delays of one layer of a context.

    Attributes:
      read: of chunks read from storage; its unit is a byte.
      compute: of recomputing chunks; its unit is a chunk.
    """

    read: Delay
    compute: Delay


def measure_read(folder: Path, storage: Storage) -> Delay:
    """Times reads from a file of random bytes in `folder`, which is removed again.

    Where there is no room for the file, or the device fails, logs a warning and returns `UNMEASURED_READ`:
    a full device must not prevent opening a store and deleting contexts.

    Args:
      folder: on the device that is measured.
      storage: how the file is read.
    """
    try:
        with temporary_file(folder / _TIMED) as (path, file):
            file.write(np.random.default_rng(0).bytes(_SIZES_BYTES[-1]))
            file.flush()
            os.fsync(file.fileno())
            with PieceReader(path, storage) as reader:
                # As chunks are read, into memory that is there.
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
    """Times one layer over each number of chunks that has a bucket; also over fewer, where a bucket's time is
    that of its chunks. Where no chunk can be computed by itself, it takes `_NEVER_MS`."""
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


def _median_ms(run: Callable[[Any], object], prepare: Callable[[], Any] = lambda: None) -> float:
    """The median time of `run(prepare())`, without `prepare`, after one run that warms up."""
    times = []
    for _ in range(1 + _REPEATS):
        given = prepare()
        began = time.perf_counter()
        run(given)
        times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times[1:])
