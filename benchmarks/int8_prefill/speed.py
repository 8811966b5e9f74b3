"""Times the prefill of each system's engine, in processes of their own.

On one processor, of all cores: floats and static steps without shadow (naive-int8), of prompts padded to the
longest, as a single bucket takes them, and in chunks that share buckets; native kernels that quantize by the
activations at hand (K-Quant); static steps with shadow (ours). On an integer and a float processor: static
steps with and without shadow, in order and out of order, beside the simulator's times of the same subgraphs.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.harness.children import in_process, in_turns
from benchmarks.harness.machine import wait_for_quiet
from benchmarks.harness.report import OURS
from jaxllm.bundle import Bundle, rewrite_bundle
from jaxllm.bundle.calibrations import prefill_parts, read_prefill
from jaxllm.int8_prefill.schedule import (
    ORDERS,
    PROCESSORS,
    Dispatcher,
    Order,
    Subgraph,
    lower_bound_ms,
    simulate,
    stages_of,
)
from jaxllm.serving.buckets.bucket_table import BucketTable
from jaxllm.serving.ground.int8_prefill_options import PrefillOptions
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.host.user_cache import cache_folder
from jaxllm.serving.int8_prefill.buckets import IntegerStageBucket
from jaxllm.serving.int8_prefill.processors import prepare_processors
from jaxllm.serving.int8_prefill.runner import Int8Prefill
from jaxllm.serving.opening.engine import Engine
from jaxllm.serving.runners.runner import prefill_prompt

# Suffix of a system whose prompts are padded to the longest.
_PADDED = "-padded"
# Bundles by what systems run them.
Paths = dict[str, Path]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeedPlan:
    """Sizes.

    Attributes:
      lengths: of prompts, ascending.
      repeats: of each prompt on each system, which take turns.
      chunk_tokens: of buckets.
    """

    lengths: tuple[int, ...] = (64, 256, 1024)
    repeats: int = 5
    chunk_tokens: tuple[int, ...] = (64, 256)


def bundles_of(integer: Path, floats: Path) -> Paths:
    """The bundles that systems take; the one without shadow is made unless it is there."""
    with Bundle.open(integer) as bundle:
        folder = cache_folder() / "benchmarks" / "prefill"
        bare = folder / f"{bundle.fingerprint[:24]}-without-shadow.jaxllm"
        if not bare.exists():
            folder.mkdir(parents=True, exist_ok=True)
            known = read_prefill(bundle)
            assert known is not None
            none = dataclasses.replace(known, shadowed=(False,) * len(known.shadowed), channels={}, rows={})
            rewrite_bundle(bare, bundle, prefill_parts(none))
    return {"int8": integer, "naive": bare, "float": floats}


def measured(paths: Paths, plan: SpeedPlan, *, processors: int) -> dict[str, Any]:
    """The measurements of a process of its own, in which JAX was not used before."""
    return in_process(_measured, paths, plan, processors)


def _measured(paths: Paths, plan: SpeedPlan, processors: int) -> dict[str, Any]:
    if processors == 1:
        return _on_all_cores(paths, plan)
    prepare_processors()
    return _on_two_processors(paths, plan)


def _on_all_cores(paths: Paths, plan: SpeedPlan) -> dict[str, Any]:
    floats, integers = PrefillOptions(mode="float"), PrefillOptions(mode="int8")
    engines = {
        "float": _opened(paths["float"], floats, plan),
        "K-Quant": _opened(paths["int8"], floats, plan),
        "naive-int8": _opened(paths["naive"], integers, plan),
        OURS: _opened(paths["int8"], integers, plan),
    }
    padded = {f"{name}{_PADDED}": engines[name] for name in ("float", "naive-int8")}
    times = _times({**engines, **padded}, plan)
    int8 = _int8(engines[OURS])
    return {
        "ms": times,
        "build_ms": {name: engine.runner.buckets.build_ms for name, engine in engines.items()},
        "buckets": {name: len(engine.runner.buckets.bucket_ms) for name, engine in engines.items()},
        "row_bytes": int8.calibration.row_bytes,
        "weight_bytes": engines[OURS].model.bundle.weight_bytes,
    }


def _on_two_processors(paths: Paths, plan: SpeedPlan) -> dict[str, Any]:
    orders: dict[str, tuple[str, Order]] = {
        f"{OURS}-no-shadow-in-order": ("naive", "in-order"),
        f"{OURS}-no-shadow": ("naive", "out-of-order"),
        f"{OURS}-in-order": ("int8", "in-order"),
        f"{OURS}-first-ready": ("int8", "first-ready"),
        OURS: ("int8", "out-of-order"),
    }
    engines = {
        name: _opened(paths[path], PrefillOptions(mode="int8", processors=2, order=order), plan)
        for name, (path, order) in orders.items()
    }
    prefills = {name: _int8(engine) for name, engine in engines.items()}
    spans: dict[str, dict[int, list[dict[str, float]]]] = {name: {} for name in engines}

    def predict(name: str, length: int) -> None:
        # Times of subgraphs change with the machine's load, from moment to moment.
        int8, order = prefills[name], engines[name].options.prefill.order
        int8.measure(min(length, plan.chunk_tokens[-1]), plan.lengths[-1], runs=1)
        prompt = int8.begin(int8.empty_cache(plan.lengths[-1]), [0] * length, 0)
        subgraphs, known = int8.subgraphs(prompt), int8.times(prompt)
        shared, handover_ms = int8.times(prompt, shared=True), int8.shared.measured.handover_ms
        simulated = simulate(subgraphs, known, order, overhead_ms=handover_ms, shared=shared).makespan_ms
        bound = lower_bound_ms(subgraphs, known)
        spans[name].setdefault(length, []).append({"simulated_ms": simulated, "bound_ms": bound})

    def watch(name: str, length: int) -> None:
        processors = prefills[name].shared.processors
        assert processors is not None
        assert processors.trace is not None
        latest = spans[name][length][-1]
        latest["real_ms"] = processors.trace.makespan_ms
        # No order is faster than the bound by the times that the subgraphs took in this run.
        int8 = prefills[name]
        prompt = int8.begin(int8.empty_cache(plan.lengths[-1]), [0] * length, 0)
        subgraphs = int8.subgraphs(prompt)
        took = {subgraphs[run.index]: run.end_ms - run.start_ms for run in processors.trace.runs}
        latest["real_to_own_bound"] = latest["real_ms"] / lower_bound_ms(subgraphs, took.__getitem__)
        latest["real_to_simulated"] = latest["real_ms"] / latest["simulated_ms"]

    _times(engines, plan, predict, watch)
    found: dict[str, Any] = {}
    for name, by_length in spans.items():
        found[name] = {}
        for length, runs in by_length.items():
            # The first run is not counted.
            medians = {key: statistics.median(run[key] for run in runs[1:]) for key in runs[0]}
            found[name][length] = medians
    int8 = prefills[OURS]
    prompt = int8.begin(int8.empty_cache(plan.lengths[-1]), [0] * plan.lengths[-1], 0)
    subgraphs = int8.subgraphs(prompt)
    return {
        "spans": found,
        "sharing": _sharing(int8, engines[OURS].runner.buckets, plan),
        "decision_us": {order: _decision_us(subgraphs, order) for order in ORDERS},
    }


def _decision_us(subgraphs: Sequence[Subgraph], order: Order) -> float:
    """Microseconds of a decision: all of a prompt's are made one after the other."""
    dispatcher = Dispatcher(subgraphs, lambda each: 1.0, order)
    began = time.perf_counter()
    while not dispatcher.done:
        for processor in PROCESSORS:
            place = dispatcher.take(processor)
            if place is not None:
                dispatcher.finish(place)
    return 1e6 * (time.perf_counter() - began) / len(subgraphs)


