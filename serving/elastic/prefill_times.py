"""Measures integer and float prefill of an engine that has both, and chooses the faster one."""

import random
import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxllm.serving.elastic.profile import DeviceProfile, PrefillTimes
from jaxllm.serving.engine.engine import Engine
from jaxllm.serving.host.progress import Progress
from jaxllm.serving.runners.runner import prefill_prompt

if TYPE_CHECKING:
    from jaxllm.serving.int8_prefill.modes import PrefillMode

_MODES: tuple["PrefillMode", ...] = ("int8", "float")


def has_both_modes(engine: Engine) -> bool:
    """Whether an engine has both integer and float prefill at some level."""
    modes = engine.model.runners.modes
    return modes is not None and any(map(modes.both, engine.model.levels))


def choose_prefill(engine: Engine, profile: DeviceProfile) -> None:
    """Lets an engine with integer and float prefill use the faster one by the profile."""
    if engine.model.runners.modes is not None:
        engine.model.runners.modes.choose_by(profile.integers_are_faster)


def measure_prefill(
    engine: Engine,
    lengths: Sequence[int],
    *,
    repeats: int,
    seed: int = 0,
    progress: Progress | None = None,
) -> PrefillTimes:
    """Measures both modes at every level, interleaved in random order; returns medians.

    Args:
      engine: warm engine that `has_both_modes`.
      lengths: prompt lengths in tokens.
      repeats: number of runs of each mode, level and length.
      seed: seed of prompts and order.
      progress: callback for ("profile", runs done, runs in all).
    """
    # Imported here: devices that only run exported programs have no JAX.
    import jax

    draw = random.Random(seed)
    cases: list[tuple[PrefillMode, int, int]] = [
        (mode, level, length) for mode in _MODES for level in engine.levels for length in lengths
    ]
    times: dict[tuple[PrefillMode, int, int], list[float]] = {case: [] for case in cases}
    # The first round warms caches and is not counted.
    for number in range(-1, repeats):
        draw.shuffle(cases)
        for done, (mode, level, length) in enumerate(cases):
            runner = engine.model.resident_runner(level)
            if mode == "int8" and not (runner.int8 is not None and runner.int8.possible):
                continue
            prompt = [draw.randrange(engine.cfg.vocab_size) for _ in range(length)]
            cache = jax.block_until_ready(runner.start(length))
            began = time.perf_counter()
            logits, _ = prefill_prompt(runner, cache, prompt, 0, runner.chunks_in(mode, length))
            jax.block_until_ready(logits)
            if number >= 0:
                times[mode, level, length].append(1000 * (time.perf_counter() - began))
            if progress is not None:
                progress("profile", (number + 1) * len(cases) + done + 1, (repeats + 1) * len(cases))

    def medians(mode: "PrefillMode") -> tuple[tuple[float, ...], ...]:
        return tuple(
            tuple(
                statistics.median(times[mode, level, length] or times["float", level, length])
                for length in lengths
            )
            for level in engine.levels
        )

    return PrefillTimes(integer_ms=medians("int8"), float_ms=medians("float"))
