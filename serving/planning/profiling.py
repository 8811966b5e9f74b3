"""Measures a `DeviceProfile`: every level of an engine, or of several that are compared, at a few lengths."""

import dataclasses
import random
import statistics
from collections.abc import Sequence

import numpy as np

from serving.engine import Engine
from serving.host.progress import Progress
from serving.options import EngineOptions
from serving.planning.prefill_times import PrefillTimes, has_both_modes, measure_prefill
from serving.planning.profile import DeviceProfile, choose_prefill
from serving.request import GenerationConfig

# Prompt lengths that are measured, as far as they fit the context; between them times are interpolated.
LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048)
REPEATS = 5
_ANSWER_TOKENS = 17


def measure(
    engine: Engine, *, repeats: int = REPEATS, seed: int = 0, progress: Progress | None = None
) -> DeviceProfile:
    """Measures every level that the engine serves (see `measure_together`). An engine with integer and float
    prefill is measured with both first, and then with the faster one of each level and length."""
    if not has_both_modes(engine):
        return measure_together([engine], repeats=repeats, seed=seed, progress=progress)[0]
    lengths = _lengths(engine.options)
    raw = measure_prefill(engine, lengths, repeats=repeats, seed=seed, progress=progress)
    prefill = PrefillTimes(integer_ms=_monotonic(raw.integer_ms), float_ms=_monotonic(raw.float_ms))
    # Only for the choice: its times per token are not measured yet.
    known = DeviceProfile(
        levels=engine.levels,
        tokens=lengths,
        chunk_tokens=engine.options.chunk_tokens,
        exact_chunks=engine.options.exact_chunks,
        ttft_ms=prefill.float_ms,
        tpot_ms=prefill.float_ms,
        prefill=prefill,
    )
    choose_prefill(engine, known)
    found = measure_together([engine], repeats=repeats, seed=seed, progress=progress)[0]
    return dataclasses.replace(found, prefill=prefill)


def measure_together(
    engines: Sequence[Engine], *, repeats: int = REPEATS, seed: int = 0, progress: Progress | None = None
) -> list[DeviceProfile]:
    """Measures every level of several engines, so that they can be compared.

    Engines, levels and lengths are interleaved in a random order, so that other load of the device affects
    all alike. Medians are made monotonic: a larger level or a longer prompt takes no less time (see
    `monotonic`).

    Args:
      engines: warmed up, each a whole model's.
      repeats: runs of each engine, level and length.
      seed: of prompts and order.
      progress: called with ("profile", runs done, runs in all).
    """
    draw = random.Random(seed)
    config = GenerationConfig(max_tokens=_ANSWER_TOKENS, ignore_eos=True)
    lengths = [_lengths(engine.options) for engine in engines]
    cases = [
        (place, level, length)
        for place, engine in enumerate(engines)
        for level in engine.levels
        for length in lengths[place]
    ]
    ttft: dict[tuple[int, int, int], list[float]] = {case: [] for case in cases}
    tpot: dict[tuple[int, int, int], list[float]] = {case: [] for case in cases}
    done = 0
    # The first round warms caches and is not counted.
    for counted in range(-1, repeats):
        draw.shuffle(cases)
        for place, level, length in cases:
            engine = engines[place]
            prompt = [draw.randrange(engine.cfg.vocab_size) for _ in range(length)]
            answer = engine.stream(prompt, config, level=level).result()
            if counted >= 0:
                ttft[place, level, length].append(answer.timings.ttft_ms)
                tpot[place, level, length].append(answer.timings.tpot_ms(len(answer.tokens)))
            done += 1
            if progress is not None:
                progress("profile", done, (repeats + 1) * len(cases))

    def medians(times: dict[tuple[int, int, int], list[float]], place: int) -> tuple[tuple[float, ...], ...]:
        found = [
            [statistics.median(times[place, level, length]) for length in lengths[place]]
            for level in engines[place].levels
        ]
        return _monotonic(found)

    return [
        DeviceProfile(
            levels=engine.levels,
            tokens=lengths[place],
            chunk_tokens=engine.options.chunk_tokens,
            exact_chunks=engine.options.exact_chunks,
            ttft_ms=medians(ttft, place),
            tpot_ms=medians(tpot, place),
        )
        for place, engine in enumerate(engines)
    ]


def monotonic(times: np.ndarray) -> np.ndarray:
    """Times `[levels, lengths]` near those given that fall along neither axis: midway between the running
    maximum and the running minimum from the end, first by length, then by level."""
    for axis in (1, 0):
        most = np.maximum.accumulate(times, axis)
        least = np.flip(np.minimum.accumulate(np.flip(times, axis), axis), axis)
        times = (most + least) / 2
    return times


def _monotonic(times: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], ...]:
    return tuple(map(tuple, monotonic(np.array(times)).tolist()))


def _lengths(options: EngineOptions) -> tuple[int, ...]:
    """The prompt lengths that are measured with resolved options."""
    room = options.context_tokens - _ANSWER_TOKENS
    lengths = [each for each in LENGTHS if each <= room] or [max(1, room)]
    return tuple(lengths if room <= lengths[-1] else [*lengths, room])
