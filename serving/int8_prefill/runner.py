"""Prefills prompts in integers for a resident runner, which decodes in floats (mllm-NPU, arXiv 2407.05858).

A prompt runs through whole layers (`jaxllm.int8_prefill.subgraphs`) on this process's device, chunk by
chunk, or through stages of layers on two processors, all chunks together. Both fill the cache for decoding.
"""

import dataclasses
import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxllm.bundle import Bundle
from jaxllm.int8_prefill.schedule import (
    STAGE_VALUES,
    Dispatcher,
    Processor,
    Stage,
    Subgraph,
    Times,
    natural_place,
    placed_by_memory,
    prompt_subgraphs,
    stage_operations,
    stages_of,
)
from jaxllm.int8_prefill.shadow import PRODUCTS, rooms
from jaxllm.int8_prefill.subgraphs import LayerCalibration, calibration_arrays, can_be_addressed
from jaxllm.kernels import native
from jaxllm.kv.cache import KVCache, TokenPositions
from jaxllm.models.layer_stack import STACK, by_address
from jaxllm.models.parameters import head_name
from jaxllm.serving.buckets.bucket import Bucket, embedding_params, norm_params
from jaxllm.serving.buckets.bucket_table import BucketTable, compiled_options, digest_of, environment_facts
from jaxllm.serving.buckets.layer import EmbedBucket, HeadBucket, NormBucket
from jaxllm.serving.buckets.model import StartBucket
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.host.machine import Device
from jaxllm.serving.host.user_cache import cache_folder
from jaxllm.serving.int8_prefill.buckets import (
    WITH_CACHE,
    IntegerChunkBucket,
    IntegerStageBucket,
    device_name,
    known_to,
    shadow_products,
    stage_params,
    takes_addresses,
    without_blocks,
)
from jaxllm.serving.int8_prefill.modes import PrefillMode, PrefillModes
from jaxllm.serving.int8_prefill.processor_pair import (
    ChunkPlanner,
    SubgraphTimes,
    chunk_plans,
    measured_times,
)
from jaxllm.serving.int8_prefill.processors import TwoProcessors
from jaxllm.serving.runners.runner import PrefillChunk, chunks_of, padded, placed_chunks, plan_chunks
from jaxllm.serving.weights.model_level import ModelLevel


@dataclasses.dataclass
class OutlierCounts:
    """Counts of the work of shadows.

    Attributes:
      products: number of products with a shadow.
      channels: total number of channels with outliers.
      enlarged: number of products whose outliers did not fit the smallest compact tensor.
    """

    products: int = 0
    channels: int = 0
    enlarged: int = 0


@dataclasses.dataclass
class Int8Shared:
    """The parts of integer prefill that all levels of a model share.

    Attributes:
      modes: the prefill mode of each prompt.
      processors: processors of the stages; None for only this process's device.
      placed: the processor of a stage of a layer.
      measured: times of stages on two processors.
      outliers: counts of shadows so far.
    """

    modes: PrefillModes
    processors: TwoProcessors | None = None
    placed: Callable[[int, Stage], Processor] = natural_place
    measured: SubgraphTimes = dataclasses.field(
        default_factory=functools.partial(SubgraphTimes, None, IntegerStageBucket)
    )
    outliers: OutlierCounts = dataclasses.field(default_factory=OutlierCounts)


def placed_stages(whole: ModelLevel, modes: PrefillModes) -> Callable[[int, Stage], Processor]:
    """Assigns stages to two processors: to the integer one as many as fit into its memory.

    Raises:
      ConfigError: no stage fits.
    """
    options = whole.options
    if not options.prefill.integer_bytes:
        return natural_place

    def bytes_of(layer: int, stage: Stage) -> int:
        leaves = jax.tree.leaves(stage_params(whole.weights, layer, layer, stage))
        return sum(leaf.nbytes for leaf in leaves)

    return placed_by_memory(
        modes.calibration.shadowed,
        bytes_of,
        lambda layer, stage: stage_operations(whole.cfg, stage, options.chunk_tokens[-1]),
        options.prefill.integer_bytes,
    )


# Results of stages that several later ones use; others are dropped when they are used.
_LASTING = ("out", "added", "block")


