"""Chooses, for every request of a trace, one of a system's variants.

A system has variants of its model (sizes, and lengths of the prompt). For each variant and question the
times are known, and whether the likeliest of the options is the right one. Every system chooses by a policy,
which does not see the right answers of the question. The bound does: it is what no policy can exceed.

A variant of ours takes at least its own time, and with a shorter prompt the tiny LM's pass, whose scores say
what is kept. What is spent on deciding comes on top: ours spends what its planner was seen to spend, and the
bound nothing.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.elastic.baselines import SHORTENED, Size
from benchmarks.harness.bench import silent
from benchmarks.harness.report import OURS
from benchmarks.traces import ANSWER_TOKENS, TraceRequest
from jaxllm.config import FULL_LEVEL
from jaxllm.elastic.slo import Slo
from jaxllm.serving.elastic.planner import MARGIN, Planner, Proposer
from jaxllm.serving.elastic.profile import DeviceProfile
from jaxllm.serving.engine.engine import Engine
from jaxllm.serving.evaluation.tasks import score_options
from jaxllm.serving.host.progress import Progress
from jaxllm.steps.branching import Branching
from jaxllm.tasks.questions import Question, branching, shorten
from jaxllm.text.droppable import prompt_tokens
from jaxllm.text.tokenizer import Tokenizer

# Of shares of objectives.
_ROUNDING = 1e-9


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Variants:
    """Times and answers of V variants on N questions, the largest variant last.

    Attributes:
      ttft_ms: `[N, V]` float64, to the first token, without changing to the variant. Infinite where the
        context does not hold the question, which is then answered wrong and late.
      tpot_ms: `[N, V]` float64, per further token.
      right: `[N, V]` bool.
      change_ms: `[V]` float64, time to change to it from another variant.
      keys: level and share of the prompt of each of ours; of other systems none.
    """

    ttft_ms: np.ndarray
    tpot_ms: np.ndarray
    right: np.ndarray
    change_ms: np.ndarray
    keys: tuple[tuple[int, float], ...] = ()

    def later(self, ms: np.ndarray) -> "Variants":
        """The same variants with `ms`, `[N, V]`, added to their `ttft_ms`."""
        return dataclasses.replace(self, ttft_ms=self.ttft_ms + ms)

    def only(self, indices: Sequence[int]) -> "Variants":
        """Some of the variants."""
        return Variants(
            ttft_ms=self.ttft_ms[:, indices],
            tpot_ms=self.tpot_ms[:, indices],
            right=self.right[:, indices],
            change_ms=self.change_ms[list(indices)],
            keys=tuple(self.keys[each] for each in indices) if self.keys else (),
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Choices:
    """A system's answers to a trace of M requests.

    Attributes:
      right: `[M]` bool, whether the answer was right, in time or not.
      met: `[M]` bool, whether the objective was met, by the known times.
      right_and_met: `[M]` bool, whether the answer was right and in time; of the bound, whether one was.
    """

    right: np.ndarray
    met: np.ndarray
    right_and_met: np.ndarray

    @classmethod
    def of(cls, right: Any, met: Any) -> "Choices":
        """Of one answer to each request."""
        right, met = np.array(right, bool), np.array(met, bool)
        return cls(right, met, right & met)


# Chooses a variant: from which are in time, `[V]` bool, and the request's number.
Policy = Callable[[np.ndarray, int], int]


def largest(allowed: np.ndarray, request: int) -> int:
    """The largest variant in time."""
    del request
    return int(np.flatnonzero(allowed)[-1])


def at_random(seed: int) -> Policy:
    """Any variant in time."""
    draw = np.random.default_rng(seed)

    def choose(allowed: np.ndarray, request: int) -> int:
        del request
        return int(draw.choice(np.flatnonzero(allowed)))

    return choose


def ranked(scores: np.ndarray) -> Policy:
    """The variant in time with the highest score, of equal ones the largest.

    Args:
      scores: `[M, V]`, of each request's variants.
    """

    def choose(allowed: np.ndarray, request: int) -> int:
        given = np.where(allowed, scores[request], -np.inf)
        return int(np.flatnonzero(given == given.max())[-1])

    return choose


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

    def overruns(self, request: int, ttft_ms: np.ndarray, tpot_ms: np.ndarray | float) -> np.ndarray:
        """The shares of a request's objective that variants take, `[V]`; infinite where `ttft_ms` is."""
        question = self.indices[request]
        most_ttft, most_tpot = self.trace[request].slo.limits(
            *(float(each[question]) for each in self.whole_ms)
        )
        first = np.divide(ttft_ms, most_ttft, out=np.full(len(ttft_ms), np.inf), where=np.isfinite(ttft_ms))
        return np.maximum(first, tpot_ms / most_tpot)

    def run(
        self,
        variants: Variants,
        policy: Policy = largest,
        *,
        margin: float = MARGIN,
        ignore_tpot: bool = False,
    ) -> Choices:
        """Lets a system choose for every request of the trace, in order.

        Args:
          policy: chooses among the variants in time; where there are none, the quickest is used.
          margin: share of an objective that is planned for; the planner's by default.
          ignore_tpot: whether the system is counted as meeting every time per token.
        """
        right, met, last = [], [], len(variants.change_ms) - 1
        for request, question in enumerate(self.indices):
            changes = np.where(np.arange(len(variants.change_ms)) == last, 0.0, variants.change_ms)
            tpot = 0.0 if ignore_tpot else variants.tpot_ms[question]
            excess = self.overruns(request, variants.ttft_ms[question] + changes, tpot)
            allowed = excess <= margin + _ROUNDING
            last = policy(allowed, request) if allowed.any() else int(np.argmin(excess))
            right.append(variants.right[question, last])
            met.append(excess[last] <= 1 + _ROUNDING)
        return Choices.of(right, met)

    def bound(self, variants: Variants) -> Choices:
        """What no policy can exceed: a request counts as right where any variant is, as in time where any
        variant is, and as both where any variant is both.

        Changing from one variant to another must take nothing.
        """
        assert not variants.change_ms.any()
        excess = [
            self.overruns(request, variants.ttft_ms[question], variants.tpot_ms[question])
            for request, question in enumerate(self.indices)
        ]
        right, in_time = variants.right[np.asarray(self.indices)], np.array(excess) <= 1 + _ROUNDING
        return Choices(*(np.asarray(each.any(axis=1)) for each in (right, in_time, right & in_time)))


