"""Chooses the level of a turn in a context, where another level than the context's has to compute all of its
tokens again."""

import dataclasses
from collections.abc import Mapping

from jaxllm.errors import ObjectiveMissed
from jaxllm.serving.elastic.objectives import Objective, overrun
from jaxllm.serving.elastic.planner import IDLE, MARGIN, Load
from jaxllm.serving.elastic.safety_margin import SafetyMargin
from jaxllm.serving.ground.plan import Cost


def level_of_turn(
    costs: Mapping[int, Cost],
    objective: Objective,
    whole: Cost,
    *,
    margin: SafetyMargin | None = None,
    load: Load = IDLE,
    strict: bool = False,
) -> int:
    """The largest level that is in time; where none is, the one that comes nearest.

    Args:
      costs: expected on an idle device, by level, with all that has to be computed.
      objective: of the answer's time.
      whole: cost that ratios are relative to.
      margin: how much later than expected answers come; None for the planner's own margin.
      load: what others take.
      strict: refuse an objective that no level meets.

    Raises:
      ObjectiveMissed: `strict`, and no level is in time.
    """
    base = 1 / MARGIN
    # As the planner does: with confidence, else with less of it, at last by the profile.
    factors = [*([] if margin is None else margin.factors()), (base, base)]
    shares: dict[int, float] = {}
    for ttft, tpot in factors:
        shares = {
            level: float(overrun(objective, _planned(cost, ttft, tpot, load), whole))
            for level, cost in costs.items()
        }
        if fitting := [level for level, share in shares.items() if share <= 1]:
            return max(fitting)
    nearest = min(shares, key=lambda level: (shares[level], -level))
    if strict:
        raise ObjectiveMissed(
            f"no sub-model meets {objective} in this context: level {nearest} comes nearest and takes "
            f"{shares[nearest]:.2f} times as much as is planned for; ask for more time, or without strict"
        )
    return nearest


def _planned(cost: Cost, ttft: float, tpot: float, load: Load) -> Cost:
    return dataclasses.replace(
        cost, ttft_ms=ttft * cost.ttft_ms + load.waiting_ms, tpot_ms=tpot * load.token_share * cost.tpot_ms
    )
