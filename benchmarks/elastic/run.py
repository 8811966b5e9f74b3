"""Runs all parts: the costs of levels, their accuracy, and a trace of six apps on every system, which is
replayed on the service, too, in turns with the whole model.

Objectives are shares of the whole model's times, which change from minute to minute on a busy device. So the
whole model answers every request as well: its times against its profile, by the median over neighbouring
requests, say how fast the device is at that moment.
"""

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.elastic import Plan, baselines, decisions
from benchmarks.harness.bench import Run, silent
from benchmarks.harness.report import OURS, Figure, Row, compared, draw_figures, lead, row, said
from benchmarks.samples import read_examples
from benchmarks.traces import TRACE_TASKS, Outcome, make_trace, replay, totals
from jaxllm.bundle.tiny_lm import read_tiny_lm
from jaxllm.config import FULL_LEVEL
from jaxllm.elastic.slo import Slo
from jaxllm.errors import ConfigError
from jaxllm.serving.elastic.objectives import CONFIDENCE, Cost, SafetyMargin, meets
from jaxllm.serving.elastic.planned_service import ANYTHING
from jaxllm.serving.elastic.planner import Planner
from jaxllm.serving.elastic.profile import DeviceProfile
from jaxllm.serving.elastic.profiling import measure_together
from jaxllm.serving.elastic.tiny_lm import TinyPlanner
from jaxllm.serving.ground.bundles import find_model, open_model
from jaxllm.serving.host.progress import Progress
from jaxllm.serving.opening.engine import Engine
from jaxllm.serving.server.service import LLMService
from jaxllm.tasks.questions import Question, branching
from jaxllm.text.tokenizer import Tokenizer


def run(bench: Run[Plan]) -> list[Row]:
    """Measures the parts that the plan names."""
    plan, rows, timed = bench.plan, [], None
    model = bench.model or baselines.elastic_shape(str(bench.shape), plan.weights, bench.progress)
    if plan.timed_shape:
        with open_model(model) as bundle:
            timed = baselines.elastic_shape(plan.timed_shape, plan.weights, bench.progress, like=bundle)
    if "trace" in plan.parts:
        rows += _trace_rows(model, timed, bench)
    elif "costs" in plan.parts:
        engine = baselines.open_elastic(timed or model, bench.progress)
        (profile,) = measure_together([engine], repeats=plan.repeats, progress=bench.progress)
        rows += _cost_rows(engine, profile, bench)
    if "accuracy" in plan.parts:
        rows += level_rows([model, *plan.compared], bench)
    return rows


def _trace_rows(model: Path, timed_model: Path | None, bench: Run[Plan]) -> list[Row]:
    """A trace on every system and in the service, and the costs of levels where they are asked for.

    Args:
      timed_model: an elastic bundle whose levels are timed in the model's place (see `baselines.py`); None
        times the model.
    """
    plan, progress = bench.plan, bench.progress
    engine = baselines.open_elastic(model, progress)
    tiny = read_tiny_lm(engine.model.bundle)
    if tiny is None:
        raise ConfigError(
            f"{model} has no tiny LM; make one with `jaxllm elasticize`, or leave out the trace with "
            "--only costs --only accuracy"
        )
    proposer = TinyPlanner(tiny, engine.levels, engine.runner.buckets.store())
    plain = [find_model(each) for each in plan.plain or ("small",)]
    others = baselines.open_baselines(engine, plain, plan.pruned, plan.layer_subsets, progress)
    if timed_model is None:
        # Whatever is compared is timed in alternation.
        engines = [engine, *(size.engine for many in others.values() for size in many)]
        engines = list({id(each): each for each in engines}.values())
        measured = measure_together(engines, repeats=plan.repeats, progress=progress)
        timed, profile = engine, measured[0]
        profiles = {id(each): found for each, found in zip(engines, measured, strict=True)}
    else:
        timed = baselines.open_elastic(timed_model, progress)
        (profile,) = measure_together([timed], repeats=plan.repeats, progress=progress)
        others, profiles = baselines.as_large(timed, profile, engine, others)
    rows = _cost_rows(timed, profile, bench) if "costs" in plan.parts else []
    asked = _asked(engine, profile, plan)
    # A planner may always leave a prompt whole, even if the proposer has no such choice.
    levels, ratios = engine.levels, tuple(sorted({*map(float, proposer.prompt_ratios), 1.0}))
    planner = Planner(profile, levels, proposer)
    # The tiny LM taken at its word, as in the paper.
    lightest = TinyPlanner(tiny, levels, engine.runner.buckets.store(), decision="lightest")
    passes, plans = decisions.plan_times(planner, proposer, asked.questions)
    ours = decisions.our_variants(engine, profile, asked.questions, proposer, ratios, progress)
    found = {
        OURS: decisions.planned(planner, ours, asked, passes),
        f"{OURS}-lightest": decisions.planned(Planner(profile, levels, lightest), ours, asked, passes),
        **decisions.ablations(ours, asked, passes, plans, plan.seed),
    }
    for name, sizes in others.items():
        variants = decisions.size_variants(sizes, profiles, asked.questions, progress)
        found[name] = asked.run(variants)
        if name == baselines.SWAP:
            found[baselines.RESIDENT] = asked.run(
                dataclasses.replace(variants, change_ms=np.zeros(len(sizes)))
            )
    rows += trace_rows(found, asked, _remarks(engine, others))
    # In service the planner learns how late answers are.
    service = LLMService(timed, profile, Planner(profile, levels, proposer, safety_margin=SafetyMargin()))
    outcomes, met = replay_beside_whole(service, asked, plan.replayed, progress)
    rows += replay_rows(outcomes, met, answers=timed_model is None)
    return rows + planning_rows(outcomes, asked, passes)


