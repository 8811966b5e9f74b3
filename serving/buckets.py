"""The one place that compiles: the table of executables for one model, filled before the first request.

Every graph is compiled ahead of time for one `Bucket`, or read from disk where an earlier process left it
(`graph_store.py`); a call whose bucket is not in the table raises `BucketMissing` instead of compiling
under a user's request.
"""

import concurrent.futures
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import Bucket, ModelConfig
from jaxllm.documents import Branches
from jaxllm.errors import BucketMissing, ConfigError, ContextOverflow
from jaxllm.kv.cache import KVCache, grow, new_cache
from jaxllm.models.parameters import Params
from jaxllm.sampling import SamplerState, Sampling, sample, sampler_state
from jaxllm.steps import decode_tokens, prefill_chunk, route_documents, score_branches, score_chunk
from serving.chunks import plan_chunks
from serving.graph_store import GraphStore, params_signature
from serving.machine import usable_cores
from serving.options import EngineOptions
from serving.packing import Packed, target_room

MAX_STOP_IDS = 16
_PROGRESS_S = 1.0
Progress = Callable[[str, int, int], None]


class BucketTable:
    """Compiled graphs of one model on one device.

    Attributes:
      cfg: the model.
      options: resolved options (see `EngineOptions.resolve`).
      build_ms: time spent waiting for graphs, in all.
      bucket_ms: time to trace and compile each bucket, or to read it (several are built at a time).
      loaded: those buckets whose graph was read from disk.
      weights_version: counts the parameters that `swap` brought; a cache belongs to one of them.
    """

    def __init__(
        self, cfg: ModelConfig, params: Params, options: EngineOptions, store: GraphStore | None = None
    ) -> None:
        """Makes an empty table; `store` keeps its graphs for later processes."""
        self.cfg = cfg
        self.options = options
        self.build_ms = 0.0
        self.bucket_ms: dict[Bucket, float] = {}
        self.loaded: set[Bucket] = set()
        self.weights_version = 0
        self._params = params
        self._dtype = jnp.dtype(options.activation_dtype)
        self._cache_dtype = jnp.dtype(options.cache_dtype)
        self._table: dict[Bucket, Any] = {}
        self._pending: dict[Bucket, concurrent.futures.Future] = {}
        self._store = store

    def __contains__(self, bucket: Bucket) -> bool:
        return bucket in self._table or bucket in self._pending

    def swap(self, params: Params) -> None:
        """Takes other parameters for the same graphs.

        Raises:
          ConfigError: their names, forms, shapes or dtypes differ.
        """
        if params_signature(params) != params_signature(self._params):
            raise ConfigError("the new parameters are of another form than those that graphs were made for")
        self._params = params
        self.weights_version += 1

    # -- which graphs ---------------------------------------------------------------------------

    def all_buckets(self) -> list[Bucket]:
        """Every bucket that answering any request can need."""
        caches = self.options.cache_tokens
        buckets = [Bucket(kind="sample")]
        for cache in caches:
            buckets.append(Bucket(kind="start", cache_tokens=cache))
            buckets.append(self._decode_bucket(cache))
            buckets += [self._prefill_bucket(chunk, cache) for chunk in self.options.chunk_tokens]
        buckets += [Bucket(kind="grow", tokens=a, cache_tokens=b) for a, b in itertools.pairwise(caches)]
        return buckets

    def request_buckets(self, prompt_tokens: int, max_tokens: int) -> list[Bucket]:
        """The fewest buckets that answer one request: one cache length, the chunks of its prompt.

        They come in the order in which the request needs them, the slowest to build of a step first.
        """
        total = min(prompt_tokens + max_tokens, self.options.context_tokens)
        cache = next(c for c in self.options.cache_tokens if c >= total)
        chunks = dict.fromkeys(plan_chunks(prompt_tokens, self.options.chunk_tokens))
        return [
            *(self._prefill_bucket(chunk, cache) for chunk in chunks),
            Bucket(kind="sample"),
            Bucket(kind="start", cache_tokens=cache),
            *([] if max_tokens == 1 else [self._decode_bucket(cache)]),
        ]

    def score_buckets(self, window_tokens: int) -> list[Bucket]:
        """The buckets that score text in windows of `window_tokens`."""
        cache = next(c for c in self.options.cache_tokens if c >= window_tokens)
        return [
            Bucket(kind="start", cache_tokens=cache),
            Bucket(kind="score", tokens=self.options.chunk_tokens[-1], cache_tokens=cache),
        ]

    def branches_bucket(self, tokens: int) -> Bucket:
        """The bucket that scores documents with many ends, in rows of `tokens`."""
        return Bucket(kind="branches", tokens=tokens, rows=max(1, self.options.score_tokens // tokens))

    def fill(
        self, buckets: Iterable[Bucket], progress: Progress | None = None, *, later: Iterable[Bucket] = ()
    ) -> None:
        """Gets graphs that the table lacks, several at a time: from disk, else by compiling them.

        Args:
          buckets: the graphs to wait for.
          progress: called with ("compile", done, total) as they get ready, and at times until then.
          later: graphs to go on with in the background; a call that needs one waits for it.
        """
        missing = [bucket for bucket in dict.fromkeys(buckets) if bucket not in self._table]
        began = time.perf_counter()
        self._begin([*missing, *later])
        waiting = {self._pending[bucket]: bucket for bucket in missing}
        try:
            while waiting:
                ready, _ = concurrent.futures.wait(waiting, _PROGRESS_S, concurrent.futures.FIRST_COMPLETED)
                for future in ready:
                    self._finish(waiting.pop(future))
                if progress is not None:
                    progress("compile", len(missing) - len(waiting), len(missing))
        except BaseException:
            # Perhaps an interrupt: what no thread has begun must not hold up the end of the process.
            for future in self._pending.values():
                future.cancel()
            raise
        self.build_ms += 1000 * (time.perf_counter() - began)

    def rehearse(self) -> None:
        """Runs every prefill, sample and decode graph once.

        XLA:CPU sets up the kernels of a graph when it first runs, which takes as long as many tokens;
        a service pays that before its first request.
        """
        for bucket in [*self._table, *self._pending]:
            if bucket.kind not in ("prefill", "decode"):
                continue
            cache = self._get(Bucket(kind="start", cache_tokens=bucket.cache_tokens))()
            if bucket.kind == "prefill":
                row, one = np.zeros((1, bucket.tokens), np.int32), np.int32(1)
                logits, _ = self._get(bucket)(self._params, row, one, np.bool_(True), cache)
                logits.block_until_ready()
                continue
            sampler = sampler_state(Sampling(), [], self.cfg.vocab_size, 0)
            logits = np.zeros((1, self.cfg.vocab_size), np.float32)
            token, sampler = self.sample(logits, sampler)
            tokens, *_ = self.decode(token, cache, sampler, np.full(MAX_STOP_IDS, -1, np.int32), 1)
            tokens.block_until_ready()

    # -- running them ---------------------------------------------------------------------------

    def start(self, tokens: int) -> KVCache:
        """An empty cache with room for `tokens` positions."""
        return self._get(Bucket(kind="start", cache_tokens=self._cache_for(tokens)))()

    def make_room(self, cache: KVCache, tokens: int) -> KVCache:
        """The cache itself, or a longer one with the same content, so that `tokens` positions fit."""
        caches = self.options.cache_tokens
        target = self._cache_for(tokens)
        while cache.capacity_tokens < target:
            here = cache.capacity_tokens
            longer = caches[caches.index(here) + 1]
            cache = self._get(Bucket(kind="grow", tokens=here, cache_tokens=longer))(cache)
        return cache

    def prefill(self, cache: KVCache, tokens: Sequence[int], at: int) -> tuple[jax.Array, KVCache]:
        """Feeds `tokens` at position `at`, chunk by chunk: logits `[1, V]` after the last, cache."""
        cache = dataclasses.replace(cache, length=np.int32(at))
        logits = None
        position = 0
        for chunk in plan_chunks(len(tokens), self.options.chunk_tokens):
            graph = self._get(self._prefill_bucket(chunk, cache.capacity_tokens))
            row, valid = _padded(tokens[position : position + chunk], chunk)
            position += valid
            last = np.bool_(position == len(tokens))
            logits, cache = graph(self._params, row, np.int32(valid), last, cache)
        assert logits is not None
        return logits, cache

    def sample(self, logits: jax.Array | np.ndarray, sampler: SamplerState) -> tuple[jax.Array, SamplerState]:
        """The first token `[1]` of an answer, and the sampler."""
        return self._get(Bucket(kind="sample"))(logits, sampler)

    def decode(
        self,
        token: jax.Array,
        cache: KVCache,
        sampler: SamplerState,
        stop_ids: np.ndarray,
        limit: int,
    ) -> tuple[jax.Array, jax.Array, KVCache, SamplerState]:
        """Up to `limit` further tokens in one dispatch (see `steps.decode_tokens`)."""
        graph = self._get(self._decode_bucket(cache.capacity_tokens))
        return graph(self._params, token, cache, sampler, stop_ids, np.int32(limit))

    def score(self, tokens: Sequence[int], targets: Sequence[int]) -> np.ndarray:
        """Log-probability (natural) of each target after its token and all tokens before it."""
        return self.predict(tokens, targets)[0]

    def predict(self, tokens: Sequence[int], targets: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """`score`, and the likeliest token `[tokens]` int32 at each place."""
        chunk = self.options.chunk_tokens[-1]
        # Not the shortest cache that is ready: other requests may have made shorter ones, without scoring.
        capacity = min(
            (b.cache_tokens for b in self._table if b.kind == "score" and b.cache_tokens >= len(tokens)),
            default=self.options.context_tokens,
        )
        graph = self._get(Bucket(kind="score", tokens=chunk, cache_tokens=capacity))
        cache = self._get(Bucket(kind="start", cache_tokens=capacity))()
        scores, best = [], []
        for at in range(0, len(tokens), chunk):
            row, valid = _padded(tokens[at : at + chunk], chunk)
            goal, _ = _padded(targets[at : at + chunk], chunk)
            out, likeliest, cache = graph(self._params, row, goal, np.int32(valid), cache)
            scores.append(np.asarray(out)[0, :valid])
            best.append(np.asarray(likeliest)[0, :valid])
        return np.concatenate(scores), np.concatenate(best)

    def route(self, tokens: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """The experts `[L_sparse, B, T, k]` that tokens `[B, T]` of packed documents visit."""
        rows, length = tokens.shape
        return np.asarray(
            self._get(Bucket(kind="routing", tokens=length, rows=rows))(self._params, tokens, starts)
        )

    def score_branches(self, packed: Packed) -> np.ndarray:
        """Log-probability (natural) of each of `packed`'s targets, `[count]` float32."""
        rows, length = packed.tokens.shape
        graph = self._get(Bucket(kind="branches", tokens=length, rows=rows))
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

    # -- compiling them -------------------------------------------------------------------------

    def _decode_bucket(self, cache: int) -> Bucket:
        return Bucket(kind="decode", tokens=self.options.decode_block, cache_tokens=cache)

    def _prefill_bucket(self, chunk: int, cache: int) -> Bucket:
        return Bucket(kind="prefill", tokens=chunk, cache_tokens=cache)

    def _cache_for(self, tokens: int) -> int:
        """The shortest cache length with a `start` graph and room for `tokens`."""
        for length in self.options.cache_tokens:
            if length >= tokens and Bucket(kind="start", cache_tokens=length) in self._table:
                return length
        raise ContextOverflow(
            f"{tokens} tokens do not fit; the longest cache that is ready holds "
            f"{max((b.cache_tokens for b in self._table if b.kind == 'start'), default=0)}"
        )

    def _get(self, bucket: Bucket) -> Any:
        graph = self._table.get(bucket)
        if graph is None and bucket in self._pending:
            graph = self._finish(bucket)
        if graph is None:
            raise BucketMissing(f"{bucket} was not compiled; fill the table with it before the first request")
        return graph

    def _begin(self, buckets: Sequence[Bucket]) -> None:
        """Has threads build those buckets that nobody has asked for yet, or that failed, in this order."""
        self._pending = {bucket: future for bucket, future in self._pending.items() if not _failed(future)}
        new = [bucket for bucket in dict.fromkeys(buckets) if bucket not in self]
        if not new:
            return
        pool = concurrent.futures.ThreadPoolExecutor(usable_cores())
        self._pending |= {bucket: pool.submit(self._build, bucket) for bucket in new}
        # Its threads end when they have nothing left to do.
        pool.shutdown(wait=False)

    def _finish(self, bucket: Bucket) -> Any:
        """Waits for a bucket that is being built and puts it into the table."""
        graph, self.bucket_ms[bucket] = self._pending.pop(bucket).result()
        self._table[bucket] = graph
        return graph

    def _build(self, bucket: Bucket) -> tuple[Any, float]:
        began = time.perf_counter()
        graph = None if self._store is None else self._store.load(bucket)
        if graph is not None:
            self.loaded.add(bucket)
        else:
            graph = self._lowered(bucket).compile()
            if self._store is not None:
                self._store.store(bucket, graph)
        return graph, 1000 * (time.perf_counter() - began)

    def _lowered(self, bucket: Bucket) -> Any:
        cfg, dtype = self.cfg, self._dtype
        empty = functools.partial(new_cache, cfg, batch=1, dtype=self._cache_dtype)
        make_cache = functools.partial(empty, tokens=bucket.cache_tokens)
        if bucket.kind == "start":
            return jax.jit(make_cache).lower()
        if bucket.kind == "grow":
            short = jax.eval_shape(functools.partial(empty, tokens=bucket.tokens))
            # Nothing to donate: no buffer of the short cache has the size of one of the long.
            return jax.jit(functools.partial(grow, tokens=bucket.cache_tokens)).lower(short)
        sampler = _shapes(sampler_state(Sampling(), [], cfg.vocab_size, 0))
        if bucket.kind == "sample":
            logits = jax.ShapeDtypeStruct((1, cfg.vocab_size), jnp.float32)
            return jax.jit(sample, donate_argnums=(1,)).lower(logits, sampler)
        params = _shapes(self._params)
        scalar = jax.ShapeDtypeStruct((), jnp.int32)
        if bucket.kind == "branches":
            rows = jax.ShapeDtypeStruct((bucket.rows, bucket.tokens), jnp.int32)
            flat = jax.ShapeDtypeStruct((target_room(bucket.rows, bucket.tokens),), jnp.int32)
            step = functools.partial(score_branches, cfg=cfg, dtype=dtype)
            return jax.jit(step).lower(params, rows, rows, Branches(rows, rows), flat, flat, scalar)  # pyright: ignore
        if bucket.kind == "routing":
            rows = jax.ShapeDtypeStruct((bucket.rows, bucket.tokens), jnp.int32)
            return jax.jit(functools.partial(route_documents, cfg=cfg, dtype=dtype)).lower(params, rows, rows)
        cache = jax.eval_shape(make_cache)
        row = jax.ShapeDtypeStruct((1, bucket.tokens), jnp.int32)
        if bucket.kind == "prefill":
            step = functools.partial(prefill_chunk, cfg=cfg, dtype=dtype)
            flag = jax.ShapeDtypeStruct((), jnp.bool_)
            return jax.jit(step, donate_argnums=(4,)).lower(params, row, scalar, flag, cache)
        if bucket.kind == "score":
            step = functools.partial(score_chunk, cfg=cfg, dtype=dtype)
            return jax.jit(step, donate_argnums=(4,)).lower(params, row, row, scalar, cache)
        step = functools.partial(decode_tokens, cfg=cfg, block=bucket.tokens, dtype=dtype)
        token = jax.ShapeDtypeStruct((1,), jnp.int32)
        stop_ids = jax.ShapeDtypeStruct((MAX_STOP_IDS,), jnp.int32)
        return jax.jit(step, donate_argnums=(2, 3)).lower(params, token, cache, sampler, stop_ids, scalar)


def _failed(future: concurrent.futures.Future) -> bool:
    return future.cancelled() or (future.done() and future.exception() is not None)


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype), tree)


def _padded(tokens: Sequence[int], length: int) -> tuple[np.ndarray, int]:
    """A `[1, length]` int32 row of `tokens` and zeros, and how many are real."""
    row = np.zeros((1, length), np.int32)
    row[0, : len(tokens)] = tokens
    return row, len(tokens)
