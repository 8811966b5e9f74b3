"""Runs all parts and makes their rows: simulation, speed on one and two processors, accuracy, pruning.

Prompts are timed in processes of their own. On one processor, of all cores: floats and static steps without
shadow (naive-int8), of prompts padded to the longest, as a single bucket takes them, and in chunks that share
buckets; native kernels that quantize by the activations at hand (K-Quant); static steps with shadow (ours).
On an integer and a float processor: static steps with and without shadow, in order and out of order, beside
the simulator's times of the same subgraphs.

The simulated phone has an integer and a float processor, by the times in the mllm-NPU paper.

Stated (arXiv 2407.05858): "with a prompt length of 256 using the Qwen1.5-1.8B model, NPU execution takes
315ms, about twice that of the CPU" (section 3.4); products of 8 bits are 4.5 to 5.8 times as fast on the NPU
as on the CPU (section 2.2); chunks have 256 tokens (section 4); 85 % of layers have no shadow, and those near
inputs and outputs matter most (section 3.3). The paper does not say which phone the 315 ms are of.

Assumed: floats on the CPU are as fast as its 8 bits, in the middle of that range; the rest of the CPU's time
goes to norms, rotations, softmax and the like, equally for each token and layer, together with attention. (If
all of the CPU's time were products of attention, it would grow with the prompt to nearly twice the NPU's at
1,024 tokens.)

315 ms for 256 tokens are at most 813 tokens/s: the paper's headline of more than 1,000 does not follow from
them, and this phone does not reach it. Neither is it the Xiaomi 14 of table 4, on which 1,500 tokens and an
answer take 1.7 s, less than 315 ms for each 256. `headline_phone` has the same proportions, and is as much
faster as the headline asks for; the bars of figure 14, with the latencies of 64 and 256 tokens, have no
numbers.
"""

import contextlib
import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.harness.bench import Run
from benchmarks.harness.children import in_process, in_turns
from benchmarks.harness.machine import wait_for_quiet
from benchmarks.harness.report import OURS, Row, compared, row
from benchmarks.int8_prefill import Plan
from benchmarks.int8_prefill.accuracy import accuracy_rows, pruning_rows, subjects
from benchmarks.models import calibrated_model, calibrated_shapes, made_once, shape
from jaxllm.bundle import Bundle, rewrite_bundle
from jaxllm.bundle.calibrations import prefill_parts, read_prefill
from jaxllm.int8_prefill import schedule
from jaxllm.int8_prefill.recipe import ORDERS
from jaxllm.serving.buckets.bucket_table import BucketTable
from jaxllm.serving.ground.int8_prefill_options import PrefillOptions
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.int8_prefill.buckets import IntegerStageBucket
from jaxllm.serving.int8_prefill.processors import prepare_processors
from jaxllm.serving.int8_prefill.runner import Int8Prefill
from jaxllm.serving.opening.engine import Engine
from jaxllm.serving.runners.runner import prefill_prompt

# Where the chunk length is chosen together with the order, and of which lengths.
_CHOSEN = f"{OURS}-chosen-chunks"
CHOSEN_CHUNKS = (256, 128, 64)
# Suffix of a system whose prompts are padded to the longest.
_PADDED = "-padded"
# What calibration measured to be lost is no reason not to time it: `accuracy` says the loss.
_INTEGERS = PrefillOptions(mode="int8", most_loss=math.inf)
# Bundles by what systems run them.
Paths = dict[str, Path]


def run(bench: Run[Plan]) -> list[Row]:
    """Measures the parts that the plan names."""
    plan, rows = bench.plan, []
    if "simulation" in plan.parts:
        rows += simulated_rows(plan.simulated_tokens)
    timed = [each for each in ("one-processor", "two-processors") if each in plan.parts]
    if timed:
        rows += _speed_rows(timed, bench)
    for part, rows_of in (("accuracy", accuracy_rows), ("pruning", pruning_rows)):
        if part in plan.parts and bench.model is not None:
            for subject in subjects(bench.model, plan, part, bench.progress):
                rows += rows_of(subject, plan)
    return rows


def _speed_rows(timed: Sequence[str], bench: Run[Plan]) -> list[Row]:
    """Rates, buckets and schedules of a calibrated model, or of random weights."""
    if bench.shape is not None:
        name, note = bench.shape, "random weights with outliers put in"
        bundles = calibrated_shapes(bench.shape, bench.progress)
    else:
        assert bench.model is not None
        name, note, bundles = bench.model.stem, "", calibrated_model(bench.model, bench.progress)
    paths, rows = bundles_of(*bundles), []
    for done, part in enumerate(timed):
        bench.progress("Measuring", done, len(timed))
        # In a process of its own, in which JAX was not used before.
        if part == "one-processor":
            found = in_process(_on_all_cores, paths, bench.plan)
            rows += _one_processor_rows(name, found, bench.plan, note)
        else:
            rows += _two_processor_rows(name, in_process(_on_two_processors, paths, bench.plan), bench.plan)
    bench.progress("Measuring", len(timed), len(timed))
    return rows