def _asked(engine: Engine, profile: DeviceProfile, plan: Plan) -> decisions.Asked:
    """A trace of the tasks' questions, with the whole model's times."""
    examples = read_examples(TRACE_TASKS, plan.data, plan.questions)
    trace = make_trace(examples, requests=plan.requests, seed=plan.seed)
    flat = [each for group in examples.values() for each in group]
    places = {id(each): index for index, each in enumerate(flat)}
    questions = [Question.read(engine.tokenizer, each) for each in flat]
    lengths = [len(each.prompt.ids) for each in questions]
    return decisions.Asked(
        trace=trace,
        questions=questions,
        indices=[places[id(request.example)] for request in trace],
        whole_ms=(
            np.array([profile.ttft(FULL_LEVEL, each) for each in lengths]),
            np.array([profile.tpot(FULL_LEVEL, each) for each in lengths]),
        ),
    )


def _cost_rows(engine: Engine, profile: DeviceProfile, bench: Run[Plan]) -> list[Row]:
    """Times and memory of levels, and the time to change them."""
    rows = baselines.time_rows(profile)
    rows += baselines.switch_rows(engine, rounds=bench.plan.rounds, progress=bench.progress)
    return rows + baselines.memory_rows(engine.model.bundle.path, engine.options.levels)


def _remarks(engine: Engine, others: dict[str, list[baselines.Size]]) -> dict[str, str]:
    """Notes on baselines that differ from ours in more than their decisions."""
    remarks = {
        f"{OURS}-oracle": "a bound: any variant that is right in time counts, and deciding takes nothing",
        f"{OURS}-fixed": "of each task's variants in time the one that is right most often, in hindsight",
        baselines.SHORTENED: "no contextual sparsity, times per token taken as met",
        baselines.PRUNED: baselines.widths(engine, others[baselines.PRUNED]),
    }
    if sizes := others.get(baselines.LAYERS):
        names = ", ".join(each.name for each in sizes)
        left = "the layers that remain as they are, no recovery training"
        remarks[baselines.LAYERS] = f"{len(sizes)} models: {names}; {left}"
    if sizes := others.get(baselines.SWAP):
        beside = f"{baselines.sizes_beside(engine, sizes)}, {baselines.widths(engine, sizes)}"
        changes = ", ".join(f"{each.name} {each.change_ms:.1f}" for each in sizes)
        remarks[baselines.RESIDENT] = beside
        remarks[baselines.SWAP] = f"{beside}; a change is counted as the read of the file, ms: {changes}"
    return remarks


ALL = "all six"
# Without <100,100>, which every answer meets.
LIMITED = "the five with a limit"
# Shares of right answers, and of right answers in time, by attribute of `Choices`.
METRICS = {"accuracy": "right", "right_and_met": "right_and_met"}


