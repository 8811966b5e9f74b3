"""Drafts with a resident model."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxllm.bundle import Bundle
from jaxllm.config import WHOLE
from jaxllm.errors import ConfigError
from jaxllm.kv.cache import KVCache
from jaxllm.models.features import require_room
from jaxllm.serving.engine.request import common_prefix
from jaxllm.serving.ground.bundles import open_model
from jaxllm.serving.ground.speculation_options import SpeculationOptions
from jaxllm.serving.host.progress import Progress
from jaxllm.serving.runners.resident import ResidentRunner
from jaxllm.serving.runners.runner import prefill_prompt
from jaxllm.serving.speculation.drafter import Growing, Target, require_same_kind
from jaxllm.serving.speculation.grower import Confidence, Grower
from jaxllm.serving.speculation.host_tree import on_host, root_alone
from jaxllm.serving.weights.memory_plan import cache_bytes, draft_options
from jaxllm.speculation.tree import TokenTree

# While the target waits for weights, drafting never ends for lack of confidence: the device would be idle.
_ANY_CONFIDENCE = 1e-30
# If there is no room, keep the most confident nodes, up to this share of the room.
_PRUNED_SHARE = 0.75


def model_drafter(
    target: Target, options: SpeculationOptions, progress: Progress | None = None
) -> "ModelDrafter":
    """A drafter with a model of the target's tokenizer.

    Raises:
      ConfigError: its tokenizer differs from the target's.
      CheckpointError: it cannot be opened.
    """
    bundle = open_model(options.model)
    require_same_kind(bundle.path, bundle.cfg, target.bundle.path, target.bundle.cfg)
    require_room(bundle.cfg, "drafter")
    wanted = draft_options(bundle.cfg, options, target.options.context_tokens)
    wanted = dataclasses.replace(wanted, buckets_bytes=target.options.buckets_bytes)
    draft = target.beside(bundle, wanted, progress)
    if not draft.tokenizer.same_tokens(target.tokenizer):
        raise ConfigError(
            f"{bundle.path} has another tokenizer than {target.bundle.path}: a drafter must have the "
            "target's tokens; train one on the target's tokenizer (jaxllm pretrain --tokenizer)"
        )
    return ModelDrafter(draft.resident_runner(WHOLE), options, own=bundle)


class ModelDrafter:
    """Grows trees with a resident model (see `Drafter` and `DrafterMemory`).

    Attributes:
      most_bytes: maximum size of its caches, and of its own weights that can be reloaded from their file.
    """

    def __init__(
        self,
        runner: ResidentRunner,
        options: SpeculationOptions,
        *,
        own: Bundle | None = None,
        greedy_temperature: float = 1.0,
        takes_rows: bool = False,
    ) -> None:
        """Makes the drafter.

        Args:
          runner: runner of the model.
          options: options of speculation.
          own: provider of the model's weights; None for weights of the target.
          greedy_temperature: see `jaxllm.serving.speculation.grower.confidence_temperature`.
          takes_rows: whether it continues from the target's keys and values, if its weights are the
            target's at fewer bits, instead of feeding the tokens itself.
        """
        self._runner, self._shape = runner, options.trees
        self._confidence = Confidence(greedy_temperature, calibrated=options.calibrated)
        self._grower = Grower(runner, options.trees, self._confidence)
        self.times = self._grower.times
        # A drafter of the target's weights has the source as the target has it.
        self._takes_rows, self._encodes = takes_rows, own is not None
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
        self._fed: jax.Array | np.ndarray | None = None
        # The tree before its first pruning, and the current index of each of its nodes, or -1.
        self._whole: TokenTree | None = None
        self._places = np.zeros(0, np.int32)

    @property
    def memory(self) -> "ModelDrafter":
        """See `Drafter`."""
        return self

    @property
    def size_bytes(self) -> int:
        """See `DrafterMemory`."""
        arrays = [leaf for leaf in jax.tree.leaves(self._cache) if leaf.ndim]
        return sum(leaf.nbytes for leaf in arrays) + (0 if self._rests else self._weight_bytes)

    def release(self) -> None:
        """See `DrafterMemory`."""
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
                self._grown([0], 0, Growing(_ANY_CONFIDENCE, 2))
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
        return self._grown(sequence, root, growing, cache), cache

    def _grown(
        self, sequence: Sequence[int], root: int, growing: Growing, target: KVCache | None = None
    ) -> TokenTree:
        runner = self._runner
        full = len(sequence) + 1 + self._shape.room > runner.options.context_tokens
        # Also if the source is longer than the drafter's encoder supports.
        if full or (self._encodes and len(self._source) > runner.options.source_tokens(runner.cfg)):
            self._tree = None
            return root_alone(root, self._shape.room)
        self._rests = False
        self._confidence.use(growing.temperature)
        self._catch_up(sequence, target)
        if self._tree is None or int(np.asarray(self._tree.tokens)[0]) != root:
            self._tree = root_alone(root, self._shape.room)
            self._fed = np.zeros(self._shape.room, bool)
        self._whole, self._stop_ids = None, growing.stop_ids
        self._run(growing, self._shape.room)
        return on_host(self._tree)

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
        cache, self._cache = self._cache, None
        assert self._fed is not None
        self._tree, self._fed, self._cache, missing = self._grower.follow(
            self._tree, self._fed, cache, path=places, token=token
        )
        self._cached += [int(drafted.tokens[node]) for node in path[: len(places) - missing]]

    def _prune(self) -> None:
        cache, self._cache = self._cache, None
        assert self._tree is not None
        assert self._fed is not None
        assert cache is not None
        before, most = self._tree, int(_PRUNED_SHARE * self._shape.room)
        whole = on_host(before)
        self._tree, self._fed, self._cache, places = self._grower.prune(before, self._fed, cache, most)
        if self._whole is None:
            self._whole, self._places = whole, places
        else:
            self._places = np.where(self._places < 0, -1, places[self._places])

    def _run(self, growing: Growing, limit: int, *, hidden: bool = False) -> int:
        """Grows the tree by up to `limit` steps; returns their number."""
        cache, self._cache = self._cache, None
        assert cache is not None
        assert self._tree is not None
        assert self._fed is not None
        self._tree, self._fed, self._cache, count = self._grower.grow(
            self._tree, self._fed, cache, growing, limit, hidden=hidden
        )
        return count

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
        if self._takes_rows and target is not None and has_own_rows(target):
            # Release the old cache first: an empty one has no committed memory yet.
            cache = None
            empty = self._with_source(self._runner.start(room), target)
            self._cache, self._cached = with_rows(empty, target, len(sequence)), list(sequence)
            return
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


def has_own_rows(cache: KVCache) -> bool:
    """Whether a cache has rows of all its tokens, and nothing else of them: no coded chunks and no states."""
    return cache.coded is None and cache.states is None


def with_rows(cache: KVCache, other: KVCache, tokens: int) -> KVCache:
    """A cache with the keys and values of the first tokens of another one, of the same model.

    Args:
      cache: cache to overwrite.
      other: source cache, with its layers in stacks or separate like those of `cache`, of any capacity.
      tokens: number of tokens; both caches have room for them.
    """

    def filled(empty: tuple[jax.Array, ...], layers: list[np.ndarray]) -> tuple[jax.Array, ...]:
        stacks = [np.zeros(each.shape, each.dtype) for each in empty]
        for layer, rows in enumerate(layers):
            if cache.places is None:
                own = stacks[layer]
            else:
                stack, slot = cache.places[layer]
                own = stacks[stack][slot]
            own[..., :tokens, :] = rows[..., :tokens, :]
        return tuple(map(jax.device_put, stacks))

    return dataclasses.replace(
        cache,
        keys=filled(cache.keys, _by_layer(other, other.keys)),
        values=filled(cache.values, _by_layer(other, other.values)),
        length=np.int32(tokens),  # pyright: ignore[reportArgumentType]
    )


def _by_layer(cache: KVCache, rows: tuple[jax.Array, ...]) -> list[np.ndarray]:
    """The keys or the values `[B, K, S, H]` of each layer, without a copy on a CPU."""
    stacks = [np.asarray(each) for each in rows]
    if cache.places is None:
        return stacks
    return [stacks[stack][slot] for stack, slot in cache.places]
