"""How fast prompts are read: by the engines of each system, in processes of their own.

On all cores together: floats and static steps alone (naive-int8), of prompts that are padded to the longest,
as one graph for all of them takes, and in chunks that share graphs; native kernels that look at activations
(K-Quant); static steps with shadow (ours). On an integer and a float processor: static steps with and without
shadow, in order and out of order, beside what the simulator says of the same subgraphs.

The weights are random, with outliers put into them: that is labelled, and only speed is measured of them.
"""

import dataclasses
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.quiet import wait_for_quiet
from jaxllm.bundle import Bundle, rewrite_bundle
from jaxllm.bundle.prefill import prefill_parts, read_prefill
from jaxllm.config import Bucket
from jaxllm.errors import JaxllmError
from jaxllm.prefill.schedule import ORDERS, PROCESSORS, Dispatcher, Order, Subgraph
from jaxllm.prefill.simulator import lower_bound_ms, simulate
from jaxllm.prefill.subgraphs import stages_of
from serving.engine import Engine
from serving.options import EngineOptions
from serving.prefill.options import PrefillOptions
from serving.prefill.processors import prepare_processors
from serving.prefill.table import IntegerTable

OURS = "jaxllm"
# Behind the name of a system whose prompts are filled up to the longest.
_PADDED = "-padded"
# Of the bundles of a shape.
Paths = dict[str, str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeedPlan:
    """Sizes.

    Attributes:
      lengths: of prompts, ascending.
      repeats: of each prompt on each system, which take turns.
      chunk_tokens: of graphs.
    """

    lengths: tuple[int, ...] = (64, 256, 1024)
    repeats: int = 5
    chunk_tokens: tuple[int, ...] = (64, 256)


def bundles_of(integer: Path, floats: Path) -> Paths:
    """The bundles that systems take, those that differ in their calibration made beside the first."""
    bare = integer.with_suffix(".naive.jaxllm")
    if not bare.exists():
        with Bundle.open(integer) as bundle:
            known = read_prefill(bundle)
            assert known is not None
            none = dataclasses.replace(known, shadowed=(False,) * len(known.shadowed), channels={}, rows={})
            rewrite_bundle(bare, bundle, prefill_parts(none))
    return {"int8": str(integer), "naive": str(bare), "float": str(floats)}


def measured(paths: Paths, plan: SpeedPlan, *, processors: int) -> dict[str, Any]:
    """What a process that measures finds (see `main`).

    Raises:
      JaxllmError: it failed.
    """
    told = json.dumps({"paths": paths, "plan": dataclasses.asdict(plan), "processors": processors})
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.prefill.speed", told], capture_output=True, text=True, check=False
    )
    if run.returncode:
        raise JaxllmError(f"measuring failed: {run.stderr.strip()[-400:]}")
    return json.loads(run.stdout.splitlines()[-1])