def cases(slos: Iterable[Slo]) -> list[str]:
    """The cases of rows: each objective, those with a limit, and all."""
    known = list(dict.fromkeys(slos))
    limited = [LIMITED] if any(slo.has_limit for slo in known) else []
    return [*map(str, known), *limited, ALL]


def trace_rows(
    found: Mapping[str, decisions.Choices], asked: decisions.Asked, remarks: Mapping[str, str]
) -> list[Row]:
    """Shares of every system, by objective and over all, ours against each other on the same requests."""
    slos = [request.slo for request in asked.trace]
    rows = []
    for case in cases(slos):
        chosen = np.array([case in cases([slo]) for slo in slos])
        questions = np.asarray(asked.indices)[chosen]
        in_time = {
            system: f"in time by the profiles {each.met[chosen].mean():.1%}" for system, each in found.items()
        }
        for metric, of in METRICS.items():
            values = {system: getattr(each, of)[chosen] for system, each in found.items()}
            notes = {}
            for system, each in values.items():
                ahead = None if system == OURS else lead(values[OURS], each, questions)
                parts = (said(each, questions), ahead, in_time[system], remarks.get(system))
                notes[system] = "; ".join(filter(None, parts))
            shares = {system: float(each.mean()) for system, each in values.items()}
            rows += compared(f"trace {case}", metric, shares, notes)
    return rows


def replay_rows(outcomes: Sequence[Outcome], met: Sequence[bool], *, answers: bool = True) -> list[Row]:
    """Rows of requests that the service answered, by objective and over all, timed by the clock.

    Args:
      met: whether each one's objective was met, at the device's speed at that moment.
      answers: whether the model is trained; otherwise rows are about times alone.
    """
    both = list(zip(outcomes, met, strict=True))
    rows = []
    for slo in cases([outcome.request.slo for outcome in outcomes]):
        pairs = [pair for pair in both if slo in cases([pair[0].request.slo])]
        each = totals([outcome for outcome, _ in pairs])
        in_time = np.array([kept for _, kept in pairs])
        # Where nothing is in time, what comes nearest was answered.
        possible = np.array([outcome.source not in ("nearest", "failed") for outcome, _ in pairs])
        sure = np.array([outcome.confident for outcome, _ in pairs])
        right = np.array([outcome.right for outcome, _ in pairs])
        note = (
            f"{each.requests} requests replayed, {each.failed} of them failed; {possible.mean():.1%} had "
            f"a choice in time, of which {_share(in_time[possible])} were; {sure.mean():.1%} had one that is "
            f"so in {CONFIDENCE:.0%} of cases, by how late answers came before, of which "
            f"{_share(in_time[sure])} were; against the profile alone {each.met:.1%} were in "
            f"time; level {each.level:.0f} and {each.kept_share:.0%} of prompts on average, "
            f"planning {each.planning_ms:.2f} ms"
        )
        values = {"slo_met": in_time.mean()}
        if answers:
            values["right_and_met"] = (right & in_time).mean()
        rows += [row(f"replay {slo}", metric, float(value), note) for metric, value in values.items()]
    return rows


def _share(flags: np.ndarray) -> str:
    return f"{flags.mean():.1%}" if len(flags) else "none"


def planning_rows(outcomes: Sequence[Outcome], asked: decisions.Asked, pass_ms: np.ndarray) -> list[Row]:
    """The share of planning in the whole model's time to the first token, in the service; none if no request
    of the replay had to be planned.

    Args:
      pass_ms: `[N]`, time of the tiny LM's pass over each question.
    """
    whole_ms = asked.whole_ms[0]
    # Without a limit nothing is planned.
    counted = [
        (outcome, index)
        for outcome, index in zip(outcomes, asked.indices, strict=False)
        if outcome.failure is None and outcome.source != "whole"
    ]
    if not counted:
        return []
    share = np.median([outcome.planning_ms / whole_ms[index] for outcome, index in counted])
    alone = np.median([pass_ms[index] / whole_ms[index] for _, index in counted])
    note = (
        f"of the whole model's TTFT, median over {len(counted)} requests of the replay that were planned; "
        f"the tiny LM's pass alone {alone:.1%}"
    )
    return [row("planning", "ttft_share", float(share), note)]


