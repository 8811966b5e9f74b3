"""Buckets of caches: making an empty one, moving one into a longer one, and copying a prefix."""

import dataclasses
import functools

import jax

from jaxllm.kv.cache import KVCache, fork, grow
from jaxllm.serving.buckets.bucket import SCALAR, Bucket, ModelShapes


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartBucket(Bucket):
    """Makes an empty cache.

    Attributes:
      cache_tokens: length of the cache (S).
    """

    cache_tokens: int

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """() -> cache."""
        return jax.jit(functools.partial(model.empty_cache, tokens=self.cache_tokens)).lower()


@dataclasses.dataclass(frozen=True, kw_only=True)
class GrowBucket(Bucket):
    """Moves a cache into a longer one.

    Attributes:
      short_tokens, long_tokens: lengths before and after.
    """

    short_tokens: int
    long_tokens: int

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(cache) -> cache."""
        # Nothing is donated: no buffer of the short cache has the size of one of the long cache.
        longer = jax.jit(functools.partial(grow, tokens=self.long_tokens))
        return longer.lower(model.cache(self.short_tokens))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForkBucket(Bucket):
    """Copies the prefix of a cache into a new one.

    Attributes:
      cache_tokens: length of both (S).
    """

    cache_tokens: int

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(cache, tokens) -> cache."""

        def forked(cache: KVCache, tokens: jax.Array) -> KVCache:
            return fork(cache, model.empty_cache(tokens=self.cache_tokens), tokens)

        # Nothing is donated: the cache stays.
        return jax.jit(forked).lower(model.cache(self.cache_tokens), SCALAR)
