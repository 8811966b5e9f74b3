"""Running a model whose prompts are read in integers: the graphs of its buckets, as calls.

Prompts pass the layers (`jaxllm.prefill.subgraphs`), whole ones on this process's device, or their
subgraphs on two processors; all else is a `BucketTable`'s. The cache is the one that decoding uses.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxllm.config import Bucket, ModelConfig
from jaxllm.elastic.submodel import CountedSubModel, whole_params
from jaxllm.kv.cache import KVCache
from jaxllm.models.parameters import Params
from jaxllm.prefill.schedule import (
    Dispatcher,
    Subgraph,
    Times,
    natural_place,
    placed_by_memory,
    prompt_subgraphs,
)
from jaxllm.prefill.shadow import rooms
from jaxllm.prefill.simulator import stage_operations
from jaxllm.prefill.subgraphs import LayerCalibration, Stage, stages_of
from serving.buckets import BucketTable
from serving.chunks import placed_chunks, plan_chunks
from serving.graph_store import GraphStore, Placement
from serving.lowering import norm_params
from serving.options import EngineOptions
from serving.prefill.graphs import (
    SHADOWS_OF,
    SUBGRAPH_KINDS,
    kind_of,
    known_to,
    lower_subgraph,
    stage_bytes,
    stage_params,
    without_blocks,
)
from serving.prefill.passing import Passing
from serving.prefill.processors import TwoProcessors
from serving.prefill.subgraph_times import SubgraphTimes, measured_times
from serving.prefill.ways import PrefillWays, Way

_TIMED_RUNS = 3
_Case = tuple[int, Stage, int, int]


@dataclasses.dataclass
class OutlierCounts:
    """What shadows had to do so far.

    Attributes:
      products: that had a shadow.
      channels: with outliers, in all of them together.
      enlarged: products whose outliers did not fit the smallest compact tensor, and took a larger one.
    """

    products: int = 0
    channels: int = 0
    enlarged: int = 0


class IntegerTable(BucketTable):
    """The graphs of a model whose weights are in memory and whose prompts are read in integers.

    Attributes:
      calibration: that prompts are read by.
      ways: which prompts are read in integers, at all levels.
      outliers: what shadows had to do so far, at all levels.
      processors: that run subgraphs; None for this process's device alone.
      measured: what subgraphs take on two processors.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        params: Params | CountedSubModel,
        options: EngineOptions,
        ways: PrefillWays,
        store: GraphStore | None = None,
        processors: TwoProcessors | None = None,
        measured: SubgraphTimes | None = None,
    ) -> None:
        """Makes an empty table of the whole model.

        Args:
          cfg: the model.
          params: its parameters, at 8 bits.
          options: resolved options.
          store: keeps graphs for later processes.
          ways, processors, measured: see the class.

        Raises:
          ConfigError: the integer processor's memory holds no subgraph.
        """
        super().__init__(cfg, params, options, store)
        self.calibration, self.ways, self.processors = ways.calibration, ways, processors
        self.measured = SubgraphTimes() if measured is None else measured
        self.outliers = OutlierCounts()
        self._placed = natural_place
        if processors is not None and options.prefill.integer_bytes:
            tokens = options.chunk_tokens[-1]
            self._placed = placed_by_memory(
                ways.calibration.shadowed,
                lambda layer, stage: stage_bytes(params, layer, stage),
                lambda layer, stage: stage_operations(cfg, stage, tokens),
                options.prefill.integer_bytes,
            )
        self._buckets: dict[tuple[int, *_Case], Bucket] = {}
        self._ready_for: tuple[int, int] | None = None

    # -- which graphs ----------------------------------------------------------------------------

    @property
    def integers(self) -> bool:
        """Whether prompts of this level may be read in integers."""
        return self.level in self.ways.integer_levels

    def mode_for(self, tokens: int) -> Way:
        """How so many tokens are read."""
        return self.ways.of(self.level, tokens)

    def all_buckets(self) -> list[Bucket]:
        """Every bucket that answering any request at this level can need."""
        floats = self.ways.both(self.level) or not self.integers
        buckets = [each for each in super().all_buckets() if floats or each.kind != "prefill"]
        if self.integers:
            for chunk, cache in self._chunk_cases():
                buckets += self.chunk_buckets(chunk, cache)
        return list(dict.fromkeys(buckets))

    def _chunk_cases(self) -> Iterator[tuple[int, int]]:
        """Lengths of chunks, and of caches that they are read into."""
        return itertools.product(self.options.chunk_tokens, self.options.cache_tokens)

    def request_buckets(self, prompt_tokens: int, max_tokens: int) -> list[Bucket]:
        """The fewest buckets that answer one request (see `BucketPlan.request_buckets`)."""
        found: list[Bucket] = []
        if self.mode_for(prompt_tokens) == "float":
            return super().request_buckets(prompt_tokens, max_tokens)
        for bucket in super().request_buckets(prompt_tokens, max_tokens):
            is_chunk = bucket.kind == "prefill"
            found += self.chunk_buckets(bucket.tokens, bucket.cache_tokens) if is_chunk else [bucket]
        return list(dict.fromkeys(found))

    def chunk_buckets(self, tokens: int, cache: int) -> list[Bucket]:
        """The buckets that read chunks of so many tokens into caches of a length."""
        found = [self._bucket("embed", tokens, 0), *self._last_buckets(tokens)]
        for layer, with_shadow in enumerate(self.calibration.shadowed):
            stages = self._stages(with_shadow)
            found += [self.subgraph_bucket(layer, stage, tokens, cache) for stage in stages]
        return list(dict.fromkeys(found))

    def _stages(self, shadowed: bool) -> tuple[Stage, ...]:
        """What a layer is cut into."""
        return ("layer",) if self.processors is None else stages_of(shadowed)

    def subgraph_bucket(self, layer: int, stage: Stage, tokens: int, cache: int) -> Bucket:
        """The bucket of a stage, which all layers share that are alike; static ones whatever the cache."""
        case = self.graphs_level, layer, stage, tokens, cache
        if case not in self._buckets:
            self._buckets[case] = self._subgraph_bucket(layer, stage, tokens, cache)
        return self._buckets[case]

    def _subgraph_bucket(self, layer: int, stage: Stage, tokens: int, cache: int) -> Bucket:
        shadowed = self.calibration.shadowed
        kinds = list(zip(self.alike, shadowed, strict=True))
        kind, attends = kind_of(stage, shadowed=shadowed[layer]), stage in ("attend", "layer")
        bucket = self._bucket(kind, tokens, cache if attends else self.options.cache_tokens[0])
        elsewhere = self.processors is not None and self._placed(layer, stage) == "integer"
        return dataclasses.replace(
            bucket,
            layer=kinds.index(kinds[layer]),
            rows=self.calibration.float_rows if kind in SHADOWS_OF else 0,
            # The integer processor's device has graphs of its own.
            bits=int(elsewhere),
        )

    def _last_buckets(self, tokens: int) -> list[Bucket]:
        """What gives logits behind the last token of a chunk."""
        return [self._norm_bucket(tokens, 1), self._head_bucket(1, self.cfg.vocab_size)]

    def _lowered(self, bucket: Bucket) -> jax.stages.Lowered:
        if bucket.kind not in SUBGRAPH_KINDS:
            return super()._lowered(bucket)
        with jax.default_device(self._device_of(bucket)):
            return lower_subgraph(
                bucket, self.cfg, self._params, self.options, blocks=self._in_blocks(bucket)
            )

    def _placement(self, bucket: Bucket) -> Placement | None:
        if self.processors is None or bucket.kind not in SUBGRAPH_KINDS:
            return None
        # XLA's own threads would take the other processor's cores.
        options = (("xla_cpu_multi_thread_eigen", False),) if self.processors.both_are_cpus else ()
        return Placement(self._device_of(bucket), self._in_blocks(bucket), options)

    def _device_of(self, bucket: Bucket) -> jax.Device:
        if self.processors is None or bucket.kind not in SUBGRAPH_KINDS or not bucket.bits:
            return jax.devices()[0]
        return self.processors.device("integer")

    def _in_blocks(self, bucket: Bucket) -> bool:
        """Whether a bucket's device takes weights as native kernels do."""
        return self.processors is None or self.processors.both_are_cpus or not bucket.bits

    # -- running them ----------------------------------------------------------------------------

    def rehearse(self) -> None:
        """Runs every graph of this level once; where two processors share them, times the subgraphs."""
        super().rehearse()
        # Of the levels that run the same graphs.
        for table in (each for each in self._levels.values() if each.graphs_level == self.graphs_level):
            if table.integers:
                table.rehearse_integers()
                break

    def rehearse_integers(self) -> None:
        """`rehearse` of the graphs that read prompts in integers alone."""
        for chunk, capacity in self._chunk_cases():
            fed = min(chunk, capacity)
            jax.block_until_ready(self.read_in("int8", self.start(capacity), [0] * fed, 0)[0])
        if self.processors is not None:
            self._time(self._chunk_cases())

    def time_request(self, prompt_tokens: int, max_tokens: int) -> None:
        """See `GraphTable`: subgraphs on two processors."""
        if self.processors is None or self.mode_for(prompt_tokens) == "float":
            return
        capacity = self.cache_for(prompt_tokens + max_tokens)
        chunks = sorted(set(plan_chunks(prompt_tokens, self.options.chunk_tokens)))
        self._time((chunk, capacity) for chunk in chunks)

    def _time(self, cases: Iterable[tuple[int, int]]) -> None:
        """Measures what is not known of chunks and caches of these lengths, and keeps it."""
        missing = [
            (chunk, capacity)
            for chunk, capacity in cases
            if any(
                bucket not in self.measured
                for bucket in self.chunk_buckets(chunk, capacity)
                if bucket.kind in SUBGRAPH_KINDS
            )
        ]
        for chunk, capacity in missing:
            self.measure(chunk, capacity)
        if missing:
            self.measured.keep()

    def prefill(self, cache: KVCache, tokens: Sequence[int], at: int) -> tuple[jax.Array, KVCache]:
        """Feeds `tokens` at position `at`, chunk by chunk: logits `[1, V]` after the last, cache."""
        return self.read_in(self.mode_for(len(tokens)), cache, tokens, at)

    def read_in(self, mode: Way, cache: KVCache, tokens: Sequence[int], at: int) -> tuple[jax.Array, KVCache]:
        """`prefill`, in integers or in floats."""
        if mode == "float":
            return super().prefill(cache, tokens, at)
        passing = self.begin_passing(cache, tokens, at)
        subgraphs = self.subgraphs(passing)
        if self.processors is None:
            for each in subgraphs:
                passing.run(each)
        else:
            dispatcher = Dispatcher(subgraphs, self.times(passing), self.options.prefill.order)
            self.processors.run(dispatcher, passing.run)
        return self.end_passing(passing, at + len(tokens))

    def subgraphs(self, passing: Passing) -> tuple[Subgraph, ...]:
        """Those of a prompt."""
        shadowed = self.calibration.shadowed
        return prompt_subgraphs(len(passing.chunks), shadowed, self._placed, self._stages)

    def times(self, passing: Passing, *, shared: bool = False) -> Times:
        """How long the subgraphs of a prompt took when they were timed, alone or while the other processor
        was busy; 1 for those that were not."""

        def time_of(each: Subgraph) -> float:
            at = passing.chunks[each.chunk].positions
            bucket = self.subgraph_bucket(each.layer, each.stage, len(at), passing.capacity)
            if bucket not in self.measured:
                return 1.0
            known = self.measured[bucket]
            empty, full = known.shared if shared else known.alone
            # Attention takes longer the more tokens are before it.
            room = max(1, passing.capacity - len(at))
            return empty + (full - empty) * min(1.0, int(at[0]) / room)

        return time_of

    def begin_passing(self, cache: KVCache, tokens: Sequence[int], at: int) -> Passing:
        """A prompt before its first layer."""
        self._make_ready()
        chunks = placed_chunks(tokens, plan_chunks(len(tokens), self.options.chunk_tokens), at)
        embeds = [self.graph(self._bucket("embed", len(row), 0)) for row, _ in chunks]
        inputs = [
            embed(self._embedding, row[None], places.positions)
            for embed, (row, places) in zip(embeds, chunks, strict=True)
        ]
        return Passing(self.call, [places for _, places in chunks], inputs, cache)

    def end_passing(self, passing: Passing, length: int) -> tuple[jax.Array, KVCache]:
        """Logits behind a prompt that has passed all layers, and its cache with so many tokens."""
        x, places = passing.x[-1], passing.chunks[-1]
        if self.processors is not None:
            x = jax.device_put(x, jax.devices()[0])
        norm, head = (self.graph(bucket) for bucket in self._last_buckets(x.shape[1]))
        hidden = norm(self._norm, x, np.array([int(places.valid) - 1], np.int32))
        logits = head(self._head, hidden)
        self._count(passing)
        return logits, dataclasses.replace(passing.cache(), length=np.int32(length))  # pyright: ignore

    def call(self, each: Subgraph, tokens: int, capacity: int, *operands: Any) -> Any:
        """Runs a subgraph of a chunk of so many tokens, where it is placed."""
        bucket, known = self._operands(each.layer, each.stage, tokens, capacity)
        if self.processors is None:
            return self.graph(bucket)(*known, *operands)
        # Others wait for it: the results must be there.
        here = jax.device_put(operands, self._device_of(bucket))
        return jax.block_until_ready(self.graph(bucket)(*known, *here))

    def _count(self, passing: Passing) -> None:
        for each, counts in passing.counts:
            products, shadows = SHADOWS_OF[kind_of(each.stage, shadowed=True)], self._known[each.layer].rows
            assert shadows is not None
            for product, channels in zip(products, np.ravel(counts).tolist(), strict=True):
                self.outliers.products += 1
                self.outliers.channels += channels
                self.outliers.enlarged += channels > rooms(len(shadows[product].place))[1]

    def measure(self, tokens: int, capacity: int, runs: int = _TIMED_RUNS) -> None:
        """Times each kind of subgraph of a chunk at the beginning and the end of a cache of a length, on two
        processors, in so many runs of all layers each: alone, and while the other processor is busy."""
        assert self.processors is not None
        # All kinds of tokens, so that there are as many outliers as there will be.
        fed = np.linspace(0, self.cfg.vocab_size - 1, min(tokens, capacity)).astype(int).tolist()

        def begin(full: bool) -> Passing:
            return self.begin_passing(self.start(capacity), fed, (capacity - len(fed)) * full)

        def bucket_of(each: Subgraph) -> Bucket:
            return self.subgraph_bucket(each.layer, each.stage, tokens, capacity)

        times, handover_ms = measured_times(self.processors, begin, self.subgraphs, bucket_of, runs)
        self.measured.put(times, handover_ms)

    # -- parameters ------------------------------------------------------------------------------

    def _make_ready(self) -> None:
        """Sorts what graphs take, once for each adapter that comes."""
        if self._ready_for == self.weights_version:
            return
        self._sort_parameters()
        whole = whole_params(self._params)
        self._norm = norm_params(self._params)
        self._head = whole["embed.tokens" if self.cfg.tied_head else "head"]
        self._known = self.calibration.layers(self.level, self.graphs_cfg)
        self._kept: dict[_Case, tuple[Bucket, tuple[Any, LayerCalibration]]] = {}
        self._placed_weights: dict[tuple[int, str, int], tuple[Any, LayerCalibration]] = {}
        self._ready_for = self.weights_version

    def _operands(
        self, layer: int, stage: Stage, tokens: int, capacity: int
    ) -> tuple[Bucket, tuple[Any, LayerCalibration]]:
        """The bucket of a stage, and the weights and the calibration that its graph takes."""
        case = layer, stage, tokens, capacity
        if case not in self._kept:
            bucket = self.subgraph_bucket(*case)
            device, known = self._device_of(bucket), known_to(bucket.kind, self._known[layer])
            # A device has what its own subgraphs take, once for all lengths.
            key = layer, bucket.kind, bucket.bits
            if key not in self._placed_weights:
                weights = stage_params(self._params, layer, bucket.layer, bucket.kind)
                weights = weights if self._in_blocks(bucket) else without_blocks(weights)
                self._placed_weights[key] = _put(weights, device), _put(known, device)
            self._kept[case] = bucket, self._placed_weights[key]
        return self._kept[case]


def _put(tree: Any, device: jax.Device) -> Any:
    """Arrays on a device; on CPUs they stay where they are in memory."""
    on_cpu = device.platform == "cpu"
    return jax.tree.map(
        lambda leaf: jax.device_put(np.asarray(leaf) if on_cpu else leaf, device, may_alias=on_cpu or None),
        tree,
    )
