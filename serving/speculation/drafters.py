"""Registers drafters by name.

A new drafter is a class with the methods of `jaxllm.serving.speculation.drafter.Drafter` and a line in
`DRAFTERS`, or an entry point of the group `jaxllm.drafters`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxllm.config import WHOLE
from jaxllm.elastic.ladder import with_weights
from jaxllm.errors import ConfigError
from jaxllm.models.features import require_room
from jaxllm.models.parameters import Params
from jaxllm.quant.parts import high_planes
from jaxllm.registry import Registry
from jaxllm.serving.buckets.bucket_table import BucketTable
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.ground.speculation_options import SpeculationOptions, TreeShape
from jaxllm.serving.host.progress import Progress
from jaxllm.serving.runners.level_runner import LevelRunner
from jaxllm.serving.runners.resident import ResidentRunner
from jaxllm.serving.speculation.drafter import Drafter, Growing, Target
from jaxllm.serving.speculation.grower import Confidence, Grower
from jaxllm.serving.speculation.host_tree import on_host, root_alone
from jaxllm.serving.speculation.lookup import NgramDrafter
from jaxllm.serving.speculation.model_drafter import ModelDrafter, model_drafter
from jaxllm.serving.weights.model_level import ModelLevel
from jaxllm.serving.weights.resident_parts import require_nested
from jaxllm.serving.weights.streamed import StreamedWeights
from jaxllm.speculation.tree import TokenTree

Making = Callable[[Target, SpeculationOptions, Progress | None], Drafter]
# The temperature at which the high plane's probabilities match the acceptance by a greedy target, measured on
# the packaged models.
_GREEDY_TEMPERATURE = 0.25


def level_drafter(
    target: Target, options: SpeculationOptions, progress: Progress | None = None
) -> ModelDrafter:
    """Makes a drafter of one of the target's levels: no other model, and less of each layer is read.

    Raises:
      ConfigError: the target does not serve the level, or its weights are streamed in a format of which no
        level can be resident.
    """
    if target.streamed is None:
        return ModelDrafter(target.resident_runner(options.level), options)
    runner, streamed = target.runner(options.level), target.streamed
    whole = target.runner(WHOLE).model
    if not isinstance(streamed, StreamedWeights) or runner.model.bucket_level != whole.bucket_level:
        raise ConfigError(
            f"level {options.level} cannot draft while weights are read: that requires int8 or int4 weights "
            "and native kernels; draft with a model of its own, or with ngram"
        )
    return ModelDrafter(_streamed_runner(target, options.level, streamed), options)


def _streamed_runner(target: Target, level: int, streamed: StreamedWeights) -> ResidentRunner:
    """A runner of a level with the weights that stay resident while the target's are streamed."""
    staying = streamed.part_weights()
    return _drafting_runner(
        target.runner(level), target.runner(WHOLE), lambda own: with_weights(own, staying), target.options
    )


def _drafting_runner(
    part: LevelRunner, whole: LevelRunner, weights_of: Callable[[Params], Params], options: EngineOptions
) -> ResidentRunner:
    """A runner of a level with its own buckets and drafting weights, to which `weights_of` maps a level's; it
    supports no sources. `part` is the runner of the level, `whole` that of the whole model."""
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


