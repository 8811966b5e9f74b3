"""What reading prompts takes in integers and in floats, for an engine that may do either."""

import dataclasses
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from serving.prefill.table import IntegerTable
from serving.prefill.ways import Way
from serving.progress import Progress

if TYPE_CHECKING:
    from serving.engine import Engine

_WAYS: tuple[Way, ...] = ("int8", "float")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillTimes:
    """Milliseconds of each level and prompt length of a device's profile.

    Attributes:
      integer_ms: by integer prefill; of levels that lose too much by it, as in floats.
      float_ms: by prefill as it is otherwise.
    """

    integer_ms: tuple[tuple[float, ...], ...]
    float_ms: tuple[tuple[float, ...], ...]

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "PrefillTimes":
        """Reads what `dataclasses.asdict` gave; raises TypeError if it is anything else."""
        return cls(**{name: tuple(tuple(row) for row in rows) for name, rows in data.items()})


def reads_both_ways(engine: "Engine") -> bool:
    """Whether an engine reads prompts in integers or in floats, as is faster, at some level."""
    table = engine.table
    return isinstance(table, IntegerTable) and any(map(table.ways.both, table.levels))


def measure_prefill(
    engine: "Engine",
    lengths: Sequence[int],
    *,
    repeats: int,
    seed: int = 0,
    progress: Progress | None = None,
) -> PrefillTimes:
    """Times both ways of every level, which take turns in a random order; medians count.

    Args:
      engine: warmed up, one that `reads_both_ways`.
      lengths: of prompts, in tokens.
      repeats: runs of each way, level and length.
      seed: of prompts and order.
      progress: called with ("profile", runs done, runs in all).
    """
    draw = random.Random(seed)
    cases: list[tuple[Way, int, int]] = [
        (way, level, length) for way in _WAYS for level in engine.table.levels for length in lengths
    ]
    times: dict[tuple[Way, int, int], list[float]] = {case: [] for case in cases}
    # The first round warms caches and is not counted.
    for number in range(-1, repeats):
        draw.shuffle(cases)
        for done, (way, level, length) in enumerate(cases):
            table = engine.table.at(level)
            assert isinstance(table, IntegerTable)
            if way == "int8" and not table.integers:
                continue
            prompt = [draw.randrange(engine.cfg.vocab_size) for _ in range(length)]
            cache = jax.block_until_ready(table.start(length))
            began = time.perf_counter()
            jax.block_until_ready(table.read_in(way, cache, prompt, 0)[0])
            if number >= 0:
                times[way, level, length].append(1000 * (time.perf_counter() - began))
            if progress is not None:
                progress("profile", (number + 1) * len(cases) + done + 1, (repeats + 1) * len(cases))

    def medians(way: Way) -> tuple[tuple[float, ...], ...]:
        return tuple(
            tuple(
                statistics.median(times[way, level, length] or times["float", level, length])
                for length in lengths
            )
            for level in engine.table.levels
        )

    return PrefillTimes(integer_ms=medians("int8"), float_ms=medians("float"))