def right_answers(
    engine: Engine,
    questions: Sequence[Question],
    prompts: Sequence[Branching],
    progress: Progress = silent,
) -> tuple[np.ndarray, np.ndarray]:
    """Which questions a model answers right, by the likeliest of the options.

    Args:
      prompts: the questions as this model reads them.

    Returns:
      `[N]` bool, whether the answer is right; `[N]` bool, whether the context holds the question. One that it
      does not hold is not right.
    """
    fits = np.array([each.longest_tokens <= engine.options.context_tokens for each in prompts])
    asked = [each for each, fit in zip(prompts, fits, strict=True) if fit]
    scores = iter(score_options(engine, asked, progress=progress) if asked else ())
    right = [fit and each.is_right(next(scores)) for each, fit in zip(questions, fits, strict=True)]
    return np.array(right, bool), fits


class _Column(NamedTuple):
    """One variant: the engine that answers, the prompts as it reads them and their tokens `[N]`, and its
    times."""

    engine: Engine
    level: int
    prompts: Sequence[Branching]
    tokens: Sequence[int]
    profile: DeviceProfile
    change_ms: float = 0.0


def _variants(columns: Sequence[_Column], questions: Sequence[Question], progress: Progress) -> Variants:
    ttft, tpot, right = [], [], []
    for each in columns:
        answers, fits = right_answers(each.engine.at(each.level), questions, each.prompts, progress)
        right.append(answers)
        ttft.append(np.where(fits, [each.profile.ttft(each.level, count) for count in each.tokens], np.inf))
        tpot.append([each.profile.tpot(each.level, count) for count in each.tokens])
    return Variants(
        ttft_ms=np.array(ttft).T,
        tpot_ms=np.array(tpot).T,
        right=np.array(right).T,
        change_ms=np.array([each.change_ms for each in columns]),
    )


def our_variants(
    engine: Engine,
    profile: DeviceProfile,
    questions: Sequence[Question],
    proposer: Proposer,
    ratios: Sequence[float],
    progress: Progress = silent,
) -> Variants:
    """Our variants: every level with the prompt at every ratio; times are without planning.

    Args:
      ratios: ascending, the last one 1.
    """
    # The largest level with the whole prompt is last.
    keys = tuple(itertools.product(engine.levels, ratios))
    made = [shorten(engine.tokenizer, each, proposer.scores(each.prompt), ratios) for each in questions]
    lengths = np.array([len(each.prompt.ids) for each in questions])
    tokens = np.maximum(1, np.rint(lengths[:, None] * np.array([shares for _, shares in made]))).astype(int)
    by_ratio = {
        ratio: ([prompts[place] for prompts, _ in made], tokens[:, place].tolist())
        for place, ratio in enumerate(ratios)
    }
    columns = [_Column(engine, level, *by_ratio[ratio], profile) for level, ratio in keys]
    return dataclasses.replace(_variants(columns, questions, progress), keys=keys)


