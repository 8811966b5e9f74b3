"""Buckets of the whole model and its caches: making caches, prefill, sampling, decoding, batched decoding."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.kv.cache import KVCache, fork, grow
from jaxllm.models.layer import InputEmbeddings
from jaxllm.models.parameters import Params
from jaxllm.sampling import Progress, SamplerState, sample
from jaxllm.serving.buckets.bucket import (
    FLAG,
    SCALAR,
    Bucket,
    CacheBucket,
    ChunkBucket,
    ModelShapes,
    ids,
    with_sampler,
)
from jaxllm.serving.ground.text_stream import MAX_STOP_IDS
from jaxllm.steps.model import BlockEnd, decode_tokens, prefill_chunk


class StartBucket(CacheBucket):
    """Makes an empty cache."""

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


class ForkBucket(CacheBucket):
    """Copies the prefix of a cache into a new one of the same length."""

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(cache, tokens) -> cache."""

        def forked(cache: KVCache, tokens: jax.Array) -> KVCache:
            return fork(cache, model.empty_cache(tokens=self.cache_tokens), tokens)

        # Nothing is donated: the cache stays.
        return jax.jit(forked).lower(model.cache(self.cache_tokens), SCALAR)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillBucket(ChunkBucket):
    """Prefills one chunk of a prompt (see `steps.model.prefill_chunk`).

    Attributes:
      rows: whether prompt embeddings are an input.
    """

    rows: bool = False

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(params, row, valid, last, cache[, inputs]) -> logits, cache."""
        inputs = []
        if self.rows:
            wide = jax.ShapeDtypeStruct((self.tokens, model.cfg.hidden_size), jnp.float32)
            inputs = [InputEmbeddings(wide, jax.ShapeDtypeStruct((self.tokens,), jnp.bool_))]  # pyright: ignore
        shapes = ids(1, self.tokens), SCALAR, FLAG, model.cache(self.cache_tokens)
        return model.lowered(prefill_chunk, *shapes, *inputs, donated=(4,))


class SampleBucket(Bucket):
    """Samples one token from logits (see `sampling.sample`). All levels share it."""

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(logits, sampler's fixed part, its progress) -> token, progress."""
        logits = jax.ShapeDtypeStruct((1, model.cfg.vocab_size), jnp.float32)
        return jax.jit(with_sampler(sample, 1), donate_argnums=(2,)).lower(logits, *model.sampler)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeBucket(CacheBucket):
    """Decodes consecutive tokens in one dispatch (see `steps.model.decode_tokens`).

    Attributes:
      block_tokens: maximum number of tokens per dispatch.
    """

    block_tokens: int

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(params, token, cache, sampler's fixed part, its progress, end) -> tokens, count, cache,
        progress."""
        step = with_sampler(functools.partial(decode_tokens, block=self.block_tokens), 3)
        end: Any = BlockEnd(ids(MAX_STOP_IDS), SCALAR)  # pyright: ignore[reportArgumentType]: shapes
        shapes = ids(1), model.cache(self.cache_tokens), *model.sampler, end
        return model.lowered(step, *shapes, donated=(2, 4))


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchBucket(CacheBucket):
    """Decodes tokens of several sequences in one dispatch (see `steps.batch.decode_rows`).

    Attributes:
      rows: maximum number of sequences; fewer are padded.
      block_tokens: maximum number of tokens per sequence and dispatch.
    """

    rows: int
    block_tokens: int

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(params, tokens, caches, samplers' fixed parts, their progress, limits) -> tokens, counts, caches,
        progress."""
        from jaxllm.steps.batch import Caches, RowLimits, can_mix_levels, decode_rows

        def step(
            params: Params,
            tokens: jax.Array,
            caches: Caches,
            fixed: tuple[SamplerState, ...],
            progress: tuple[Progress, ...],
            limits: RowLimits,
            **static: Any,
        ) -> tuple[jax.Array, jax.Array, Caches, tuple[Progress, ...]]:
            samplers = tuple(own.after(each) for own, each in zip(fixed, progress, strict=True))
            block = self.block_tokens
            found = decode_rows(params, tokens, caches, samplers, limits, block=block, **static)
            sampled, counts, caches, samplers = found
            return sampled, counts, caches, tuple(each.progress for each in samplers)

        units = ids(self.rows, model.cfg.layers, 2) if can_mix_levels(model.params) else None
        limits: Any = RowLimits(ids(self.rows, MAX_STOP_IDS), ids(self.rows), units)  # pyright: ignore
        each_row = model.cache(self.cache_tokens), *model.sampler
        shapes = ids(self.rows), *((each,) * self.rows for each in each_row), limits
        return model.lowered(step, *shapes, donated=(2, 4))
