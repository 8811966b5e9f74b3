"""Drafts with the high planes of the target's nested weights: no second model, no second cache.

Drafting reads half of the target's bytes. The drafter writes the rows of its tree after the sequence in the
target's cache, where verification then overwrites them: so all rows before a tree are the target's, and no
prompt is read twice.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxllm.config import WHOLE
from jaxllm.errors import ConfigError
from jaxllm.models.features import require_room
from jaxllm.quant.parts import high_planes
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.ground.speculation_options import SpeculationOptions, TreeShape
from jaxllm.serving.host.progress import Progress
from jaxllm.serving.runners.resident import ResidentRunner
from jaxllm.serving.speculation.confidence import Confidence
from jaxllm.serving.speculation.drafter import Growing, Target
from jaxllm.serving.speculation.grower import Grower, GrowingDrafter
from jaxllm.serving.speculation.host_tree import on_host, root_alone
from jaxllm.serving.speculation.level_drafter import drafting_runner, streamed_drafting_runner
from jaxllm.serving.speculation.model_drafter import ModelDrafter
from jaxllm.serving.weights.high_planes import require_nested
from jaxllm.serving.weights.streamed import StreamedWeights
from jaxllm.speculation.tree import TokenTree

# The temperature at which the high plane's probabilities match the acceptance by a greedy target, measured on
# the packaged models.
_GREEDY_TEMPERATURE = 0.25


def nested_drafter(
    target: Target, options: SpeculationOptions, progress: Progress | None = None
) -> "NestedDrafter | ModelDrafter":
    """Makes a drafter with the high planes of the target's weights, or of one of its levels.

    If low planes are streamed, it has its own cache, and drafts on while they are read. It also has one if a
    level's caches have other shapes than the model's, like those of mixtures.

    Raises:
      ConfigError: the target's weights are not nested, or it does not serve the level.
    """
    del progress
    require_room(target.bundle.cfg, "drafter")
    require_nested(target.bundle)
    drafting, streamed = options.level or WHOLE, target.streamed
    if target.options.attend_coded:
        raise ConfigError("the drafter 'nested' does not attend to stored chunks: leave out attend_coded")
    if streamed is None:
        source, whole = target.resident_runner(drafting), target.resident_runner(WHOLE)
        if source.model.bucket_level == WHOLE:
            return NestedDrafter(source, whole, options)
        runner = drafting_runner(source, whole, high_planes, _drafting_options(source, options))
        return ModelDrafter(runner, options, greedy_temperature=_GREEDY_TEMPERATURE)
    if not isinstance(streamed, StreamedWeights):
        raise ConfigError("the high planes of experts that are stored apart cannot draft; draft with a model")
    runner, whole = streamed_drafting_runner(target, drafting, streamed), drafting == WHOLE
    return ModelDrafter(runner, options, greedy_temperature=_GREEDY_TEMPERATURE, takes_rows=whole)


def high_planes_runner(target: Target) -> ResidentRunner:
    """A runner of the 4-bit model given by the high planes of a target's weights.

    Raises:
      ConfigError: the target's weights are not nested, or not resident.
    """
    require_nested(target.bundle)
    source = target.resident_runner(WHOLE)
    return drafting_runner(source, source, high_planes, source.options)


class NestedDrafter(GrowingDrafter):
    """Grows trees with the high planes of the weights of a level, in the target's cache (see `Drafter`)."""

    memory = None

    def __init__(self, source: ResidentRunner, whole: ResidentRunner, options: SpeculationOptions) -> None:
        """Makes the drafter.

        Args:
          source: runner of the level whose high planes draft.
          whole: runner of the whole model.
          options: options of speculation.
        """
        self._shape: TreeShape = options.trees
        self._source, self._version = source, source.weights_version
        self._runner = drafting_runner(source, whole, high_planes, _drafting_options(source, options))
        self._confidence = Confidence(_GREEDY_TEMPERATURE, calibrated=options.calibrated)
        self._grower = Grower(self._runner, options.trees, self._confidence)
        self._tree = root_alone(0, options.trees.room)

    def warm_up(self, progress: Progress | None = None, *, tokens: int | None = None) -> None:
        """See `Drafter`. Runs every bucket once."""
        longest = self._runner.options.cache_tokens
        caches = longest if tokens is None else (self._runner.cache_for(tokens),)
        self._runner.fill(self._grower.trees.growing_buckets(caches), progress)

    def read(self, source: tuple[int, ...]) -> None:
        """Nothing: the target's cache has the source."""
        del source

    def grow(self, sequence: Sequence[int], root: int, growing: Growing, cache: Any) -> tuple[TokenTree, Any]:
        """See `Drafter`."""
        self._follow_swaps()
        self._confidence.use(growing.temperature)
        self._tree = root_alone(root, self._shape.room)
        room = min(growing.most, cache.capacity_tokens - len(sequence), self._shape.room)
        if room < 2:
            return self._tree, cache
        mass = cache.mass
        cache = dataclasses.replace(cache, mass=None, length=np.int32(len(sequence)))
        growing = dataclasses.replace(growing, most=room)
        fed = np.zeros(self._shape.room, bool)
        tree, _, cache, _ = self._grower.grow(self._tree, fed, cache, growing, self._shape.room)
        self._tree = on_host(tree)
        return self._tree, dataclasses.replace(cache, mass=mass)

    def step(self) -> bool:
        """Never grows the tree: its cache is in use, and a target in memory never waits."""
        return False

    def follow(self, path: Sequence[int], token: int) -> None:
        """Learns from the path only: verification has written the accepted tokens' rows."""
        self._confidence.learn(self._tree, path, token)

    def _follow_swaps(self) -> None:
        """Updates to the target's current weights, such as an adapter's."""
        if self._version != self._source.weights_version:
            self._runner.model.swap(high_planes(self._source.model.weights))
            self._version = self._source.weights_version


def _drafting_options(source: ResidentRunner, options: SpeculationOptions) -> EngineOptions:
    # Attention mass is counted for the target, not for drafts.
    return dataclasses.replace(source.options, trees=options.trees, kv_codec="")
