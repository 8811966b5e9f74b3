"""Drafts with a low level of the target itself: no other model, and less of each layer is read."""

from jaxllm.config import WHOLE
from jaxllm.elastic.submodel import with_weights
from jaxllm.errors import ConfigError
from jaxllm.models.parameters import Params
from serving.buckets.bucket_table import BucketTable
from serving.host.progress import Progress
from serving.loading import LoadedModel
from serving.runners.resident import ResidentRunner
from serving.speculation.model_drafter import ModelDrafter
from serving.speculation.options import SpeculationOptions
from serving.weights.model_level import ModelLevel
from serving.weights.streamed import StreamedWeights


def level_drafter(
    target: LoadedModel, level: int, options: SpeculationOptions, progress: Progress | None = None
) -> ModelDrafter:
    """A drafter that is one of the target's levels.

    Raises:
      ConfigError: the target does not serve the level, or its weights are streamed in a form of
        which no level can stay in memory.
    """
    del level, progress
    if target.streamed is None:
        return ModelDrafter(target.resident_runner(options.level), options)
    runner, streamed = target.runner(options.level), target.streamed
    whole = target.runner(WHOLE).model
    if not isinstance(streamed, StreamedWeights) or runner.model.bucket_level != whole.bucket_level:
        raise ConfigError(
            f"level {options.level} cannot draft while weights are read: that takes int8 or int4 weights and "
            "native kernels; draft with a model of its own, or with ngram"
        )
    return ModelDrafter(drafting_runner(target, options.level, streamed.part_weights()), options)


def drafting_runner(target: LoadedModel, level: int, weights: Params) -> ResidentRunner:
    """A runner of a level with the weights that stay in memory while the target's are streamed."""
    runner, whole = target.runner(level), target.runner(WHOLE).model
    shared = ModelLevel(target.bundle.cfg, with_weights(whole.weights, weights), target.options)
    store = runner.buckets.store()
    buckets = BucketTable(shared.shapes, store and store.of(shared.cfg, shared.params))
    if level == WHOLE:
        return ResidentRunner(shared, buckets)
    part = with_weights(runner.model.weights, weights)
    own = ModelLevel(runner.cfg, part, target.options, level=level, whole=shared)
    return ResidentRunner(own, buckets)
