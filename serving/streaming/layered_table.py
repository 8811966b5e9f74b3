"""Running a model layer by layer: the same calls as with all of its weights in memory.

Where layers, and the rows of the tables of tokens, come from is for the tables that stand on this one.
"""

import abc
import contextlib
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Protocol

import jax
import numpy as np

from jaxllm.config import Bucket, ModelConfig
from jaxllm.elastic.submodel import CountedSubModel
from jaxllm.kv.cache import KVCache, Places, TreeRows
from jaxllm.models.parameters import Params
from jaxllm.quant import Weight
from jaxllm.sampling import SamplerState, Sampling, sampler_state
from jaxllm.speculative.tree import TokenTree
from serving.chunks import placed_chunks, plan_chunks
from serving.graph_store import GraphStore
from serving.graph_table import GraphTable
from serving.lowering import embedding_params, norm_params
from serving.machine import give_back_memory
from serving.options import EngineOptions
from serving.progress import Progress
from serving.speculative.verdict import Verdict
from serving.streaming.pieces import HeadPiece
from serving.streaming.weight_stream import Meanwhile


class Head(Protocol):
    """What brings the table that gives logits.

    Attributes:
      head: its pieces.
    """

    head: list[HeadPiece]

    def head_rows(
        self, number: int, meanwhile: Meanwhile | None = None
    ) -> contextlib.AbstractContextManager[Weight]:
        """One of the pieces of `head`, while the context lasts."""
        ...


