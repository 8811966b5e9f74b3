"""Drafting with a low level of the target itself: no other model, and no memory for one."""

from jaxllm.errors import ConfigError
from serving.buckets import BucketTable
from serving.engine import Engine
from serving.graph_table import Progress
from serving.speculative.model_drafter import ModelDrafter
from serving.speculative.options import SpeculationOptions


def level_drafter(
    target: Engine, options: SpeculationOptions, progress: Progress | None = None
) -> ModelDrafter:
    """A drafter that is one of the target's levels.

    Raises:
      ConfigError: the target does not serve the level, or its weights are not in memory.
    """
    del progress
    table = target.table.at(options.level)
    if not isinstance(table, BucketTable):
        raise ConfigError(
            f"level {options.level} cannot draft: the target's weights are read while it runs; draft with a "
            "model of its own, or with ngram"
        )
    return ModelDrafter(table, options.trees)