def main(told: str) -> None:
    """Measures in this process, which nobody else's JAX has touched, and prints one JSON object."""
    asked = json.loads(told)
    plan = SpeedPlan(**{name: tuple(v) if isinstance(v, list) else v for name, v in asked["plan"].items()})
    paths: Paths = asked["paths"]
    if asked["processors"] == 1:
        found = _on_all_cores(paths, plan)
    else:
        prepare_processors()
        found = _on_two_processors(paths, plan)
    print(json.dumps(found))


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
    table = _integer_table(engines[OURS])
    return {
        "ms": times,
        "build_ms": {name: engine.table.build_ms for name, engine in engines.items()},
        "graphs": {name: len(engine.table.bucket_ms) for name, engine in engines.items()},
        "row_bytes": table.calibration.row_bytes,
        "weight_bytes": engines[OURS].bundle.weight_bytes,
        "outliers": dataclasses.asdict(table.outliers),
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
    tables = {name: _integer_table(engine) for name, engine in engines.items()}
    spans: dict[str, dict[int, list[dict[str, float]]]] = {name: {} for name in engines}

    def predict(name: str, length: int) -> None:
        # What a subgraph takes changes with what else the machine does, from moment to moment.
        table, order = tables[name], engines[name].options.prefill.order
        table.measure(min(length, plan.chunk_tokens[-1]), plan.lengths[-1], runs=1)
        passing = table.begin_passing(table.start(plan.lengths[-1]), [0] * length, 0)
        subgraphs, known = table.subgraphs(passing), table.times(passing)
        shared, handover_ms = table.times(passing, shared=True), table.measured.handover_ms
        simulated = simulate(subgraphs, known, order, overhead_ms=handover_ms, shared=shared).makespan_ms
        bound = lower_bound_ms(subgraphs, known)
        spans[name].setdefault(length, []).append({"simulated_ms": simulated, "bound_ms": bound})

    def watch(name: str, length: int) -> None:
        processors = tables[name].processors
        assert processors is not None
        assert processors.trace is not None
        latest = spans[name][length][-1]
        latest["real_ms"] = processors.trace.makespan_ms
        # No order is faster with the times that the subgraphs took in this very run.
        table = tables[name]
        passing = table.begin_passing(table.start(plan.lengths[-1]), [0] * length, 0)
        subgraphs = table.subgraphs(passing)
        took = {subgraphs[run.place]: run.end_ms - run.start_ms for run in processors.trace.runs}
        latest["real_to_own_bound"] = latest["real_ms"] / lower_bound_ms(subgraphs, took.__getitem__)
        latest["real_to_simulated"] = latest["real_ms"] / latest["simulated_ms"]

    times = _times(engines, plan, predict, watch)
    found: dict[str, Any] = {}
    for name, by_length in spans.items():
        found[name] = {}
        for length, runs in by_length.items():
            # The first run is not counted.
            medians = {key: statistics.median(run[key] for run in runs[1:]) for key in runs[0]}
            found[name][str(length)] = medians
    table = tables[OURS]
    passing = table.begin_passing(table.start(plan.lengths[-1]), [0] * plan.lengths[-1], 0)
    subgraphs = table.subgraphs(passing)
    return {
        "ms": times,
        "spans": found,
        "sharing": _sharing(table, plan),
        "decision_us": {order: _decision_us(subgraphs, order) for order in ORDERS},
    }


def _decision_us(subgraphs: Sequence[Subgraph], order: Order) -> float:
    """What a decision takes, in microseconds: all of a prompt's, one after the other."""
    dispatcher = Dispatcher(subgraphs, lambda each: 1.0, order)
    began = time.perf_counter()
    while not dispatcher.done:
        for processor in PROCESSORS:
            place = dispatcher.take(processor)
            if place is not None:
                dispatcher.finish(place)
    return 1e6 * (time.perf_counter() - began) / len(subgraphs)


def _opened(path: str, how: PrefillOptions, plan: SpeedPlan) -> Engine:
    longest = plan.lengths[-1]
    options = EngineOptions(
        context_tokens=longest,
        cache_tokens=(longest,),
        chunk_tokens=plan.chunk_tokens,
        cache_dtype="float16",
        # What building takes is measured, not reading.
        executables_bytes=0,
        prefill=how,
    )
    return Engine.open(path, options=options)


def _integer_table(engine: Engine) -> IntegerTable:
    assert isinstance(engine.table, IntegerTable)
    return engine.table


def _times(
    engines: dict[str, Engine],
    plan: SpeedPlan,
    before: Callable[[str, int], None] = lambda name, length: None,
    after: Callable[[str, int], None] = lambda name, length: None,
) -> dict[str, dict[str, float]]:
    """Milliseconds of each system and length, medians over prompts that all get by turns; `before` and
    `after` are called with both around each."""
    found: dict[str, dict[str, float]] = {name: {} for name in engines}
    draw = np.random.default_rng(0)
    for length in plan.lengths:
        taken: dict[str, list[float]] = {name: [] for name in engines}
        for number in range(plan.repeats + 1):
            order = list(engines) if number % 2 else list(engines)[::-1]
            tokens: list[int] | None = None
            for name in order:
                engine = engines[name]
                tokens = tokens or draw.integers(0, engine.cfg.vocab_size, length).tolist()
                before(name, length)
                cache = jax.block_until_ready(engine.table.start(plan.lengths[-1]))
                missing = (plan.lengths[-1] - length) * name.endswith(_PADDED)
                wait_for_quiet(0.3)
                began = time.perf_counter()
                jax.block_until_ready(engine.table.prefill(cache, tokens + [0] * missing, 0)[0])
                spent_ms = 1000 * (time.perf_counter() - began)
                after(name, length)
                if number:
                    taken[name].append(spent_ms)
        for name, values in taken.items():
            found[name][str(length)] = statistics.median(values)
    return found


def _sharing(table: IntegerTable, plan: SpeedPlan) -> dict[str, Any]:
    """Graphs, their memory and the time to build them for prompts of the greatest length: shared by chunks
    and layers, against one for each chunk and layer, counted from those that were built."""
    chunk, longest = plan.chunk_tokens[-1], plan.lengths[-1]
    chunks, layers = -(-longest // chunk), table.cfg.layers
    own = [each for each in table.chunk_buckets(chunk, longest) if each.kind.startswith("int_")]
    apart = [each for layer in range(layers) for each in _of_layer(table, layer, chunk, longest) * chunks]
    memory = {bucket: _graph_bytes(table.graph(bucket)) for bucket in own}
    return {
        "shared": {
            "graphs": len(own),
            "bytes": sum(memory.values()),
            "build_ms": sum(table.bucket_ms[each] for each in own),
        },
        "apart": {
            "graphs": len(apart),
            "bytes": sum(memory[each] for each in apart),
            "build_ms": sum(table.bucket_ms[each] for each in apart),
        },
    }


def _of_layer(table: IntegerTable, layer: int, chunk: int, cache: int) -> list[Bucket]:
    stages = stages_of(table.calibration.shadowed[layer])
    return [table.subgraph_bucket(layer, stage, chunk, cache) for stage in stages]


def _graph_bytes(graph: Any) -> int:
    """What a graph takes besides its arguments: code, and memory while it runs."""
    known = graph.memory_analysis()
    return int(known.generated_code_size_in_bytes + known.temp_size_in_bytes + known.output_size_in_bytes)


if __name__ == "__main__":
    main(sys.argv[1])