class PromptPass:
    """The state of a prompt between its subgraphs: layers' inputs, the cache, and intermediates of stages.

    Independent subgraphs may run at the same time.

    Attributes:
      chunks: the positions of the tokens of each chunk.
      x: per chunk, the input `[1, T, D]` of its current layer.
      counts: per subgraph with shadows, the number of channels with outliers of each product.
      cache: the cache as it is now; the caller sets its length.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        chunks: Sequence[TokenPositions],
        inputs: Sequence[jax.Array],
        cache: KVCache,
    ) -> None:
        """The state before the first layer.

        Args:
          call: `(subgraph, tokens of its chunk, capacity of the cache, *operands)` -> its results.
          chunks: see the class.
          inputs: per chunk, the first layer's input.
          cache: cache of the preceding tokens; its arrays are donated.
        """
        self.chunks, self.x, self.cache = list(chunks), list(inputs), cache
        self.counts: list[tuple[Subgraph, Any]] = []
        self.capacity = cache.capacity_tokens
        self._call = call
        # Per chunk, the results of the stages of its current layer.
        self._values: list[dict[str, Any]] = [{} for _ in chunks]
        # Both processors append counts.
        self._counting = threading.Lock()

    def run(self, each: Subgraph) -> None:
        """Runs one subgraph, after its dependencies (see `STAGE_VALUES`)."""
        names, results = STAGE_VALUES[each.stage]
        operands = [self._operand(each, name) for name in names]
        found = self._call(each, self.x[each.chunk].shape[1], self.capacity, *operands)
        values = dict(zip(results, found if len(results) > 1 else (found,), strict=True))
        if "x" in values:
            self.x[each.chunk] = values.pop("x")
        if "past" in values:
            past, mass = values.pop("past"), values.pop("mass")
            self.cache = dataclasses.replace(self.cache.with_past(each.layer, past), mass=mass)
        if (count := values.pop("count", None)) is not None:
            with self._counting:
                self.counts.append((each, count))
        self._values[each.chunk] |= values

    def repeated(self, each: Subgraph) -> Callable[[], None]:
        """A function that runs a subgraph at each call, after its dependencies."""
        values, x = self._values[each.chunk], self.x[each.chunk]
        before = dict(values)

        def once() -> None:
            values.clear()
            values.update(before)
            self.x[each.chunk] = x
            self.run(each)

        return once

    def _operand(self, each: Subgraph, name: str) -> Any:
        if name == "x":
            return self.x[each.chunk]
        if name == "at":
            return self.chunks[each.chunk]
        if name == "past":
            return self.cache.past(each.layer)
        if name == "mass":
            return self.cache.mass
        values = self._values[each.chunk]
        if name == "head_shadows":
            # A layer without a shadow has none.
            return values.pop(name, None)
        return values[name] if name in _LASTING else values.pop(name)


_TIMED_RUNS = 3


def times_path(bundle: Bundle, options: EngineOptions) -> Path:
    """Path of the times of a bundle's subgraphs on this machine with these resolved options."""
    how = options.prefill
    facts = [
        bundle.fingerprint,
        [native.kernels().name, native.threads()],
        environment_facts(),
        compiled_options(options),
        [how.integer_device, how.integer_bytes],
    ]
    return cache_folder() / "profiles" / f"{digest_of(facts)[:32]}.subgraphs.json"


