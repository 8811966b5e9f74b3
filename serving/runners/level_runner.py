"""Defines the base of runners of compiled buckets: the buckets they need, caches, first tokens, contexts.

Buckets of single layers are imported where they are used: without contexts and streamed weights nothing is.
"""

import abc
import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxllm.errors import ContextOverflow
from jaxllm.kv.cache import KVCache, Past, TokenPositions
from jaxllm.models.parameters import Params
from jaxllm.sampling import SamplerState
from jaxllm.serving.buckets.bucket import Bucket
from jaxllm.serving.buckets.bucket_table import BucketTable
from jaxllm.serving.buckets.model import ForkBucket, GrowBucket, SampleBucket, StartBucket
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.host.progress import Progress
from jaxllm.serving.runners.runner import Runner, plan_chunks
from jaxllm.serving.weights.model_level import ModelLevel
from jaxllm.text.tokenizer_files import MAX_START_TOKENS

if TYPE_CHECKING:
    from jaxllm.kv.chunks import LayerChunks


class LevelRunner(Runner):
    """Runs one level of a model with compiled buckets. It also encodes chunks of caches for storage, and
    restores them into other caches (see `jaxllm.serving.contexts`).

    Attributes:
      int8: integer prefill, a `jaxllm.serving.int8_prefill.runner.Int8Prefill`; None for float prefill only.
      resident: whether all weights are in memory.
      sources: source lengths of an encoder-decoder with buckets, ascending; empty for other models.
    """

    options: EngineOptions
    resident = False
    int8: Any = None
    sources: tuple[int, ...] = ()

    def __init__(self, model: ModelLevel, buckets: BucketTable) -> None:
        self.model, self.buckets, self.lock = model, buckets, buckets.lock
        self.cfg, self.options, self.level = model.cfg, model.options, model.level
        if model.cfg.encoder is not None:
            # Here, because few models have encoders, and a start waits for imports.
            from jaxllm.serving.buckets.source import source_lengths

            self.sources = source_lengths(model.cfg, model.options)

    @property
    def weights_version(self) -> tuple[int, int]:
        """See `Runner`."""
        return self.model.weights_version

    @property
    def params(self) -> Params:
        """The level's parameters."""
        return self.model.params

    def require_usable(self) -> None:
        """See `Runner`."""
        self.buckets.require_usable()

    # -- which buckets it needs -------------------------------------------------------------------

    def buckets_for(
        self,
        prompt_tokens: int | None = None,
        max_tokens: int = 0,
        *,
        caches: Sequence[int] = (),
        trees: Sequence[int] = (),
    ) -> list[Bucket]:
        """The buckets of one request, or of any.

        Args:
          prompt_tokens: length of the request's prompt; None for any request.
          max_tokens: length of its answer; 0 if unknown.
          caches: lengths of caches that are used; by default that of the request, or all, between which
            caches can move, with batches and contexts.
          trees: numbers of nodes of token trees to verify.

        Returns:
          Buckets in the order in which a request needs them; of one step the slowest to build first.
        """
        every = prompt_tokens is None and not caches
        if prompt_tokens is None:
            chunks, sources = self.options.chunk_tokens, self.sources
            caches = caches or self.options.cache_tokens
        else:
            sources = self.sources and (_fitting(prompt_tokens, self.sources),)
            # A source is not in the cache of tokens: of the decoder the prompt is the start tokens.
            begins = MAX_START_TOKENS if sources else prompt_tokens
            chunks = plan_chunks(begins, self.options.chunk_tokens)
            caches = caches or (self.cache_for(begins + max_tokens),)
        found: list[Bucket] = []
        for cache in caches:
            found += [each for source in sources for each in self._source_buckets(source, cache)]
            found += [each for chunk in chunks for each in self._chunk_buckets(chunk, cache, prompt_tokens)]
            found += [SampleBucket(), self.model.bucket(StartBucket, cache_tokens=cache)]
            found += [] if max_tokens == 1 else self._decode_buckets(cache)
            found += [each for nodes in trees for each in self._tree_buckets(nodes, cache)]
        if every:
            for short, long in itertools.pairwise(caches):
                found.append(self.model.bucket(GrowBucket, short_tokens=short, long_tokens=long))
            later = [] if self.options.spare_memory else self.later_buckets()
            found += [*later, *self._context_buckets()]
        return list(dict.fromkeys(found))

    def later_buckets(self) -> list[Bucket]:
        """Buckets that a model which spares memory may answer without at first: those of several rows."""
        return [] if self.batch is None else self.batch.buckets()

    @abc.abstractmethod
    def _source_buckets(self, tokens: int, cache: int) -> list[Bucket]:
        """The buckets that read a source of up to `tokens` tokens."""

    @abc.abstractmethod
    def _chunk_buckets(self, tokens: int, cache: int, prompt_tokens: int | None) -> list[Bucket]:
        """The buckets that prefill a chunk of `tokens` tokens, of a prompt of this length, or of any."""

    @abc.abstractmethod
    def _decode_buckets(self, cache: int) -> list[Bucket]:
        """The buckets that decode further tokens."""

    @abc.abstractmethod
    def _tree_buckets(self, nodes: int, cache: int) -> list[Bucket]:
        """The buckets that verify a token tree."""

    @abc.abstractmethod
    def _embed_bucket(self, tokens: int) -> Bucket:
        """The bucket that embeds `tokens` tokens."""

    def _restore_bucket(self, tokens: int, cache: int, layer: int) -> Bucket:
        """The bucket that restores one layer of a context and recomputes `tokens` tokens of it."""
        from jaxllm.serving.buckets.layer import RestoreBucket

        return self.model.bucket(RestoreBucket, tokens=tokens, cache_tokens=cache, layer=layer)

    def fork_buckets(self) -> list[Bucket]:
        """The buckets that copy prefixes of caches (see `fork`); none for encoder-decoders, whose answers
        depend on their source, and for models with states, which have no prefixes."""
        if self.cfg.encoder is not None or self.cfg.states is not None:
            return []
        return [self.model.bucket(ForkBucket, cache_tokens=each) for each in self.options.cache_tokens]

    def _context_buckets(self) -> list[Bucket]:
        """The buckets that restore and encode contexts; empty without contexts."""
        options, bucket, layers = self.options, self.model.bucket, self.model.layer_kinds
        if not options.kv_codec or self.cfg.states is not None:
            # Of models with states chunks are cut and put together on the host.
            return []
        from jaxllm.serving.buckets.layer import (
            EncodeBucket,
            LastLogitsBucket,
            LoadBucket,
            PrefillRestoredBucket,
        )

        counts = [count * options.kv_chunk_tokens for count in options.recomputed_chunks]
        fed = options.chunk_tokens if self.prefills_restored else ()
        found = [self._embed_bucket(count) for count in (*counts, *fed)]
        found += [bucket(LastLogitsBucket, tokens=count) for count in fed]
        for cache in options.cache_tokens:
            found.append(bucket(LoadBucket, cache_tokens=cache))
            for layer in layers:
                where = {"cache_tokens": cache, "layer": layer}
                found += [self._restore_bucket(count, cache, layer) for count in counts]
                found += [bucket(PrefillRestoredBucket, tokens=count, **where) for count in fed]
                found += [bucket(EncodeBucket, bits=bits, **where) for bits in options.chunk_format.widths]
        return found

    def cache_for(self, tokens: int) -> int:
        """The cache length of a request of `tokens` tokens, prompt and answer together."""
        return _fitting(tokens, self.options.cache_tokens)

    # -- preparing --------------------------------------------------------------------------------

    def fill(
        self, buckets: Iterable[Bucket], progress: Progress | None = None, *, later: Iterable[Bucket] = ()
    ) -> None:
        """Compiles or reads buckets (see `BucketTable.fill`)."""
        self.buckets.fill(buckets, progress, later=later)

    def prepare(
        self,
        prompt_tokens: int,
        max_tokens: int,
        progress: Progress | None = None,
        *,
        trees: Sequence[int] = (),
    ) -> None:
        """Prepares one request (see `buckets_for`): waits for the buckets of its first token and of trees,
        and builds the others meanwhile."""
        every = self.buckets_for(prompt_tokens, max_tokens)
        cache = next(each.cache_tokens for each in every if isinstance(each, StartBucket))
        first = self.buckets_for(prompt_tokens, 1, caches=[cache], trees=trees)
        self.fill(first, progress, later=every)
        self.time_prompt(prompt_tokens, max_tokens)

    def time_prompt(self, prompt_tokens: int, max_tokens: int) -> None:
        """Times the stages of one prompt if integer prefill schedules by them; its buckets are compiled."""
        if self.int8 is not None:
            self.int8.time_request(prompt_tokens, max_tokens)

    @abc.abstractmethod
    def rehearse(self) -> None:
        """Runs each bucket once; all are compiled.

        XLA:CPU sets up the kernels of a bucket at its first run, which takes as long as many tokens: a
        service does so before its first request.
        """

    # -- answering --------------------------------------------------------------------------------

    def start(self, tokens: int) -> KVCache:
        """See `Runner`."""
        return self.empty_cache(self.capacity_for(tokens))

    def empty_cache(self, capacity: int) -> KVCache:
        """An empty cache of length `capacity`, one of `EngineOptions.cache_tokens`."""
        return self._compiled(StartBucket, cache_tokens=capacity)()

    def make_room(self, cache: KVCache, tokens: int) -> KVCache:
        """See `Runner`."""
        caches = self.options.cache_tokens
        target = self.capacity_for(tokens - cache.coded_tokens)
        while (short := cache.capacity_tokens) < target:
            long = caches[caches.index(short) + 1]
            cache = self._compiled(GrowBucket, short_tokens=short, long_tokens=long)(cache)
        return cache

    def can_fork(self, cache: KVCache) -> bool:
        """Whether `fork` can begin at once; if not, its bucket is loaded in the background."""
        bucket = self.model.bucket(ForkBucket, cache_tokens=cache.capacity_tokens)
        return self.buckets.begin_loading(bucket)

    def fork(self, cache: KVCache, tokens: int) -> KVCache:
        """Copies the first `tokens` tokens of a cache into a cache of the same length; requires
        `fork_buckets`."""
        return self._compiled(ForkBucket, cache_tokens=cache.capacity_tokens)(cache, np.int32(tokens))

    def capacity_for(self, tokens: int) -> int:
        """The shortest compiled cache length with room for `tokens` positions.

        Raises:
          ContextOverflow: no length has room.
        """
        lengths = self.options.cache_tokens
        ready = [
            each
            for each in lengths
            if self.buckets.is_ready(self.model.bucket(StartBucket, cache_tokens=each))
        ]
        for length in ready:
            if length >= tokens:
                return length
        raise ContextOverflow(
            f"{tokens} tokens do not fit; the longest cache that is ready holds {max(ready, default=0)}"
        )

    def sample(self, logits: jax.Array | np.ndarray, sampler: SamplerState) -> tuple[jax.Array, SamplerState]:
        """See `Runner`."""
        sampler = _placed(sampler)
        token, progress = self.buckets.get(SampleBucket())(logits, sampler.fixed, sampler.progress)
        return token, sampler.after(progress)

    def decode_limit(self, pace: int, remaining: int) -> int:
        """See `Runner`."""
        return min(pace, self.options.decode_block, remaining)

    def _compiled(self, family: type[Bucket], **fields: Any) -> Any:
        """A compiled bucket of this level (see `ModelLevel.bucket`)."""
        return self.buckets.get(self.model.bucket(family, **fields))

    # -- contexts ---------------------------------------------------------------------------------

    @property
    def prefills_restored(self) -> bool:
        """Whether `prefill_restored` runs a chunk of a prompt layer by layer while its context is restored.
        Not with streamed weights, which compete with stored chunks for storage."""
        return False

    def load_chunks(self, cache: KVCache, sources: Any, bits: np.ndarray) -> KVCache:
        """Loads stored chunks into a cache, which is donated, in one dispatch (see
        `jaxllm.steps.layers.load_cache`)."""
        from jaxllm.serving.buckets.layer import LoadBucket

        load = self._compiled(LoadBucket, cache_tokens=cache.capacity_tokens)
        heads = [self.cfg.units(layer).kv_heads for layer in range(self.cfg.layers)]
        # Only sources by address need the used heads.
        used = None if isinstance(sources, tuple) else np.array(heads, np.int32)
        return load(used, cache, sources, bits)

    def encode_chunks(self, cache: KVCache, layer: int, bits: int, numbers: Sequence[int]) -> jax.Array:
        """Encodes chunks of one layer of a cache, which is unchanged, as consecutive bytes.

        Args:
          cache: cache.
          layer: index of the layer.
          bits: bit width of the chunks.
          numbers: numbers of the chunks, at most `ENCODED_CHUNKS`; the bytes after theirs are undefined.
        """
        from jaxllm.serving.buckets.layer import ENCODED_CHUNKS, EncodeBucket

        encode = self._compiled(EncodeBucket, bits=bits, cache_tokens=cache.capacity_tokens, layer=layer)
        padded = np.array([*numbers, *[numbers[0]] * (ENCODED_CHUNKS - len(numbers))], np.int32)
        return encode(cache.past(layer), padded)

    @abc.abstractmethod
    def begin_layers(self, tokens: np.ndarray, at: TokenPositions) -> jax.Array:
        """The first layer's input `[1, T, D]` for the tokens `[T]` of recomputed chunks, which then run
        through `restore_layer` of each layer in turn."""

    @abc.abstractmethod
    def restore_layer(
        self, layer: int, x: jax.Array, at: TokenPositions, past: Past, chunks: "LayerChunks"
    ) -> tuple[jax.Array, Past]:
        """Restores one layer of a context: loads its stored chunks and recomputes others (see
        `jaxllm.steps.layers.restore_layer`).

        Args:
          layer: its index.
          x: its input for the recomputed chunks, `[1, T, D]`; donated.
          at: positions of their tokens.
          past: its keys and values; donated.
          chunks: the stored ones.

        Returns:
          The next layer's input, and this layer's keys and values.
        """

    def prefill_restored(
        self, layer: int, x: jax.Array, at: TokenPositions, cache: KVCache, chunks: "LayerChunks"
    ) -> tuple[jax.Array, KVCache]:
        """Loads a layer's stored chunks, and runs new tokens through it (see
        `jaxllm.steps.layers.prefill_restored`); only where `prefills_restored`.

        Args:
          layer: index of the layer.
          x: its input `[1, T, D]` (see `begin_layers`); donated.
          at: positions of the tokens, consecutive.
          cache: cache; donated.
          chunks: stored chunks.

        Returns:
          The next layer's input, and the cache.
        """
        raise NotImplementedError

    def restored_logits(self, x: jax.Array, row: int) -> jax.Array:
        """Logits `[1, V]` after token `row` of the last layer's output `[1, T, D]` of `prefill_restored`."""
        raise NotImplementedError


def _fitting(tokens: int, lengths: Sequence[int]) -> int:
    """The shortest of ascending lengths with room for `tokens`, or the longest."""
    return next((each for each in lengths if each >= tokens), lengths[-1])


def _placed(sampler: SamplerState) -> SamplerState:
    """The sampler with its constant arrays on the device. On a CPU only arrays `[V]`: there a dispatch
    accepts numbers from the host in a tenth of the time of placing them."""
    if isinstance(sampler.bias, jax.Array):
        return sampler
    if jax.default_backend() != "cpu":
        return jax.device_put(sampler.fixed).after(sampler.progress)
    bias, in_prompt = jax.device_put((sampler.bias, sampler.in_prompt))
    return dataclasses.replace(sampler, bias=bias, in_prompt=in_prompt)
