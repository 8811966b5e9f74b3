"""Times steps on the device."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax


def median_s(step: Callable[[], Any], repetitions: int, *, warm_steps: int) -> float:
    """Median time of a step in seconds, until its results are there; the first of the warm ones compiles."""
    for _ in range(warm_steps):
        jax.block_until_ready(step())
    times = []
    for _ in range(repetitions):
        began = time.perf_counter()
        jax.block_until_ready(step())
        times.append(time.perf_counter() - began)
    return statistics.median(times)
