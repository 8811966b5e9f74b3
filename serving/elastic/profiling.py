"""Measures a `DeviceProfile`: every level of an engine, or of several that are compared, at a few prompt
lengths; or coarsely, in seconds instead of minutes. A service measures once and stores the profile."""

import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from jaxllm.serving.elastic.profile import DeviceProfile, PrefillTimes, Rows, load_profile, save_profile
from jaxllm.serving.engine.engine import Engine
from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.serving.engine.step import Answer, step
from jaxllm.serving.host.progress import Progress
from jaxllm.serving.host.user_cache import cache_folder
from jaxllm.serving.runners.runner import prefill_prompt

if TYPE_CHECKING:
    from jaxllm.bundle import Bundle
    from jaxllm.serving.ground.options import EngineOptions

# Prompt lengths to measure, as far as they fit the context; times between them are interpolated.
LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048)
REPEATS = 5
ANSWER_TOKENS = 17
# Of coarse profiles: no further length is measured after this time, once there are two.
COARSE_LENGTHS = (16, 128, 512)
MOST_S = 10.0
_VERSION = 5
_MODES: tuple[Literal["int8", "float"], ...] = ("int8", "float")


def profile_path(bundle: "Bundle", options: "EngineOptions") -> Path:
    """The path of the profile of a bundle on this device, with these resolved options."""
    # Imported here: devices that only run exported programs have no JAX.
    from jaxllm.kernels import native
    from jaxllm.serving.buckets.bucket_table import compiled_options, digest_of, environment_facts

    facts = {
        "version": _VERSION,
        "kernels": [native.kernels().name, native.threads()],
        "environment": environment_facts(),
        "options": compiled_options(options),
        # The allowed loss changes no time.
        "prefill": dataclasses.asdict(options.prefill) | {"most_loss": None},
    }
    return cache_folder() / "profiles" / f"{digest_of([bundle.fingerprint, facts])[:32]}.json"


def known_profile(
    engine: Engine[Any], *, coarse: bool = False, progress: Progress | None = None
) -> DeviceProfile:
    """The device's profile of an engine, measured and stored for later starts if there is none.

    Args:
      engine: warm engine of a whole model.
      coarse: whether a coarse profile suffices; an engine with integer and float prefill, which must be
        compared at each level, gets a full one anyway.
      progress: callback for ("profile", done, total).

    Raises:
      ConfigError: the profile cannot be read or written.
    """
    path = profile_path(engine.model.bundle, engine.options)
    known, both = load_profile(path), has_both_modes(engine)
    if (
        known is not None
        and set(engine.levels) <= set(known.levels)
        and (coarse or not known.coarse)
        and (known.prefill is not None or not both)
    ):
        return known
    if coarse and not both:
        profile = measure_coarsely(engine, progress=progress)
    else:
        profile = measure(engine, progress=progress).completed_by(known)
    save_profile(profile, path)
    return profile


def measure_coarsely(
    engine: Engine, *, progress: Progress | None = None, clock: Callable[[], float] = time.perf_counter
) -> DeviceProfile:
    """Measures the smallest and the largest level once at a few prompt lengths.

    Times of other levels are interpolated linearly by their share of the units, and times of longer prompts
    extrapolated from the last two lengths, which underestimates when attention dominates.

    Args:
      engine: warmed up, a whole model's.
      progress: callback for ("profile", lengths done, number of lengths).
      clock: clock in seconds.
    """
    lengths, ends = _fitting(engine, COARSE_LENGTHS), sorted({engine.levels[0], engine.levels[-1]})
    draw, began_s, measured = random.Random(0), clock(), list[list[tuple[float, float]]]()
    for length in lengths:
        if len(measured) >= 2 and clock() - began_s > MOST_S:
            break
        row = []
        for level in ends:
            # The first run warms caches and is not counted.
            timed_run(engine, level, length, draw).result()
            row.append(_times(timed_run(engine, level, length, draw).result()))
        measured.append(row)
        if progress is not None:
            progress("profile", len(measured), len(lengths))
    # [times, levels, lengths]
    known = np.array(measured).T
    ttft_ms, tpot_ms = (
        np.array([np.interp(engine.levels, ends, column) for column in monotonic(rows).T]).T for rows in known
    )
    profile = _profile(engine, lengths[: len(measured)], ttft_ms, tpot_ms)
    return dataclasses.replace(profile, coarse=True)


