"""The whole bench: levels' costs, then a trace of six apps on every system."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.elastic import levels as level_bench
from benchmarks.elastic.systems import (
    Choices,
    Variants,
    at_random,
    best,
    interval,
    largest,
    run_trace,
)
from benchmarks.elastic.tables import (
    layer_wise,
    our_variants,
    plain_models,
    pruned_models,
    size_variants,
)
from benchmarks.report import Row, compared
from jaxllm.bundle.elastic import read_ladder
from jaxllm.bundle.tiny_lm import read_tiny_lm
from jaxllm.elastic.ladder import WHOLE
from jaxllm.elastic.slo import Slo
from jaxllm.errors import ConfigError
from jaxllm.tasks.branching import branching
from jaxllm.tasks.shortened import Question
from serving.engine import Engine
from serving.evaluation.scoring import score_options
from serving.evaluation.tasks import read_questions
from serving.options import EngineOptions
from serving.planner import MARGIN, Planner
from serving.profile import measure
from serving.service import LLMService
from serving.tiny_lm import TinyPlanner
from serving.trace import TRACE_TASKS, TraceRequest, make_trace, replay, totals_by_slo

OURS = "jaxllm"
Progress = Callable[[str, int, int], None]
ALL = "all six"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Sizes of one run.

    Attributes:
      repeats: of each timing.
      rounds: of changing levels.
      requests: of the trace.
      questions: of each task, that the trace draws from.
      replayed: requests that are really answered, to see which objectives are met.
      seed: of the trace.
    """

    repeats: int = 7
    rounds: int = 15
    requests: int = 1200
    questions: int = 100
    replayed: int = 600
    seed: int = 0

    @classmethod
    def quick(cls) -> "Plan":
        """Fits in a minute for the packaged model."""
        return cls(repeats=2, rounds=3, requests=120, questions=8, replayed=24)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """What is measured.

    Attributes:
      model: an elastic bundle.
      data: the folder of the tasks' files; None leaves the trace out.
      plain: PFS, models of other sizes.
      beside: elastic bundles of the same model made in other ways (orders, anchors, recoveries), to compare
        accuracy level by level.
      pruned: LLM-Pruner, an elastic bundle made without anchors; None takes the model's own levels.
    """

    model: Path
    data: Path | None = None
    plain: tuple[Path, ...] = ()
    pruned: Path | None = None
    beside: tuple[Path, ...] = ()


def run(subject: Subject, plan: Plan, progress: Progress | None = None) -> list[Row]:
    """Measures everything.

    Raises:
      ConfigError: the model is no elastic bundle, or has no tiny LM for the trace.
    """
    engine = _open(subject.model, progress)
    profile = measure(engine, repeats=plan.repeats, progress=progress)
    rows = level_bench.time_rows(profile)
    rows += level_bench.switch_rows(engine, rounds=plan.rounds, progress=progress)
    rows += level_bench.memory_rows(subject.model, engine.options.levels)
    if subject.data is None:
        return rows
    tiny = read_tiny_lm(engine.bundle)
    if tiny is None:
        raise ConfigError(
            f"{subject.model} has no tiny LM; make one with `jaxllm elasticize`, or leave out --data"
        )
    proposer = TinyPlanner(tiny, engine.table.levels, engine.table.store)
    examples = read_questions(TRACE_TASKS, subject.data, plan.questions).examples
    trace = make_trace(examples, requests=plan.requests, seed=plan.seed)
    flat = {id(each): place for place, each in enumerate(e for group in examples.values() for e in group)}
    questions = [Question.read(engine.tokenizer, each) for group in examples.values() for each in group]
    asked = [flat[id(request.example)] for request in trace]
    lengths = [len(each.prompt.ids) for each in questions]
    whole = (
        np.array([profile.ttft(WHOLE, each) for each in lengths]),
        np.array([profile.tpot(WHOLE, each) for each in lengths]),
    )
    planning = np.array([proposer.planning_ms(each) for each in lengths])
    slos = [request.slo for request in trace]
    ours = our_variants(engine, profile, questions, proposer, progress)
    planner, ratios = Planner(profile, engine.table.levels, proposer), tuple(proposer.prompt_ratios)
    found = {
        OURS: _planned(planner, ours, questions, asked, trace, engine.table.levels, ratios),
        **_ablations(ours, asked, slos, whole, planning, len(ratios), plan.seed),
        **_others(subject, plan, engine, questions, asked, slos, whole, progress),
    }
    rows += _trace_rows(found, slos)
    rows += level_accuracies([subject.model, *subject.beside], questions, progress)
    service = LLMService(engine, profile, planner)
    for slo, each in totals_by_slo(replay(service, trace[: plan.replayed], progress=progress)).items():
        said = (
            f"{each.requests} requests really answered; level {each.level:.0f} and {each.kept_share:.0%} of "
            f"prompts on average, planning {each.planning_ms:.2f} ms"
        )
        rows.append(
            Row(case=f"trace {slo}", system=OURS, metric="slo_met", value=each.held, unit="share", note=said)
        )
    share, said = float(np.median(planning / whole[0])), "of the whole model's TTFT, median over questions"
    rows.append(Row(case="planning", system=OURS, metric="ttft_share", value=share, unit="share", note=said))
    return rows


