"""Defines the parts of integer prefill that all levels of a model share."""

import dataclasses
import functools
from collections.abc import Callable

from jaxllm.int8_prefill.schedule import (
    Processor,
    Stage,
    natural_place,
    placed_by_memory,
    stage_operations,
)
from jaxllm.serving.int8_prefill.modes import PrefillModes
from jaxllm.serving.int8_prefill.processors import TwoProcessors
from jaxllm.serving.int8_prefill.stage_bucket import IntegerStageBucket, stage_bytes
from jaxllm.serving.int8_prefill.subgraph_times import SubgraphTimes
from jaxllm.serving.weights.model_level import ModelLevel


@dataclasses.dataclass
class OutlierCounts:
    """Counts of the work of shadows.

    Attributes:
      products: number of products with a shadow.
      channels: total number of channels with outliers.
      enlarged: number of products whose outliers did not fit the smallest compact tensor.
    """

    products: int = 0
    channels: int = 0
    enlarged: int = 0


@dataclasses.dataclass
class Int8Shared:
    """The parts of integer prefill that all levels of a model share.

    Attributes:
      modes: the prefill mode of each prompt.
      processors: processors of the stages; None for only this process's device.
      placed: the processor of a stage of a layer.
      measured: times of stages on two processors.
      outliers: counts of shadows so far.
    """

    modes: PrefillModes
    processors: TwoProcessors | None = None
    placed: Callable[[int, Stage], Processor] = natural_place
    measured: SubgraphTimes = dataclasses.field(
        default_factory=functools.partial(SubgraphTimes, None, IntegerStageBucket)
    )
    outliers: OutlierCounts = dataclasses.field(default_factory=OutlierCounts)


def placed_stages(whole: ModelLevel, modes: PrefillModes) -> Callable[[int, Stage], Processor]:
    """Assigns stages to two processors: to the integer one as many as fit into its memory.

    Raises:
      ConfigError: no stage fits.
    """
    options = whole.options
    if not options.prefill.integer_bytes:
        return natural_place
    return placed_by_memory(
        modes.calibration.shadowed,
        lambda layer, stage: stage_bytes(whole.weights, layer, stage),
        lambda layer, stage: stage_operations(whole.cfg, stage, options.chunk_tokens[-1]),
        options.prefill.integer_bytes,
    )
