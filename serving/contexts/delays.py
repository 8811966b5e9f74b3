"""How long this device takes to read chunks and to compute them again: what `plan_restore` weighs."""

import dataclasses
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.kv.recompute import Delay
from serving.contexts.graphs import ContextGraphs
from serving.direct_io import PieceReader, Storage

_SIZES_BYTES = (1 << 14, 1 << 18, 1 << 20)
_REPEATS = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Delays:
    """Of one layer of a context.

    Attributes:
      reading: by bytes.
      computing: by chunks.
    """

    reading: Delay
    computing: Delay


def measure_reading(folder: Path, storage: Storage) -> Delay:
    """Times reads from a file of random bytes in `folder`, which is removed again.

    Raises:
      ConfigError: it cannot be written.
    """
    path = folder / f".reading-{os.getpid()}"
    try:
        with path.open("wb") as file:
            file.write(np.random.default_rng(0).bytes(_SIZES_BYTES[-1]))
            file.flush()
            os.fsync(file.fileno())
        with PieceReader(path, storage) as reader:
            times = [_median_ms(lambda size=size: reader.read(0, size)) for size in _SIZES_BYTES]
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written to time reads ({error.strerror})") from error
    finally:
        path.unlink(missing_ok=True)
    return Delay.fit(_SIZES_BYTES, times)


def measure_computing(graphs: ContextGraphs) -> Delay:
    """Times one layer's pass over chunks, of each number that there is a graph for."""
    table = graphs.table
    options = table.options
    counts, tokens = options.recomputed_chunks, [0] * options.context_tokens

    def once(count: int) -> None:
        # The last chunks see the most.
        end = options.context_tokens // graphs.chunk_tokens
        at = graphs.places(range(max(0, end - count), end), count)
        cache = table.start(options.context_tokens)
        jax.block_until_ready(graphs.restore_layer(0, graphs.embed(tokens, at), at, cache, {}))

    times = [_median_ms(lambda count=count: once(count)) for count in counts]
    if len(counts) == 1:
        return Delay(fixed_ms=0.0, per_unit_ms=times[0] / counts[0])
    return Delay.fit(counts, times)


def _median_ms(run: Callable[[], object]) -> float:
    """Of some runs, after a first one that sets things up."""
    run()
    times = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        run()
        times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times)
