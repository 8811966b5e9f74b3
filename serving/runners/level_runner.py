"""Defines the base of runners of compiled buckets: preparation, caches, first tokens, contexts."""

import abc
import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import jax
import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError, ContextOverflow
from jaxllm.kv.cache import KVCache, Past, TokenPositions
from jaxllm.kv.chunks import LayerChunks
from jaxllm.models.parameters import Params
from jaxllm.sampling import SamplerState
from jaxllm.serving.buckets.bucket import Bucket
from jaxllm.serving.buckets.bucket_table import BucketTable
from jaxllm.serving.buckets.cache import ForkBucket, GrowBucket, StartBucket
from jaxllm.serving.buckets.context import ENCODED_CHUNKS, EncodeBucket, LoadBucket
from jaxllm.serving.buckets.decode import SampleBucket
from jaxllm.serving.buckets.parts import used_heads
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.ground.prompt_rows import PromptRows
from jaxllm.serving.host.progress import Progress
from jaxllm.serving.runners.runner import BatchRunner, PrefillChunk, PrefillMode
from jaxllm.serving.runners.verdict import Verdict
from jaxllm.serving.weights.model_level import ModelLevel
from jaxllm.text.tokenizer_files import MAX_START_TOKENS

if TYPE_CHECKING:
    from jaxllm.speculation.tree import TokenTree


class IntegerPrefill(Protocol):
    """Prefills the prompts of one level in integers, into the caches of decoding.

    Attributes:
      possible: whether the level can prefill in integers.
      floats_too: whether the level can prefill in floats, now or later.
    """

    @property
    def possible(self) -> bool: ...  # noqa: D102

    @property
    def floats_too(self) -> bool: ...  # noqa: D102

    def mode(self, tokens: int) -> PrefillMode:
        """The prefill mode of a prompt of `tokens` tokens."""
        ...

    def chunk_buckets(self, tokens: int, cache: int) -> list[Bucket]:
        """The buckets that prefill chunks of `tokens` tokens into caches of length `cache`."""
        ...

    def prefill_chunks(self, tokens: int) -> list[PrefillChunk]:
        """See `Runner`."""
        ...

    def prefill(
        self, cache: KVCache, tokens: Sequence[int], at: int, chunk: PrefillChunk
    ) -> tuple[jax.Array | None, KVCache]:
        """See `Runner`."""
        ...

    def time_request(self, prompt_tokens: int, max_tokens: int) -> None:
        """Times the stages of one request's prompt, if two processors need it."""
        ...

    def rehearse(self) -> None:
        """Runs each bucket once."""
        ...


