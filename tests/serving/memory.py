"""Budgets of memory for a share of an engine's weights."""

import dataclasses

from jaxllm import Engine
from jaxllm.serving.ground.speculation_options import SpeculationOptions
from jaxllm.serving.weights.memory_plan import drafter_bytes, fixed_bytes, whole_budget


def budget(engine: Engine, share: float, speculation: SpeculationOptions | None = None) -> int:
    """Memory for a share of an engine's weights, and all else, a drafter among it."""
    options = engine.options
    if speculation is not None:
        options = dataclasses.replace(options, trees=speculation.trees)
    fixed = fixed_bytes(engine.cfg, options) + int(share * engine.model.bundle.weight_bytes)
    if speculation is not None:
        fixed += drafter_bytes(speculation, options.context_tokens, engine.cfg)
    return whole_budget(fixed)