class Int8Prefill:
    """Prefills prompts of one level in integers.

    Attributes:
      model: the level.
      shared: the shared parts of all levels.
      calibration: activation scales and shadows of the layers.
    """

    def __init__(self, model: ModelLevel, buckets: BucketTable, shared: Int8Shared) -> None:
        self.model, self.shared, self._buckets = model, shared, buckets
        self.calibration = shared.modes.calibration
        # Layers, products and counts of chunks that are not in `shared.outliers` yet; the counts of a chunk's
        # layers may be one array.
        self._outliers: list[tuple[int, tuple[int, ...], Any]] = []
        # (layer, stage, tokens of the chunk, capacity of the cache) -> the bucket of the stage.
        self.stage_bucket = functools.cache(self._stage_bucket)
        self._ready_for: tuple[int, int] | None = None
        options = model.options
        self._planner = ChunkPlanner(
            options.chunk_tokens, options.prefill.order, shared.measured, self.stage_bucket, self.subgraphs
        )

    # -- which prompts ----------------------------------------------------------------------------

    @property
    def possible(self) -> bool:
        """Whether this level may prefill in integers."""
        return self.model.level in self.shared.modes.integer_levels

    @property
    def floats_too(self) -> bool:
        """Whether this level may prefill in floats, now or later."""
        return not self.possible or self.shared.modes.both(self.model.level)

    def mode(self, tokens: int) -> PrefillMode:
        """The prefill mode of a prompt of `tokens` tokens."""
        return self.shared.modes.of(self.model.level, tokens)

    # -- which buckets it needs -------------------------------------------------------------------

    def chunk_buckets(self, tokens: int, cache: int) -> list[Bucket]:
        """The buckets that prefill chunks of `tokens` tokens into caches of length `cache`; empty if the
        level does not prefill in integers."""
        if not self.possible:
            return []
        if self.in_one_step:
            return [self._chunk_bucket(tokens, cache)]
        stages = [self.stage_bucket(each.layer, each.stage, tokens, cache) for each in self.subgraphs(1)]
        return list(dict.fromkeys([self._embed_bucket(tokens), *self._last_buckets(tokens), *stages]))

    @property
    def in_one_step(self) -> bool:
        """Whether all layers of a chunk run in one dispatch, on this process's device."""
        model = self.model
        by_address = STACK in model.params and can_be_addressed(model.weights, model.cfg)
        return self.shared.processors is None and by_address

    def _chunk_bucket(self, tokens: int, cache: int) -> IntegerChunkBucket:
        return IntegerChunkBucket(
            tokens=tokens,
            cache_tokens=cache,
            shadowed=self.calibration.shadowed,
            float_rows=self.calibration.float_rows,
            level=self.model.bucket_level,
        )

    def _stage_bucket(self, layer: int, stage: Stage, tokens: int, cache: int) -> IntegerStageBucket:
        """The bucket of a stage; layers of the same form share it."""
        shadowed = self.calibration.shadowed
        kinds = list(zip(self.model.alike, shadowed, strict=True))
        multiplied = shadow_products(stage, shadowed=shadowed[layer])
        bucket = IntegerStageBucket(
            stage=stage,
            shadowed=shadowed[layer] and stage in WITH_CACHE,
            tokens=tokens,
            cache_tokens=cache if stage in WITH_CACHE else 0,
            layer=kinds.index(kinds[layer]),
            float_rows=self.calibration.float_rows if multiplied else 0,
            level=self.model.bucket_level,
        )
        processors = self.shared.processors
        if processors is None:
            return bucket
        return dataclasses.replace(
            bucket,
            device=device_name(processors.device(self.shared.placed(layer, stage))),
            blocks=processors.both_are_cpus or self.shared.placed(layer, stage) == "float",
            own_cores=processors.both_are_cpus,
        )

    def _embed_bucket(self, tokens: int) -> Bucket:
        return self.model.bucket(EmbedBucket, tokens=tokens)

    def _last_buckets(self, tokens: int) -> tuple[Bucket, Bucket]:
        """The buckets that compute logits after the last token of a chunk."""
        return NormBucket(tokens=tokens, rows=1), HeadBucket(rows=1, vocab_tokens=self.model.cfg.vocab_size)

    # -- getting ready ----------------------------------------------------------------------------

    def rehearse(self) -> None:
        """Runs each chunk length in each cache length once; on two processors also times the stages."""
        if not self.possible:
            return
        for chunk, capacity in self._chunk_cases():
            fed = min(chunk, capacity)
            whole = PrefillChunk(tokens=chunk, last=True, mode="int8")
            jax.block_until_ready(self.prefill(self.empty_cache(capacity), [0] * fed, 0, whole)[0])
        if self.shared.processors is not None:
            self._planner.measure_missing(self._chunk_cases(), self.measure)

    def time_request(self, prompt_tokens: int, max_tokens: int) -> None:
        """Times the stages of one request's prompt if they are not timed yet; only on two processors."""
        if self.shared.processors is None or self.mode(prompt_tokens) == "float":
            return
        options = self.model.options
        wanted = min(prompt_tokens + max_tokens, options.context_tokens)
        capacity = next(each for each in options.cache_tokens if each >= wanted)
        chunks = sorted(set(itertools.chain(*chunk_plans(prompt_tokens, options.chunk_tokens))))
        self._planner.measure_missing([(chunk, capacity) for chunk in chunks], self.measure)

    def _chunk_cases(self) -> Iterator[tuple[int, int]]:
        """All pairs of chunk length and cache length."""
        return itertools.product(self.model.options.chunk_tokens, self.model.options.cache_tokens)

    def measure(self, tokens: int, capacity: int, runs: int = _TIMED_RUNS) -> None:
        """Times each kind of stage of a chunk on two processors, with the other one idle and busy.

        Args:
          tokens: length of the chunk.
          capacity: length of the cache; the chunk is timed at its beginning and at its end.
          runs: number of runs of all layers in each case.
        """
        assert self.shared.processors is not None
        # Tokens from all over the vocabulary, for a typical number of outliers.
        fed = np.linspace(0, self.model.cfg.vocab_size - 1, min(tokens, capacity)).astype(int).tolist()

        def begin(full: bool) -> PromptPass:
            return self.begin(self.empty_cache(capacity), fed, (capacity - len(fed)) * full, [tokens])

        def bucket_of(each: Subgraph) -> IntegerStageBucket:
            return self.stage_bucket(each.layer, each.stage, tokens, capacity)

        times, handover_ms = measured_times(self.shared.processors, begin, self.subgraphs(1), bucket_of, runs)
        self.shared.measured.put(times, handover_ms)
        self._planner.chosen.clear()

    def empty_cache(self, capacity: int) -> KVCache:
        """An empty cache of one of `EngineOptions.cache_tokens`."""
        return self._buckets.get(self.model.bucket(StartBucket, cache_tokens=capacity))()

    # -- answering --------------------------------------------------------------------------------

    def prefill_chunks(self, tokens: int) -> list[PrefillChunk]:
        """See `Runner`: a single one on two processors, which run stages of all chunks side by side."""
        if self.shared.processors is not None:
            return [PrefillChunk(tokens=tokens, last=True, mode="int8")]
        return chunks_of(plan_chunks(tokens, self.model.options.chunk_tokens), mode="int8")

    def prefill(
        self, cache: KVCache, tokens: Sequence[int], at: int, chunk: PrefillChunk
    ) -> tuple[jax.Array | None, KVCache]:
        """See `Runner`."""
        if self.in_one_step:
            self._make_ready()
            compiled = self._buckets.get(self._chunk_bucket(chunk.tokens, cache.capacity_tokens))
            row, valid = padded(tokens, chunk.tokens)
            cache, last = dataclasses.replace(cache, length=np.int32(at)), np.bool_(chunk.last)
            logits, counts, cache = compiled(self._addressed, row, np.int32(valid), last, cache)
            every, shadowed = tuple(range(len(PRODUCTS))), np.flatnonzero(self.calibration.shadowed)
            self._outliers += [(layer, every, counts) for layer in shadowed.tolist()]
            if chunk.last:
                self._count_outliers()
            return logits if chunk.last else None, cache
        lengths = [chunk.tokens] if self.shared.processors is None else None
        prompt = self.begin(cache, tokens, at, lengths)
        subgraphs = self.subgraphs(len(prompt.chunks))
        if self.shared.processors is None:
            for each in subgraphs:
                prompt.run(each)
        else:
            dispatcher = Dispatcher(subgraphs, self.times(prompt), self.model.options.prefill.order)
            self.shared.processors.run(dispatcher, prompt.run)
        for each, counts in prompt.counts:
            self._outliers.append((each.layer, shadow_products(each.stage, shadowed=True), counts))
        logits = None
        if chunk.last:
            x, positions = prompt.x[-1], prompt.chunks[-1]
            if self.shared.processors is not None:
                x = jax.device_put(x, jax.devices()[0])
            norm, head = (self._buckets.get(bucket) for bucket in self._last_buckets(x.shape[1]))
            logits = head(self._head, norm(self._norm, x, np.array([int(positions.valid) - 1], np.int32)))
            self._count_outliers()
        length = np.int32(at + len(tokens))
        return logits, dataclasses.replace(prompt.cache, length=length)  # pyright: ignore

    def subgraphs(self, chunks: int) -> tuple[Subgraph, ...]:
        """The subgraphs of a prompt of so many chunks."""
        stages = (lambda shadowed: ("layer",)) if self.shared.processors is None else stages_of
        return prompt_subgraphs(chunks, self.calibration.shadowed, self.shared.placed, stages)

    def times(self, prompt: PromptPass, *, shared: bool = False) -> Times:
        """A function for the measured times of a prompt's subgraphs in milliseconds: with the other processor
        idle, or busy if `shared`; 1 for unmeasured ones."""
        chunks = [(len(each.positions), int(each.positions[0])) for each in prompt.chunks]
        return self._planner.times(chunks, prompt.capacity, shared=shared)

    def begin(
        self, cache: KVCache, tokens: Sequence[int], at: int, lengths: Sequence[int] | None = None
    ) -> PromptPass:
        """A prompt before its first layer, in chunks of `lengths`, or in planned ones."""
        self._make_ready()
        lengths = lengths or self._planner.plan(len(tokens), at, cache.capacity_tokens)
        chunks = placed_chunks(tokens, lengths, at)
        embeds = [self._buckets.get(self._embed_bucket(len(row))) for row, _ in chunks]
        inputs = [
            embed(self._embedding, row[None], positions.positions)
            for embed, (row, positions) in zip(embeds, chunks, strict=True)
        ]
        return PromptPass(self.call, [positions for _, positions in chunks], inputs, cache)

    def call(self, each: Subgraph, tokens: int, capacity: int, *operands: Any) -> Any:
        """Runs a subgraph of a chunk of `tokens` tokens on its processor."""
        bucket, known = self._operands(each.layer, each.stage, tokens, capacity)
        if self.shared.processors is None:
            return self._buckets.get(bucket)(*known, *operands)
        # The scheduler starts dependent subgraphs on return: the results must be complete.
        here = jax.device_put(operands, _device(bucket))
        return jax.block_until_ready(self._buckets.get(bucket)(*known, *here))

    def _count_outliers(self) -> None:
        """Adds the counts of all chunks; copying them to the host waits for the device."""
        outliers = self.shared.outliers
        found, self._outliers = self._outliers, []
        for layer, products, counts in found:
            shadows, counts = self._known[layer].rows, np.asarray(counts)
            assert shadows is not None
            own = counts[layer] if counts.ndim == 2 else np.ravel(counts)
            for product, channels in zip(products, own.tolist(), strict=True):
                outliers.products += 1
                outliers.channels += channels
                outliers.enlarged += channels > rooms(len(shadows[product].place))[1]

    # -- parameters -------------------------------------------------------------------------------

    def _make_ready(self) -> None:
        """Sorts the arguments of buckets, once per version of the weights."""
        model = self.model
        if self._ready_for == model.weights_version:
            return
        self._embedding, self._norm = embedding_params(model.params), norm_params(model.params)
        self._head = {head_name(model.cfg): model.params[head_name(model.cfg)]}
        self._known = self.calibration.layers(model.level, model.bucket_cfg)
        if self.in_one_step:
            beside = [calibration_arrays(each) for each in self._known]
            self._addressed = by_address(model.weights, model.bucket_cfg, beside)
        self._placed: dict[tuple[int, Stage, str], tuple[Any, LayerCalibration]] = {}
        self._ready_for = model.weights_version

    def _operands(
        self, layer: int, stage: Stage, tokens: int, capacity: int
    ) -> tuple[IntegerStageBucket, tuple[Any, LayerCalibration]]:
        """The bucket of a stage, its weights and its calibration."""
        bucket = self.stage_bucket(layer, stage, tokens, capacity)
        # One copy per device, for all chunk and cache lengths.
        key = layer, stage, bucket.device
        if key not in self._placed:
            known = known_to(self._known[layer], stage, shadowed=bucket.shadowed)
            own = self.model.params if takes_addresses(stage, self.model.cfg) else self.model.weights
            weights = stage_params(own, layer, bucket.layer, stage)
            weights = weights if bucket.blocks else without_blocks(weights)
            device = _device(bucket)
            self._placed[key] = _put(weights, device), _put(known, device)
        return bucket, self._placed[key]


def _device(bucket: IntegerStageBucket) -> Device:
    where = bucket.placement
    return jax.devices()[0] if where is None else where.device


def _put(tree: Any, device: Device) -> Any:
    """Puts arrays on a device; on a CPU without a copy."""
    on_cpu = device.platform == "cpu"
    return jax.tree.map(
        lambda leaf: jax.device_put(np.asarray(leaf) if on_cpu else leaf, device, may_alias=on_cpu or None),
        tree,
    )