def measure(
    engine: Engine, *, repeats: int = REPEATS, seed: int = 0, progress: Progress | None = None
) -> DeviceProfile:
    """Measures every level of the engine (see `measure_together`). An engine with integer and float prefill
    is measured with both first, and then with the faster one of each level and length."""
    if not has_both_modes(engine):
        return measure_together([engine], repeats=repeats, seed=seed, progress=progress)[0]
    prefill = measure_prefill(engine, repeats=repeats, seed=seed, progress=progress)
    # Only for the choice: its times per token are not measured yet.
    known = _profile(engine, _lengths(engine), prefill.float_ms, prefill.float_ms)
    choose_prefill(engine, dataclasses.replace(known, prefill=prefill))
    found = measure_together([engine], repeats=repeats, seed=seed, progress=progress)[0]
    return dataclasses.replace(found, prefill=prefill)


def measure_together(
    engines: Sequence[Engine], *, repeats: int = REPEATS, seed: int = 0, progress: Progress | None = None
) -> list[DeviceProfile]:
    """Measures every level of several warm engines to compare (see `Measurement`); `progress` is called with
    ("profile", runs done, runs in all) after each dispatch."""
    measurement, more = Measurement(engines, repeats=repeats, seed=seed), True
    while more:
        more = measurement.step()
        if progress is not None:
            progress("profile", measurement.done, measurement.total)
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
        """Prepares `repeats` runs of each engine, level and length, whose prompts and order `seed` gives."""
        self._engines, self._draw = tuple(engines), random.Random(seed)
        self._lengths = [_lengths(engine) for engine in engines]
        self._cases = [
            (place, level, length)
            for place, engine in enumerate(engines)
            for level in engine.levels
            for length in self._lengths[place]
        ]
        self._times: dict[tuple[int, int, int], list[tuple[float, float]]] = {
            case: [] for case in self._cases
        }
        self.total, self.done = (repeats + 1) * len(self._cases), 0
        self._run: Answer | None = None

    def step(self) -> bool:
        """Runs a dispatch of the current run, or of the next; returns whether there is more to do."""
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
                self._times[self._cases[number]].append(_times(self._run))
            self.done, self._run = self.done + 1, None
        return self.done < self.total

    def interrupt(self) -> None:
        """Drops the current run, to be repeated, because other calls need the device."""
        run, self._run = self._run, None
        if run is not None:
            run.close()

    def profiles(self) -> list[DeviceProfile]:
        """The profile of each engine, when all runs have ended."""
        found = []
        for place, (engine, lengths) in enumerate(zip(self._engines, self._lengths, strict=True)):
            medians = [
                [np.median(self._times[place, level, length], axis=0) for length in lengths]
                for level in engine.levels
            ]
            ttft_ms, tpot_ms = np.moveaxis(np.array(medians), -1, 0)
            found.append(_profile(engine, lengths, monotonic(ttft_ms), monotonic(tpot_ms)))
        return found


def has_both_modes(engine: Engine) -> bool:
    """Whether an engine has both integer and float prefill at some level."""
    modes = engine.model.runners.modes
    return modes is not None and any(map(modes.both, engine.model.levels))


def choose_prefill(engine: Engine, profile: DeviceProfile) -> None:
    """Lets an engine with integer and float prefill use the faster one by the profile."""
    if engine.model.runners.modes is not None:
        engine.model.runners.modes.choose_by(profile.integers_are_faster)