class LayeredTable(GraphTable, abc.ABC):
    """The graphs of a model's pieces (see `GraphTable`), as calls."""

    def __init__(
        self,
        cfg: ModelConfig,
        params: Params | CountedSubModel,
        options: EngineOptions,
        head: Head,
        store: GraphStore | None = None,
    ) -> None:
        """Makes an empty table of the whole model.

        Args:
          cfg: the model.
          params: its parameters.
          options: resolved options.
          head: brings the table that gives logits.
          store: keeps graphs for later processes.
        """
        super().__init__(cfg, params, options, store)
        self._head = head
        # The same at every level and under every adapter.
        self._embedding, self._norm = embedding_params(params), norm_params(params)

    # -- which graphs ----------------------------------------------------------------------------

    def all_buckets(self) -> list[Bucket]:
        """Every bucket that answering any request at this level can need."""
        caches = self.options.cache_tokens
        buckets = [Bucket(kind="sample"), *self._head_buckets(1)]
        for tokens in (1, *self.options.chunk_tokens):
            buckets += [self._rows_bucket(tokens), self._norm_bucket(tokens, 1)]
            buckets += [bucket for cache in caches for bucket in self._layer_buckets("layer", tokens, cache)]
        buckets += [self._start_bucket(cache) for cache in caches]
        buckets += self._grow_buckets()
        return buckets + (self.context_buckets() if self.options.kv_codec else [])

    def embed_bucket(self, chunks: int) -> Bucket:
        """The bucket that embeds the tokens of some chunks, as it does those of a prompt."""
        return self._rows_bucket(chunks * self.options.kv_chunk_tokens)

    def request_buckets(self, prompt_tokens: int, max_tokens: int) -> list[Bucket]:
        """The fewest buckets that answer one request (see `BucketPlan.request_buckets`)."""
        cache = self.cache_for(prompt_tokens + max_tokens)
        lengths = [*dict.fromkeys(plan_chunks(prompt_tokens, self.options.chunk_tokens)), 1]
        buckets = [self._start_bucket(cache), Bucket(kind="sample"), *self._head_buckets(1)]
        for tokens in lengths:
            buckets += [self._rows_bucket(tokens), self._norm_bucket(tokens, 1)]
            buckets += self._layer_buckets("layer", tokens, cache)
        return buckets

    def tree_buckets(self, nodes: int) -> list[Bucket]:
        """The buckets that read a token tree of `nodes` nodes."""
        buckets = [self._rows_bucket(nodes), self._norm_bucket(nodes, nodes), *self._head_buckets(nodes)]
        buckets.append(Bucket(kind="settle", tokens=nodes))
        for cache in self.options.cache_tokens:
            buckets += [*self._layer_buckets("tree", nodes, cache), self._bucket("keep", nodes, cache)]
        return buckets

    def fill(
        self, buckets: Iterable[Bucket], progress: Progress | None = None, *, later: Iterable[Bucket] = ()
    ) -> None:
        """See `GraphTable.fill`. What compiling took is given back, for the budget has no room for it."""
        super().fill([*buckets, *later], progress)
        give_back_memory()

    def rehearse(self) -> None:
        """Runs a chunk of each length and a token, once for each length of cache."""
        for capacity in self.options.cache_tokens:
            cache = self.start(capacity)
            for tokens in self.options.chunk_tokens:
                if tokens <= capacity:
                    _, cache = self.prefill(cache, [0] * tokens, 0)
            logits, _ = self.prefill(cache, [0], 0)
            self.sample(logits, sampler_state(Sampling(), [], self.cfg.vocab_size, 0))

    # -- running them ----------------------------------------------------------------------------

    def prefill(self, cache: KVCache, tokens: Sequence[int], at: int) -> tuple[np.ndarray, KVCache]:
        """Feeds `tokens` at position `at`: logits `[1, V]` after the last, cache.

        All chunks of the prompt pass a layer before the next layer is needed, so that each is read once.
        """
        one = len(tokens) == 1
        lengths = [1] if one else plan_chunks(len(tokens), self.options.chunk_tokens)
        chunks = placed_chunks(tokens, lengths, at)
        outputs, cache = self._pass(chunks, cache)
        last = np.array([int(chunks[-1][1].valid) - 1], np.int32)
        logits = self._logits(outputs[-1], last)
        return logits, dataclasses.replace(cache, length=np.int32(at + len(tokens)))  # pyright: ignore

    def decode(
        self,
        token: jax.Array,
        cache: KVCache,
        sampler: SamplerState,
        stop_ids: np.ndarray,
        limit: int,
        held: Sequence[int] = (),
    ) -> tuple[np.ndarray, int, KVCache, SamplerState]:
        """Up to `limit` further tokens: ids `[1, count]`, count, cache, sampler."""
        del held
        found, at = [], int(cache.length)
        stops = set(stop_ids.tolist())
        last = int(np.asarray(token)[0])
        while len(found) < limit and last not in (stops if found else ()):
            logits, cache = self.prefill(cache, [last], at + len(found))
            chosen, sampler = self.sample(logits, sampler)
            last = int(np.asarray(chosen)[0])
            found.append(last)
        return np.array([found], np.int32), len(found), cache, sampler

    def verify(
        self,
        tree: TokenTree,
        cache: KVCache,
        sampler: SamplerState,
        limit: int,
        meanwhile: Meanwhile | None = None,
    ) -> tuple[Verdict, KVCache, SamplerState]:
        """What the model says of a token tree (see `BucketTable.verify`).

        `meanwhile` is called while weights are waited for (see `WeightStream.piece`).
        """
        logits, cache = self.read_tree(tree, cache, meanwhile)
        settled = self.graph(Bucket(kind="settle", tokens=tree.room))
        tokens, count, path, sampler = settled(tree, logits, sampler, np.int32(limit))
        return Verdict.of(tokens, count, path), self.keep_path(cache, path, count), sampler

    def read_tree(
        self, tree: TokenTree, cache: KVCache, meanwhile: Meanwhile | None = None
    ) -> tuple[np.ndarray, KVCache]:
        """Logits `[N, V]` float32 behind each node of a tree, and the cache with its rows behind the
        sequence's, whose length stays as it is."""
        nodes, length = np.arange(tree.room, dtype=np.int32), np.int32(int(cache.length))
        rows = TreeRows(length, length + nodes, np.asarray(tree.ancestors))  # pyright: ignore
        at = Places(length + np.asarray(tree.depths), np.int32(int(tree.count)), rows)  # pyright: ignore
        cache = cache.counted_by_node(tree.room)
        (x,), cache = self._pass([(np.asarray(tree.tokens), at)], cache, meanwhile)
        return self._logits(x, nodes, meanwhile), cache

    def keep_path(self, cache: KVCache, path: np.ndarray, count: int) -> KVCache:
        """The cache with a path `[N]` of a tree behind its sequence instead of the tree."""
        graph = self.graph(self._bucket("keep", len(path), cache.capacity_tokens))
        return graph(dataclasses.replace(cache, mass=None), cache.mass, np.asarray(path), np.int32(count))

    @abc.abstractmethod
    def _pass(
        self, chunks: Sequence[tuple[np.ndarray, Places]], cache: KVCache, meanwhile: Meanwhile | None = None
    ) -> tuple[list[jax.Array], KVCache]:
        """All layers, one after the other: the last one's outputs `[1, T, D]`, and the cache.

        Args:
          chunks: tokens `[T]`, and where they stand; later ones see earlier ones.
          cache: donated. Its length stays as it is.
          meanwhile: other work, while weights are waited for.
        """

    def begin_layers(self, tokens: np.ndarray, at: Places) -> jax.Array:
        """See `GraphTable`."""
        return self._embedded(tokens, at)

    @abc.abstractmethod
    def _embedded(self, tokens: np.ndarray, at: Places) -> jax.Array:
        """What the first layer takes of tokens `[T]`, `[1, T, D]`."""

    def _logits(self, x: jax.Array, rows: np.ndarray, meanwhile: Meanwhile | None = None) -> np.ndarray:
        """Logits `[N, V]` float32 behind N of a pass's tokens."""
        found = []
        hidden = self.graph(self._norm_bucket(x.shape[1], len(rows)))(self._norm, x, rows)
        for number, piece in enumerate(self._head.head):
            graph = self.graph(self._head_bucket(len(rows), piece.count))
            with self._head.head_rows(number, meanwhile) as table:
                found.append(np.asarray(graph(table, hidden)))
        return np.concatenate(found, axis=1) if len(found) > 1 else found[0]

    # -- buckets ---------------------------------------------------------------------------------

    def _rows_bucket(self, tokens: int) -> Bucket:
        return Bucket(kind="rows", tokens=tokens)

    def _head_buckets(self, rows: int) -> list[Bucket]:
        return [self._head_bucket(rows, count) for count in {each.count for each in self._head.head}]

    def _layer_bucket(self, kind: str, tokens: int, cache: int, layer: int) -> Bucket:
        bucket = self._bucket(kind, tokens, cache)  # pyright: ignore[reportArgumentType]
        return dataclasses.replace(bucket, layer=self.alike[layer])

    def _layer_buckets(self, kind: str, tokens: int, cache: int) -> list[Bucket]:
        return [self._layer_bucket(kind, tokens, cache, layer) for layer in sorted(set(self.alike))]
