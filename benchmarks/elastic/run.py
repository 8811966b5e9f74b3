"""Runs all parts: the costs of levels, their accuracy, and a trace of six apps on every system."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.elastic import PARTS
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
from benchmarks.elastic.policies import OURS
from benchmarks.elastic.replay import replay_beside_whole
from benchmarks.elastic.rows import level_rows, planning_rows, replay_rows, trace_rows
from benchmarks.elastic.scaled_times import as_large, check_same_levels
from benchmarks.elastic.switching import switch_rows
from benchmarks.elastic.variants import our_variants, right_answers, size_variants
from benchmarks.measuring.report import Row
from benchmarks.samples.questions import read_examples
from jaxllm.bundle.tiny_lm import read_tiny_lm
from jaxllm.config import WHOLE
from jaxllm.errors import ConfigError
from jaxllm.tasks.branching import branching
from jaxllm.tasks.shortened import Question
from jaxllm.text.tokenizer import Tokenizer
from serving.bundles import open_model
from serving.engine import Engine
from serving.host.progress import Progress
from serving.planning.planner import Planner
from serving.planning.profile import DeviceProfile
from serving.planning.profiling import measure_together
from serving.planning.safety_margin import SafetyMargin
from serving.planning.tiny_lm import TinyPlanner
from serving.service import LLMService
from serving.traces.trace import TRACE_TASKS, make_trace


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Sizes of one run.

    Attributes:
      repeats: of each timing.
      rounds: pairs of requests that change to each level and that stay.
      requests: of the trace.
      questions: of each task, that the trace draws from.
      layer_subsets: models of the baseline that leaves out layers, besides the whole one; 0 takes all.
      replayed: requests that are really answered, to see which objectives are met.
      seed: of the trace.
      parts: of `PARTS`, those to run.
    """

    repeats: int = 5
    rounds: int = 41
    requests: int = 1200
    questions: int = 40
    layer_subsets: int = 0
    replayed: int = 150
    seed: int = 0
    parts: tuple[str, ...] = tuple(PARTS)

    @classmethod
    def quick(cls) -> "Plan":
        """Fits in a minute for the packaged model."""
        return cls(repeats=2, rounds=3, requests=60, questions=3, layer_subsets=4, replayed=12)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """What is measured.

    Attributes:
      model: an elastic bundle.
      data: the folder of the tasks' files; None takes packaged samples.
      plain: models of other sizes, for PFS.
      compared: elastic bundles of the same model made otherwise (orders, anchors, recoveries), whose accuracy
        is compared level by level.
      pruned: an elastic bundle made without anchors, for LLM-Pruner; None takes the model's own levels.
      timed: an elastic bundle whose levels are timed in the model's place (see `scaled_times.py`); None
        times the model.
    """

    model: Path
    data: Path | None = None
    plain: tuple[Path, ...] = ()
    pruned: Path | None = None
    compared: tuple[Path, ...] = ()
    timed: Path | None = None


def run(subject: Subject, plan: Plan, progress: Progress | None = None) -> list[Row]:
    """Measures the parts that the plan names.

    Raises:
      ConfigError: the model is no elastic bundle, or has no tiny LM for the trace.
    """
    rows = []
    if "trace" in plan.parts:
        rows += _trace_rows(subject, plan, progress)
    elif "costs" in plan.parts:
        engine = open_elastic(subject.timed or subject.model, progress)
        (profile,) = measure_together([engine], repeats=plan.repeats, progress=progress)
        rows += _cost_rows(subject, plan, engine, profile, progress)
    if "accuracy" in plan.parts:
        with open_model(subject.model) as bundle:
            tokenizer = Tokenizer(bundle.tokenizer_files())
        examples = read_examples(TRACE_TASKS, subject.data, plan.questions)
        questions = [Question.read(tokenizer, each) for group in examples.values() for each in group]
        rows += level_rows(_level_answers([subject.model, *subject.compared], questions, progress))
    return rows


