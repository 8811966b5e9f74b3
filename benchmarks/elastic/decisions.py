"""What each system decides for every request of a trace, by its tables."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from benchmarks.elastic.baselines import SHORTENED
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
from jaxllm.config import WHOLE
from jaxllm.elastic.slo import Slo
from jaxllm.tasks.shortened import Question
from serving.objectives import meets
from serving.planner import MARGIN, Planner, Proposer
from serving.trace import ANSWER_TOKENS, TraceRequest

# One that the whole model cannot meet, so that there is something to plan.
_TIGHT = Slo(ttft=0.5, tpot=0.5)


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


def plan_times(
    planner: Planner, proposer: Proposer, questions: Sequence[Question]
) -> tuple[np.ndarray, np.ndarray]:
    """What deciding takes for each question: `[N]` milliseconds of the tiny LM's pass, and of all of it.

    What the planner does besides is taken to be the same for all, the median of what it took for each.
    """
    passes = np.array([proposer.planning_ms(len(each.prompt.ids)) for each in questions])
    spent = [planner.plan(each.prompt, _TIGHT, answer_tokens=ANSWER_TOKENS).planning_ms for each in questions]
    return passes, passes + max(0.0, float(np.median(spent - passes)))


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
    pass_ms: np.ndarray,
    planning_ms: np.ndarray,
    seed: int,
) -> dict[str, Choices]:
    """Ours with other decisions, and with half of its means; and the baseline that shortens prompts alone.

    All of ours take the planner's time, without the tiny LM's pass where prompts stay whole; the baseline
    takes that pass alone.

    Args:
      ours: see `tables.our_variants`.
      asked: the trace.
      levels: of ours.
      ratios: of ours, the whole prompt among them.
      proposed: those ratios that ours may propose.
      pass_ms, planning_ms: see `plan_times`; the latter is in the times of ours.
      seed: of random decisions.
    """
    all_ways = ways(levels, ratios)

    def some(*chosen: tuple[int, float]) -> list[int]:
        return [all_ways.index(each) for each in chosen]

    open_ways = [way for way in all_ways if way[1] in proposed or way == (WHOLE, 1.0)]
    free = ours.only(some(*open_ways))
    models = ours.only(some(*((level, 1.0) for level in levels)), less_ms=pass_ms)
    shorter = some(*((WHOLE, ratio) for ratio in ratios))
    prompts = ours.only(shorter)
    scored = ours.only(shorter, less_ms=planning_ms - pass_ms)
    return {
        f"{OURS}-random": asked.run(free, at_random(seed)),
        f"{OURS}-oracle": asked.run(free, best(free.right[np.asarray(asked.places)])),
        f"{OURS}-model-only": asked.run(models),
        f"{OURS}-prompt-only": asked.run(prompts),
        SHORTENED: asked.run(scored, ignore_tpot=True),
    }
