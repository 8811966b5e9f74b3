"""The one place that compiles: the table of executables for one model, filled before the first request.

Every graph is compiled ahead of time for one `Bucket`, or read from disk where an earlier process left it
(`graph_store.py`); a call whose bucket is not in the table raises `BucketMissing` instead of compiling
under a user's request. What runs the graphs are its subclasses: `BucketTable` for weights in memory,
`StreamedTable` for weights that are read while it runs.
"""

import abc
import concurrent.futures
import copy
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import jax
import numpy as np

from jaxllm.config import WHOLE, Bucket, ModelConfig
from jaxllm.elastic.submodel import CountedSubModel
from jaxllm.errors import BucketMissing, ConfigError, ContextOverflow
from jaxllm.kv.cache import KVCache, Places
from jaxllm.models.parameters import Params
from jaxllm.sampling import SamplerState
from serving.bucket_plan import BucketPlan
from serving.forked import require_not_forked
from serving.graph_store import GraphStore, Placement, params_signature
from serving.lowering import layer_params, lower
from serving.machine import usable_cores
from serving.options import EngineOptions
from serving.progress import Progress

_PROGRESS_S = 1.0


class GraphTable(BucketPlan, abc.ABC):
    """Compiled graphs of one model on one device, seen from one of its levels.

    The tables of a model's levels (`at`) share the graphs, the counts of them and the lock. Calls that take
    or change weights, graphs or caches come one at a time: engines and answers hold the lock for them.

    Attributes:
      lock: see above; a thread may take it again.
      cfg: the model, or the sub-model of this level.
      level: in percent; 100 is the whole model.
      graphs_level: the level whose graphs this one runs: itself, or 100 where all run the same.
      options: resolved options (see `EngineOptions.resolve`).
      bucket_ms: time to trace and compile each bucket, or to read it (several are built at a time).
      loaded: those buckets whose graph was read from disk.
      weights_version: names this level's parameters, which `swap` changes; a cache belongs to one of them.
      streams_layers: whether layers come from storage while they are used.
    """

    streams_layers = False

    def __init__(
        self,
        cfg: ModelConfig,
        params: Params | CountedSubModel,
        options: EngineOptions,
        store: GraphStore | None = None,
    ) -> None:
        """Makes an empty table of the whole model; `store` keeps its graphs for later processes."""
        self.lock = threading.RLock()
        self.cfg = cfg
        self.level = self.graphs_level = WHOLE
        self.options = options
        self.bucket_ms: dict[Bucket, float] = {}
        self.loaded: set[Bucket] = set()
        self.weights_version = (WHOLE, 0)
        self._waited_ms = [0.0]
        self._levels: dict[int, Self] = {WHOLE: self}
        self._params = params
        self._alike: tuple[int, ...] | None = None
        self._table: dict[Bucket, Any] = {}
        self._pending: dict[Bucket, concurrent.futures.Future] = {}
        self._store = store
        self._guards: list[Callable[[], None]] = []

    def __contains__(self, bucket: Bucket) -> bool:
        return bucket in self._table or bucket in self._pending

    @property
    def build_ms(self) -> float:
        """Time spent waiting for graphs, in all."""
        return self._waited_ms[0]

    @property
    def params(self) -> Params | CountedSubModel:
        """This level's parameters."""
        return self._params

    @property
    def graphs_cfg(self) -> ModelConfig:
        """The model that this level's graphs were made for, whose shapes caches have."""
        return self._levels[self.graphs_level].cfg

    @property
    def alike(self) -> tuple[int, ...]:
        """Of each layer the first one that shares its graphs of one layer: whose parameters have the same
        names and forms, and of which the config says the same."""
        if self._alike is None:
            firsts: dict[Any, int] = {}
            cfg = self.graphs_cfg
            kinds = [
                (
                    cfg.units(layer),
                    cfg.attention_windows[layer],
                    cfg.layer_rope(layer),
                    cfg.is_sparse(layer),
                    params_signature(layer_params(self._params, layer, 0)),
                )
                for layer in range(cfg.layers)
            ]
            self._alike = tuple(firsts.setdefault(kind, layer) for layer, kind in enumerate(kinds))
        return self._alike

    @property
    def store(self) -> GraphStore | None:
        """Where graphs are kept for later processes, if they are."""
        return self._store

    @property
    def levels(self) -> tuple[int, ...]:
        """The levels that there are tables of, ascending."""
        return tuple(sorted(self._levels))

    def at(self, level: int) -> Self:
        """The table of a level.

        Raises:
          ConfigError: there is none.
        """
        if level not in self._levels:
            raise ConfigError(
                f"level {level} is not served; the engine was opened for "
                f"{', '.join(map(str, self.levels))}: name it in EngineOptions.levels"
            )
        return self._levels[level]

    def add_level(
        self, level: int, cfg: ModelConfig, params: Params | CountedSubModel, *, same_graphs: bool = False
    ) -> Self:
        """The table of one more level, whose graphs and counts are this one's.

        Args:
          level: in percent.
          cfg: the sub-model.
          params: its parameters; those of the whole model where slicing costs nothing in a graph.
          same_graphs: whether the whole model's graphs take these parameters too, and no others are needed.

        Raises:
          ConfigError: they do not.
        """
        table = copy.copy(self)
        table.cfg, table.level, table.weights_version, table._params = cfg, level, (level, 0), params
        table._alike = None
        if same_graphs:
            self._require_same_form(params)
        else:
            table.graphs_level = level
            table._store = None if self._store is None else self._store.of(cfg, params)
        self._levels[level] = table
        return table

    def swap(self, params: Params | CountedSubModel) -> None:
        """Takes other parameters for the same graphs.

        Raises:
          ConfigError: their names, forms, shapes or dtypes differ.
        """
        self._require_same_form(params)
        self._params = params
        self.weights_version = (self.level, self.weights_version[1] + 1)

    def _require_same_form(self, params: Params | CountedSubModel) -> None:
        if params_signature(params) != params_signature(self._params):
            raise ConfigError("the new parameters are of another form than those that graphs were made for")

    # -- getting them ---------------------------------------------------------------------------

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
        self._waited_ms[0] += 1000 * (time.perf_counter() - began)

    # -- what needs no weights -------------------------------------------------------------------

    def start(self, tokens: int) -> KVCache:
        """An empty cache with room for `tokens` positions."""
        return self.graph(self._start_bucket(self.capacity_for(tokens)))()

    def make_room(self, cache: KVCache, tokens: int) -> KVCache:
        """The cache itself, or a longer one with the same content, so that `tokens` positions fit."""
        caches = self.options.cache_tokens
        target = self.capacity_for(tokens)
        while cache.capacity_tokens < target:
            here = cache.capacity_tokens
            longer = caches[caches.index(here) + 1]
            cache = self.graph(self._grow_bucket(here, longer))(cache)
        return cache

    def time_request(self, prompt_tokens: int, max_tokens: int) -> None:
        """Times what the order of one request's work depends on, if it depends on anything; its graphs are
        there."""
        del prompt_tokens, max_tokens

    def expect(self, tokens: np.ndarray) -> None:
        """Says what will be read next, `[M]` ids, before it is known where: what must come from storage for
        them may be on its way then."""
        del tokens

    def capacity_for(self, tokens: int) -> int:
        """The shortest cache length with a `start` graph and room for `tokens`.

        Raises:
          ContextOverflow: there is none.
        """
        for length in self.options.cache_tokens:
            if length >= tokens and self._start_bucket(length) in self._table:
                return length
        ready = (each for each in self.options.cache_tokens if self._start_bucket(each) in self._table)
        raise ContextOverflow(
            f"{tokens} tokens do not fit; the longest cache that is ready holds {max(ready, default=0)}"
        )

    def sample(self, logits: jax.Array | np.ndarray, sampler: SamplerState) -> tuple[jax.Array, SamplerState]:
        """The first token `[1]` of an answer, and the sampler."""
        return self.graph(Bucket(kind="sample"))(logits, sampler)

    def decode_limit(self, pace: int, remaining: int) -> int:
        """How many tokens `decode` should be asked for: of `remaining` that are wanted, where `pace` take as
        long as a user should wait for the next words."""
        return min(pace, self.options.decode_block, remaining)

    # -- contexts that come back ----------------------------------------------------------------

    @abc.abstractmethod
    def begin_layers(self, tokens: np.ndarray, at: Places) -> jax.Array:
        """What the first layer takes, `[1, T, D]`, of the tokens `[T]` of whole chunks of contexts; they pass
        all layers then, one after another."""

    @abc.abstractmethod
    def restore_layer(
        self,
        layer: int,
        x: jax.Array,
        at: Places,
        past: tuple[jax.Array, jax.Array],
        source: np.ndarray,
        bits: np.ndarray,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """One layer of a context that comes back (see `layer_steps.restore_layer`).

        Args:
          layer: its index.
          x, past: donated.
          at: where the tokens of computed chunks stand.
          source, bits: see `load_chunks`.
        """

    def _restoring_bucket(self, layer: int, at: Places, past: tuple[jax.Array, jax.Array]) -> Bucket:
        count = len(at.positions) // self.options.kv_chunk_tokens
        return self.restore_bucket(count, past[0].shape[2], layer)

    # -- whether they may be used -----------------------------------------------------------------

    def guard(self, require: Callable[[], None]) -> None:
        """Has all levels ask `require`, which raises where graphs would compute something else than they
        should, before each graph and behind each answer's tokens."""
        self._guards.append(require)

    def require_usable(self) -> None:
        """Raises a JaxllmError in a forked process, and where a guard does."""
        require_not_forked()
        for require in self._guards:
            require()

    def close(self) -> None:
        """Lets go of all levels' graphs, whose memory would else be free only when the collector comes by."""
        self.guard(_refuse)
        for future in self._pending.values():
            future.cancel()
        self._pending.clear()
        self._table.clear()

    # -- compiling them -------------------------------------------------------------------------

    def graph(self, bucket: Bucket) -> Any:
        """A bucket's executable, which a caller may run as `lowering.lower` describes it.

        Raises:
          BucketMissing: the table was not filled with it.
          JaxllmError: see `require_usable`.
        """
        self.require_usable()
        graph = self._table.get(bucket)
        if graph is None and bucket in self._pending:
            graph = self._finish(bucket)
        if graph is None:
            raise BucketMissing(f"{bucket} was not compiled; fill the table with it before the first request")
        return graph

    def _begin(self, buckets: Sequence[Bucket]) -> None:
        """Has threads build those buckets that nobody has asked for yet, or that failed, in this order."""
        for bucket in [bucket for bucket, future in self._pending.items() if _failed(future)]:
            del self._pending[bucket]
        new = [bucket for bucket in dict.fromkeys(buckets) if bucket not in self]
        if not new:
            return
        pool = concurrent.futures.ThreadPoolExecutor(usable_cores())
        self._pending.update({bucket: pool.submit(self._build, bucket) for bucket in new})
        # Its threads end when they have nothing left to do.
        pool.shutdown(wait=False)

    def _finish(self, bucket: Bucket) -> Any:
        """Waits for a bucket that is being built and puts it into the table."""
        graph, self.bucket_ms[bucket] = self._pending.pop(bucket).result()
        self._table[bucket] = graph
        return graph

    def _build(self, bucket: Bucket) -> tuple[Any, float]:
        began = time.perf_counter()
        at = self._levels[bucket.level]
        where = at._placement(bucket)
        graph = None if at._store is None else at._store.load(bucket, where)
        if graph is not None:
            self.loaded.add(bucket)
        else:
            options = None if where is None else dict(where.compiler_options)
            graph = at._lowered(bucket).compile(compiler_options=options or None)
            if at._store is not None:
                at._store.store(bucket, graph, where)
        return graph, 1000 * (time.perf_counter() - began)

    def _placement(self, bucket: Bucket) -> Placement | None:
        """Where the graph of a bucket runs; None for the first device."""
        del bucket
        return None

    def _lowered(self, bucket: Bucket) -> jax.stages.Lowered:
        """The traced graph of a bucket of this level."""
        return lower(bucket, self.cfg, self._params, self.options)


def _refuse() -> None:
    raise ConfigError("this engine is closed; open the model again")


def _failed(future: concurrent.futures.Future) -> bool:
    return future.cancelled() or (future.done() and future.exception() is not None)
