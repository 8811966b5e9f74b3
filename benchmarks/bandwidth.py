"""How fast this machine's cores read memory: the limit of decoding, which reads all weights per token.

The native library's own read loop is tried, and numpy's reductions over the same large buffer, which run
without Python's lock, one thread per core: the fastest of all counts.
"""

import concurrent.futures
import os
import time

import numpy as np

from benchmarks.quiet import Disturbance, wait_for_quiet
from jaxllm.kernels import native

# Several times any cache of the last level that a core can call its own.
_BUFFER_BYTES = 1 << 30
_ROUNDS = 4
# On a busy machine rounds are repeated, but not for ever.
_LIMIT_S = 2.0
# The same loop (a running maximum) over words of other widths: which of them numpy reads with the widest
# loads, and enough of them in flight, differs between its builds. Sums are slower than memory.
_WORDS = (np.uint8, np.int32, np.float32, np.int64)


def read_bandwidth(threads: int, *, buffer_bytes: int = _BUFFER_BYTES) -> float:
    """Bytes per second that `threads` cores read together: the best of several methods and rounds.

    Args:
      threads: at most the cores that this process may use.
      buffer_bytes: how much is read per round; less than the caches hold would measure those.
    """
    buffer = np.zeros(buffer_bytes // 8, np.int64)
    buffer += 1  # written, so that it is memory and not the one page of zeros
    cores = sorted(os.sched_getaffinity(0))[:threads] if hasattr(os, "sched_getaffinity") else None

    def pin() -> None:
        if cores is not None:
            os.sched_setaffinity(0, cores)  # of the calling thread

    with concurrent.futures.ThreadPoolExecutor(threads, initializer=pin) as pool:

        def read_s(parts: list[np.ndarray]) -> float:
            began = time.perf_counter()
            list(pool.map(np.max, parts))
            return time.perf_counter() - began

        def read_by_kernel(_: list[np.ndarray]) -> float:
            began = time.perf_counter()
            native.read_all(buffer)
            return time.perf_counter() - began

        methods = [(read_s, word) for word in _WORDS]
        if native.kernels().native:
            native.set_threads(threads)
            methods.append((read_by_kernel, np.uint8))
        best_s = float("inf")
        for method, word in methods:
            parts = np.array_split(buffer.view(word), threads)
            undisturbed, until = 0, time.perf_counter() + _LIMIT_S
            while undisturbed < _ROUNDS and time.perf_counter() < until:
                disturbance = Disturbance()
                best_s = min(best_s, method(parts))
                if disturbance.ended(own_s=0.0):
                    wait_for_quiet(0.3)
                else:
                    undisturbed += 1
    return buffer.nbytes / best_s