class LevelRunner(abc.ABC):
    """Runs one level of a model with compiled buckets (see `Runner`, and `ContextRunner`).

    Attributes:
      model: the level.
      buckets: the compiled buckets of all levels.
      int8: integer prefill; None for float prefill only.
      resident: whether all weights are in memory.
    """

    resident = False
    int8: IntegerPrefill | None = None

    def __init__(self, model: ModelLevel, buckets: BucketTable) -> None:
        self.model, self.buckets = model, buckets

    @property
    def lock(self) -> threading.RLock:
        """Taken by the caller of each method; all levels of a model share it."""
        return self.buckets.lock

    @property
    def cfg(self) -> ModelConfig:
        """The model, or the level's sub-model."""
        return self.model.cfg

    @property
    def options(self) -> EngineOptions:
        """Resolved options of the engine."""
        return self.model.options

    @property
    def level(self) -> int:
        """In percent; 100 is the whole model."""
        return self.model.level

    @property
    def weights_version(self) -> tuple[int, int]:
        """Identifies the weights that computed a cache."""
        return self.model.weights_version

    @property
    def idle_read_s(self) -> float:
        """See `Runner`; 0 without read-ahead."""
        return 0.0

    @property
    def batch(self) -> BatchRunner | None:
        """Batched decoding; None if answers are not batched, as with streamed weights: buckets of single
        layers and experts have a batch of one."""
        return None

    @property
    def prefills_restored(self) -> bool:
        """Whether `prefill_restored` runs a chunk of a prompt layer by layer while its context is restored.
        Not with streamed weights, which compete with stored chunks for storage."""
        return False

    @property
    def params(self) -> Params:
        """The level's parameters."""
        return self.model.params

    def require_usable(self) -> None:
        """See `Runner`."""
        self.buckets.require_usable()

    # -- which buckets it needs -------------------------------------------------------------------

    @abc.abstractmethod
    def all_buckets(self) -> list[Bucket]:
        """All buckets that a request at this level can need."""

    @abc.abstractmethod
    def request_buckets(self, prompt_tokens: int, max_tokens: int) -> list[Bucket]:
        """The buckets of one request: of one cache length and the chunk lengths of its prompt.

        In the order in which the request needs them; of one step the slowest to build first.
        """

    def later_buckets(self, prompt_tokens: int, max_tokens: int) -> list[Bucket]:
        """The `request_buckets` that the first token does not need; possibly none."""
        del prompt_tokens, max_tokens
        return []

    @abc.abstractmethod
    def tree_buckets(self, nodes: int, caches: Sequence[int] | None = None) -> list[Bucket]:
        """The buckets that verify token trees of `nodes` nodes in caches of the lengths `caches`, or of all
        lengths."""

    @abc.abstractmethod
    def embed_bucket(self, tokens: int) -> Bucket:
        """The bucket that embeds `tokens` tokens."""

    @abc.abstractmethod
    def restore_bucket(self, tokens: int, cache: int, layer: int) -> Bucket:
        """The bucket that restores one layer of a context and recomputes `tokens` tokens of it."""

    def grow_buckets(self) -> list[Bucket]:
        """The buckets that move caches into longer ones."""
        pairs, level = itertools.pairwise(self.options.cache_tokens), self.model.bucket_level
        return [GrowBucket(short_tokens=short, long_tokens=long, level=level) for short, long in pairs]

    def fork_buckets(self) -> list[Bucket]:
        """The buckets that copy prefixes of caches (see `fork`); none for encoder-decoders, whose answers
        depend on their source, and for models with states, which have no prefixes."""
        if self.cfg.encoder is not None or self.cfg.states is not None:
            return []
        level = self.model.bucket_level
        return [ForkBucket(cache_tokens=each, level=level) for each in self.options.cache_tokens]

    def context_buckets(self) -> list[Bucket]:
        """The buckets that restore and encode contexts; empty without contexts."""
        options = self.options
        if not options.kv_codec or self.cfg.states is not None:
            # Of models with states chunks are cut and put together on the host.
            return []
        counts = [count * options.kv_chunk_tokens for count in options.recomputed_chunks]
        buckets = [self.embed_bucket(count) for count in counts]
        for cache in options.cache_tokens:
            buckets.append(self._load_bucket(cache))
            for layer in self.model.layer_kinds:
                buckets += [self.restore_bucket(count, cache, layer) for count in counts]
                buckets += [self._encode_bucket(bits, cache, layer) for bits in options.chunk_format.widths]
        return buckets

    def cache_for(self, tokens: int) -> int:
        """The cache length of a request of `tokens` tokens, prompt and answer together."""
        return next(c for c in self.options.cache_tokens if c >= min(tokens, self.options.context_tokens))

    def request_cache(self, prompt_tokens: int, max_tokens: int) -> int:
        """`cache_for` of a request; a source is not in the cache of tokens."""
        begins = prompt_tokens if self.cfg.encoder is None else MAX_START_TOKENS
        return self.cache_for(begins + max_tokens)

    # -- preparing --------------------------------------------------------------------------------

    def fill(
        self, buckets: Iterable[Bucket], progress: Progress | None = None, *, later: Iterable[Bucket] = ()
    ) -> None:
        """Compiles or reads buckets (see `BucketTable.fill`)."""
        self.buckets.fill(buckets, progress, later=later)

    def prepare(self, prompt_tokens: int, max_tokens: int, progress: Progress | None = None) -> None:
        """Prepares one request: waits for the buckets of its first token, and builds the others meanwhile."""
        needed = self.request_buckets(prompt_tokens, max_tokens)
        later = self.later_buckets(prompt_tokens, max_tokens)
        self.fill([each for each in needed if each not in later], progress, later=needed)
        self.time_prompt(prompt_tokens, max_tokens)

    def time_prompt(self, prompt_tokens: int, max_tokens: int) -> None:
        """Times the stages of one prompt if integer prefill schedules by them; its buckets are compiled."""
        if self.int8 is not None:
            self.int8.time_request(prompt_tokens, max_tokens)

    def prepare_trees(
        self, sizes: Iterable[int], progress: Progress | None = None, *, tokens: int | None = None
    ) -> None:
        """Prepares the verification of token trees, in addition to `prepare`.

        Args:
          sizes: numbers of nodes.
          progress: see `BucketTable.fill`.
          tokens: of a request with its answer and a tree; None for caches of all lengths.
        """
        caches = None if tokens is None else [self.cache_for(tokens)]
        self.fill([bucket for nodes in sizes for bucket in self.tree_buckets(nodes, caches)], progress)

    @abc.abstractmethod
    def rehearse(self) -> None:
        """Runs each bucket once; all are compiled.

        XLA:CPU sets up the kernels of a bucket at its first run, which takes as long as many tokens: a
        service does so before its first request.
        """

    # -- answering --------------------------------------------------------------------------------

    def read_source(self, cache: KVCache, tokens: Sequence[int]) -> KVCache:
        """See `Runner`."""
        raise ConfigError("sources are read by models with an encoder")

    @abc.abstractmethod
    def prefill_chunks(self, tokens: int) -> list[PrefillChunk]:
        """See `Runner`."""

    def chunks_in(self, mode: PrefillMode, tokens: int) -> list[PrefillChunk]:
        """See `Runner`."""
        del mode
        return self.prefill_chunks(tokens)

    def prefill_rows(
        self, cache: KVCache, tokens: Sequence[int], at: int, chunk: PrefillChunk, rows: PromptRows
    ) -> tuple[Any, KVCache]:
        """See `Runner`."""
        raise ConfigError("rows in place of tokens take all weights in memory; give more --memory")

    @abc.abstractmethod
    def prefill(
        self, cache: KVCache, tokens: Sequence[int], at: int, chunk: PrefillChunk
    ) -> tuple[Any, KVCache]:
        """See `Runner`."""

    @abc.abstractmethod
    def decode(
        self,
        token: Any,
        cache: KVCache,
        sampler: SamplerState,
        stop_ids: np.ndarray,
        limit: int,
        cached: Sequence[int] = (),
    ) -> tuple[Any, Any, KVCache, SamplerState]:
        """See `Runner`."""

    @abc.abstractmethod
    def verify(
        self,
        tree: "TokenTree",
        cache: KVCache,
        sampler: SamplerState,
        limit: int,
        meanwhile: Callable[[float], bool] | None = None,
    ) -> tuple[Verdict, KVCache, SamplerState]:
        """See `Runner`."""

    def start(self, tokens: int) -> KVCache:
        """See `Runner`."""
        return self.empty_cache(self.capacity_for(tokens))

    def empty_cache(self, capacity: int) -> KVCache:
        """An empty cache of length `capacity`, one of `EngineOptions.cache_tokens`."""
        return self.buckets.get(StartBucket(cache_tokens=capacity, level=self.model.bucket_level))()

    def make_room(self, cache: KVCache, tokens: int) -> KVCache:
        """See `Runner`."""
        caches = self.options.cache_tokens
        target = self.capacity_for(tokens - cache.coded_tokens)
        while (short := cache.capacity_tokens) < target:
            long = caches[caches.index(short) + 1]
            grow = GrowBucket(short_tokens=short, long_tokens=long, level=self.model.bucket_level)
            cache = self.buckets.get(grow)(cache)
        return cache

    def fork(self, cache: KVCache, tokens: int) -> KVCache:
        """Copies the first `tokens` tokens of a cache into a cache of the same length; requires
        `fork_buckets`."""
        bucket = ForkBucket(cache_tokens=cache.capacity_tokens, level=self.model.bucket_level)
        return self.buckets.get(bucket)(cache, np.int32(tokens))

    def capacity_for(self, tokens: int) -> int:
        """The shortest compiled cache length with room for `tokens` positions.

        Raises:
          ContextOverflow: no length has room.
        """
        level = self.model.bucket_level
        ready = [
            length
            for length in self.options.cache_tokens
            if self.buckets.is_ready(StartBucket(cache_tokens=length, level=level))
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

    def expect(self, tokens: np.ndarray) -> None:
        """See `Runner`."""
        del tokens

    # -- contexts ---------------------------------------------------------------------------------

    def load_chunks(self, cache: KVCache, sources: Any, bits: np.ndarray) -> KVCache:
        """See `ContextRunner`."""
        load = self.buckets.get(self._load_bucket(cache.capacity_tokens))
        by_address = not isinstance(sources, tuple)
        return load(used_heads(self.cfg) if by_address else None, cache, sources, bits)

    def encode_chunks(self, cache: KVCache, layer: int, bits: int, numbers: Sequence[int]) -> jax.Array:
        """See `ContextRunner`."""
        encode = self.buckets.get(self._encode_bucket(bits, cache.capacity_tokens, layer))
        padded = np.array([*numbers, *[numbers[0]] * (ENCODED_CHUNKS - len(numbers))], np.int32)
        return encode(cache.past(layer), padded)

    @abc.abstractmethod
    def begin_layers(self, tokens: np.ndarray, at: TokenPositions) -> jax.Array:
        """See `ContextRunner`."""

    @abc.abstractmethod
    def restore_layer(
        self, layer: int, x: jax.Array, at: TokenPositions, past: Past, chunks: LayerChunks
    ) -> tuple[jax.Array, Past]:
        """See `ContextRunner`."""

    def prefill_restored(
        self, layer: int, x: jax.Array, at: TokenPositions, cache: KVCache, chunks: LayerChunks
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

    def _load_bucket(self, cache: int) -> Bucket:
        return LoadBucket(cache_tokens=cache, level=self.model.bucket_level)

    def _encode_bucket(self, bits: int, cache: int, layer: int) -> Bucket:
        model = self.model
        return EncodeBucket(bits=bits, cache_tokens=cache, layer=model.alike[layer], level=model.bucket_level)


def _placed(sampler: SamplerState) -> SamplerState:
    """The sampler with its constant arrays on the device. On a CPU only arrays `[V]`: there a dispatch
    accepts numbers from the host in a tenth of the time of placing them."""
    if isinstance(sampler.bias, jax.Array):
        return sampler
    if jax.default_backend() != "cpu":
        return jax.device_put(sampler.fixed).after(sampler.progress)
    bias, in_prompt = jax.device_put((sampler.bias, sampler.in_prompt))
    return dataclasses.replace(sampler, bias=bias, in_prompt=in_prompt)
