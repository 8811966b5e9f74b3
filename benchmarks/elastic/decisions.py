"""Chooses, for every request of a trace, one of a system's variants.

A system has variants of its model (sizes, and lengths of the prompt). For each variant and question the
times are known, and whether the likeliest of the options is the right one. Every system chooses by a policy,
which does not see the right answers of the question. The bound does: it is what no policy can exceed.

Asks the models of each system every question, and looks up their times.

Decides for every request of a trace what ours, its ablations and a baseline answer.

A variant of ours takes at least its own time, and with a shorter prompt the tiny LM's pass, whose scores say
what is kept. What is spent on deciding comes on top: ours spends what its planner was seen to spend, and the
bound nothing.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from benchmarks.elastic.baselines import SHORTENED, Size
from benchmarks.harness.plan import silent
from benchmarks.harness.report import OURS
from benchmarks.traces import ANSWER_TOKENS, TraceRequest
from jaxllm.config import WHOLE
from jaxllm.elastic.slo import Slo
from jaxllm.serving.elastic.planner import MARGIN, Planner, Proposer
from jaxllm.serving.elastic.profile import DeviceProfile
from jaxllm.serving.engine.engine import Engine
from jaxllm.serving.evaluation.scoring import score_options
from jaxllm.serving.host.progress import Progress
from jaxllm.steps.branching import Branching
from jaxllm.tasks.questions import Question, branching, shorten
from jaxllm.text.droppable import prompt_tokens
from jaxllm.text.tokenizer import Tokenizer

# Of shares of objectives.
_ROUNDING = 1e-9


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Variants:
    """Times and answers of V variants on N questions.

    Attributes:
      names: of the variants `[V]`, the largest last.
      ttft_ms: `[N, V]` float64, to the first token, without changing to the variant. Infinite where the
        context does not hold the question, which is then answered wrong and late.
      tpot_ms: `[N, V]` float64, per further token.
      right: `[N, V]` bool.
      change_ms: `[V]` float64, time to change to it from another variant.
      keys: level and share of the prompt of each of ours; of other systems none.
    """

    names: tuple[str, ...]
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
            names=tuple(self.names[each] for each in indices),
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
      questions: `[M]` int, which question each request asked.
      right: `[M]` bool, whether the answer was right, in time or not.
      met: `[M]` bool, whether the objective was met, by the known times.
      both: `[M]` bool, whether one answer was right and in time; None where `right` and `met` are of the same
        answers.
    """

    questions: np.ndarray
    right: np.ndarray
    met: np.ndarray
    both: np.ndarray | None = None

    @property
    def right_and_met(self) -> np.ndarray:
        """`[M]` bool, whether the answer was right and in time."""
        return self.right & self.met if self.both is None else self.both


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


def run_trace(
    variants: Variants,
    questions: Sequence[int],
    slos: Sequence[Slo],
    whole_ms: tuple[np.ndarray, np.ndarray],
    policy: Policy,
    *,
    margin: float = 1.0,
    ignore_tpot: bool = False,
) -> Choices:
    """Lets a system choose for every request of a trace, in order.

    Args:
      variants: of the system.
      questions: `[M]`, which question each request asks.
      slos: `[M]`, its objective.
      whole_ms: `[N]` times to the first token and per token of the whole model with the whole prompt.
      policy: chooses among the variants in time; where there are none, the quickest is used.
      margin: share of an objective that is planned for.
      ignore_tpot: whether the system is counted as meeting every time per token.
    """
    right, met = np.zeros(len(questions), bool), np.zeros(len(questions), bool)
    last = len(variants.names) - 1
    for request, (question, slo) in enumerate(zip(questions, slos, strict=True)):
        changes = np.where(np.arange(len(variants.names)) == last, 0.0, variants.change_ms)
        whole = (float(whole_ms[0][question]), float(whole_ms[1][question]))
        tpot = 0.0 if ignore_tpot else variants.tpot_ms[question]
        excess = overruns(slo, whole, variants.ttft_ms[question] + changes, tpot)
        allowed = excess <= margin + _ROUNDING
        last = policy(allowed, request) if allowed.any() else int(np.argmin(excess))
        right[request], met[request] = variants.right[question, last], excess[last] <= 1 + _ROUNDING
    return Choices(np.asarray(questions), right, met)


def overruns(
    slo: Slo, whole_ms: tuple[float, float], ttft_ms: np.ndarray, tpot_ms: np.ndarray | float
) -> np.ndarray:
    """The shares of an objective that variants take, `[V]`; infinite where `ttft_ms` is.

    Args:
      slo: the objective.
      whole_ms: times to the first token and per token of the whole model with the whole prompt.
      ttft_ms, tpot_ms: of the variants.
    """
    most_ttft, most_tpot = slo.limits(*whole_ms)
    first = np.divide(ttft_ms, most_ttft, out=np.full(len(ttft_ms), np.inf), where=np.isfinite(ttft_ms))
    return np.maximum(first, tpot_ms / most_tpot)


