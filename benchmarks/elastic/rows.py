"""The rows of the trace: how right and how much in time every system is, and what the service really took."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from benchmarks.elastic.decisions import Asked
from benchmarks.elastic.resampling import lead, said
from benchmarks.elastic.systems import OURS, Choices
from benchmarks.report import Row, compared
from jaxllm.elastic.slo import Slo
from serving.slack import CONFIDENCE
from serving.trace import Outcome, totals

ALL = "all six"
# Without <100,100>, which every answer meets.
LIMITED = "the five with a limit"
# Of right answers alone, and of those that were in time, too.
METRICS = ("accuracy", "right_and_held")


def cases(slos: Iterable[Slo]) -> list[str]:
    """What requests of these objectives are told by: each objective, those with a limit, and all."""
    known = list(dict.fromkeys(slos))
    limited = [LIMITED] if any(slo.has_limit for slo in known) else []
    return [*map(str, known), *limited, ALL]


def trace_rows(found: Mapping[str, Choices], asked: Asked, remarks: Mapping[str, str]) -> list[Row]:
    """Every system, by objective and in all, ours against each other on the same requests.

    Args:
      found: what each did, ours among them.
      asked: the trace.
      remarks: by system, how it ran.
    """
    slos = [request.slo for request in asked.trace]
    rows = []
    for case in cases(slos):
        chosen = np.array([case in cases([slo]) for slo in slos])
        questions = np.asarray(asked.places)[chosen]
        held = {
            system: f"in time by the tables {each.held[chosen].mean():.1%}" for system, each in found.items()
        }
        for metric in METRICS:
            values = {
                system: (each.right if metric == "accuracy" else each.right_and_held)[chosen]
                for system, each in found.items()
            }
            notes = {}
            for system, each in values.items():
                parts = [said(each, questions)]
                if system != OURS:
                    parts.append(lead(values[OURS], each, questions))
                parts.append(held[system])
                notes[system] = "; ".join([*parts, *filter(None, [remarks.get(system)])])
            shares = {system: float(each.mean()) for system, each in values.items()}
            rows += compared(
                shares, ours=OURS, case=f"trace {case}", metric=metric, unit="share", notes=notes
            )
    return rows


def replay_rows(outcomes: Sequence[Outcome], met: Sequence[bool], *, answers: bool = True) -> list[Row]:
    """What the service really did, by objective and in all: its answers written out, its times by the clock.

    Args:
      outcomes: of the requests.
      met: whether each one's objective was met, as the device was then.
      answers: whether the model that was asked knows any; else times alone are told.
    """
    both = list(zip(outcomes, met, strict=True))
    rows = []
    for slo in cases([outcome.request.slo for outcome in outcomes]):
        pairs = [pair for pair in both if slo in cases([pair[0].request.slo])]
        each = totals([outcome for outcome, _ in pairs])
        held = np.array([kept for _, kept in pairs])
        # Where nothing is in time, what comes nearest was answered.
        possible = np.array([outcome.source not in ("nearest", "failed") for outcome, _ in pairs])
        sure = np.array([outcome.confident for outcome, _ in pairs])
        right = np.array([outcome.right for outcome, _ in pairs])
        note = (
            f"{each.requests} requests really asked, {each.failed} of them failed; {possible.mean():.1%} had "
            f"a choice in time, of which {_share(held[possible])} were; {sure.mean():.1%} had one that is so "
            f"in {CONFIDENCE:.0%} of cases, by how late answers came before, of which {_share(held[sure])} "
            f"were; against the profile alone {each.held:.1%} were in time; level {each.level:.0f} and "
            f"{each.kept_share:.0%} of prompts on average, planning {each.planning_ms:.2f} ms"
        )
        values = {"slo_met": held.mean()}
        if answers:
            values["right_and_held"] = (right & held).mean()
        rows += [
            Row(case=f"replay {slo}", system=OURS, metric=metric, value=float(value), unit="share", note=note)
            for metric, value in values.items()
        ]
    return rows


def _share(flags: np.ndarray) -> str:
    return f"{flags.mean():.1%}" if len(flags) else "none"


def planning_rows(outcomes: Sequence[Outcome], asked: Asked, pass_ms: np.ndarray) -> list[Row]:
    """What planning took of the whole model's time to the first token, in the service; none if no request of
    the replay had to be planned.

    Args:
      outcomes: of the trace's first requests.
      asked: the trace.
      pass_ms: `[N]`, what a pass of the tiny LM over each question takes alone.
    """
    whole_ms = asked.whole_ms[0]
    # An objective with room for everything asks nobody.
    places = [
        (outcome, place)
        for outcome, place in zip(outcomes, asked.places, strict=False)
        if outcome.failure is None and outcome.source != "whole"
    ]
    if not places:
        return []
    share = np.median([outcome.planning_ms / whole_ms[place] for outcome, place in places])
    alone = np.median([pass_ms[place] / whole_ms[place] for _, place in places])
    note = (
        f"of the whole model's TTFT, median over {len(places)} requests of the replay that were planned; the "
        f"tiny LM's pass alone {alone:.1%}"
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
