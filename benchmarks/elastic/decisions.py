"""Decides for every request of a trace what ours, its ablations and a baseline answer."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from benchmarks.elastic.baselines import SHORTENED
from benchmarks.elastic.policies import (
    OURS,
    Choices,
    Policy,
    Variants,
    at_random,
    best,
    largest,
    run_trace,
)
from benchmarks.elastic.variants import variant_keys
from jaxllm.config import WHOLE
from jaxllm.elastic.slo import Slo
from jaxllm.tasks.shortened import Question
from serving.planning.objectives import meets
from serving.planning.planner import MARGIN, Planner
from serving.planning.proposer import Proposer
from serving.traces.trace import ANSWER_TOKENS, TraceRequest

# The whole model cannot meet it, so that it has to be planned.
_TIGHT = Slo(ttft=0.5, tpot=0.5)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Asked:
    """A trace and its questions.

    Attributes:
      trace: M requests.
      questions: the N that it draws from.
      indices: `[M]`, which of them each request asks.
      whole_ms: `[N]` times to the first token and per token of the whole model with the whole prompt;
        objectives are shares of them.
    """

    trace: Sequence[TraceRequest]
    questions: Sequence[Question]
    indices: Sequence[int]
    whole_ms: tuple[np.ndarray, np.ndarray]

    def run(self, variants: Variants, policy: Policy = largest, *, ignore_tpot: bool = False) -> Choices:
        """`run_trace` of these requests, with the planner's margin."""
        slos = [request.slo for request in self.trace]
        return run_trace(
            variants, self.indices, slos, self.whole_ms, policy, margin=MARGIN, ignore_tpot=ignore_tpot
        )


def with_whole(ratios: Sequence[float]) -> tuple[float, ...]:
    """Shares of a prompt, ascending, the whole one among them.

    A planner may always leave a prompt whole, even if the proposer has no such choice.
    """
    return tuple(sorted({*map(float, ratios), 1.0}))


def plan_times(
    planner: Planner, proposer: Proposer, questions: Sequence[Question]
) -> tuple[np.ndarray, np.ndarray]:
    """Times to plan each question: `[N]` milliseconds of the tiny LM's pass, and of the whole plan.

    All else that the planner does is counted alike for all questions, by its median.
    """
    passes = np.array([proposer.planning_ms(len(each.prompt.ids)) for each in questions])
    spent = [planner.plan(each.prompt, _TIGHT, answer_tokens=ANSWER_TOKENS).planning_ms for each in questions]
    return passes, passes + max(0.0, float(np.median(spent - passes)))


def planned(
    planner: Planner, ours: Variants, asked: Asked, levels: Sequence[int], ratios: Sequence[float]
) -> Choices:
    """The choices of our planner, its own time counted in."""
    all_keys = variant_keys(levels, ratios)
    right, met = [], []
    for index, request in zip(asked.indices, asked.trace, strict=True):
        made = planner.plan(asked.questions[index].prompt, request.slo, answer_tokens=ANSWER_TOKENS)
        variant = all_keys.index((made.level, made.prompt_ratio))
        right.append(bool(ours.right[index, variant]))
        fits = np.isfinite(ours.ttft_ms[index, variant])
        met.append(bool(fits) and meets(request.slo, made.expected, made.whole))
    return Choices(np.asarray(asked.indices), np.array(right), np.array(met))


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
    """Choices of ours under other policies, with models or prompts alone, and of the baseline that shortens
    prompts.

    Ours take the planner's time, without the tiny LM's pass where prompts stay whole; the baseline takes that
    pass alone.

    Args:
      ours: see `variants.our_variants`.
      asked: the trace.
      levels: of ours.
      ratios: of ours, the whole prompt among them.
      proposed: those ratios that ours may propose.
      pass_ms, planning_ms: see `plan_times`; the latter is in the times of ours.
      seed: of random decisions.
    """
    all_keys = variant_keys(levels, ratios)

    def some(*chosen: tuple[int, float]) -> list[int]:
        return [all_keys.index(each) for each in chosen]

    allowed_keys = [key for key in all_keys if key[1] in proposed or key == (WHOLE, 1.0)]
    free = ours.only(some(*allowed_keys))
    models = ours.only(some(*((level, 1.0) for level in levels)), less_ms=pass_ms)
    shorter = some(*((WHOLE, ratio) for ratio in ratios))
    prompts = ours.only(shorter)
    scored = ours.only(shorter, less_ms=planning_ms - pass_ms)
    return {
        f"{OURS}-random": asked.run(free, at_random(seed)),
        f"{OURS}-oracle": asked.run(free, best(free.right[np.asarray(asked.indices)])),
        f"{OURS}-model-only": asked.run(models),
        f"{OURS}-prompt-only": asked.run(prompts),
        SHORTENED: asked.run(scored, ignore_tpot=True),
    }