def size_variants(
    sizes: Sequence[Size],
    profiles: Mapping[int, DeviceProfile],
    questions: Sequence[Question],
    progress: Progress = silent,
) -> Variants:
    """A variant for each of several models, ascending, with the whole prompt by the model's own tokenizer."""

    @functools.cache
    def read(tokenizer: Tokenizer) -> tuple[list[Branching], list[int]]:
        prompts = [branching(tokenizer, each.example) for each in questions]
        return prompts, [len(prompt_tokens(tokenizer, each.example).ids) for each in questions]

    columns = [
        _Column(
            size.engine, size.level, *read(size.engine.tokenizer), profiles[id(size.engine)], size.change_ms
        )
        for size in sizes
    ]
    return _variants(columns, questions, progress)


def plan_times(
    planner: Planner, proposer: Proposer, questions: Sequence[Question]
) -> tuple[np.ndarray, np.ndarray]:
    """Times to plan each question: `[N]` milliseconds of the tiny LM's pass, and of the whole plan.

    All else that the planner does is counted alike for all questions, by its median.
    """
    # The whole model cannot meet it, so that it has to be planned.
    tight = Slo(ttft=0.5, tpot=0.5)
    passes = np.array([proposer.planning_ms(len(each.prompt.ids)) for each in questions])
    spent = [planner.plan(each.prompt, tight, answer_tokens=ANSWER_TOKENS).planning_ms for each in questions]
    return passes, passes + max(0.0, float(np.median(spent - passes)))


def least_times(ours: Variants, pass_ms: np.ndarray) -> Variants:
    """Our variants with the tiny LM's pass, `[N]` milliseconds, where the prompt is shortened: the least that
    each can take."""
    return ours.later(pass_ms[:, None] * np.array([ratio < 1 for _, ratio in ours.keys]))


def planned(planner: Planner, ours: Variants, asked: Asked, pass_ms: np.ndarray) -> Choices:
    """The choices of our planner, each with the time that its plan took, and at least that of the tiny LM's
    pass where the prompt was shortened.

    Args:
      pass_ms: `[N]`, time of the tiny LM's pass over each question.
    """
    least, right, met = least_times(ours, pass_ms), [], []
    for number, (index, request) in enumerate(zip(asked.indices, asked.trace, strict=True)):
        made = planner.plan(asked.questions[index].prompt, request.slo, answer_tokens=ANSWER_TOKENS)
        at = [ours.keys.index((made.level, made.prompt_ratio))]
        taken = np.maximum(least.ttft_ms[index, at], ours.ttft_ms[index, at] + made.planning_ms)
        right.append(ours.right[index, at[0]])
        met.append(asked.overruns(number, taken, ours.tpot_ms[index, at])[0] <= 1)
    return Choices.of(right, met)


def ablations(
    ours: Variants, asked: Asked, pass_ms: np.ndarray, planning_ms: np.ndarray, seed: int
) -> dict[str, Choices]:
    """Choices of ours under other policies, with models or prompts alone, of the baseline that shortens
    prompts, and the bound of them all.

    Every variant takes what it must (see `least_times`). Policies of ours take the rest of the planner's time
    on top, but with the whole model and the whole prompt, which need no plan. The bound, the best fixed
    choices and the baseline take nothing on top; the first two use all of an objective, without a margin.

    Args:
      pass_ms, planning_ms: see `plan_times`; the latter is in the times of ours.
    """
    least = least_times(ours, pass_ms)
    plans = np.array([key != (FULL_LEVEL, 1.0) for key in ours.keys])
    decided = least.later((planning_ms - pass_ms)[:, None] * plans)
    # How often each variant is right about the questions of a request's task, known in hindsight.
    tasks, indices = np.array([each.task for each in asked.trace]), np.asarray(asked.indices)
    accuracies = [ours.right[np.unique(indices[tasks == task])].mean(0) for task in tasks]
    whole_prompts = [place for place, (_, ratio) in enumerate(ours.keys) if ratio == 1]
    whole_models = [place for place, (level, _) in enumerate(ours.keys) if level == FULL_LEVEL]
    return {
        f"{OURS}-random": asked.run(decided, at_random(seed)),
        f"{OURS}-fixed": asked.run(least, ranked(np.array(accuracies)), margin=1.0),
        f"{OURS}-oracle": asked.bound(least),
        f"{OURS}-model-only": asked.run(decided.only(whole_prompts)),
        f"{OURS}-prompt-only": asked.run(decided.only(whole_models)),
        SHORTENED: asked.run(least.only(whole_models), ignore_tpot=True),
    }