def nested_drafter(
    target: Target, options: SpeculationOptions, progress: Progress | None = None
) -> "NestedDrafter | ModelDrafter":
    """Makes a drafter with the high planes of the target's weights, or of one of its levels.

    If low planes are streamed, it has its own cache, and drafts on while they are read. It also has one if a
    level's caches have other shapes than the model's, like those of mixtures.

    Raises:
      ConfigError: the target's weights are not nested, or it does not serve the level.
    """
    require_room(target.bundle.cfg, "drafter")
    require_nested(target.bundle)
    drafting, streamed = options.level or WHOLE, target.streamed
    if target.options.attend_coded:
        raise ConfigError("the drafter 'nested' does not attend to stored chunks: leave out attend_coded")
    if streamed is None:
        source, whole = target.resident_runner(drafting), target.resident_runner(WHOLE)
        if source.model.bucket_level == WHOLE:
            return NestedDrafter(source, whole, options)
        runner = _drafting_runner(source, whole, high_planes, _drafting_options(source, options))
        return ModelDrafter(runner, options, greedy_temperature=_GREEDY_TEMPERATURE)
    if not isinstance(streamed, StreamedWeights):
        raise ConfigError("the high planes of experts that are stored apart cannot draft; draft with a model")
    runner, whole = _streamed_runner(target, drafting, streamed), drafting == WHOLE
    return ModelDrafter(runner, options, greedy_temperature=_GREEDY_TEMPERATURE, takes_rows=whole)


def high_planes_runner(target: Target) -> ResidentRunner:
    """A runner of the 4-bit model given by the high planes of a target's weights.

    Raises:
      ConfigError: the target's weights are not nested, or not resident.
    """
    require_nested(target.bundle)
    source = target.resident_runner(WHOLE)
    return _drafting_runner(source, source, high_planes, source.options)


class NestedDrafter:
    """Grows trees with the high planes of the weights of a level, in the target's cache (see `Drafter`).

    Drafting reads half of the target's bytes. The drafter writes the rows of its tree after the sequence in
    the target's cache, where verification then overwrites them: so all rows before a tree are the target's,
    and no prompt is read twice.
    """

    memory = None

    def __init__(self, source: ResidentRunner, whole: ResidentRunner, options: SpeculationOptions) -> None:
        """`source` is the runner of the level whose high planes draft, `whole` that of the whole model."""
        self._shape: TreeShape = options.trees
        self._source, self._version = source, source.weights_version
        self._runner = _drafting_runner(source, whole, high_planes, _drafting_options(source, options))
        self._confidence = Confidence(_GREEDY_TEMPERATURE, calibrated=options.calibrated)
        self._grower = Grower(self._runner, options.trees, self._confidence)
        self.times = self._grower.times
        self._tree = root_alone(0, options.trees.room)

    def warm_up(self, progress: Progress | None = None, *, tokens: int | None = None) -> None:
        """See `Drafter`. Runs every bucket once."""
        longest = self._runner.options.cache_tokens
        caches = longest if tokens is None else (self._runner.cache_for(tokens),)
        self._runner.fill(self._grower.growing_buckets(caches), progress)

    def read(self, source: tuple[int, ...]) -> None:
        """Nothing: the target's cache has the source."""

    def grow(self, sequence: Sequence[int], root: int, growing: Growing, cache: Any) -> tuple[TokenTree, Any]:
        """See `Drafter`."""
        if self._version != self._source.weights_version:
            # The target's weights have changed, for example by an adapter.
            self._runner.model.swap(high_planes(self._source.model.weights))
            self._version = self._source.weights_version
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


def _drafting_options(source: ResidentRunner, options: SpeculationOptions) -> EngineOptions:
    # Attention mass is counted for the target, not for drafts.
    return dataclasses.replace(source.options, trees=options.trees, kv_codec="")


DRAFTERS: Registry[Making] = Registry(
    "jaxllm.drafters",
    {
        "model": model_drafter,
        "ngram": lambda target, options, progress: NgramDrafter(options.trees),
        "level": level_drafter,
        "nested": nested_drafter,
    },
)


def make_drafter(target: Target, options: SpeculationOptions, progress: Progress | None = None) -> Drafter:
    """Makes the drafter named by options, for a target.

    Raises:
      ConfigError: no drafter has this name, or it does not support the target.
    """
    if options.drafter not in DRAFTERS:
        raise ConfigError(f"there is no drafter {options.drafter!r}; there are {', '.join(DRAFTERS)}")
    return DRAFTERS[options.drafter](target, options, progress)
