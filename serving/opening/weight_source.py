"""Chooses the source of a model's weights: memory, storage by pieces, or storage expert by expert."""

import logging
from typing import TYPE_CHECKING

from jaxllm.bundle import Bundle
from jaxllm.bundle.levels import require_level
from jaxllm.config import FULL_LEVEL, ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.models.features import require_feature
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.host.allocator import give_back_large_blocks
from jaxllm.serving.host.progress import Progress

if TYPE_CHECKING:
    from jaxllm.serving.experts.weights import ExpertWeights
    from jaxllm.serving.weights.streamed import StreamedWeights

    # Reads weights while the model runs, by pieces or expert by expert.
    Streamed = StreamedWeights | ExpertWeights

_log = logging.getLogger("jaxllm")


def streamed_weights(
    bundle: Bundle,
    options: EngineOptions,
    progress: Progress | None = None,
    *,
    reserved_bytes: int = 0,
    level: ModelConfig | None = None,
    high_planes: bool = False,
) -> "Streamed | None":
    """Streams a model's weights by pieces, or its experts; None if everything fits into the budget, or
    there is none.

    Args:
      bundle: an open bundle.
      options: resolved options.
      progress: see `StreamedWeights`.
      reserved_bytes: bytes of the budget for a drafter.
      level: a level that stays resident.
      high_planes: whether the high planes of nested weights stay resident.

    Raises:
      BudgetExceeded: the budget is too small for streaming, too.
      ConfigError: a loss of experts is allowed, but none is nested; or the head has a bias.
      CheckpointError: the file is damaged or cannot be read.
    """
    if not (options.experts.loss or options.memory_bytes):
        return None
    from jaxllm.serving.weights.memory_plan import (
        MemoryBudget,
        around_experts_bytes,
        fixed_bytes,
        nested_experts,
        runtime_bytes,
    )

    if options.experts.loss and not nested_experts(bundle):
        raise ConfigError(
            f"{bundle.path} has no nested experts that are stored separately, which alone have a high plane "
            "to compute by; make a bundle by `jaxllm prepare HF_DIR --weights int8-nested --expert-bits 8`, "
            "or allow no loss of experts"
        )
    fixed = fixed_bytes(bundle.cfg, options) + reserved_bytes
    fixed += runtime_bytes(options.memory_bytes)
    if bundle.layout.experts_apart:
        fixed += around_experts_bytes(bundle, options)
    if not options.memory_bytes or bundle.weight_bytes + fixed <= options.memory_bytes:
        return None
    require_feature(bundle.cfg, "streamed weights")
    if bundle.cfg.experts and not bundle.layout.experts_apart:
        from jaxllm.bundle import expert_widths

        _log.warning(
            "%s is streamed by whole layers, because its experts are stored together; to read only those "
            "that are visited, lay them apart: jaxllm prepare %s --expert-bits %d -o apart.jaxllm",
            bundle.path,
            bundle.path,
            expert_widths(bundle).max(),
        )
    if bundle.cfg.encoder is not None:
        # Else the scores of a source's pairs of tokens stay, in pieces, when its answer is decoded.
        give_back_large_blocks()
    # Imported here: a start of a model that fits should not wait for it.
    from jaxllm.serving.experts.weights import ExpertWeights
    from jaxllm.serving.weights.resident_part import HighPlanes, LevelMemory
    from jaxllm.serving.weights.streamed import StreamedWeights

    parts = f"a context of {options.context_tokens} tokens, activations, "
    parts += "the draft and the runtime" if reserved_bytes else "and the runtime"
    budget = MemoryBudget(options.memory_bytes, fixed, parts)
    if bundle.layout.experts_apart:
        return ExpertWeights(
            bundle,
            budget,
            storage=options.storage,
            options=options.experts,
            progress=progress,
        )
    part = None if level is None else LevelMemory(bundle, level)
    streamed = StreamedWeights(
        bundle,
        budget,
        storage=options.storage,
        read_ahead=options.read_ahead,
        part=HighPlanes(bundle, options.memory_bytes - fixed) if high_planes else part,
        levels=[require_level(bundle, each) for each in options.levels if each != FULL_LEVEL],
        progress=progress,
    )
    _log.info("%s in a memory of %s: %s", bundle.path, f"{options.memory_bytes:,}", streamed.plan_text())
    return streamed


def budget_with_experts(bundle: Bundle, options: EngineOptions, expert_bytes: int) -> int:
    """The budget of a mixture that leaves `expert_bytes` for its experts; `options` are resolved."""
    from jaxllm.serving.experts.store import hot_bytes
    from jaxllm.serving.weights.memory_plan import around_experts_bytes, fixed_bytes, whole_budget

    fixed = fixed_bytes(bundle.cfg, options) + around_experts_bytes(bundle, options)
    return whole_budget(fixed + hot_bytes(bundle) + expert_bytes)
