"""Which graphs requests need: the buckets of one level, by kind and length."""

import abc
import dataclasses
import itertools
from collections.abc import Iterable

from jaxllm.config import Bucket, Kind
from jaxllm.errors import ConfigError
from serving.chunks import plan_chunks
from serving.options import EngineOptions
from serving.speculative.options import TreeShape

# Chunks that are encoded in one dispatch.
ENCODED_CHUNKS = 8


class BucketPlan(abc.ABC):
    """The buckets that answer requests.

    Attributes:
      options: resolved options.
      graphs_level: the level whose graphs are run.
    """

    options: EngineOptions
    graphs_level: int

    @property
    @abc.abstractmethod
    def alike(self) -> tuple[int, ...]:
        """Of each layer the first one that shares its graphs of one layer."""

    def all_buckets(self) -> list[Bucket]:
        """Every bucket that answering any request at this level can need."""
        caches = self.options.cache_tokens
        buckets = [Bucket(kind="sample")]
        for cache in caches:
            buckets.append(self._start_bucket(cache))
            buckets.append(self._decode_bucket(cache))
            buckets += [self._prefill_bucket(chunk, cache) for chunk in self.options.chunk_tokens]
        buckets += self._grow_buckets()
        return buckets + (self.context_buckets() if self.options.kv_codec else [])

    def context_buckets(self) -> list[Bucket]:
        """The buckets that bring contexts back and store them."""
        caches, counts = self.options.cache_tokens, self.options.recomputed_chunks
        layers = sorted(set(self.alike))
        buckets = [self.embed_bucket(count) for count in counts]
        for cache in caches:
            buckets.append(self.load_bucket(cache))
            for layer in layers:
                buckets += [self.restore_bucket(count, cache, layer) for count in counts]
                buckets += [
                    self.encode_bucket(bits, cache, layer) for bits in self.options.chunk_format.widths
                ]
        return buckets

    def draft_buckets(self) -> list[Bucket]:
        """The buckets that grow token trees, besides those that feed the draft."""
        return [
            bucket
            for cache in self.options.cache_tokens
            for bucket in (self.draft_bucket(cache), self.follow_bucket(cache))
        ]

    def load_bucket(self, cache: int) -> Bucket:
        """The bucket that puts stored chunks into all layers of a cache."""
        return self._bucket("load", 0, cache)

    def embed_bucket(self, chunks: int) -> Bucket:
        """The bucket that embeds the tokens of some chunks."""
        return self._bucket("embed", chunks * self.options.kv_chunk_tokens, 0)

    def restore_bucket(self, chunks: int, cache: int, layer: int) -> Bucket:
        """The bucket that brings one layer back, and computes some chunks of it."""
        bucket = self._bucket("restore", chunks * self.options.kv_chunk_tokens, cache)
        return dataclasses.replace(bucket, layer=self.alike[layer])

    def encode_bucket(self, bits: int, cache: int, layer: int) -> Bucket:
        """The bucket that stores some chunks of one layer."""
        bucket = self._bucket("encode", ENCODED_CHUNKS * self.options.kv_chunk_tokens, cache)
        return dataclasses.replace(bucket, layer=self.alike[layer], bits=bits)

    def request_buckets(self, prompt_tokens: int, max_tokens: int) -> list[Bucket]:
        """The fewest buckets that answer one request: one cache length, the chunks of its prompt.

        They come in the order in which the request needs them, the slowest to build of a step first.
        """
        cache = self.cache_for(prompt_tokens + max_tokens)
        chunks = dict.fromkeys(plan_chunks(prompt_tokens, self.options.chunk_tokens))
        return [
            *(self._prefill_bucket(chunk, cache) for chunk in chunks),
            Bucket(kind="sample"),
            self._start_bucket(cache),
            *([] if max_tokens == 1 else [self._decode_bucket(cache)]),
        ]

    def score_buckets(self, window_tokens: int) -> list[Bucket]:
        """The buckets that score text in windows of `window_tokens`."""
        cache = next(c for c in self.options.cache_tokens if c >= window_tokens)
        return [
            self._start_bucket(cache),
            self._score_bucket(cache),
        ]

    def ends_buckets(self, cache: int) -> list[Bucket]:
        """The buckets that score what may follow a prompt in a cache of a length."""
        return [self._score_bucket(cache, chunk) for chunk in self.options.chunk_tokens]

    def branches_bucket(self, tokens: int) -> Bucket:
        """The bucket that scores documents with many ends, in rows of `tokens`."""
        rows = max(1, self.options.score_tokens // tokens)
        return Bucket(kind="branches", tokens=tokens, rows=rows, level=self.graphs_level)

    def routing_bucket(self, tokens: int, rows: int = 1) -> Bucket:
        """The bucket that says which experts the tokens of rows of documents visit."""
        return Bucket(kind="routing", tokens=tokens, rows=rows, level=self.graphs_level)

    def cache_for(self, tokens: int) -> int:
        """The cache length of a request of so many tokens, the answer's among them."""
        return next(c for c in self.options.cache_tokens if c >= min(tokens, self.options.context_tokens))

    def of_cache(self, buckets: Iterable[Bucket], cache: int) -> list[Bucket]:
        """Those that serve one length of cache: its own, and those that have to do with none."""
        return [each for each in buckets if each.cache_tokens in (0, cache) and each.kind != "grow"]

    def _grow_buckets(self) -> list[Bucket]:
        return [self._grow_bucket(*pair) for pair in itertools.pairwise(self.options.cache_tokens)]

    def _decode_bucket(self, cache: int) -> Bucket:
        return self._bucket("decode", self.options.decode_block, cache)

    def _prefill_bucket(self, chunk: int, cache: int) -> Bucket:
        return self._bucket("prefill", chunk, cache)

    def _score_bucket(self, cache: int, chunk: int | None = None) -> Bucket:
        return self._bucket("score", chunk or self.options.chunk_tokens[-1], cache)

    @property
    def _trees(self) -> TreeShape:
        trees = self.options.trees
        if trees is None:
            raise ConfigError("this engine has no graphs for token trees; name EngineOptions.trees")
        return trees

    def draft_bucket(self, cache: int) -> Bucket:
        """The bucket that grows a token tree behind a cache."""
        return self._bucket("draft", self._trees.room, cache)

    def follow_bucket(self, cache: int) -> Bucket:
        """The bucket that brings a draft's cache and tree behind what was accepted."""
        return self._bucket("follow", self._trees.room, cache)

    def _norm_bucket(self, tokens: int, rows: int) -> Bucket:
        return Bucket(kind="norm", tokens=tokens, rows=rows)

    def _head_bucket(self, rows: int, count: int) -> Bucket:
        return Bucket(kind="head", rows=rows, bits=count)

    def _start_bucket(self, cache: int) -> Bucket:
        return self._bucket("start", 0, cache)

    def _grow_bucket(self, short: int, long: int) -> Bucket:
        return self._bucket("grow", short, long)

    def _bucket(self, kind: Kind, tokens: int, cache: int) -> Bucket:
        return Bucket(kind=kind, tokens=tokens, cache_tokens=cache, level=self.graphs_level)
