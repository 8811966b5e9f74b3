"""The whole bench: levels' costs, then a trace of six apps on every system."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.elastic import levels as level_bench
from benchmarks.elastic.baselines import (
    LAYERS,
    PRUNED,
    RESIDENT,
    SHORTENED,
    SWAP,
    Size,
    open_baselines,
    open_elastic,
    sizes_beside,
    widths,
)
from benchmarks.elastic.decisions import Asked, ablations, plan_times, planned, with_whole
from benchmarks.elastic.larger import as_large, check_same_levels
from benchmarks.elastic.replaying import replay_beside_whole
from benchmarks.elastic.rows import level_rows, planning_rows, replay_rows, trace_rows
from benchmarks.elastic.switching import switch_rows
from benchmarks.elastic.systems import OURS
from benchmarks.elastic.tables import our_variants, right_answers, size_variants
from benchmarks.report import Row
from jaxllm.bundle.tiny_lm import read_tiny_lm
from jaxllm.config import WHOLE
from jaxllm.errors import ConfigError
from jaxllm.tasks.branching import branching
from jaxllm.tasks.shortened import Question
from jaxllm.tokenizer import Tokenizer
from serving.engine import Engine
from serving.evaluation.tasks import read_questions
from serving.models import open_model
from serving.planner import Planner
from serving.profile import DeviceProfile
from serving.profiling import measure_together
from serving.progress import Progress
from serving.service import LLMService
from serving.slack import Slack
from serving.tiny_lm import TinyPlanner
from serving.trace import TRACE_TASKS, make_trace


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Sizes of one run.

    Attributes:
      repeats: of each timing.
      rounds: pairs of requests that change to each level and that stay.
      requests: of the trace.
      questions: of each task, that the trace draws from.
      replayed: requests that are really answered, to see which objectives are met.
      seed: of the trace.
    """

    repeats: int = 5
    rounds: int = 41
    requests: int = 1200
    questions: int = 40
    replayed: int = 150
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
      times: an elastic bundle whose levels are timed in the model's place (see `elastic.larger`); None times
        the model.
    """

    model: Path
    data: Path | None = None
    plain: tuple[Path, ...] = ()
    pruned: Path | None = None
    beside: tuple[Path, ...] = ()
    times: Path | None = None


def compare_levels(subject: Subject, plan: Plan, progress: Progress | None = None) -> list[Row]:
    """How right every level of the model is, and of the bundles beside it; nothing is timed.

    Raises:
      ConfigError: a model is no elastic bundle, or the subject has no data.
    """
    if subject.data is None:
        raise ConfigError("levels are compared by the tasks' questions: name the folder of their files")
    examples = read_questions(TRACE_TASKS, subject.data, plan.questions).examples
    with open_model(subject.model) as bundle:
        tokenizer = Tokenizer(bundle.tokenizer_files())
    questions = [Question.read(tokenizer, each) for group in examples.values() for each in group]
    return level_rows(_level_answers([subject.model, *subject.beside], questions, progress))


def run(subject: Subject, plan: Plan, progress: Progress | None = None) -> list[Row]:
    """Measures everything.

    Raises:
      ConfigError: the model is no elastic bundle, or has no tiny LM for the trace.
    """
    engine = open_elastic(subject.model, progress)
    if subject.data is None:
        (profile,) = measure_together([engine], repeats=plan.repeats, progress=progress)
        return _cost_rows(subject, plan, engine, profile, progress)
    tiny = read_tiny_lm(engine.bundle)
    if tiny is None:
        raise ConfigError(
            f"{subject.model} has no tiny LM; make one with `jaxllm elasticize`, or leave out --data"
        )
    proposer = TinyPlanner(tiny, engine.table.levels, engine.table.store)
    examples = read_questions(TRACE_TASKS, subject.data, plan.questions).examples
    others = open_baselines(engine, subject.plain, subject.pruned, progress)
    if subject.times is None:
        # Whatever is compared is timed in alternation.
        timed, engines = engine, [engine, *(size.engine for many in others.values() for size in many)]
        engines = list({id(each): each for each in engines}.values())
        measured = measure_together(engines, repeats=plan.repeats, progress=progress)
        profiles = {id(each): found for each, found in zip(engines, measured, strict=True)}
        profile = measured[0]
    else:
        timed = open_elastic(subject.times, progress)
        check_same_levels(engine, timed)
        (profile,) = measure_together([timed], repeats=plan.repeats, progress=progress)
        others, profiles = as_large(timed, profile, engine, others)
    rows = _cost_rows(subject, plan, timed, profile, progress)
    trace = make_trace(examples, requests=plan.requests, seed=plan.seed)
    flat = {id(each): place for place, each in enumerate(e for group in examples.values() for e in group)}
    questions = [Question.read(engine.tokenizer, each) for group in examples.values() for each in group]
    lengths = [len(each.prompt.ids) for each in questions]
    asked = Asked(
        trace=trace,
        questions=questions,
        places=[flat[id(request.example)] for request in trace],
        whole_ms=(
            np.array([profile.ttft(WHOLE, each) for each in lengths]),
            np.array([profile.tpot(WHOLE, each) for each in lengths]),
        ),
    )
    levels, ratios = engine.table.levels, with_whole(proposer.prompt_ratios)
    planner = Planner(profile, levels, proposer)
    # The tiny LM taken at its word, as in the paper.
    lightest = TinyPlanner(tiny, levels, engine.table.store, decision="lightest")
    passes, plans = plan_times(planner, proposer, questions)
    ours = our_variants(engine, profile, questions, proposer, ratios, plans, progress)
    found = {
        OURS: planned(planner, ours, asked, levels, ratios),
        f"{OURS}-lightest": planned(Planner(profile, levels, lightest), ours, asked, levels, ratios),
        **ablations(ours, asked, levels, ratios, proposer.prompt_ratios, passes, plans, plan.seed),
    }
    for name, sizes in others.items():
        variants = size_variants(sizes, profiles, questions, progress)
        found[name] = asked.run(variants)
        if name == SWAP:
            found[RESIDENT] = asked.run(dataclasses.replace(variants, change_ms=np.zeros(len(sizes))))
    rows += trace_rows(found, asked, _remarks(engine, others))
    rows += level_rows(_level_answers([subject.model, *subject.beside], questions, progress))
    # In service the planner learns how late answers come; the tables above know no lateness.
    service = LLMService(timed, profile, Planner(profile, levels, proposer, slack=Slack()))
    outcomes, met = replay_beside_whole(service, asked, plan.replayed, progress)
    answers = subject.times is None
    return rows + replay_rows(outcomes, met, answers=answers) + planning_rows(outcomes, asked, passes)


def _cost_rows(
    subject: Subject, plan: Plan, engine: Engine, profile: DeviceProfile, progress: Progress | None
) -> list[Row]:
    """What levels cost, and changing them."""
    return [
        *level_bench.time_rows(profile),
        *switch_rows(engine, rounds=plan.rounds, progress=progress),
        *level_bench.memory_rows(subject.times or subject.model, engine.options.levels),
    ]


def _remarks(engine: Engine, others: dict[str, list[Size]]) -> dict[str, str]:
    """How baselines ran that differ from ours in more than their decisions."""
    remarks = {
        LAYERS: "the layers that remain as they are, no recovery training",
        SHORTENED: "no contextual sparsity, times per token taken as met",
        PRUNED: widths(engine, others[PRUNED]),
    }
    if SWAP in others:
        changes = ", ".join(f"{each.name} {each.change_ms:.1f}" for each in others[SWAP])
        remarks[RESIDENT] = f"{sizes_beside(engine, others[SWAP])}, {widths(engine, others[SWAP])}"
        remarks[SWAP] = f"{remarks[RESIDENT]}; a change taken to be reading the file alone, ms: {changes}"
    return remarks


def _level_answers(
    bundles: Sequence[Path], questions: Sequence[Question], progress: Progress | None
) -> dict[str, dict[int, np.ndarray]]:
    """Whether every level of several elastic bundles answers the same questions right, with whole prompts."""
    found: dict[str, dict[int, np.ndarray]] = {}
    for path in bundles:
        engine = open_elastic(path, progress)
        prompts = [branching(engine.tokenizer, each.example) for each in questions]
        found[_unused(f"{OURS} {path.stem}", found)] = {
            level: right_answers(engine.at(level), questions, prompts, progress)[0]
            for level in engine.table.levels
        }
    return found


def _unused(name: str, taken: dict[str, dict[int, np.ndarray]]) -> str:
    """A name, or with a number behind it if there is such a one already."""
    same = sum(each == name or each.startswith(f"{name} (") for each in taken)
    return f"{name} ({same + 1})" if same else name