def _opened(path: Path, how: PrefillOptions, plan: SpeedPlan) -> Engine:
    longest = plan.lengths[-1]
    options = EngineOptions(
        context_tokens=longest,
        cache_tokens=(longest,),
        chunk_tokens=plan.chunk_tokens,
        cache_dtype="float16",
        # Nothing is read from disk: building is measured.
        buckets_bytes=0,
        prefill=how,
    )
    return Engine.open(path, options=options)


def _int8(engine: Engine) -> Int8Prefill:
    int8 = engine.runner.int8
    assert int8 is not None
    return int8


def _times(
    engines: dict[str, Engine],
    plan: SpeedPlan,
    before: Callable[[str, int], None] = lambda name, length: None,
    after: Callable[[str, int], None] = lambda name, length: None,
) -> dict[str, dict[int, float]]:
    """Milliseconds of each system and length, medians over prompts that all get by turns; `before` and
    `after` are called with both around each."""
    found: dict[str, dict[int, float]] = {name: {} for name in engines}
    draw = np.random.default_rng(0)
    for length in plan.lengths:
        taken: dict[str, list[float]] = {name: [] for name in engines}
        vocab_size = next(iter(engines.values())).cfg.vocab_size
        prompts = draw.integers(0, vocab_size, (plan.repeats + 1, length)).tolist()
        for number, tokens, name in in_turns(engines, prompts):
            engine = engines[name]
            before(name, length)
            cache = jax.block_until_ready(engine.runner.start(plan.lengths[-1]))
            missing = (plan.lengths[-1] - length) * name.endswith(_PADDED)
            wait_for_quiet(0.3)
            began = time.perf_counter()
            jax.block_until_ready(prefill_prompt(engine.runner, cache, tokens + [0] * missing, 0)[0])
            spent_ms = 1000 * (time.perf_counter() - began)
            after(name, length)
            if number:
                taken[name].append(spent_ms)
        for name, values in taken.items():
            found[name][length] = statistics.median(values)
    return found


def _sharing(int8: Int8Prefill, table: BucketTable, plan: SpeedPlan) -> dict[str, Any]:
    """Buckets, their memory and the time to build them for prompts of the greatest length: shared by chunks
    and layers, against one for each chunk and layer, counted by those that were built."""
    chunk, longest = plan.chunk_tokens[-1], plan.lengths[-1]
    chunks, layers = -(-longest // chunk), int8.model.cfg.layers
    apart = [each for layer in range(layers) for each in _of_layer(int8, layer, chunk, longest) * chunks]
    own = list(dict.fromkeys(apart))
    memory = {bucket: _compiled_bytes(table.get(bucket)) for bucket in own}
    return {
        "shared": {
            "buckets": len(own),
            "bytes": sum(memory.values()),
            "build_ms": sum(table.bucket_ms[each] for each in own),
        },
        "apart": {
            "buckets": len(apart),
            "bytes": sum(memory[each] for each in apart),
            "build_ms": sum(table.bucket_ms[each] for each in apart),
        },
    }


def _of_layer(int8: Int8Prefill, layer: int, chunk: int, cache: int) -> list[IntegerStageBucket]:
    stages = stages_of(int8.calibration.shadowed[layer])
    return [int8.stage_bucket(layer, stage, chunk, cache) for stage in stages]


def _compiled_bytes(compiled: Any) -> int:
    """Bytes of a bucket besides its arguments: code, and memory while it runs."""
    known = compiled.memory_analysis()
    return int(known.generated_code_size_in_bytes + known.temp_size_in_bytes + known.output_size_in_bytes)