def level_rows(bundles: Sequence[Path], bench: Run[Plan]) -> list[Row]:
    """Accuracy of every level of several elastic bundles, the first one ours, on the same questions with
    whole prompts; ours reads them, and a name that is taken has a number behind it."""
    with open_model(bundles[0]) as bundle:
        tokenizer = Tokenizer(bundle.tokenizer_files())
    examples = read_examples(TRACE_TASKS, bench.plan.data, bench.plan.questions)
    questions = [Question.read(tokenizer, each) for group in examples.values() for each in group]
    places, names, ours, rows = np.arange(len(questions)), list[str](), dict[int, np.ndarray](), []
    for number, path in enumerate(bundles):
        engine, name = baselines.open_elastic(path, bench.progress), f"{OURS} {path.stem}"
        prompts = [branching(engine.tokenizer, each.example) for each in questions]
        names.append(name)
        shown = f"{name} ({names.count(name)})" if names.count(name) > 1 else name
        for level in engine.levels:
            right, _ = decisions.right_answers(engine.at(level), questions, prompts, bench.progress)
            note = said(right, places)
            if number and level in ours:
                note += f"; {lead(ours[level], right, places)}"
            elif not number:
                ours[level] = right
            rows.append(row(f"level {level}", "level_accuracy", float(right.mean()), note, system=shown))
    return rows


_LEVEL, _TRACE = r"level (?P<x>\d+)(?:, (?P<line>prompt \d+))?", "trace (?P<x>.+)"
_RIGHT, _ACROSS = "accuracy (share of right answers)", "level (% of the layers' parameters)"
# The paper's: accuracy and times over levels, and accuracy in time of every system.
FIGURES = (
    Figure(name="level_accuracy", metric="level_accuracy", case=_LEVEL, up=_RIGHT, across=_ACROSS),
    Figure(
        name="ttft_ms", metric="ttft_ms", case=_LEVEL, up="time to the first token (ms)", across=_ACROSS,
        log=True,
    ),
    Figure(name="tpot_ms", metric="tpot_ms", case=_LEVEL, up="time per token (ms)", across=_ACROSS, log=True),
    Figure(name="trace_accuracy", metric="accuracy", case=_TRACE, up=_RIGHT, kind="groups"),
    Figure(
        name="trace_right_and_met", metric="right_and_met", case=_TRACE, kind="groups",
        up="share of answers right and in time",
    ),
)  # fmt: skip
draw = functools.partial(draw_figures, "elastic", FIGURES)


def replay_beside_whole(
    service: LLMService, asked: decisions.Asked, requests: int, progress: Progress = silent
) -> tuple[list[Outcome], list[bool]]:
    """Asks the first requests of a trace.

    Returns:
      The outcome of each request, and whether its objective was met at the device's speed at that moment.
    """
    outcomes, speeds = [], []
    some = asked.trace[:requests]
    for done, (request, index) in enumerate(zip(some, asked.indices, strict=False), start=1):
        (whole,) = replay(service, [dataclasses.replace(request, slo=ANYTHING)])
        (ours,) = replay(service, [request])
        outcomes.append(ours)
        taken = np.array([whole.cost.ttft_ms, whole.cost.tpot_ms])
        # Requests that did not fit have no times, and answers of one token no time per further token.
        speeds.append(np.where(taken > 0, taken / [times[index] for times in asked.whole_ms], np.nan))
        progress("replay", done, len(some))
    found = []
    for number, (outcome, index) in enumerate(zip(outcomes, asked.indices, strict=False)):
        # The median speed of the requests before and after it; 1 where there are none.
        near = np.array(speeds[max(0, number - 4) : number + 5]).T
        known = [column[np.isfinite(column)] for column in near]
        ttft, tpot = (float(np.median(each)) if len(each) else 1.0 for each in known)
        whole = Cost(
            ttft_ms=asked.whole_ms[0][index] * ttft,
            tpot_ms=asked.whole_ms[1][index] * tpot,
            tokens=outcome.cost.tokens,
        )
        found.append(outcome.failure is None and meets(outcome.request.slo, outcome.cost, whole))
    return outcomes, found
