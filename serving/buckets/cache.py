"""Buckets of caches: making an empty one, and moving one into a longer one."""

import dataclasses
import functools

import jax

from jaxllm.kv.cache import grow
from serving.buckets.bucket import Bucket, ModelShapes


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
