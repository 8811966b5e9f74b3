"""Times the change to another level: a request's time to the first token beside one that stays at its level.

Choosing another level sets an attribute of a Python object, and costs nothing by itself; the next dispatch
takes longer, for it has new arguments and reads memory that the last request did not read.

Measures the cost of levels: time to the first token and per token, memory, and copying one.
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from benchmarks.harness.bench import silent
from benchmarks.harness.children import in_process
from benchmarks.harness.machine import peak_resident_bytes
from benchmarks.harness.report import OURS, Row, bootstrap, compared, row
from jaxllm.config import WHOLE
from jaxllm.elastic.ladder import is_unit_parameter
from jaxllm.models.parameters import param_specs
from jaxllm.serving.elastic.profile import DeviceProfile
from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.host.progress import Progress
from jaxllm.serving.opening.engine import Engine

# Prompt of the requests that are timed, and of the process whose memory is measured.
PROMPT_TOKENS = 64


@dataclasses.dataclass(frozen=True)
class Added:
    """Time that changing to a level adds to a request's time to the first token.

    Attributes:
      median_ms: over pairs of a request that changes the level and one that does not.
      low_ms, high_ms: its 95 % interval.
      ttft_ms: median of those that do not.
    """

    median_ms: float
    low_ms: float
    high_ms: float
    ttft_ms: float

    @classmethod
    def of(cls, changed_ms: np.ndarray, stayed_ms: np.ndarray) -> "Added":
        """Computes it from times `[pairs]` of either kind."""
        longer = np.asarray(changed_ms, np.float64) - stayed_ms
        low, high = bootstrap(len(longer), lambda drawn: np.median(longer[drawn], axis=1))
        return cls(float(np.median(longer)), low, high, float(np.median(stayed_ms)))


def switch_rows(engine: Engine, *, rounds: int, progress: Progress = silent) -> list[Row]:
    """The time that changing the level adds to the next time to the first token, and the time to copy the
    level's weights, for a system that moves them.

    There is a ratio only where ours differs from zero.
    """
    added = added_by_level(engine, rounds=rounds, progress=progress)
    rows = []
    for level, each in added.items():
        moved_ms, moved_bytes = move(engine, level)
        case, sure = f"to level {level}", each.low_ms > 0
        note = (
            f"{own_bytes(engine, level)} bytes of weights moved; longer to the first token than a request "
            f"that stays, median of {rounds} pairs in turns, 95 % in [{each.low_ms:+.3f}, "
            f"{each.high_ms:+.3f}] ms; {each.median_ms / each.ttft_ms:+.2%} of its TTFT"
        )
        ratio = moved_ms / each.median_ms if sure else None
        copied = f"{moved_bytes} bytes of weights copied, which is all that is counted"
        rows += [
            row(case, "switch_ms", each.median_ms, note, baseline="LLM-Pruner", ratio=ratio),
            row(case, "switch_ms", moved_ms, copied, system="LLM-Pruner"),
        ]
    return rows


def added_by_level(engine: Engine, *, rounds: int, progress: Progress = silent) -> dict[int, Added]:
    """Times requests that change the level and requests that stay, in pairs.

    Every timed request follows another one: of a random other level, or of its own. The order in a pair and
    the prompts are drawn.
    """
    levels, config = engine.levels, GenerationConfig(max_tokens=1)
    draw = np.random.default_rng(0)
    times = {(level, changes): [] for level in levels for changes in (False, True)}

    def ttft_ms(level: int) -> float:
        prompt = draw.integers(0, engine.cfg.vocab_size, PROMPT_TOKENS).tolist()
        return engine.stream(prompt, config, level=level).result().timings.ttft_ms

    for done in range(rounds):
        for level in draw.permutation(levels).tolist():
            others = [each for each in levels if each != level] or [level]
            for changes in draw.permutation([False, True]).tolist():
                ttft_ms(int(draw.choice(others)) if changes else level)
                times[level, changes].append(ttft_ms(level))
        progress("switch", done + 1, rounds)
    return {level: Added.of(np.array(times[level, True]), np.array(times[level, False])) for level in levels}


def time_rows(profile: DeviceProfile) -> list[Row]:
    """Rows of every level's times, each against the whole model's."""
    rows = []
    for metric, times_of in (("ttft_ms", profile.ttft_ms), ("tpot_ms", profile.tpot_ms)):
        whole = times_of[profile.levels.index(WHOLE)]
        for level, times in zip(profile.levels, times_of, strict=True):
            for tokens, value, of_whole in zip(profile.tokens, times, whole, strict=True):
                against = {"baseline": "whole model", "ratio": of_whole / value}
                rows.append(row(f"level {level}, prompt {tokens}", metric, value, **against))
    return rows


def own_bytes(engine: Engine, level: int) -> int:
    """Bytes of a level's weights outside of the whole model's memory, without its recovery adapter."""
    shared = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(engine.runner_at(WHOLE).params)}
    weights = [getattr(weight, "base", weight) for weight in engine.runner_at(level).params.values()]
    leaves = [leaf for leaf in jax.tree.leaves(weights) if leaf.unsafe_buffer_pointer() not in shared]
    return sum(leaf.nbytes for leaf in leaves)


def memory_rows(model: Path, levels: Sequence[int]) -> list[Row]:
    """Peak memory of a process that serves all levels, against one that serves the whole model.

    Both read their buckets from disk, as a service does from its second start on: each runs twice.
    """
    # The whole model is the baseline here.
    peaks = {
        name: [in_process(_peak, model, asked) for _ in range(2)][-1]
        for name, asked in ((OURS, levels), ("whole model", ()))
    }
    return compared("serving all levels", "peak_memory_bytes", peaks)


def move(engine: Engine, level: int) -> tuple[float, int]:
    """Milliseconds and bytes of copying the units of a level out of the whole model in memory."""
    whole, part = engine.cfg.whole, engine.runner_at(level).cfg
    sizes, kept = (
        {name: math.prod(spec.shape) for name, spec in param_specs(cfg).items()} for cfg in (whole, part)
    )
    parts = [
        # As many bytes as the level has, from anywhere in the buffer.
        np.asarray(leaf).reshape(-1)[: -(-leaf.size * kept[name] // sizes[name])]
        for name, weight in engine.runner_at(WHOLE).model.weights.items()
        if is_unit_parameter(name)
        for leaf in jax.tree.leaves(getattr(weight, "base", weight))
    ]
    times = []
    for _ in range(5):
        began = time.perf_counter()
        copies = [part.copy() for part in parts]
        times.append(1000 * (time.perf_counter() - began))
        del copies
    return statistics.median(times), sum(part.nbytes for part in parts)


def _peak(model: Path, levels: Sequence[int]) -> int:
    """Peak memory of this process in bytes, after it answered at every level."""
    engine = Engine.open(model, options=EngineOptions(levels=tuple(levels)))
    config = GenerationConfig(max_tokens=4, ignore_eos=True)
    for level in engine.levels:
        engine.stream(list(range(PROMPT_TOKENS)), config, level=level).result()
    return peak_resident_bytes()
