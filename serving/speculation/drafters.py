"""Drafters with resident models, and the registry of all drafters.

A new drafter is a class with the methods of `jaxllm.serving.speculation.drafter.Drafter` and a line in
`DRAFTERS`, or an entry point of the group `jaxllm.drafters`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxllm.bundle import Bundle
from jaxllm.config import FULL_LEVEL
from jaxllm.elastic.ladder import with_weights
from jaxllm.errors import ConfigError
from jaxllm.kv.cache import KVCache
from jaxllm.models.features import require_feature
from jaxllm.models.parameters import Params
from jaxllm.quant.parts import high_planes
from jaxllm.registry import Registry
from jaxllm.serving.buckets.bucket_table import BucketTable
from jaxllm.serving.engine.request import common_prefix
from jaxllm.serving.ground.bundles import open_model
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.ground.speculation_options import SpeculationOptions
from jaxllm.serving.host.progress import Progress
from jaxllm.serving.runners.level_runner import LevelRunner
from jaxllm.serving.runners.resident import ResidentRunner
from jaxllm.serving.runners.runner import prefill_prompt
from jaxllm.serving.speculation.drafter import Drafter, NgramDrafter, Target, require_same_kind
from jaxllm.serving.speculation.grower import Confidence, Grower, Nodes
from jaxllm.serving.weights.memory_plan import cache_bytes, draft_options
from jaxllm.serving.weights.model_level import ModelLevel, require_nested
from jaxllm.serving.weights.streamed import StreamedWeights
from jaxllm.speculation.token_tree import Growing, TokenTree, on_host, root_alone

# Maps a level's parameters to those that draft.
WeightsOf = Callable[[Params], Params]
# While the target waits for weights, drafting never ends for lack of confidence: the device would be idle.
_ANY_CONFIDENCE = 1e-30
# If there is no room, keep the most confident nodes, up to this share of the room.
_PRUNED_SHARE = 0.75
# The temperature at which the high plane's probabilities match the acceptance by a greedy target, measured on
# the packaged models.
_GREEDY_TEMPERATURE = 0.25


class ModelDrafter(Drafter):
    """Grows trees with a resident model (see `Drafter`). Its memory are its caches, and its own weights that
    can be reloaded from their file."""

    def __init__(
        self,
        runner: ResidentRunner,
        options: SpeculationOptions,
        *,
        own: Bundle | None = None,
        greedy_temperature: float = 1.0,
    ) -> None:
        """Makes the drafter.

        Args:
          runner: runner of the model.
          options: options of speculation.
          own: provider of the model's weights; None for weights of the target.
          greedy_temperature: see `jaxllm.serving.speculation.grower.Confidence`.
        """
        self._runner, self._shape = runner, options.trees
        self._confidence = Confidence(greedy_temperature, calibrated=options.calibrated)
        self._grower = Grower(runner, options.trees, self._confidence)
        self.times = self._grower.times
        # A drafter of the target's weights has the source as the target has it.
        self._encodes = own is not None
        self._own = own if own is not None and own.read_in_place else None
        self._weight_bytes = 0 if self._own is None else self._own.weight_bytes
        self.most_bytes = self._weight_bytes + cache_bytes(runner.cfg, runner.options)
        self._rests = False
        self._stop_ids: tuple[int, ...] = ()
        # The tokens in the cache, and the tree after them.
        self._cached: list[int] = []
        self._cache: KVCache | None = None
        self._source: tuple[int, ...] = ()
        self._version = runner.weights_version
        self._tree: TokenTree | None = None
        self._fed: Nodes | None = None
        # The tree before its first pruning, and the current index of each of its nodes, or -1.
        self._whole: TokenTree | None = None
        self._places = np.zeros(0, np.int32)

    @property
    def size_bytes(self) -> int:
        """See `Drafter`."""
        arrays = [leaf for leaf in jax.tree.leaves(self._cache) if leaf.ndim]
        return sum(leaf.nbytes for leaf in arrays) + (0 if self._rests else self._weight_bytes)

    def release(self) -> None:
        """See `Drafter`."""
        self._forget()
        self._rests = True
        if self._own is not None:
            self._own.release_weights()

    def warm_up(self, progress: Progress | None = None, *, tokens: int | None = None) -> None:
        """See `Drafter`. Runs every bucket once."""
        caches = None if tokens is None else (self._runner.cache_for(tokens + 1 + self._shape.room),)
        self._runner.fill(self._grower.buckets(caches), progress)
        for capacity in caches or self._runner.options.cache_tokens:
            if capacity > self._shape.room:
                self._forget()
                self._cache = self._runner.start(capacity)
                self.grow([0], 0, Growing(_ANY_CONFIDENCE, 2), None)
                self.step()
                self._prune()
                self.follow([0], 0)
        self._forget()
        self._grower.forget()
        self._confidence.forget()

    def read(self, source: tuple[int, ...]) -> None:
        """See `Drafter`; its own encoder reads the source, unless its weights are the target's."""
        if source != self._source:
            self._forget()
            self._source = source

    def grow(self, sequence: Sequence[int], root: int, growing: Growing, cache: Any) -> tuple[TokenTree, Any]:
        """See `Drafter`; it has a cache of its own."""
        runner = self._runner
        full = len(sequence) + 1 + self._shape.room > runner.options.context_tokens
        # Also if the source is longer than the drafter's encoder supports.
        if full or (self._encodes and len(self._source) > runner.options.source_tokens(runner.cfg)):
            self._tree = None
            return root_alone(root, self._shape.room), cache
        self._rests = False
        self._confidence.use(growing.temperature)
        self._catch_up(sequence, cache)
        if self._tree is None or int(np.asarray(self._tree.tokens)[0]) != root:
            self._tree = root_alone(root, self._shape.room)
            self._fed = np.zeros(self._shape.room, bool)
        self._whole, self._stop_ids = None, growing.stop_ids
        self._run(growing, self._shape.room)
        return on_host(self._tree), cache

    def step(self) -> bool:
        """See `Drafter`."""
        if self._tree is None:
            return False
        if int(self._tree.count) >= self._shape.room:
            self._prune()
        # Stop if the tree has enough nodes that are more confident than any that could be added.
        most = int(_PRUNED_SHARE * self._shape.room)
        growing = Growing(_ANY_CONFIDENCE, most, stop_ids=self._stop_ids)
        return self._run(growing, 1, hidden=True) > 0

    def follow(self, path: Sequence[int], token: int) -> None:
        """See `Drafter`."""
        if self._tree is None or self._cache is None:
            return
        drafted = self._whole or on_host(self._tree)
        self._confidence.learn(drafted, path, token)
        places = list(path) if self._whole is None else self._places[np.asarray(path)].tolist()
        if -1 in places:
            # From the first pruned node on, the drafter has nothing of the path.
            dropped = places.index(-1)
            places, token = places[:dropped], int(drafted.tokens[path[dropped]])
        self._tree, self._fed, self._cache, missing = self._grower.follow(
            *self._donated(), path=places, token=token
        )
        self._cached += [int(drafted.tokens[node]) for node in path[: len(places) - missing]]

    def _prune(self) -> None:
        before, most = self._donated(), int(_PRUNED_SHARE * self._shape.room)
        whole = on_host(before[0])
        self._tree, self._fed, self._cache, places = self._grower.prune(*before, most)
        if self._whole is None:
            self._whole, self._places = whole, places
        else:
            self._places = np.where(self._places < 0, -1, places[self._places])

    def _run(self, growing: Growing, limit: int, *, hidden: bool = False) -> int:
        """Grows the tree by up to `limit` steps; returns their number."""
        self._tree, self._fed, self._cache, count = self._grower.grow(
            *self._donated(), growing, limit, hidden=hidden
        )
        return count

    def _donated(self) -> tuple[TokenTree, Nodes, KVCache]:
        """The tree, its `fed`, and the cache, which steps donate."""
        cache, self._cache = self._cache, None
        assert self._tree is not None
        assert self._fed is not None
        assert cache is not None
        return self._tree, self._fed, cache

    def _catch_up(self, sequence: Sequence[int], target: KVCache | None) -> None:
        """Makes the cache match this sequence, of which the target's cache has the rows."""
        if self._version != self._runner.weights_version:
            self._forget()
            self._version = self._runner.weights_version
        common, room = common_prefix(self._cached, sequence), len(sequence) + 1 + self._shape.room
        if common == len(sequence) == len(self._cached) and self._cache is not None:
            self._cache = self._runner.make_room(self._cache, room)
            return
        self._tree = None
        cache, self._cache = self._cache, None
        if cache is None:
            cache, common = self._with_source(self._runner.start(room), target), 0
        cache = self._runner.make_room(cache, room)
        # If the sequence only became shorter, feed its last token again, to set the cache's length.
        common = min(common, len(sequence) - 1)
        _, self._cache = prefill_prompt(self._runner, cache, sequence[common:], common)
        self._cached = list(sequence)

    def _with_source(self, cache: KVCache, target: KVCache | None) -> KVCache:
        """The cache with the source, if there is one."""
        if self._encodes:
            return self._runner.read_source(cache, self._source) if self._source else cache
        if target is None or target.source is None:
            return cache
        # A copy: the target's cache is donated.
        copied = jax.tree.map(lambda each: jax.device_put(np.array(each)), target.source)
        return dataclasses.replace(cache, source=copied)

    def _forget(self) -> None:
        self._cached, self._cache, self._tree = [], None, None


