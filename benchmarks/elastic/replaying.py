"""A trace really asked, beside the whole model in the same minutes.

A ratio is of what the whole model takes. What that is changes from minute to minute on a device that does
other things, too, so the whole model answers every request as well, in turns with ours: its times against its
profile, in the middle of some neighbours, say how fast the device is at that moment.
"""

import dataclasses

import numpy as np

from benchmarks.elastic.decisions import Asked
from serving.objectives import Cost, meets
from serving.progress import Progress
from serving.service import ANYTHING, LLMService
from serving.trace import Outcome, replay

# Requests whose medians say how fast the device is: this one and as many on both sides.
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
      What became of each request, and whether its objective was met as the device was then.
    """
    outcomes, speeds = [], []
    some = asked.trace[:requests]
    for done, (request, place) in enumerate(zip(some, asked.places, strict=False), start=1):
        (whole,) = replay(service, [dataclasses.replace(request, slo=ANYTHING)])
        (ours,) = replay(service, [request])
        outcomes.append(ours)
        taken = np.array([whole.cost.ttft_ms, whole.cost.tpot_ms])
        # What did not fit has no times, and an answer of one token none per further token.
        speeds.append(np.where(taken > 0, taken / [times[place] for times in asked.whole_ms], np.nan))
        if progress is not None:
            progress("replay", done, len(some))
    found = []
    for number, (outcome, place) in enumerate(zip(outcomes, asked.places, strict=False)):
        near = np.array(speeds[max(0, number - _NEIGHBOURS) : number + _NEIGHBOURS + 1])
        ttft, tpot = (_median(column) for column in near.T)
        whole = Cost(
            ttft_ms=asked.whole_ms[0][place] * ttft,
            tpot_ms=asked.whole_ms[1][place] * tpot,
            tokens=outcome.cost.tokens,
        )
        found.append(outcome.failure is None and meets(outcome.request.slo, outcome.cost, whole))
    return outcomes, found


def _median(values: np.ndarray) -> float:
    """Of those that are known; 1 where none is."""
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else 1.0
