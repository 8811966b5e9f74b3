"""Running a model whose weights are in memory: the graphs of its buckets, as calls."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np

from jaxllm.branching import Packed
from jaxllm.config import Bucket
from jaxllm.documents import Branches
from jaxllm.kv.cache import KVCache, Places
from jaxllm.sampling import SamplerState, Sampling, sampler_state
from jaxllm.speculative.tree import TokenTree
from serving.chunks import padded, plan_chunks
from serving.graph_table import GraphTable
from serving.lowering import embedding_params, layer_params
from serving.speculative.verdict import Verdict
from serving.text import MAX_STOP_IDS


class BucketTable(GraphTable):
    """The graphs of a model whose weights are in memory (see `GraphTable`), as calls."""

    # Of the parameters that `_layers` and `_embedding` hold by layers.
    _sorted_version: tuple[int, int] | None = None

    def rehearse(self) -> None:
        """Runs every prefill, sample and decode graph of this level once.

        XLA:CPU sets up the kernels of a graph when it first runs, which takes as long as many tokens;
        a service pays that before its first request.
        """
        for bucket in [*self._table, *self._pending]:
            if bucket.kind not in ("prefill", "decode") or bucket.level != self.graphs_level:
                continue
            cache = self.graph(self._start_bucket(bucket.cache_tokens))()
            if bucket.kind == "prefill":
                row, one = np.zeros((1, bucket.tokens), np.int32), np.int32(1)
                logits, _ = self.graph(bucket)(self._params, row, one, np.bool_(True), cache)
                logits.block_until_ready()
                continue
            sampler = sampler_state(Sampling(), [], self.cfg.vocab_size, 0)
            logits = np.zeros((1, self.cfg.vocab_size), np.float32)
            token, sampler = self.sample(logits, sampler)
            tokens, *_ = self.decode(token, cache, sampler, np.full(MAX_STOP_IDS, -1, np.int32), 1)
            tokens.block_until_ready()

    # -- running them ---------------------------------------------------------------------------

    def begin_layers(self, tokens: np.ndarray, at: Places) -> jax.Array:
        """See `GraphTable`."""
        self._sort_parameters()
        bucket = self.embed_bucket(len(tokens) // self.options.kv_chunk_tokens)
        return self.graph(bucket)(self._embedding, tokens[None], np.asarray(at.positions))

    def restore_layer(
        self,
        layer: int,
        x: jax.Array,
        at: Places,
        past: tuple[jax.Array, jax.Array],
        source: np.ndarray,
        bits: np.ndarray,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """See `GraphTable`."""
        self._sort_parameters()
        graph = self.graph(self._restoring_bucket(layer, at, past))
        return graph(self._layers[layer], x, at, past, source, bits)

    def _sort_parameters(self) -> None:
        """Sorts the parameters by layers, once for each adapter that comes."""
        if self._sorted_version != self.weights_version:
            self._layers = [layer_params(self._params, layer, like) for layer, like in enumerate(self.alike)]
            self._embedding = embedding_params(self._params)
            self._sorted_version = self.weights_version

    def prefill(self, cache: KVCache, tokens: Sequence[int], at: int) -> tuple[jax.Array, KVCache]:
        """Feeds `tokens` at position `at`, chunk by chunk: logits `[1, V]` after the last, cache."""
        cache = dataclasses.replace(cache, length=np.int32(at))
        logits = None
        position = 0
        for chunk in plan_chunks(len(tokens), self.options.chunk_tokens):
            graph = self.graph(self._prefill_bucket(chunk, cache.capacity_tokens))
            row, valid = padded(tokens[position : position + chunk], chunk)
            position += valid
            last = np.bool_(position == len(tokens))
            logits, cache = graph(self._params, row, np.int32(valid), last, cache)
        assert logits is not None
        return logits, cache

    def decode(
        self,
        token: jax.Array,
        cache: KVCache,
        sampler: SamplerState,
        stop_ids: np.ndarray,
        limit: int,
        held: Sequence[int] = (),
    ) -> tuple[jax.Array, jax.Array, KVCache, SamplerState]:
        """Up to `limit` further tokens in one dispatch (see `steps.decode_tokens`); what the cache holds need
        not be said."""
        del held
        graph = self.graph(self._decode_bucket(cache.capacity_tokens))
        return graph(self._params, token, cache, sampler, stop_ids, np.int32(limit))

    def tree_buckets(self, nodes: int) -> list[Bucket]:
        """The buckets that read a token tree of `nodes` nodes."""
        return [self._bucket("verify", nodes, cache) for cache in self.options.cache_tokens]

    def verify(
        self,
        tree: TokenTree,
        cache: KVCache,
        sampler: SamplerState,
        limit: int,
        meanwhile: Callable[[float], bool] | None = None,
    ) -> tuple[Verdict, KVCache, SamplerState]:
        """What the model says of a token tree behind the sequence in the cache.

        Args:
          tree: with room for as many nodes as one of `TreeShape.nodes`.
          cache: donated.
          sampler: donated.
          limit: most tokens that it may say.
          meanwhile: other work while it waits, which this one never does.

        Returns:
          The verdict, the cache with the accepted path behind its sequence, and the sampler behind that.
        """
        del meanwhile
        graph = self.graph(self._bucket("verify", tree.room, cache.capacity_tokens))
        tokens, count, path, cache, sampler = graph(self._params, tree, cache, sampler, np.int32(limit))
        return Verdict.of(tokens, count, path), cache, sampler

    def score(
        self, tokens: Sequence[int], targets: Sequence[int], cache: KVCache | None = None
    ) -> np.ndarray:
        """Log-probability (natural) of each target after its token and all tokens before it: those that a
        `cache` holds, which is donated, come first."""
        return self.predict(tokens, targets, cache)[0]

    def predict(
        self, tokens: Sequence[int], targets: Sequence[int], cache: KVCache | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """`score`, and the likeliest token `[tokens]` int32 at each place."""
        chunk = self.options.chunk_tokens[-1]
        # Not the shortest cache that is ready: other requests may have made shorter ones, without scoring.
        capacity = min(
            (
                length
                for length in self.options.cache_tokens
                if length >= len(tokens) and self._score_bucket(length) in self._table
            ),
            default=self.options.context_tokens,
        )
        if cache is None:
            cache = self.graph(self._start_bucket(capacity))()
        scores, best, _ = self._scored(tokens, targets, cache, [chunk] * -(-len(tokens) // chunk))
        return scores, best

    def score_end(
        self, tokens: Sequence[int], targets: Sequence[int], cache: KVCache
    ) -> tuple[np.ndarray, KVCache]:
        """`score` of one of several ends of what a `cache` holds, and the cache for the next one: of `cache`,
        which is donated, it has all but the mass that it had."""
        length = int(cache.length)
        chunks = plan_chunks(len(tokens), self.options.chunk_tokens)
        scores, _, cache = self._scored(tokens, targets, cache, chunks)
        # Rows behind the length of a cache are attended to by nobody.
        return scores, dataclasses.replace(cache, length=np.int32(length))

    def _scored(
        self, tokens: Sequence[int], targets: Sequence[int], cache: KVCache, chunks: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray, KVCache]:
        """`predict` in chunks of these lengths, and the cache behind the tokens."""
        scores, best, at = [], [], 0
        for chunk in chunks:
            graph = self.graph(self._score_bucket(cache.capacity_tokens, chunk))
            row, valid = padded(tokens[at : at + chunk], chunk)
            goal, _ = padded(targets[at : at + chunk], chunk)
            out, likeliest, cache = graph(self._params, row, goal, np.int32(valid), cache)
            scores.append(np.asarray(out)[0, :valid])
            best.append(np.asarray(likeliest)[0, :valid])
            at += valid
        return np.concatenate(scores), np.concatenate(best), cache

    def route(self, tokens: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """The experts `[L_sparse, B, T, k]` that tokens `[B, T]` of packed documents visit."""
        rows, length = tokens.shape
        return np.asarray(self.graph(self.routing_bucket(length, rows))(self._params, tokens, starts))

    def score_branches(self, packed: Packed) -> np.ndarray:
        """Log-probability (natural) of each of `packed`'s targets, `[count]` float32."""
        rows, length = packed.tokens.shape
        graph = self.graph(Bucket(kind="branches", tokens=length, rows=rows, level=self.graphs_level))
        branches = Branches(trunk_ends=packed.trunk_ends, starts=packed.branch_starts)  # pyright: ignore
        out = graph(
            self._params,
            packed.tokens,
            packed.starts,
            branches,
            packed.places,
            packed.targets,
            np.int32(packed.count),
        )
        return np.asarray(out)[: packed.count]