def model_drafter(
    target: Target, options: SpeculationOptions, progress: Progress | None = None
) -> ModelDrafter:
    """A drafter with a model of the target's tokenizer.

    Raises:
      ConfigError: its tokenizer differs from the target's.
      CheckpointError: it cannot be opened.
    """
    bundle = open_model(options.model)
    require_same_kind(bundle.path, bundle.cfg, target.bundle.path, target.bundle.cfg)
    require_feature(bundle.cfg, "drafter")
    wanted = draft_options(bundle.cfg, options, target.options.context_tokens)
    wanted = dataclasses.replace(wanted, buckets_bytes=target.options.buckets_bytes)
    draft = target.beside(bundle, wanted, progress)
    if not draft.tokenizer.same_tokens(target.tokenizer):
        raise ConfigError(
            f"{bundle.path} has another tokenizer than {target.bundle.path}: a drafter must have the "
            "target's tokens; take the high planes of an int8-nested target (nested), or train a model on "
            "its tokenizer (jaxllm pretrain --tokenizer)"
        )
    return ModelDrafter(draft.resident_runner(FULL_LEVEL), options, own=bundle)


def level_drafter(
    target: Target, options: SpeculationOptions, progress: Progress | None = None
) -> ModelDrafter:
    """Makes a drafter of one of the target's levels: no other model, and less of each layer is read.

    Raises:
      ConfigError: the target does not serve the level, or its weights are streamed in a format of which no
        level can be resident.
    """
    streamed = target.streamed
    if streamed is None:
        return ModelDrafter(target.resident_runner(options.level), options)
    part, whole = target.runner(options.level).model, target.runner(FULL_LEVEL).model
    if not isinstance(streamed, StreamedWeights) or part.bucket_level != whole.bucket_level:
        raise ConfigError(
            f"level {options.level} cannot draft while weights are read: that requires int8 or int4 weights "
            "and native kernels; draft with a model of its own, or with ngram"
        )
    level, staying = target.runner(options.level), streamed.part_weights()
    runner = _drafting_runner(
        level, target.runner(FULL_LEVEL), lambda own: with_weights(own, staying), target.options
    )
    return ModelDrafter(runner, options)