def level_accuracies(
    bundles: Sequence[Path], questions: Sequence[Question], progress: Progress | None = None
) -> list[Row]:
    """Accuracy of every level of several elastic bundles on the same questions, with whole prompts."""
    rows = []
    for path in bundles:
        engine = _open(path, progress)
        asked = [branching(engine.tokenizer, each.example) for each in questions]
        for level in engine.table.levels:
            scores = score_options(engine.at(level), asked, progress=progress)
            right = [each.is_right(likely) for each, likely in zip(questions, scores, strict=True)]
            low, high = interval(np.array(right))
            rows.append(
                Row(
                    case=f"level {level}", system=f"{OURS} {path.stem}", metric="level_accuracy",
                    value=float(np.mean(right)), unit="share", note=f"95 % in [{low:.1%}, {high:.1%}]",
                )
            )  # fmt: skip
    return rows


def _open(model: Path, progress: Progress | None, context_tokens: int = 0) -> Engine:
    """An engine for all levels of a bundle."""
    engine = Engine.open(model, warm_up=False, progress=progress)
    ladder = read_ladder(engine.bundle)
    if ladder is None:
        raise ConfigError(f"{model} has no levels; make an elastic bundle with `jaxllm elasticize`")
    options = EngineOptions(context_tokens=context_tokens, levels=tuple(sorted({*ladder.levels} - {WHOLE})))
    return Engine.open(model, options=options, progress=progress)


def _planned(
    planner: Planner,
    ours: Variants,
    questions: Sequence[Question],
    asked: Sequence[int],
    trace: Sequence[TraceRequest],
    levels: Sequence[int],
    ratios: Sequence[float],
) -> Choices:
    """What our planner does with a trace; whether objectives are met is for the replay to say."""
    right, held = [], []
    for place, request in zip(asked, trace, strict=True):
        question = questions[place]
        made = planner.plan(question.prompt, request.slo, answer_tokens=32)
        variant = levels.index(made.level) * len(ratios) + ratios.index(made.prompt_ratio)
        right.append(bool(ours.right[place, variant]))
        held.append(made.source != "nearest")
    return Choices(np.array(right), np.array(held))


def _ablations(
    ours: Variants,
    asked: Sequence[int],
    slos: Sequence[Slo],
    whole: tuple[np.ndarray, np.ndarray],
    planning_ms: np.ndarray,
    ratios: int,
    seed: int,
) -> dict[str, Choices]:
    """Ours with other decisions, and with half of its means; and the baseline that shortens prompts alone."""
    count = len(ours.names)
    models = ours.only(range(ratios - 1, count, ratios), less_ms=planning_ms)
    prompts = ours.only(range(count - ratios, count))
    choose = functools.partial(run_trace, questions=asked, slos=slos, whole_ms=whole, margin=MARGIN)
    return {
        f"{OURS}-random": choose(ours, policy=at_random(seed)),
        f"{OURS}-oracle": choose(ours, policy=best(ours.right[np.asarray(asked)])),
        f"{OURS}-model-only": choose(models, policy=largest),
        f"{OURS}-prompt-only": choose(prompts, policy=largest),
        "LG2+CS": choose(prompts, policy=largest, ignore_tpot=True),
    }


def _others(
    subject: Subject,
    plan: Plan,
    engine: Engine,
    questions: Sequence[Question],
    asked: Sequence[int],
    slos: Sequence[Slo],
    whole: tuple[np.ndarray, np.ndarray],
    progress: Progress | None,
) -> dict[str, Choices]:
    """What the other systems do with the trace."""
    choose = functools.partial(
        run_trace, questions=asked, slos=slos, whole_ms=whole, policy=largest, margin=MARGIN
    )
    found: dict[str, Choices] = {}
    timed = functools.partial(measure, repeats=plan.repeats, progress=progress)
    if subject.plain:
        weights = engine.bundle.layout.weights
        sizes = plain_models(subject.plain, weights=weights, options=engine.options, timed=timed)
        variants = size_variants(sizes, questions, progress)
        found["PFS-swap"] = choose(variants)
        found["PFS"] = choose(dataclasses.replace(variants, change_ms=np.zeros(len(sizes))))
    pruned = engine if subject.pruned is None else _open(subject.pruned, progress)
    variants = size_variants(pruned_models(pruned, timed(pruned)), questions, progress)
    found["LLM-Pruner"] = choose(variants)
    importance = engine.bundle.layout.parts["elastic"].facts.get("layer_importance")
    if importance is not None:
        found["LE"] = choose(size_variants(layer_wise(engine, importance, timed), questions, progress))
    return found


def _trace_rows(found: Mapping[str, Choices], slos: Sequence[Slo]) -> list[Row]:
    """Accuracy of every system, by objective and in all, ours against each other."""
    names = [str(slo) for slo in slos]
    rows = []
    for case in (*dict.fromkeys(names), ALL):
        chosen = np.array([case in (name, ALL) for name in names])
        values = {system: float(each.right[chosen].mean()) for system, each in found.items()}
        notes = {}
        for system, each in found.items():
            low, high = interval(each.right[chosen])
            notes[system] = (
                f"95 % in [{low:.1%}, {high:.1%}], in time by the tables {each.held[chosen].mean():.1%}"
            )
        rows += compared(
            values, ours=OURS, case=f"trace {case}", metric="accuracy", unit="share", notes=notes
        )
    return rows
