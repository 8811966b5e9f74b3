"""Running a model whose prompts are read in integers: the graphs of its buckets, as calls.

Prompts pass the layers as subgraphs (`jaxllm.prefill.subgraphs`), on this process's device or on two
processors; all else is a `BucketTable`'s. The cache is the one that decoding uses.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxllm.config import Bucket, ModelConfig
from jaxllm.elastic.submodel import CountedSubModel, whole_params
from jaxllm.kv.cache import KVCache, Places
from jaxllm.models.parameters import Params
from jaxllm.prefill.calibration import PrefillCalibration
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
from jaxllm.prefill.subgraphs import LayerCalibration, Stage, product_sizes, stages_of
from jaxllm.sampling import Sampling, sampler_state
from serving.buckets import BucketTable
from serving.chunks import padded, plan_chunks
from serving.graph_store import GraphStore
from serving.lowering import MAX_STOP_IDS, norm_params
from serving.options import EngineOptions
from serving.prefill.graphs import (
    SUBGRAPH_KINDS,
    float_rows,
    kind_of,
    known_to,
    lower_subgraph,
    stage_bytes,
    stage_params,
)
from serving.prefill.passing import Passing
from serving.prefill.processors import TwoProcessors

_TIMED_RUNS = 5
# Which product's outliers the results of a stage count.
_COUNTED: dict[Stage, int] = {"project_shadow": 0, "attend": 1, "widen_shadow": 2, "narrow_shadow": 3}
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
      outliers: what shadows had to do so far, at all levels.
      processors: that run subgraphs; None for this process's device alone.
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
        self._placed = natural_place
        if processors is not None and options.prefill.integer_bytes:
            tokens = options.chunk_tokens[-1]
            self._placed = placed_by_memory(
                calibration.shadowed,
                lambda layer, stage: stage_bytes(params, layer, stage),
                lambda layer, stage: stage_operations(cfg, stage, tokens),
                options.prefill.integer_bytes,
            )
        # By layer and bucket, measured when the table is rehearsed.
        self._times: dict[_Case, float] = {}
        self._ready_for: tuple[int, int] | None = None

    # -- which graphs ----------------------------------------------------------------------------

    def all_buckets(self) -> list[Bucket]:
        """Every bucket that answering any request at this level can need."""
        buckets = [each for each in super().all_buckets() if each.kind != "prefill"]
        for cache in self.options.cache_tokens:
            for chunk in self.options.chunk_tokens:
                buckets += self.chunk_buckets(chunk, cache)
        return list(dict.fromkeys(buckets))

    def request_buckets(self, prompt_tokens: int, max_tokens: int) -> list[Bucket]:
        """The fewest buckets that answer one request (see `BucketPlan.request_buckets`)."""
        found: list[Bucket] = []
        for bucket in super().request_buckets(prompt_tokens, max_tokens):
            is_chunk = bucket.kind == "prefill"
            found += self.chunk_buckets(bucket.tokens, bucket.cache_tokens) if is_chunk else [bucket]
        return list(dict.fromkeys(found))

    def chunk_buckets(self, tokens: int, cache: int) -> list[Bucket]:
        """The buckets that read chunks of so many tokens into caches of a length."""
        found = [self._bucket("embed", tokens, 0), *self._last_buckets(tokens)]
        for layer, with_shadow in enumerate(self.calibration.shadowed):
            found += [self.subgraph_bucket(layer, stage, tokens, cache) for stage in stages_of(with_shadow)]
        return list(dict.fromkeys(found))

    def subgraph_bucket(self, layer: int, stage: Stage, tokens: int, cache: int) -> Bucket:
        """The bucket of a stage, which all layers share that are alike; static ones whatever the cache."""
        shadowed = self.calibration.shadowed
        kinds = list(zip(self.alike, shadowed, strict=True))
        kind = kind_of(stage, shadowed=shadowed[layer])
        bucket = self._bucket(kind, tokens, cache if stage == "attend" else self.options.cache_tokens[0])
        elsewhere = self.processors is not None and self._placed(layer, stage) == "integer"
        return dataclasses.replace(
            bucket,
            layer=kinds.index(kinds[layer]),
            rows=float_rows(kind, self.calibration, layer),
            # The integer processor's device has graphs of its own.
            bits=int(elsewhere),
        )

    def _last_buckets(self, tokens: int) -> list[Bucket]:
        """What gives logits behind the last token of a chunk."""
        return [
            Bucket(kind="norm", tokens=tokens, rows=1),
            Bucket(kind="head", rows=1, bits=self.cfg.vocab_size),
        ]

    def _lowered(self, bucket: Bucket) -> jax.stages.Lowered:
        if bucket.kind not in SUBGRAPH_KINDS:
            return super()._lowered(bucket)
        with jax.default_device(self._device_of(bucket)):
            return lower_subgraph(bucket, self.cfg, self._params, self.options)

    def _build(self, bucket: Bucket) -> tuple[Any, float]:
        if self._device_of(bucket) == jax.devices()[0]:
            return super()._build(bucket)
        # Executables on disk are of the first device.
        began = time.perf_counter()
        graph = self.at(bucket.level)._lowered(bucket).compile()
        return graph, 1000 * (time.perf_counter() - began)

    def _device_of(self, bucket: Bucket) -> jax.Device:
        if self.processors is None or bucket.kind not in SUBGRAPH_KINDS or not bucket.bits:
            return jax.devices()[0]
        return self.processors.device("integer")

    # -- running them ----------------------------------------------------------------------------

    def rehearse(self) -> None:
        """Runs every graph of this level once; where two processors share them, times the subgraphs."""
        stops = np.full(MAX_STOP_IDS, -1, np.int32)
        for capacity in self.options.cache_tokens:
            for tokens in self.options.chunk_tokens:
                fed = min(tokens, capacity)
                logits, cache = self.prefill(self.graph(self._start_bucket(capacity))(), [0] * fed, 0)
                token, sampler = self.sample(logits, sampler_state(Sampling(), [], self.cfg.vocab_size, 0))
                if fed < capacity:
                    jax.block_until_ready(self.decode(token, cache, sampler, stops, 1)[0])
                if self.processors is not None:
                    self._measure(fed, capacity)

    def prefill(self, cache: KVCache, tokens: Sequence[int], at: int) -> tuple[jax.Array, KVCache]:
        """Feeds `tokens` at position `at`, chunk by chunk: logits `[1, V]` after the last, cache."""
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
        return prompt_subgraphs(len(passing.chunks), self.calibration.shadowed, self._placed)

    def times(self, passing: Passing) -> Times:
        """How long the subgraphs of a prompt took when they were timed; 1 for all where they were not."""

        def time_of(each: Subgraph) -> float:
            tokens = passing.x[each.chunk].shape[1]
            return self._times.get((each.layer, each.stage, tokens, passing.capacity), 1.0)

        return time_of

    def begin_passing(self, cache: KVCache, tokens: Sequence[int], at: int) -> Passing:
        """A prompt before its first layer."""
        self._make_ready()
        chunks, inputs, position = [], [], 0
        for length in plan_chunks(len(tokens), self.options.chunk_tokens):
            row, valid = padded(tokens[position : position + length], length)
            positions = np.arange(at + position, at + position + length, dtype=np.int32)
            chunks.append(Places(positions, np.int32(valid), run=True))  # pyright: ignore[reportArgumentType]
            embed = self.graph(self._bucket("embed", length, 0))
            inputs.append(embed(self._embedding, row, positions))
            position += valid
        return Passing(self.call, chunks, inputs, cache)

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
        for each, count in passing.counts:
            channels = int(count)
            inputs, _ = product_sizes(self.cfg, each.layer, _COUNTED[each.stage])
            self.outliers.products += 1
            self.outliers.channels += channels
            self.outliers.enlarged += channels > rooms(inputs)[1]

    def _measure(self, tokens: int, capacity: int) -> None:
        """Times each kind of subgraph of a chunk in a cache of a length."""
        taken: dict[tuple[Bucket, int], list[float]] = {}
        cases: dict[_Case, tuple[Bucket, int]] = {}
        for _ in range(_TIMED_RUNS):
            cache = self.graph(self._start_bucket(capacity))()
            passing = self.begin_passing(cache, [0] * tokens, 0)
            for each in self.subgraphs(passing):
                length = passing.x[each.chunk].shape[1]
                case = each.layer, each.stage, length, capacity
                cases[case] = self.subgraph_bucket(*case), length
                assert self.processors is not None
                spent_ms = self.processors.timed(each.processor, functools.partial(passing.run, each))
                taken.setdefault(cases[case], []).append(spent_ms)
        self._times |= {case: statistics.median(taken[key]) for case, key in cases.items()}

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
