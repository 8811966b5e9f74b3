"""Running a model whose prompts are read in integers: the graphs of its buckets, as calls.

Prompts pass the layers (`jaxllm.prefill.subgraphs`), whole ones on this process's device, or their
subgraphs on two processors; all else is a `BucketTable`'s. The cache is the one that decoding uses.
"""

import dataclasses
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import numpy as np

from jaxllm.config import Bucket, ModelConfig
from jaxllm.elastic.submodel import CountedSubModel, whole_params
from jaxllm.kv.cache import KVCache
from jaxllm.models.parameters import Params
from jaxllm.prefill.calibration import PrefillCalibration
from jaxllm.prefill.schedule import (
    PROCESSORS,
    Dispatcher,
    Processor,
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
from serving.graph_store import GraphStore
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

_TIMED_RUNS = 5
_Case = tuple[int, Stage, int, int]
# Of a level and a number of tokens, whether integers read them faster.
Chooser = Callable[[int, int], bool]


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
      outliers: what shadows had to do so far, at all levels.
      both: whether prompts are read in integers or in floats, as is faster (see `choose_by`).
      processors: that run subgraphs; None for this process's device alone.
      handover_ms: that a subgraph takes besides its work, on two processors; measured when the table is
        rehearsed.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        params: Params | CountedSubModel,
        options: EngineOptions,
        calibration: PrefillCalibration,
        store: GraphStore | None = None,
        processors: TwoProcessors | None = None,
    ) -> None:
        """Makes an empty table of the whole model.

        Args:
          cfg: the model.
          params: its parameters, at 8 bits.
          options: resolved options.
          calibration: of this model.
          store: keeps graphs for later processes.
          processors: see the class.

        Raises:
          ConfigError: the integer processor's memory holds no subgraph.
        """
        super().__init__(cfg, params, options, store)
        self.calibration, self.processors = calibration, processors
        self.outliers = OutlierCounts()
        # Both ways are there; one for all levels says which is taken, and floats until it is known.
        self.both = options.prefill.mode == "auto"
        self._chooser: list[Chooser] = [lambda level, tokens: False]
        self._placed = natural_place
        if processors is not None and options.prefill.integer_bytes:
            tokens = options.chunk_tokens[-1]
            self._placed = placed_by_memory(
                calibration.shadowed,
                lambda layer, stage: stage_bytes(params, layer, stage),
                lambda layer, stage: stage_operations(cfg, stage, tokens),
                options.prefill.integer_bytes,
            )
        # Milliseconds in an empty cache and in a full one, measured when the table is rehearsed.
        # The second ones are those while the other processor is busy.
        self._times: dict[_Case, tuple[float, float]] = {}
        self._shared_times: dict[_Case, tuple[float, float]] = {}
        self.handover_ms = 0.0
        self._ready_for: tuple[int, int] | None = None

    # -- which graphs ----------------------------------------------------------------------------

    def all_buckets(self) -> list[Bucket]:
        """Every bucket that answering any request at this level can need."""
        buckets = [each for each in super().all_buckets() if self.both or each.kind != "prefill"]
        for cache in self.options.cache_tokens:
            for chunk in self.options.chunk_tokens:
                buckets += self.chunk_buckets(chunk, cache)
        return list(dict.fromkeys(buckets))

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

    def _compiled(self, bucket: Bucket) -> jax.stages.Compiled:
        lowered = self._lowered(bucket)
        if self.processors is None or bucket.kind not in SUBGRAPH_KINDS or not self.processors.both_are_cpus:
            return lowered.compile()
        # XLA's own threads would take the other processor's cores.
        return lowered.compile(compiler_options={"xla_cpu_multi_thread_eigen": False})

    def _build(self, bucket: Bucket) -> tuple[Any, float]:
        if self._device_of(bucket) == jax.devices()[0]:
            return super()._build(bucket)
        # Executables on disk are of the first device.
        began = time.perf_counter()
        graph = self.at(bucket.level)._compiled(bucket)
        return graph, 1000 * (time.perf_counter() - began)

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
        for capacity in self.options.cache_tokens:
            for tokens in self.options.chunk_tokens:
                fed = min(tokens, capacity)
                jax.block_until_ready(self.read_in("int8", self.start(capacity), [0] * fed, 0)[0])
                if self.processors is not None:
                    self.measure(fed, capacity)

    def prefill(self, cache: KVCache, tokens: Sequence[int], at: int) -> tuple[jax.Array, KVCache]:
        """Feeds `tokens` at position `at`, chunk by chunk: logits `[1, V]` after the last, cache."""
        return self.read_in(self.mode_for(len(tokens)), cache, tokens, at)

    def choose_by(self, chooser: Chooser) -> None:
        """Says which of both ways reads prompts, at all levels."""
        self._chooser[0] = chooser

    def mode_for(self, tokens: int) -> Literal["int8", "float"]:
        """How so many tokens are read."""
        return "int8" if not self.both or self._chooser[0](self.level, tokens) else "float"

    def read_in(
        self, mode: Literal["int8", "float"], cache: KVCache, tokens: Sequence[int], at: int
    ) -> tuple[jax.Array, KVCache]:
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
        was busy; 1 for all where they were not."""
        times = self._shared_times if shared else self._times

        def time_of(each: Subgraph) -> float:
            at = passing.chunks[each.chunk].positions
            case = each.layer, each.stage, len(at), passing.capacity
            empty, full = times.get(case, (1.0, 1.0))
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
        # All kinds of tokens, so that there are as many outliers as there will be.
        fed = np.linspace(0, self.cfg.vocab_size - 1, tokens).astype(int).tolist()
        taken: dict[tuple[Bucket, bool, bool], list[float]] = {}
        handovers: list[float] = []
        cases: dict[_Case, Bucket] = {}
        # At both ends of the cache, and both ways.
        for _, full, busy in itertools.product(range(runs), (False, True), (False, True)):
            at = (capacity - tokens) * full
            passing = self.begin_passing(self.start(capacity), fed, at)
            besides = self._work_of_each(self.begin_passing(self.start(capacity), fed, at)) if busy else {}
            for each in self.subgraphs(passing):
                case = each.layer, each.stage, passing.x[each.chunk].shape[1], capacity
                cases[case] = bucket = self.subgraph_bucket(*case)
                assert self.processors is not None
                work = functools.partial(passing.run, each)
                beside = besides.get("float" if each.processor == "integer" else "integer")
                spent_ms, handover_ms = self.processors.timed(each.processor, work, beside)
                taken.setdefault((bucket, full, busy), []).append(spent_ms)
                if not busy:
                    handovers.append(handover_ms)
        medians = {key: statistics.median(times) for key, times in taken.items()}
        self.handover_ms = statistics.median(handovers)
        for busy, times in ((False, self._times), (True, self._shared_times)):
            for case, bucket in cases.items():
                times[case] = medians[bucket, False, busy], medians[bucket, True, busy]

    def _work_of_each(self, passing: Passing) -> dict[Processor, Callable[[], None]]:
        """What keeps each processor busy: its first subgraph of most work, again and again."""
        found: dict[Processor, Callable[[], None]] = {}
        for each in self.subgraphs(passing):
            if each.processor not in found and (each.processor == "integer" or each.stage == "attend"):
                found[each.processor] = passing.repeated(each)
            if len(found) == len(PROCESSORS):
                break
            assert self.processors is not None
            self.processors.timed(each.processor, functools.partial(passing.run, each))
        return found

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
