"""Makes rows of the trace: right answers and answers in time of every system, and times of the service."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from benchmarks.elastic.bootstrap import lead, said
from benchmarks.elastic.decisions import Asked
from benchmarks.elastic.policies import OURS, Choices
from benchmarks.measuring.report import Row, compared
from jaxllm.elastic.slo import Slo
from serving.planning.safety_margin import CONFIDENCE
from serving.traces.trace import Outcome, totals

ALL = "all six"
# Without <100,100>, which every answer meets.
LIMITED = "the five with a limit"
# Shares of right answers, and of right answers in time.
METRICS = ("accuracy", "right_and_met")


def cases(slos: Iterable[Slo]) -> list[str]:
    """The cases of rows: each objective, those with a limit, and all."""
    known = list(dict.fromkeys(slos))
    limited = [LIMITED] if any(slo.has_limit for slo in known) else []
    return [*map(str, known), *limited, ALL]


def trace_rows(found: Mapping[str, Choices], asked: Asked, remarks: Mapping[str, str]) -> list[Row]:
    """Shares of every system, by objective and over all, ours against each other on the same requests.

    Args:
      found: the choices of each, ours among them.
      asked: the trace.
      remarks: by system, how it ran.
    """
    slos = [request.slo for request in asked.trace]
    rows = []
    for case in cases(slos):
        chosen = np.array([case in cases([slo]) for slo in slos])
        questions = np.asarray(asked.indices)[chosen]
        in_time = {
            system: f"in time by the profiles {each.met[chosen].mean():.1%}" for system, each in found.items()
        }
        for metric in METRICS:
            values = {
                system: (each.right if metric == "accuracy" else each.right_and_met)[chosen]
                for system, each in found.items()
            }
            notes = {}
            for system, each in values.items():
                parts = [said(each, questions)]
                if system != OURS:
                    parts.append(lead(values[OURS], each, questions))
                parts.append(in_time[system])
                notes[system] = "; ".join([*parts, *filter(None, [remarks.get(system)])])
            shares = {system: float(each.mean()) for system, each in values.items()}
            rows += compared(
                shares, ours=OURS, case=f"trace {case}", metric=metric, unit="share", notes=notes
            )
    return rows


def replay_rows(outcomes: Sequence[Outcome], met: Sequence[bool], *, answers: bool = True) -> list[Row]:
    """Rows of requests that the service answered, by objective and over all, timed by the clock.

    Args:
      outcomes: of the requests.
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
        rows += [
            Row(case=f"replay {slo}", system=OURS, metric=metric, value=float(value), unit="share", note=note)
            for metric, value in values.items()
        ]
    return rows


def _share(flags: np.ndarray) -> str:
    return f"{flags.mean():.1%}" if len(flags) else "none"


def planning_rows(outcomes: Sequence[Outcome], asked: Asked, pass_ms: np.ndarray) -> list[Row]:
    """The share of planning in the whole model's time to the first token, in the service; none if no request
    of the replay had to be planned.

    Args:
      outcomes: of the trace's first requests.
      asked: the trace.
      pass_ms: `[N]`, time of the tiny LM's pass over each question.
    """
    whole_ms = asked.whole_ms[0]
    # Without a limit nothing is planned.
    planned = [
        (outcome, index)
        for outcome, index in zip(outcomes, asked.indices, strict=False)
        if outcome.failure is None and outcome.source != "whole"
    ]
    if not planned:
        return []
    share = np.median([outcome.planning_ms / whole_ms[index] for outcome, index in planned])
    alone = np.median([pass_ms[index] / whole_ms[index] for _, index in planned])
    note = (
        f"of the whole model's TTFT, median over {len(planned)} requests of the replay that were planned; "
        f"the tiny LM's pass alone {alone:.1%}"
    )
    return [
        Row(case="planning", system=OURS, metric="ttft_share", value=float(share), unit="share", note=note)
    ]


def level_rows(accuracies: Mapping[str, Mapping[int, np.ndarray]]) -> list[Row]:
    """Accuracy of every level of several bundles that were asked the same questions, the first one ours.

    Args:
      accuracies: by bundle and level, `[N]` bool, whether each question was answered right.
    """
    rows = []
    ours = next(iter(accuracies.values()))
    for name, levels in accuracies.items():
        for level, right in levels.items():
            questions = np.arange(len(right))
            note = said(right, questions)
            if levels is not ours and level in ours:
                note += f"; {lead(ours[level], right, questions)}"
            rows.append(
                Row(
                    case=f"level {level}", system=name, metric="level_accuracy", value=float(right.mean()),
                    unit="share", note=note,
                )
            )  # fmt: skip
    return rows
