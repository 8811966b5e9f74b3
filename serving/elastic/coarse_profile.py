"""Measures a coarse initial `DeviceProfile`, in seconds instead of minutes.

The smallest level and the whole model are measured once at a few lengths. Times of other levels are
interpolated linearly by their share of the units, and times of longer prompts extrapolated from the last
two lengths, which underestimates when attention dominates.
"""

import random
import time
from collections.abc import Callable

import numpy as np

from jaxllm.serving.elastic.profile import DeviceProfile
from jaxllm.serving.elastic.profiling import Timed, monotonic, most_prompt_tokens, timed, timed_run
from jaxllm.serving.engine.engine import Engine
from jaxllm.serving.host.progress import Progress

LENGTHS = (16, 128, 512)
# No further length is measured after this time, once there are two.
MOST_S = 10.0


def measure_coarsely(
    engine: Engine, *, progress: Progress | None = None, clock: Callable[[], float] = time.perf_counter
) -> DeviceProfile:
    """Measures the smallest and the largest level of an engine at a few prompt lengths.

    Args:
      engine: warmed up, a whole model's.
      progress: callback for ("profile", runs done, number of runs).
      clock: clock in seconds.
    """
    room = most_prompt_tokens(engine)
    lengths = [each for each in LENGTHS if each <= room] or [max(1, room)]
    ends = sorted({engine.levels[0], engine.levels[-1]})
    draw, began_s, times = random.Random(0), clock(), list[list[Timed]]()
    for length in lengths:
        if len(times) >= 2 and clock() - began_s > MOST_S:
            break
        row = []
        for level in ends:
            # The first run warms caches and is not counted.
            timed_run(engine, level, length, draw).result()
            row.append(timed(timed_run(engine, level, length, draw).result()))
        times.append(row)
        if progress is not None:
            progress("profile", len(times), len(lengths))

    def rows(measured: list[list[float]]) -> tuple[tuple[float, ...], ...]:
        by_length = monotonic(np.array(measured).T).T
        found = [np.interp(engine.levels, ends, each) for each in by_length]
        return tuple(map(tuple, np.array(found).T.tolist()))

    return DeviceProfile(
        levels=engine.levels,
        tokens=tuple(lengths[: len(times)]),
        chunk_tokens=engine.options.chunk_tokens,
        exact_chunks=engine.options.exact_chunks,
        ttft_ms=rows([[each.ttft_ms for each in row] for row in times]),
        tpot_ms=rows([[each.tpot_ms for each in row] for row in times]),
        coarse=True,
    )