def measure_prefill(
    engine: Engine, *, repeats: int, seed: int = 0, progress: Progress | None = None
) -> PrefillTimes:
    """Measures both modes of an engine that `has_both_modes` at every level and length, interleaved in random
    order; returns monotonic medians. Levels without integer prefill have the times of float prefill."""
    # Imported here: devices that only run exported programs have no JAX.
    import jax

    draw, lengths = random.Random(seed), _lengths(engine)
    cases = [(mode, level, length) for mode in _MODES for level in engine.levels for length in lengths]
    times: dict[tuple[str, int, int], list[float]] = {case: [] for case in cases}
    # The first round warms caches and is not counted.
    for number in range(-1, repeats):
        draw.shuffle(cases)
        for done, (mode, level, length) in enumerate(cases):
            runner = engine.model.resident_runner(level)
            if mode == "int8" and not (runner.int8 is not None and runner.int8.possible):
                continue
            prompt = _random_prompt(engine, length, draw)
            cache = jax.block_until_ready(runner.start(length))
            began = time.perf_counter()
            logits, _ = prefill_prompt(runner, cache, prompt, 0, runner.chunks_in(mode, length))
            jax.block_until_ready(logits)
            if number >= 0:
                times[mode, level, length].append(1000 * (time.perf_counter() - began))
            if progress is not None:
                progress("profile", (number + 1) * len(cases) + done + 1, (repeats + 1) * len(cases))

    def medians(mode: str) -> Rows:
        cases = [[(level, length) for length in lengths] for level in engine.levels]
        found = [[times[mode, *case] or times["float", *case] for case in row] for row in cases]
        return _rows(monotonic([[statistics.median(each) for each in row] for row in found]))

    return PrefillTimes(integer_ms=medians("int8"), float_ms=medians("float"))


def timed_run(engine: Engine, level: int, length: int, draw: random.Random) -> Answer:
    """The answer to a random prompt of `length` tokens, with the standard answer length of profiles."""
    config = GenerationConfig(max_tokens=ANSWER_TOKENS, ignore_eos=True)
    return engine.stream(_random_prompt(engine, length, draw), config, level=level)


def monotonic(times: Any) -> np.ndarray:
    """Nearby times `[levels, lengths]` that decrease along neither axis: midway between the running maximum
    and the running minimum from the end, first by length, then by level."""
    times = np.asarray(times)
    for axis in (1, 0):
        most = np.maximum.accumulate(times, axis)
        least = np.flip(np.minimum.accumulate(np.flip(times, axis), axis), axis)
        times = (most + least) / 2
    return times


def most_prompt_tokens(engine: Engine) -> int:
    """The longest prompt to measure: for an encoder-decoder the longest source, for other models the context
    without the answer."""
    if engine.cfg.encoder is not None:
        return engine.options.source_tokens(engine.cfg)
    return engine.options.context_tokens - ANSWER_TOKENS


def _profile(engine: Engine, lengths: Sequence[int], ttft_ms: Any, tpot_ms: Any) -> DeviceProfile:
    """A profile of times `[levels, lengths]`."""
    return DeviceProfile(
        levels=engine.levels,
        tokens=tuple(lengths),
        chunk_tokens=engine.options.chunk_tokens,
        exact_chunks=engine.options.exact_chunks,
        ttft_ms=_rows(ttft_ms),
        tpot_ms=_rows(tpot_ms),
    )


def _rows(times: Any) -> Rows:
    return tuple(map(tuple, np.asarray(times).tolist()))


def _times(run: Answer) -> tuple[float, float]:
    """Milliseconds of a finished run to its first token, and per further token."""
    return run.timings.ttft_ms, run.timings.tpot_ms(len(run.tokens))


def _random_prompt(engine: Engine, length: int, draw: random.Random) -> list[int]:
    return [draw.randrange(engine.cfg.vocab_size) for _ in range(length)]


def _lengths(engine: Engine) -> tuple[int, ...]:
    """The prompt lengths to measure, with the longest prompt."""
    lengths, room = _fitting(engine, LENGTHS), most_prompt_tokens(engine)
    return lengths if room <= lengths[-1] else (*lengths, room)


def _fitting(engine: Engine, lengths: Sequence[int]) -> tuple[int, ...]:
    room = most_prompt_tokens(engine)
    return tuple(length for length in lengths if length <= room) or (max(1, room),)
