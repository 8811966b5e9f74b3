"""Registers drafters by name.

A new drafter is a class with the methods of `jaxllm.serving.speculation.drafter.Drafter` and a line in
`DRAFTERS`, or an entry point of the group `jaxllm.drafters`.
"""

from collections.abc import Callable

from jaxllm.errors import ConfigError
from jaxllm.registry import Registry
from jaxllm.serving.ground.speculation_options import SpeculationOptions
from jaxllm.serving.host.progress import Progress
from jaxllm.serving.speculation.drafter import Drafter, Target
from jaxllm.serving.speculation.level_drafter import level_drafter
from jaxllm.serving.speculation.model_drafter import model_drafter
from jaxllm.serving.speculation.nested_drafter import nested_drafter
from jaxllm.serving.speculation.ngram_drafter import ngram_drafter

Making = Callable[[Target, SpeculationOptions, Progress | None], Drafter]

DRAFTERS: Registry[Making] = Registry(
    "jaxllm.drafters",
    {"model": model_drafter, "ngram": ngram_drafter, "level": level_drafter, "nested": nested_drafter},
)


def make_drafter(target: Target, options: SpeculationOptions, progress: Progress | None = None) -> Drafter:
    """Makes the drafter named by options, for a target.

    Raises:
      ConfigError: no drafter has this name, or it does not support the target.
    """
    if options.drafter not in DRAFTERS:
        raise ConfigError(f"there is no drafter {options.drafter!r}; there are {', '.join(DRAFTERS)}")
    return DRAFTERS[options.drafter](target, options, progress)
