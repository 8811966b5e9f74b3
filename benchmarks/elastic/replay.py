"""Replays a trace on the service, in turns with the whole model.

Objectives are shares of the whole model's times, which change from minute to minute on a busy device. So the
whole model answers every request as well: its times against its profile, by the median over neighbouring
requests, say how fast the device is at that moment.
"""

import dataclasses

import numpy as np

from benchmarks.elastic.decisions import Asked
from serving.host.progress import Progress
from serving.planned_service import ANYTHING
from serving.planning.objectives import Cost, meets
from serving.service import LLMService
from serving.traces.trace import Outcome, replay

# Requests before and after one whose median speed is taken.
_NEIGHBOURS = 4


def replay_beside_whole(
    service: LLMService, asked: Asked, requests: int, progress: Progress | None = None
) -> tuple[list[Outcome], list[bool]]:
    """Asks the first requests of a trace.

    Args:
      service: with our planner.
      asked: the trace.
      requests: how many of it.
      progress: called with ("replay", requests done, requests in all).

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
        if progress is not None:
            progress("replay", done, len(some))
    found = []
    for number, (outcome, index) in enumerate(zip(outcomes, asked.indices, strict=False)):
        near = np.array(speeds[max(0, number - _NEIGHBOURS) : number + _NEIGHBOURS + 1])
        ttft, tpot = (_median(column) for column in near.T)
        whole = Cost(
            ttft_ms=asked.whole_ms[0][index] * ttft,
            tpot_ms=asked.whole_ms[1][index] * tpot,
            tokens=outcome.cost.tokens,
        )
        found.append(outcome.failure is None and meets(outcome.request.slo, outcome.cost, whole))
    return outcomes, found


def _median(values: np.ndarray) -> float:
    """The median of the finite values; 1 where there are none."""
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else 1.0