def _drafting_runner(
    part: LevelRunner, whole: LevelRunner, weights_of: WeightsOf, options: EngineOptions
) -> ResidentRunner:
    """A runner of a level with its own buckets and drafting weights, to which `weights_of` maps a level's; it
    supports no sources. `part` is the runner of the level, `whole` that of the whole model."""
    shared = ModelLevel(whole.cfg, weights_of(whole.model.weights), options)
    store = part.buckets.store()
    buckets = BucketTable(shared.shapes, store and store.of(shared.cfg, shared.params, options))
    if part.level == FULL_LEVEL:
        return ResidentRunner(shared, buckets, encodes=False)
    sharing = shared if part.model.bucket_level == FULL_LEVEL else None
    own = ModelLevel(part.cfg, weights_of(part.model.weights), options, level=part.level, whole=sharing)
    if own.bucket_level != FULL_LEVEL:
        buckets.add_level(own.level, own.shapes, store and store.of(own.cfg, own.params, options))
    return ResidentRunner(own, buckets)


def nested_drafter(
    target: Target, options: SpeculationOptions, progress: Progress | None = None
) -> "NestedDrafter | ModelDrafter":
    """Makes a drafter with the high planes of the target's weights, or of one of its levels.

    It has a cache of its own if a level's caches have other shapes than the model's, like those of mixtures.

    Raises:
      ConfigError: the target's weights are not nested, or it does not serve the level.
    """
    require_feature(target.bundle.cfg, "drafter")
    require_nested(target.bundle)
    streamed = target.streamed
    if target.options.attend_quantized_kv:
        raise ConfigError(
            "the drafter 'nested' does not attend to stored chunks: leave out attend_quantized_kv"
        )
    if streamed is not None and not isinstance(streamed, StreamedWeights):
        raise ConfigError(
            "the high planes of experts that are stored separately cannot draft; draft with a model"
        )
    # Of streamed weights also the head's low plane, if there is memory for it.
    staying = {} if streamed is None else streamed.part_weights()

    def weights_of(own: Params) -> Params:
        return with_weights(high_planes(own), staying)

    source, whole = target.runner(options.level or FULL_LEVEL), target.runner(FULL_LEVEL)
    if source.model.bucket_level == FULL_LEVEL:
        return NestedDrafter(source, whole, options, weights_of)
    runner = _drafting_runner(source, whole, weights_of, _drafting_options(source, options))
    return ModelDrafter(runner, options, greedy_temperature=_GREEDY_TEMPERATURE)