def bound(
    variants: Variants, questions: Sequence[int], slos: Sequence[Slo], whole_ms: tuple[np.ndarray, np.ndarray]
) -> Choices:
    """What no policy can exceed: a request counts as right where any variant is, as in time where any variant
    is, and as both where any variant is both.

    Changing from one variant to another must take nothing.

    Args:
      variants: of the system, at the least that each can take.
      questions, slos, whole_ms: see `run_trace`.
    """
    assert not variants.change_ms.any()
    in_time = np.array(
        [
            overruns(
                slo,
                (float(whole_ms[0][question]), float(whole_ms[1][question])),
                variants.ttft_ms[question],
                variants.tpot_ms[question],
            )
            <= 1 + _ROUNDING
            for question, slo in zip(questions, slos, strict=True)
        ]
    )
    right = variants.right[np.asarray(questions)]
    best = [np.asarray(each.any(axis=1)) for each in (right, in_time, right & in_time)]
    return Choices(np.asarray(questions), best[0], best[1], both=best[2])


def right_answers(
    engine: Engine,
    questions: Sequence[Question],
    prompts: Sequence[Branching],
    progress: Progress = silent,
) -> tuple[np.ndarray, np.ndarray]:
    """Which questions a model answers right, by the likeliest of the options.

    Args:
      engine: the model.
      questions: N, what is right.
      prompts: the questions as this model reads them.
      progress: of scoring.

    Returns:
      `[N]` bool, whether the answer is right; `[N]` bool, whether the context holds the question. One that it
      does not hold is not right.
    """
    fits = np.array([each.longest_tokens <= engine.options.context_tokens for each in prompts])
    asked = [each for each, fit in zip(prompts, fits, strict=True) if fit]
    scores = iter(score_options(engine, asked, progress=progress) if asked else ())
    right = [fit and each.is_right(next(scores)) for each, fit in zip(questions, fits, strict=True)]
    return np.array(right, bool), fits


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
      engine: serves the levels.
      profile: their times.
      questions: N.
      proposer: whose scores shorten prompts.
      ratios: ascending, the last one 1.
      progress: of scoring.
    """
    # The largest level with the whole prompt is last.
    keys = tuple(itertools.product(engine.levels, ratios))
    made = [shorten(engine.tokenizer, each, proposer.scores(each.prompt), ratios) for each in questions]
    lengths = np.array([len(each.prompt.ids) for each in questions])
    tokens = lengths[:, None] * np.array([shares for _, shares in made])
    ttft, tpot, right = [], [], []
    for level, ratio in keys:
        column = ratios.index(ratio)
        answers, fits = right_answers(
            engine.at(level), questions, [prompts[column] for prompts, _ in made], progress
        )
        counts = np.maximum(1, np.rint(tokens[:, column])).astype(int)
        times = np.array([profile.ttft(level, count) for count in counts])
        right.append(answers)
        ttft.append(np.where(fits, times, np.inf))
        tpot.append([profile.tpot(level, count) for count in counts])
    return Variants(
        names=tuple(f"{level} % of the model, {ratio:.0%} of the prompt" for level, ratio in keys),
        ttft_ms=np.array(ttft).T,
        tpot_ms=np.array(tpot).T,
        right=np.array(right).T,
        change_ms=np.zeros(len(right)),
        keys=keys,
    )


def size_variants(
    sizes: Sequence[Size],
    profiles: Mapping[int, DeviceProfile],
    questions: Sequence[Question],
    progress: Progress = silent,
) -> Variants:
    """A variant for each of several models, ascending, with the whole prompt by the model's own tokenizer.

    Args:
      sizes: the models.
      profiles: of their engines, by `id`.
      questions: N.
      progress: of scoring.
    """
    read: dict[int, tuple[list[Branching], list[int]]] = {}
    ttft, tpot, right = [], [], []
    for size in sizes:
        tokenizer, profile = size.engine.tokenizer, profiles[id(size.engine)]
        if id(tokenizer) not in read:
            read[id(tokenizer)] = _read(tokenizer, questions)
        prompts, lengths = read[id(tokenizer)]
        answers, fits = right_answers(size.engine.at(size.level), questions, prompts, progress)
        right.append(answers)
        ttft.append(np.where(fits, [profile.ttft(size.level, each) for each in lengths], np.inf))
        tpot.append([profile.tpot(size.level, each) for each in lengths])
    return Variants(
        names=tuple(size.name for size in sizes),
        ttft_ms=np.array(ttft).T,
        tpot_ms=np.array(tpot).T,
        right=np.array(right).T,
        change_ms=np.array([size.change_ms for size in sizes]),
    )


def _read(tokenizer: Tokenizer, questions: Sequence[Question]) -> tuple[list[Branching], list[int]]:
    """Questions as a tokenizer's model reads them, and the tokens of their prompts."""
    prompts = [branching(tokenizer, each.example) for each in questions]
    return prompts, [len(prompt_tokens(tokenizer, each.example).ids) for each in questions]


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

    @property
    def slos(self) -> list[Slo]:
        """The objective of each request."""
        return [request.slo for request in self.trace]

    def run(
        self,
        variants: Variants,
        policy: Policy = largest,
        *,
        margin: float = MARGIN,
        ignore_tpot: bool = False,
    ) -> Choices:
        """`run_trace` of these requests, by default with the planner's margin."""
        return run_trace(
            variants, self.indices, self.slos, self.whole_ms, policy, margin=margin, ignore_tpot=ignore_tpot
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


def least_times(ours: Variants, pass_ms: np.ndarray) -> Variants:
    """Our variants with the tiny LM's pass, `[N]` milliseconds, where the prompt is shortened: the least that
    each can take."""
    return ours.later(pass_ms[:, None] * np.array([ratio < 1 for _, ratio in ours.keys]))


def planned(planner: Planner, ours: Variants, asked: Asked, pass_ms: np.ndarray) -> Choices:
    """The choices of our planner, each with the time that its plan took, and at least that of the tiny LM's
    pass where the prompt was shortened.

    Args:
      planner: of ours.
      ours: see `variants.our_variants`.
      asked: the trace.
      pass_ms: `[N]`, time of the tiny LM's pass over each question.
    """
    least, right, met = least_times(ours, pass_ms), [], []
    for index, request in zip(asked.indices, asked.trace, strict=True):
        made = planner.plan(asked.questions[index].prompt, request.slo, answer_tokens=ANSWER_TOKENS)
        at = [ours.keys.index((made.level, made.prompt_ratio))]
        taken = np.maximum(least.ttft_ms[index, at], ours.ttft_ms[index, at] + made.planning_ms)
        whole = (float(asked.whole_ms[0][index]), float(asked.whole_ms[1][index]))
        right.append(ours.right[index, at[0]])
        met.append(overruns(request.slo, whole, taken, ours.tpot_ms[index, at])[0] <= 1)
    return Choices(np.asarray(asked.indices), np.array(right, bool), np.array(met, bool))


def ablations(
    ours: Variants, asked: Asked, pass_ms: np.ndarray, planning_ms: np.ndarray, seed: int
) -> dict[str, Choices]:
    """Choices of ours under other policies, with models or prompts alone, of the baseline that shortens
    prompts, and the bound of them all.

    Every variant takes what it must (see `least_times`). Policies of ours take the rest of the planner's time
    on top, but with the whole model and the whole prompt, which need no plan. The bound, the best fixed
    choices and the baseline take nothing on top; the first two use all of an objective, without a margin.

    Args:
      ours: see `variants.our_variants`.
      asked: the trace.
      pass_ms, planning_ms: see `plan_times`; the latter is in the times of ours.
      seed: of random decisions.
    """
    least = least_times(ours, pass_ms)
    plans = np.array([key != (WHOLE, 1.0) for key in ours.keys])
    decided = least.later((planning_ms - pass_ms)[:, None] * plans)
    whole_prompts = [place for place, (_, ratio) in enumerate(ours.keys) if ratio == 1]
    whole_models = [place for place, (level, _) in enumerate(ours.keys) if level == WHOLE]
    return {
        f"{OURS}-random": asked.run(decided, at_random(seed)),
        f"{OURS}-fixed": asked.run(least, ranked(_task_accuracies(ours, asked)), margin=1.0),
        f"{OURS}-oracle": bound(least, asked.indices, asked.slos, asked.whole_ms),
        f"{OURS}-model-only": asked.run(decided.only(whole_prompts)),
        f"{OURS}-prompt-only": asked.run(decided.only(whole_models)),
        SHORTENED: asked.run(least.only(whole_models), ignore_tpot=True),
    }


def _task_accuracies(ours: Variants, asked: Asked) -> np.ndarray:
    """How often each variant is right about the questions of a request's task, `[M, V]`: what is known in
    hindsight, and of the task alone."""
    tasks = np.array([request.task for request in asked.trace])
    found = np.zeros((len(tasks), ours.right.shape[1]))
    for task in np.unique(tasks):
        questions = np.unique(np.asarray(asked.indices)[tasks == task])
        found[tasks == task] = ours.right[questions].mean(0)
    return found
