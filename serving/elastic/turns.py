"""Chooses the level of a turn in a context; a level other than the context's must recompute all of its
tokens."""

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
    """The largest level that meets the objective, else the nearest one.

    Args:
      costs: expected cost on an idle device, by level, including all recomputation.
      objective: objective of the answer's time.
      whole: cost that ratios refer to.
      margin: learned ratio of measured to expected times; None for the planner's own margin.
      load: load by other calls.
      strict: whether to raise if no level meets the objective.

    Raises:
      ObjectiveMissed: `strict`, and no level meets the objective.
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