def high_planes_runner(target: Target) -> ResidentRunner:
    """A runner of the 4-bit model given by the high planes of a target's weights.

    Raises:
      ConfigError: the target's weights are not nested, or not resident.
    """
    require_nested(target.bundle)
    source = target.resident_runner(FULL_LEVEL)
    return _drafting_runner(source, source, high_planes, source.options)


class NestedDrafter(Drafter):
    """Grows trees with the high planes of the weights of a level, in the target's cache (see `Drafter`).

    Drafting reads half of the target's bytes. The drafter writes the rows of its tree after the sequence in
    the target's cache, where verification then overwrites them: so all rows before a tree are the target's,
    no prompt is read twice, and no memory is needed for another cache. For the same reason no tree grows
    while a streamed target is verified: that gains less than as many bytes of low planes in memory do.
    """

    def __init__(
        self, source: LevelRunner, whole: LevelRunner, options: SpeculationOptions, weights_of: WeightsOf
    ) -> None:
        """Makes the drafter.

        Args:
          source: runner of the level whose high planes draft.
          whole: runner of the whole model.
          options: options of speculation.
          weights_of: maps the level's parameters to those that draft.
        """
        self._shape, self._weights_of = options.trees, weights_of
        self._source, self._version = source, source.weights_version
        self._runner = _drafting_runner(source, whole, weights_of, _drafting_options(source, options))
        self._confidence = Confidence(_GREEDY_TEMPERATURE, calibrated=options.calibrated)
        self._grower = Grower(self._runner, options.trees, self._confidence)
        self.times = self._grower.times
        self._tree = root_alone(0, options.trees.room)

    def warm_up(self, progress: Progress | None = None, *, tokens: int | None = None) -> None:
        """See `Drafter`. Runs every bucket once."""
        longest = self._runner.options.cache_tokens
        caches = longest if tokens is None else (self._runner.cache_for(tokens),)
        self._runner.fill([self._grower.draft_bucket(cache) for cache in caches], progress)

    def grow(self, sequence: Sequence[int], root: int, growing: Growing, cache: Any) -> tuple[TokenTree, Any]:
        """See `Drafter`."""
        if self._version != self._source.weights_version:
            # The target's weights have changed, for example by an adapter.
            model = self._runner.model
            model.put(model.prepared(self._weights_of(self._source.model.weights)))
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

    def follow(self, path: Sequence[int], token: int) -> None:
        """Learns from the path only: verification has written the accepted tokens' rows."""
        self._confidence.learn(self._tree, path, token)


def _drafting_options(source: LevelRunner, options: SpeculationOptions) -> EngineOptions:
    # Attention mass is counted for the target, not for drafts.
    return dataclasses.replace(source.options, trees=options.trees, kv_codec="")


Making = Callable[[Target, SpeculationOptions, Progress | None], Drafter]
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
