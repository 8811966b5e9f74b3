"""What each system decides for every request of a trace, by its tables."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from benchmarks.elastic.systems import (
    OURS,
    Choices,
    Policy,
    Variants,
    at_random,
    best,
    largest,
    run_trace,
)
from benchmarks.elastic.tables import ways
from jaxllm.elastic.ladder import WHOLE
from jaxllm.tasks.shortened import Question
from serving.objectives import meets
from serving.planner import MARGIN, Planner
from serving.trace import ANSWER_TOKENS, TraceRequest


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Asked:
    """A trace, and what there is to know of its questions.

    Attributes:
      trace: M requests.
      questions: the N that it draws from.
      places: `[M]`, which of them each request asks.
      whole_ms: `[N]` times to the first token and per token of the whole model with the whole prompt, which
        objectives are shares of.
    """

    trace: Sequence[TraceRequest]
    questions: Sequence[Question]
    places: Sequence[int]
    whole_ms: tuple[np.ndarray, np.ndarray]

    def run(self, variants: Variants, policy: Policy = largest, *, ignore_tpot: bool = False) -> Choices:
        """`run_trace` of these requests, with the planner's margin."""
        slos = [request.slo for request in self.trace]
        return run_trace(
            variants, self.places, slos, self.whole_ms, policy, margin=MARGIN, ignore_tpot=ignore_tpot
        )


def with_whole(ratios: Sequence[float]) -> tuple[float, ...]:
    """Shares of a prompt, ascending, the whole one among them.

    A planner may always leave a prompt whole, even if what proposes knows no such choice.
    """
    return tuple(sorted({*map(float, ratios), 1.0}))


def planned(
    planner: Planner, ours: Variants, asked: Asked, levels: Sequence[int], ratios: Sequence[float]
) -> Choices:
    """What our planner does, with the time that it really takes in what it expects."""
    all_ways = ways(levels, ratios)
    right, held = [], []
    for place, request in zip(asked.places, asked.trace, strict=True):
        made = planner.plan(asked.questions[place].prompt, request.slo, answer_tokens=ANSWER_TOKENS)
        way = all_ways.index((made.level, made.prompt_ratio))
        right.append(bool(ours.right[place, way]))
        fits = np.isfinite(ours.ttft_ms[place, way])
        held.append(bool(fits) and meets(request.slo, made.expected, made.whole))
    return Choices(np.asarray(asked.places), np.array(right), np.array(held))


def ablations(
    ours: Variants,
    asked: Asked,
    levels: Sequence[int],
    ratios: Sequence[float],
    proposed: Sequence[float],
    planning_ms: np.ndarray,
    seed: int,
) -> dict[str, Choices]:
    """Ours with other decisions, and with half of its means; and the baseline that shortens prompts alone.

    Args:
      ours: see `tables.our_variants`.
      asked: the trace.
      levels: of ours.
      ratios: of ours, the whole prompt among them.
      proposed: those ratios that ours may propose.
      planning_ms: `[N]`, what is taken off for who needs no tiny LM.
      seed: of random decisions.
    """
    all_ways = ways(levels, ratios)

    def some(*chosen: tuple[int, float]) -> list[int]:
        return [all_ways.index(each) for each in chosen]

    open_ways = [way for way in all_ways if way[1] in proposed or way == (WHOLE, 1.0)]
    free = ours.only(some(*open_ways))
    models = ours.only(some(*((level, 1.0) for level in levels)), less_ms=planning_ms)
    prompts = ours.only(some(*((WHOLE, ratio) for ratio in ratios)))
    return {
        f"{OURS}-random": asked.run(free, at_random(seed)),
        f"{OURS}-oracle": asked.run(free, best(free.right[np.asarray(asked.places)])),
        f"{OURS}-model-only": asked.run(models),
        f"{OURS}-prompt-only": asked.run(prompts),
        "LG2+CS": asked.run(prompts, ignore_tpot=True),
    }
