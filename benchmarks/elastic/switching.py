"""Times the change to another level: a request's time to the first token beside one that stays at its level.

Choosing another level sets an attribute of a Python object, and costs nothing by itself; the next dispatch
takes longer, for it has new arguments and reads memory that the last request did not read.
"""

import dataclasses

import numpy as np

from benchmarks.elastic.levels import move, own_bytes
from benchmarks.elastic.policies import OURS
from benchmarks.measuring.report import Row
from serving.engine import Engine
from serving.host.progress import Progress
from serving.request import GenerationConfig

# Prompt of the requests that are timed.
PROMPT_TOKENS = 64
_RESAMPLINGS = 2000


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
    def of(cls, changed_ms: np.ndarray, stayed_ms: np.ndarray, seed: int = 0) -> "Added":
        """Computes it from times `[pairs]` of either kind."""
        longer = np.asarray(changed_ms, np.float64) - stayed_ms
        drawn = np.random.default_rng(seed).integers(0, len(longer), (_RESAMPLINGS, len(longer)))
        low, high = np.percentile(np.median(longer[drawn], axis=1), (2.5, 97.5))
        return cls(float(np.median(longer)), float(low), float(high), float(np.median(stayed_ms)))


def switch_rows(engine: Engine, *, rounds: int, progress: Progress | None = None) -> list[Row]:
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
        rows += [
            Row(
                case=case, system=OURS, metric="switch_ms", value=each.median_ms, unit="ms",
                baseline="LLM-Pruner", ratio=moved_ms / each.median_ms if sure else None, note=note,
            ),
            Row(
                case=case, system="LLM-Pruner", metric="switch_ms", value=moved_ms, unit="ms",
                note=f"{moved_bytes} bytes of weights copied, which is all that is counted",
            ),
        ]  # fmt: skip
    return rows


def added_by_level(engine: Engine, *, rounds: int, progress: Progress | None = None) -> dict[int, Added]:
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
        if progress is not None:
            progress("switch", done + 1, rounds)
    return {level: Added.of(np.array(times[level, True]), np.array(times[level, False])) for level in levels}
