"""Registers drafters by name.

A new drafter is a class with the methods of `serving.speculation.drafter.Drafter` and a line in `DRAFTERS`.
"""

from collections.abc import Callable

from jaxllm.errors import ConfigError
from serving.host.progress import Progress
from serving.loading import LoadedModel
from serving.speculation.drafter import Drafter
from serving.speculation.level_drafter import level_drafter
from serving.speculation.model_drafter import model_drafter
from serving.speculation.nested_drafter import nested_drafter
from serving.speculation.ngram_drafter import ngram_drafter
from serving.speculation.options import SpeculationOptions

Making = Callable[[LoadedModel, int, SpeculationOptions, Progress | None], Drafter]

DRAFTERS: dict[str, Making] = {
    "model": model_drafter,
    "ngram": ngram_drafter,
    "level": level_drafter,
    "nested": nested_drafter,
}


def make_drafter(
    target: LoadedModel, level: int, options: SpeculationOptions, progress: Progress | None = None
) -> Drafter:
    """The drafter that options name, for a level of a target.

    Raises:
      ConfigError: no drafter has this name, or it does not fit the target.
    """
    if options.drafter not in DRAFTERS:
        raise ConfigError(f"there is no drafter {options.drafter!r}; there are {', '.join(DRAFTERS)}")
    return DRAFTERS[options.drafter](target, level, options, progress)
