"""Bucket of encoder-decoders: a source is encoded, and projected into a cache."""

import dataclasses

import jax

from jaxllm.config import ModelConfig
from jaxllm.models.encoder_decoder import read_source
from serving.buckets.bucket import SCALAR, Bucket, ModelShapes, ids
from serving.options import EngineOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceBucket(Bucket):
    """Reads a source into an empty cache (see `models.encoder_decoder.read_source`).

    Attributes:
      tokens: length of the source, padding included.
      cache_tokens: length of the cache.
    """

    tokens: int
    cache_tokens: int

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(params, the encoder's, row, valid, cache) -> cache."""
        step = model.jitted(read_source, 4)
        cache = model.cache(self.cache_tokens)
        return step.lower(model.params, model.encoder, ids(1, self.tokens), SCALAR, cache)


def source_lengths(cfg: ModelConfig, options: EngineOptions) -> tuple[int, ...]:
    """The lengths of sources that there are buckets for, ascending: those of prefill chunks, and the longest
    source. None for models without an encoder."""
    longest = options.source_tokens(cfg)
    if not longest:
        return ()
    return (*(each for each in options.chunk_tokens if each < longest), longest)
