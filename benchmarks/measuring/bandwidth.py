"""Measures memory's read bandwidth: the limit of decoding, which reads all weights per token.

On a shared machine it changes from second to second, so it is measured before and after each sample
(`alternation.py`). The native library's read loop is tried, and numpy's reductions over the same large
buffer, which run without Python's lock, one thread per core; the fastest counts.
"""

import concurrent.futures
import os
import time
from collections.abc import Callable

import numpy as np

from jaxllm.kernels import native

# Many times what the caches hold.
_BUFFER_BYTES = 1 << 29
_TRIALS, _ROUNDS, _KEPT = 3, 2, 2
# The same loop (a running maximum) over words of other widths: which of them numpy reads with the widest
# loads, and enough of them in flight, differs between its builds. Sums are slower than memory.
_WORDS = (np.uint8, np.int32, np.float32, np.int64)


class MemoryProbe:
    """Reads a buffer by the loops that are fastest on this machine. A context manager."""

    def __init__(self, threads: int, *, buffer_bytes: int = _BUFFER_BYTES) -> None:
        """Makes the buffer and finds the fastest loops.

        Args:
          threads: that read together; at most the cores that this process may use.
          buffer_bytes: read at a time; less than the caches hold would measure the caches.
        """
        self._buffer = np.zeros(buffer_bytes // 8, np.int64)
        self._buffer += 1  # written, so that it is memory and not the one page of zeros
        self._threads = threads
        cores = sorted(os.sched_getaffinity(0))[:threads] if hasattr(os, "sched_getaffinity") else None

        def pin() -> None:
            if cores is not None:
                os.sched_setaffinity(0, cores)  # of the calling thread

        self._pool = concurrent.futures.ThreadPoolExecutor(threads, initializer=pin)
        loops: list[Callable[[], float]] = [self._by_words(word) for word in _WORDS]
        if native.kernels().native:
            loops.append(self._by_kernel)
        trials = [min(loop() for _ in range(_TRIALS)) for loop in loops]
        self._loops = [loops[i] for i in np.argsort(trials)[:_KEPT]]

    def __enter__(self) -> "MemoryProbe":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._pool.shutdown()

    def bytes_per_s(self) -> float:
        """Bytes that the threads read per second, in the fastest of a few rounds."""
        return self._buffer.nbytes / min(loop() for _ in range(_ROUNDS) for loop in self._loops)

    def _by_words(self, word: type) -> Callable[[], float]:
        parts = np.array_split(self._buffer.view(word), self._threads)

        def read_s() -> float:
            began = time.perf_counter()
            list(self._pool.map(np.max, parts))
            return time.perf_counter() - began

        return read_s

    def _by_kernel(self) -> float:
        # Set each time: threads belong to the process.
        native.set_threads(self._threads)
        began = time.perf_counter()
        native.read_all(self._buffer)
        return time.perf_counter() - began
