"""Measures a `DeviceProfile`: every level of an engine, or of several that are compared, at a few lengths."""

import dataclasses
import random
import statistics
from collections.abc import Callable, Sequence

import numpy as np

from jaxllm.serving.elastic.prefill_times import choose_prefill, has_both_modes, measure_prefill
from jaxllm.serving.elastic.profile import DeviceProfile, PrefillTimes
from jaxllm.serving.engine.answer import Answer
from jaxllm.serving.engine.engine import Engine
from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.serving.engine.step import step
from jaxllm.serving.host.progress import Progress

# Prompt lengths to measure, as far as they fit the context; times between them are interpolated.
LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048)
REPEATS = 5
ANSWER_TOKENS = 17


@dataclasses.dataclass(frozen=True)
class Timed:
    """Times of one run in milliseconds: to the first token, and per further token."""

    ttft_ms: float
    tpot_ms: float


def measure(
    engine: Engine, *, repeats: int = REPEATS, seed: int = 0, progress: Progress | None = None
) -> DeviceProfile:
    """Measures every level of the engine (see `measure_together`). An engine with integer and float prefill
    is measured with both first, and then with the faster one of each level and length."""
    if not has_both_modes(engine):
        return measure_together([engine], repeats=repeats, seed=seed, progress=progress)[0]
    lengths = _lengths(engine)
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
    """Measures every level of several engines to compare (see `Measurement`).

    Args:
      engines: warm engines, each of a whole model.
      repeats: number of runs of each engine, level and length.
      seed: seed of prompts and order.
      progress: callback for ("profile", runs done, runs in all).
    """
    measurement, told = Measurement(engines, repeats=repeats, seed=seed), 0
    while measurement.step():
        if progress is not None and measurement.done > told:
            told = measurement.done
            progress("profile", told, measurement.total)
    if progress is not None:
        progress("profile", measurement.total, measurement.total)
    return measurement.profiles()


class Measurement:
    """Measures every level of several engines, one dispatch at a time.

    Engines, levels and lengths are interleaved in random order, so that other load of the device affects all
    equally. Medians are made monotonic in levels and prompt lengths (see `monotonic`).

    Attributes:
      total: total number of runs.
      done: number of finished runs.
    """

    def __init__(self, engines: Sequence[Engine], *, repeats: int = REPEATS, seed: int = 0) -> None:
        """Prepares runs: see `measure_together`."""
        self._engines, self._draw = tuple(engines), random.Random(seed)
        self._lengths = [_lengths(engine) for engine in engines]
        self._cases = [
            (place, level, length)
            for place, engine in enumerate(engines)
            for level in engine.levels
            for length in self._lengths[place]
        ]
        self._times: dict[tuple[int, int, int], list[Timed]] = {case: [] for case in self._cases}
        self.total, self.done = (repeats + 1) * len(self._cases), 0
        self._run: Answer | None = None

    def step(self) -> bool:
        """Runs a dispatch of the current run, or of the next.

        Returns:
          Whether there is more to do.
        """
        if self.done == self.total:
            return False
        number = self.done % len(self._cases)
        if self._run is None:
            if number == 0:
                self._draw.shuffle(self._cases)
            place, level, length = self._cases[number]
            self._run = timed_run(self._engines[place], level, length, self._draw)
        step(self._run)
        if self._run.stage == "ended":
            # The first round warms caches and is not counted.
            if self.done >= len(self._cases):
                self._times[self._cases[number]].append(timed(self._run))
            self.done, self._run = self.done + 1, None
        return self.done < self.total

    def interrupt(self) -> None:
        """Drops the current run, to be repeated, because other calls need the device."""
        run, self._run = self._run, None
        if run is not None:
            run.close()

    def profiles(self) -> list[DeviceProfile]:
        """The profile of each engine, when all runs have ended."""
        return [
            DeviceProfile(
                levels=engine.levels,
                tokens=self._lengths[place],
                chunk_tokens=engine.options.chunk_tokens,
                exact_chunks=engine.options.exact_chunks,
                ttft_ms=self._medians(place, lambda each: each.ttft_ms),
                tpot_ms=self._medians(place, lambda each: each.tpot_ms),
            )
            for place, engine in enumerate(self._engines)
        ]

    def _medians(self, place: int, what: Callable[[Timed], float]) -> tuple[tuple[float, ...], ...]:
        found = [
            [
                statistics.median(map(what, self._times[place, level, length]))
                for length in self._lengths[place]
            ]
            for level in self._engines[place].levels
        ]
        return _monotonic(found)


def timed_run(engine: Engine, level: int, length: int, draw: random.Random) -> Answer:
    """The answer to a random prompt of `length` tokens, with the standard answer length of profiles."""
    prompt = [draw.randrange(engine.cfg.vocab_size) for _ in range(length)]
    return engine.stream(prompt, GenerationConfig(max_tokens=ANSWER_TOKENS, ignore_eos=True), level=level)


def timed(run: Answer) -> Timed:
    """The times of a finished run."""
    return Timed(run.timings.ttft_ms, run.timings.tpot_ms(len(run.tokens)))


def monotonic(times: np.ndarray) -> np.ndarray:
    """Nearby times `[levels, lengths]` that decrease along neither axis: midway between the running maximum
    and the running minimum from the end, first by length, then by level."""
    for axis in (1, 0):
        most = np.maximum.accumulate(times, axis)
        least = np.flip(np.minimum.accumulate(np.flip(times, axis), axis), axis)
        times = (most + least) / 2
    return times


def _monotonic(times: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], ...]:
    return tuple(map(tuple, monotonic(np.array(times)).tolist()))


def most_prompt_tokens(engine: Engine) -> int:
    """The longest prompt to measure: for an encoder-decoder the longest source, for other models the context
    without the answer."""
    if engine.cfg.encoder is not None:
        return engine.options.source_tokens(engine.cfg)
    return engine.options.context_tokens - ANSWER_TOKENS


def _lengths(engine: Engine) -> tuple[int, ...]:
    """The prompt lengths to measure."""
    room = most_prompt_tokens(engine)
    lengths = [each for each in LENGTHS if each <= room] or [max(1, room)]
    return tuple(lengths if room <= lengths[-1] else [*lengths, room])