def _trace_rows(subject: Subject, plan: Plan, progress: Progress | None) -> list[Row]:
    """A trace on every system and in the service, and the costs of levels where they are asked for."""
    engine = open_elastic(subject.model, progress)
    tiny = read_tiny_lm(engine.model.bundle)
    if tiny is None:
        raise ConfigError(
            f"{subject.model} has no tiny LM; make one with `jaxllm elasticize`, or leave out the trace with "
            "--only costs --only accuracy"
        )
    proposer = TinyPlanner(tiny, engine.levels, engine.runner.buckets.store())
    others = open_baselines(engine, subject.plain, subject.pruned, plan.layer_subsets, progress)
    timed, profile, profiles = engine, None, {}
    if subject.timed is None:
        # Whatever is compared is timed in alternation.
        engines = [engine, *(size.engine for many in others.values() for size in many)]
        engines = list({id(each): each for each in engines}.values())
        measured = measure_together(engines, repeats=plan.repeats, progress=progress)
        profiles = {id(each): found for each, found in zip(engines, measured, strict=True)}
        profile = measured[0]
    else:
        timed = open_elastic(subject.timed, progress)
        check_same_levels(engine, timed)
        (profile,) = measure_together([timed], repeats=plan.repeats, progress=progress)
        others, profiles = as_large(timed, profile, engine, others)
    rows = _cost_rows(subject, plan, timed, profile, progress) if "costs" in plan.parts else []
    asked = _asked(engine, profile, subject, plan)
    levels, ratios = engine.levels, with_whole(proposer.prompt_ratios)
    planner = Planner(profile, levels, proposer)
    # The tiny LM taken at its word, as in the paper.
    lightest = TinyPlanner(tiny, levels, engine.runner.buckets.store(), decision="lightest")
    passes, plans = plan_times(planner, proposer, asked.questions)
    ours = our_variants(engine, profile, asked.questions, proposer, ratios, plans, progress)
    found = {
        OURS: planned(planner, ours, asked, levels, ratios),
        f"{OURS}-lightest": planned(Planner(profile, levels, lightest), ours, asked, levels, ratios),
        **ablations(ours, asked, levels, ratios, proposer.prompt_ratios, passes, plans, plan.seed),
    }
    for name, sizes in others.items():
        variants = size_variants(sizes, profiles, asked.questions, progress)
        found[name] = asked.run(variants)
        if name == SWAP:
            found[RESIDENT] = asked.run(dataclasses.replace(variants, change_ms=np.zeros(len(sizes))))
    rows += trace_rows(found, asked, _remarks(engine, others))
    # In service the planner learns how late answers are.
    service = LLMService(timed, profile, Planner(profile, levels, proposer, safety_margin=SafetyMargin()))
    outcomes, met = replay_beside_whole(service, asked, plan.replayed, progress)
    answers = subject.timed is None
    return rows + replay_rows(outcomes, met, answers=answers) + planning_rows(outcomes, asked, passes)


def _asked(engine: Engine, profile: DeviceProfile, subject: Subject, plan: Plan) -> Asked:
    """A trace of the tasks' questions, with the whole model's times."""
    examples = read_examples(TRACE_TASKS, subject.data, plan.questions)
    trace = make_trace(examples, requests=plan.requests, seed=plan.seed)
    flat = {id(each): index for index, each in enumerate(e for group in examples.values() for e in group)}
    questions = [Question.read(engine.tokenizer, each) for group in examples.values() for each in group]
    lengths = [len(each.prompt.ids) for each in questions]
    return Asked(
        trace=trace,
        questions=questions,
        indices=[flat[id(request.example)] for request in trace],
        whole_ms=(
            np.array([profile.ttft(WHOLE, each) for each in lengths]),
            np.array([profile.tpot(WHOLE, each) for each in lengths]),
        ),
    )


def _cost_rows(
    subject: Subject, plan: Plan, engine: Engine, profile: DeviceProfile, progress: Progress | None
) -> list[Row]:
    """Times and memory of levels, and the time to change them."""
    return [
        *level_bench.time_rows(profile),
        *switch_rows(engine, rounds=plan.rounds, progress=progress),
        *level_bench.memory_rows(subject.timed or subject.model, engine.options.levels),
    ]


def _remarks(engine: Engine, others: dict[str, list[Size]]) -> dict[str, str]:
    """Notes on baselines that differ from ours in more than their decisions."""
    remarks = {
        SHORTENED: "no contextual sparsity, times per token taken as met",
        PRUNED: widths(engine, others[PRUNED]),
    }
    if LAYERS in others:
        names = ", ".join(each.name for each in others[LAYERS])
        remarks[LAYERS] = (
            f"{len(others[LAYERS])} models: {names}; the layers that remain as they are, no recovery training"
        )
    if SWAP in others:
        changes = ", ".join(f"{each.name} {each.change_ms:.1f}" for each in others[SWAP])
        remarks[RESIDENT] = f"{sizes_beside(engine, others[SWAP])}, {widths(engine, others[SWAP])}"
        remarks[SWAP] = f"{remarks[RESIDENT]}; a change is counted as the read of the file, ms: {changes}"
    return remarks


def _level_answers(
    bundles: Sequence[Path], questions: Sequence[Question], progress: Progress | None
) -> dict[str, dict[int, np.ndarray]]:
    """Right answers of every level of several elastic bundles to the same questions, with whole prompts."""
    found: dict[str, dict[int, np.ndarray]] = {}
    for path in bundles:
        engine = open_elastic(path, progress)
        prompts = [branching(engine.tokenizer, each.example) for each in questions]
        found[_unused(f"{OURS} {path.stem}", found)] = {
            level: right_answers(engine.at(level), questions, prompts, progress)[0] for level in engine.levels
        }
    return found


def _unused(name: str, taken: dict[str, dict[int, np.ndarray]]) -> str:
    """The name, with a number behind it if it is taken."""
    same = sum(each == name or each.startswith(f"{name} (") for each in taken)
    return f"{name} ({same + 1})" if same else name
