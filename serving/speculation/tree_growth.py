"""Grows token trees with a resident model, and follows the accepted paths."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxllm.kv.cache import KVCache
from jaxllm.serving.buckets.bucket import Bucket
from jaxllm.serving.buckets.tree import DraftBucket, FollowBucket, PruneBucket
from jaxllm.serving.ground.speculation_options import TreeShape
from jaxllm.serving.runners.resident import ResidentRunner
from jaxllm.serving.weights.model_level import AnyBucket
from jaxllm.speculation.tree import TokenTree
from jaxllm.steps.trees import DraftEnd

Nodes = jax.Array | np.ndarray
_FOLLOWING = (FollowBucket, PruneBucket)


class TreeGrowth:
    """Runs the steps of one drafter's trees.

    Attributes:
      runner: runner of the drafter's model.
      shape: shape of its trees.
    """

    def __init__(self, runner: ResidentRunner, shape: TreeShape) -> None:
        self.runner, self.shape = runner, shape

    def buckets(self, caches: Sequence[int] | None = None) -> list[Bucket]:
        """The buckets that draft in caches of the lengths `caches`, or of all lengths."""
        found = self.runner.buckets_for(caches=caches or ())
        for cache in caches or self.runner.options.cache_tokens:
            found += [self._draft_bucket(cache), *(self._bucket(each, cache) for each in _FOLLOWING)]
        return found

    def growing_buckets(self, caches: Sequence[int]) -> list[Bucket]:
        """The buckets that grow token trees in caches of these lengths, which are filled by others."""
        return [self._draft_bucket(cache) for cache in caches]

    def draft(
        self, tree: TokenTree, fed: Nodes, cache: KVCache, end: DraftEnd
    ) -> tuple[TokenTree, jax.Array, KVCache, jax.Array]:
        """Grows a token tree after the sequence in the cache (see `steps.drafting.draft`).

        Args:
          tree: token tree; donated.
          fed: `[M]` bool, nodes whose keys and values the cache has; donated.
          cache: cache; donated.
          end: end of drafting.

        Returns:
          The tree, `fed`, the cache, and the number of runs, int32 scalar.
        """
        compiled = self.runner.buckets.get(self._draft_bucket(cache.capacity_tokens))
        return compiled(self.runner.model.params, tree, fed, cache, end)

    def follow(
        self, tree: TokenTree, fed: Nodes, cache: KVCache, *, path: Sequence[int], token: int
    ) -> tuple[TokenTree, jax.Array, KVCache, int]:
        """Moves cache and tree to the end of the accepted path (see `steps.trees.follow`).

        Args:
          tree, fed: see `draft`; not donated.
          cache: cache; donated.
          path: accepted nodes.
          token: the target's token after them.

        Returns:
          The tree, `fed`, the cache, and the number of the path's last nodes that it lacks.
        """
        nodes = np.full(self.shape.room, path[-1], np.int32)
        nodes[: len(path)] = path
        compiled = self.runner.buckets.get(self._bucket(FollowBucket, cache.capacity_tokens))
        cache, tree, fed, missing = compiled(cache, tree, fed, nodes, np.int32(len(path)), np.int32(token))
        return tree, fed, cache, int(missing)  # pyright: ignore[reportReturnType]: of the device

    def prune(
        self, tree: TokenTree, fed: Nodes, cache: KVCache, most: int
    ) -> tuple[TokenTree, jax.Array, KVCache, np.ndarray]:
        """Keeps the `most` most confident nodes of a tree of `draft` (see `steps.trees.prune`); the cache is
        donated. Returns the tree, `fed`, the cache, and each node's new index, -1 if it was dropped."""
        compiled = self.runner.buckets.get(self._bucket(PruneBucket, cache.capacity_tokens))
        cache, left, fed_then, places = compiled(cache, tree, fed, np.int32(most))
        return left, fed_then, cache, np.asarray(places)

    def _draft_bucket(self, cache: int) -> DraftBucket:
        return self._bucket(DraftBucket, cache, growth=self.shape.growth)

    def _bucket(self, family: type[AnyBucket], cache: int, **fields: Any) -> AnyBucket:
        return self.runner.model.bucket(family, tokens=self.shape.room, cache_tokens=cache, **fields)