def simulated_rows(prompts: Sequence[int]) -> list[Row]:
    """Makespans of a prompt's subgraphs in each order on simulated phones."""
    rows, layers = [], shadowed_layers()

    def simulated(chunk: int, order: schedule.Order) -> tuple[schedule.Timeline, float]:
        """What happens, and a lower bound on its makespan."""
        times, subgraphs = phone.times(MODEL, chunk), schedule.prompt_subgraphs(-(-tokens // chunk), layers)
        return schedule.simulate(subgraphs, times, order), schedule.lower_bound_ms(subgraphs, times)

    for phone, tokens in itertools.product((stated_phone(), headline_phone()), prompts):
        found = {_of_order(order): simulated(CHUNK_TOKENS, order) for order in reversed(ORDERS)}
        # As the runner does: the chunk length of the least makespan, of equals the longest.
        by_chunk = {chunk: simulated(chunk, "out-of-order") for chunk in CHOSEN_CHUNKS}
        chunk = min(by_chunk, key=lambda each: by_chunk[each][0].makespan_ms)
        found[_CHOSEN] = by_chunk[chunk]
        spans = {name: each.makespan_ms for name, (each, _) in found.items()}
        notes: dict[str, str | None] = {
            name: f"{span / found[name][1]:.3f} times the lower bound; {1000 * tokens / span:.0f} tokens/s; "
            f"bubbles {found[name][0].idle_share:.0%}"
            for name, span in spans.items()
        }
        notes[OURS] = f"{notes[OURS]}; {1 - spans[OURS] / spans[f'{OURS}-in-order']:.0%} less than in order"
        notes[_CHOSEN] = f"{notes[_CHOSEN]}; chunks of {chunk} tokens"
        case = f"simulated {phone.name}, Qwen1.5-1.8B, {tokens} tokens"
        rows += compared(case, "makespan_ms", spans, notes)
    return rows


def _of_order(order: str) -> str:
    return OURS if order == "out-of-order" else f"{OURS}-{order}"


def _one_processor_rows(shape: str, found: dict[str, Any], plan: Plan, note: str) -> list[Row]:
    """Rates of prompts on all cores together, sizes of float rows, and times to build the engines."""
    rows = []
    ms = found["ms"]
    for length in plan.lengths:
        rates = {name: 1000 * length / each[length] for name, each in ms.items()}
        spent = ms[OURS][length] / ms["naive-int8"][length] - 1
        notes: dict[str, str | None] = dict.fromkeys(rates, note)
        notes[OURS] = "; ".join(filter(None, [note, f"shadow takes {spent:.1%} of naive-int8's time"]))
        case = f"{shape}, prompt of {length} tokens, one processor"
        rows += compared(case, "prefill_tokens_per_s", rates, notes)
    share = found["row_bytes"] / found["weight_bytes"]
    note = f"{share:.2%} of the weights' bytes"
    rows.append(row(f"{shape}, float rows in the file", "row_bytes", float(found["row_bytes"]), note))
    for name, spent in found["build_ms"].items():
        note = f"{found['buckets'][name]} buckets"
        rows.append(row(f"{shape}, all buckets of an engine", "build_ms", spent, note, system=name))
    return rows


def _two_processor_rows(shape: str, found: dict[str, Any], plan: Plan) -> list[Row]:
    """Makespans of prompts on an integer and a float processor, and buckets of their subgraphs."""
    rows, sharing = [], found["sharing"]
    notes: dict[str, str | None] = dict.fromkeys(sharing, "counted by those that are shared")
    notes[OURS] = None
    for metric in sharing[OURS]:
        values = {name: each[metric] for name, each in sharing.items()}
        rows += compared(f"{shape}, subgraphs of the longest prompt", metric, values, notes)
    for length in plan.lengths:
        known = {name: each[length] for name, each in found["spans"].items()}
        spans = {name: each["real_ms"] for name, each in known.items()}
        notes = {
            name: f"{each['real_to_simulated'] - 1:+.0%} against simulated {each['simulated_ms']:.0f} ms; "
            f"{each['real_ms'] / each['bound_ms'] - 1:+.0%} against the bound of {each['bound_ms']:.0f} ms, "
            f"{each['real_to_own_bound'] - 1:+.0%} against that of the times in the run itself"
            for name, each in known.items()
        }
        spent = spans[OURS] / spans[f"{OURS}-no-shadow"] - 1
        notes[OURS] = f"{notes[OURS]}; shadow takes {spent:.1%} of the time without"
        rows += compared(f"{shape}, prompt of {length} tokens, two processors", "makespan_ms", spans, notes)
    for order, spent in found["decision_us"].items():
        name = _of_order(order)
        rows.append(row(f"{shape}, a decision", "decision_us", spent, system=name))
    return rows


def bundles_of(integer: Path, floats: Path) -> Paths:
    """The bundles that systems take; the one without shadow is made unless it is there."""
    with Bundle.open(integer) as bundle:
        known = read_prefill(bundle)
        assert known is not None
        none = dataclasses.replace(known, shadowed=(False,) * len(known.shadowed), channels={}, rows={})
        bare = made_once(
            "prefill", f"{bundle.fingerprint[:24]}-without-shadow.jaxllm",
            write=lambda path: rewrite_bundle(path, bundle, prefill_parts(none)),
        )  # fmt: skip
    return {"int8": integer, "naive": bare, "float": floats}


def _on_all_cores(paths: Paths, plan: Plan) -> dict[str, Any]:
    floats, integers = PrefillOptions(mode="float"), _INTEGERS
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


def _on_two_processors(paths: Paths, plan: Plan) -> dict[str, Any]:
    prepare_processors()
    orders: dict[str, tuple[str, schedule.Order]] = {
        f"{OURS}-no-shadow-in-order": ("naive", "in-order"),
        f"{OURS}-no-shadow": ("naive", "out-of-order"),
        f"{OURS}-in-order": ("int8", "in-order"),
        f"{OURS}-first-ready": ("int8", "first-ready"),
        OURS: ("int8", "out-of-order"),
    }
    engines = {
        name: _opened(paths[path], dataclasses.replace(_INTEGERS, processors=2, order=order), plan)
        for name, (path, order) in orders.items()
    }
    prefills = {name: _int8(engine) for name, engine in engines.items()}
    spans: dict[str, dict[int, list[dict[str, float]]]] = {name: {} for name in engines}

    def begun(int8: Int8Prefill, length: int) -> tuple[Any, Sequence[schedule.Subgraph]]:
        prompt = int8.begin(int8.empty_cache(plan.lengths[-1]), [0] * length, 0)
        return prompt, int8.subgraphs(len(prompt.chunks))

    @contextlib.contextmanager
    def watched(name: str, length: int) -> Iterator[None]:
        # Times of subgraphs change with the machine's load, from moment to moment.
        int8, order = prefills[name], engines[name].options.prefill.order
        int8.measure(min(length, plan.chunk_tokens[-1]), plan.lengths[-1], runs=1)
        prompt, subgraphs = begun(int8, length)
        known, shared = int8.times(prompt), int8.times(prompt, shared=True)
        how = {"overhead_ms": int8.shared.measured.handover_ms, "shared": shared}
        simulated_ms = schedule.simulate(subgraphs, known, order, **how).makespan_ms
        bound_ms = schedule.lower_bound_ms(subgraphs, known)
        yield
        processors = int8.shared.processors
        assert processors is not None
        assert processors.trace is not None
        real_ms = processors.trace.makespan_ms
        # No order is faster than the bound by the times that the subgraphs took in this run.
        _, subgraphs = begun(int8, length)
        took = {subgraphs[run.index]: run.end_ms - run.start_ms for run in processors.trace.runs}
        run = {
            "simulated_ms": simulated_ms, "bound_ms": bound_ms, "real_ms": real_ms,
            "real_to_own_bound": real_ms / schedule.lower_bound_ms(subgraphs, took.__getitem__),
            "real_to_simulated": real_ms / simulated_ms,
        }  # fmt: skip
        spans[name].setdefault(length, []).append(run)

    _times(engines, plan, watched)
    # The first run is not counted.
    found = {
        name: {
            length: {key: statistics.median(run[key] for run in runs[1:]) for key in runs[0]}
            for length, runs in by_length.items()
        }
        for name, by_length in spans.items()
    }
    int8 = prefills[OURS]
    _, subgraphs = begun(int8, plan.lengths[-1])
    return {
        "spans": found,
        "sharing": _sharing(int8, engines[OURS].runner.buckets, plan),
        "decision_us": {order: _decision_us(subgraphs, order) for order in ORDERS},
    }


def _decision_us(subgraphs: Sequence[schedule.Subgraph], order: schedule.Order) -> float:
    """Microseconds of a decision: all of a prompt's are made one after the other."""
    dispatcher = schedule.Dispatcher(subgraphs, lambda each: 1.0, order)
    began = time.perf_counter()
    while not dispatcher.done:
        for processor in schedule.PROCESSORS:
            place = dispatcher.take(processor)
            if place is not None:
                dispatcher.finish(place)
    return 1e6 * (time.perf_counter() - began) / len(subgraphs)


def _opened(path: Path, how: PrefillOptions, plan: Plan) -> Engine:
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
    plan: Plan,
    watched: Callable[[str, int], AbstractContextManager[None]] = lambda name, length: nullcontext(),
) -> dict[str, dict[int, float]]:
    """Milliseconds of each system and length, medians over prompts that all get by turns, each in what
    `watched` makes of both."""
    found: dict[str, dict[int, float]] = {name: {} for name in engines}
    draw = np.random.default_rng(0)
    for length in plan.lengths:
        taken: dict[str, list[float]] = {name: [] for name in engines}
        vocab_size = next(iter(engines.values())).cfg.vocab_size
        prompts = draw.integers(0, vocab_size, (plan.repeats + 1, length)).tolist()
        for number, tokens, name in in_turns(engines, prompts):
            engine = engines[name]
            with watched(name, length):
                cache = jax.block_until_ready(engine.runner.start(plan.lengths[-1]))
                missing = (plan.lengths[-1] - length) * name.endswith(_PADDED)
                wait_for_quiet(0.3)
                began = time.perf_counter()
                jax.block_until_ready(prefill_prompt(engine.runner, cache, tokens + [0] * missing, 0)[0])
                spent_ms = 1000 * (time.perf_counter() - began)
            if number:
                taken[name].append(spent_ms)
        for name, values in taken.items():
            found[name][length] = statistics.median(values)
    return found


def _sharing(int8: Int8Prefill, table: BucketTable, plan: Plan) -> dict[str, Any]:
    """Buckets, their memory and the time to build them for prompts of the greatest length: shared by chunks
    and layers, against one for each chunk and layer, counted by those that were built."""
    chunk, longest = plan.chunk_tokens[-1], plan.lengths[-1]
    chunks, layers = -(-longest // chunk), int8.model.cfg.layers
    apart = [
        int8.stage_bucket(layer, stage, chunk, longest)
        for layer in range(layers)
        for stage in schedule.stages_of(int8.calibration.shadowed[layer]) * chunks
    ]
    own = list(dict.fromkeys(apart))

    def memory_bytes(bucket: IntegerStageBucket) -> int:
        """Besides its arguments: code, and memory while it runs."""
        known: Any = table.get(bucket).memory_analysis()
        return int(known.generated_code_size_in_bytes + known.temp_size_in_bytes + known.output_size_in_bytes)

    memory = {bucket: memory_bytes(bucket) for bucket in own}
    return {
        name: {
            "buckets": float(len(some)),
            "bucket_bytes": float(sum(memory[each] for each in some)),
            "build_ms": float(sum(table.bucket_ms[each] for each in some)),
        }
        for name, some in {OURS: own, "bucket-per-chunk-and-layer": apart}.items()
    }


# The sizes of Qwen1.5-1.8B.
MODEL = shape(D=2048, L=24, N=16, K=16, H=128, F=5504, V=151936)
CHUNK_TOKENS = 256


def shadowed_layers() -> tuple[bool, ...]:
    """Whether each layer of `MODEL` has a shadow: 15 % of them, nearest to inputs and outputs."""
    return tuple(layer < 2 or layer >= MODEL.layers - 2 for layer in range(MODEL.layers))


def stated_phone() -> schedule.SpeedProfile:
    """The phone, on which a chunk of `CHUNK_TOKENS` takes as long as stated on either processor."""
    chunk = schedule.prompt_subgraphs(1, shadowed_layers())

    def work(processor: schedule.Processor) -> float:
        own = [each for each in chunk if each.processor == processor]
        return sum(schedule.stage_operations(MODEL, each.stage, CHUNK_TOKENS) for each in own)

    integer_gops = work("integer") / 315 / 1e6
    float_gflops = integer_gops / ((4.5 + 5.8) / 2)
    besides_ms = 315 / 2 - work("float") / float_gflops / 1e6
    return schedule.SpeedProfile(
        name="phone of 315 ms for 256 tokens on its NPU",
        integer_gops=integer_gops,
        float_gflops=float_gflops,
        attend_us_per_token=1000 * besides_ms / (MODEL.layers * CHUNK_TOKENS),
    )


def headline_phone() -> schedule.SpeedProfile:
    """`stated_phone`, with both processors as much faster as 1,024 tokens in 1,024 ms need."""
    # More than 1,000 tokens/s (abstract), which section 4.2 measures up to 1,024 tokens.
    stated, subgraphs = stated_phone(), schedule.prompt_subgraphs(1024 // CHUNK_TOKENS, shadowed_layers())
    faster = schedule.simulate(subgraphs, stated.times(MODEL, CHUNK_TOKENS)).makespan_ms / 1024
    return dataclasses.replace(
        stated,
        name="phone of 1,000 tokens/s",
        integer_gops=stated.integer_gops * faster,
        float_gflops=stated.float_gflops * faster,
        attend_us_per_token=stated.attend_us_per_token / faster,
    )
