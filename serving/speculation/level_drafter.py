"""Drafts with a low level of the target: no other model, and less of each layer is read."""

from collections.abc import Callable

from jaxllm.config import WHOLE
from jaxllm.elastic.ladder import with_weights
from jaxllm.errors import ConfigError
from jaxllm.models.parameters import Params
from jaxllm.serving.buckets.bucket_table import BucketTable
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.ground.speculation_options import SpeculationOptions
from jaxllm.serving.host.progress import Progress
from jaxllm.serving.runners.level_runner import LevelRunner
from jaxllm.serving.runners.resident import ResidentRunner
from jaxllm.serving.speculation.drafter import Target
from jaxllm.serving.speculation.model_drafter import ModelDrafter
from jaxllm.serving.weights.model_level import ModelLevel
from jaxllm.serving.weights.streamed import StreamedWeights


def level_drafter(
    target: Target, options: SpeculationOptions, progress: Progress | None = None
) -> ModelDrafter:
    """Makes a drafter of one of the target's levels.

    Raises:
      ConfigError: the target does not serve the level, or its weights are streamed in a format of which no
        level can be resident.
    """
    del progress
    if target.streamed is None:
        return ModelDrafter(target.resident_runner(options.level), options)
    runner, streamed = target.runner(options.level), target.streamed
    whole = target.runner(WHOLE).model
    if not isinstance(streamed, StreamedWeights) or runner.model.bucket_level != whole.bucket_level:
        raise ConfigError(
            f"level {options.level} cannot draft while weights are read: that takes int8 or int4 weights and "
            "native kernels; draft with a model of its own, or with ngram"
        )
    return ModelDrafter(streamed_drafting_runner(target, options.level, streamed), options)


def streamed_drafting_runner(target: Target, level: int, streamed: StreamedWeights) -> ResidentRunner:
    """A runner of a level with the weights that stay resident while the target's are streamed."""
    staying = streamed.part_weights()
    whole = target.runner(WHOLE)
    return drafting_runner(
        target.runner(level), whole, lambda weights: with_weights(weights, staying), target.options
    )


def drafting_runner(
    part: LevelRunner, whole: LevelRunner, weights_of: Callable[[Params], Params], options: EngineOptions
) -> ResidentRunner:
    """A runner of a level with drafting weights and its own buckets. It supports no sources.

    Args:
      part: runner of the level.
      whole: runner of the whole model.
      weights_of: maps a level's weights to drafting weights.
      options: options of the drafter.
    """
    shared = ModelLevel(whole.cfg, weights_of(whole.model.weights), options)
    store = part.buckets.store()
    buckets = BucketTable(shared.shapes, store and store.of(shared.cfg, shared.params, options))
    if part.level == WHOLE:
        return ResidentRunner(shared, buckets, encodes=False)
    sharing = shared if part.model.bucket_level == WHOLE else None
    own = ModelLevel(part.cfg, weights_of(part.model.weights), options, level=part.level, whole=sharing)
    if own.bucket_level != WHOLE:
        buckets.add_level(own.level, own.shapes, store and store.of(own.cfg, own.params, options))
    return ResidentRunner(own, buckets)
