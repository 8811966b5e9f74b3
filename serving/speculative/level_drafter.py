"""Drafting with a low level of the target itself: no other model, and less of each layer to be read."""

import dataclasses

from jaxllm.config import WHOLE
from jaxllm.elastic.submodel import CountedSubModel
from jaxllm.errors import ConfigError
from serving.buckets import BucketTable
from serving.engine import Engine
from serving.progress import Progress
from serving.speculative.model_drafter import ModelDrafter
from serving.speculative.options import SpeculationOptions
from serving.streaming.weights import StreamedWeights


def level_drafter(
    target: Engine, options: SpeculationOptions, progress: Progress | None = None
) -> ModelDrafter:
    """A drafter that is one of the target's levels.

    Raises:
      ConfigError: the target does not serve the level, or its weights are read in a way that no level can
        stay in memory.
    """
    del progress
    table = target.table.at(options.level)
    if isinstance(table, BucketTable):
        return ModelDrafter(table, options.trees)
    streamed, whole, part = target.streamed, target.table.at(WHOLE).params, table.params
    if (
        not isinstance(streamed, StreamedWeights)
        or not isinstance(whole, CountedSubModel)
        or not isinstance(part, CountedSubModel)
    ):
        raise ConfigError(
            f"level {options.level} cannot draft while weights are read: that takes int8 or int4 weights and "
            "native kernels; draft with a model of its own, or with ngram"
        )
    weights = streamed.level_weights()
    resident = BucketTable(
        target.bundle.cfg, dataclasses.replace(whole, whole=weights), target.options, table.store
    )
    part = dataclasses.replace(part, whole=weights)
    return ModelDrafter(resident.add_level(options.level, table.cfg, part, same_graphs=True), options.trees)
