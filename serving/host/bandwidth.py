"""Measures the bandwidth of this machine's memory: the limit of decoding, which reads all weights per token.

On a shared machine it changes from second to second, so it is measured beside what is compared with it. The
native library's read loop is tried, and numpy's reductions over the same large buffer, which run without
Python's lock, one thread per core; the fastest counts.
"""

import concurrent.futures
import contextlib
import os
import time
from collections.abc import Callable, Iterator

import numpy as np

from jaxllm.kernels import native


@contextlib.contextmanager
def memory_probe(threads: int, *, buffer_bytes: int = 1 << 29) -> Iterator[Callable[[], float]]:
    """Yields what measures the bytes that threads read per second, by the loops that are fastest here.

    Args:
      threads: that read together; at most the cores that this process may use.
      buffer_bytes: read at a time; less than the caches hold would measure the caches.
    """
    buffer = np.zeros(buffer_bytes // 8, np.int64)
    buffer += 1  # written, so that it is memory and not the one page of zeros
    cores = sorted(os.sched_getaffinity(0))[:threads] if hasattr(os, "sched_getaffinity") else None

    def pin() -> None:
        if cores is not None:
            os.sched_setaffinity(0, cores)  # of the calling thread

    def read_s(word: type | None) -> float:
        """The seconds of a pass by words of a type; None for the native kernel."""
        parts = np.array_split(buffer.view(word or np.uint8), threads)
        if word is None:
            # Set each time: threads belong to the process.
            native.set_threads(threads)
        began = time.perf_counter()
        if word is None:
            native.read_all(buffer)
        else:
            list(pool.map(np.max, parts))
        return time.perf_counter() - began

    with concurrent.futures.ThreadPoolExecutor(threads, initializer=pin) as pool:
        # The same loop (a running maximum) over words of other widths: which of them numpy reads with the
        # widest loads, and enough of them in flight, differs between its builds. Sums are slower than memory.
        words = [np.uint8, np.int32, np.float32, np.int64, *([None] if native.kernels().native else [])]
        trials = [min(read_s(word) for _ in range(3)) for word in words]
        fastest = [words[place] for place in np.argsort(trials)[:2]]
        # In the fastest of a few rounds.
        yield lambda: buffer.nbytes / min(read_s(word) for _ in range(2) for word in fastest)
