"""Reads prompts on two real processors, in a process whose JAX was prepared for them: prints what came out,
or, of a service that is started twice, what was measured and compiled."""

import json
import sys

import jax
import numpy as np

from jaxllm.serving.int8_prefill import processors
from jaxllm.serving.int8_prefill.processors import prepare_processors
from jaxllm.serving.runners.runner import prefill_prompt

prepare_processors()

from jaxllm import Engine  # noqa: E402
from jaxllm.quant import BlockedArray, QArray  # noqa: E402
from jaxllm.serving.engine.request import GenerationConfig  # noqa: E402
from jaxllm.serving.ground.int8_prefill_options import PrefillOptions  # noqa: E402
from jaxllm.serving.ground.options import EngineOptions  # noqa: E402
from jaxllm.serving.int8_prefill import runner as int8_prefill  # noqa: E402
from jaxllm.serving.int8_prefill.buckets import IntegerStageBucket  # noqa: E402


def in_rows(int8: int8_prefill.Int8Prefill) -> dict[str, bool]:
    """Whether the products of each processor have weights that are not in blocks."""
    stages = {"integer": "project", "float": "attend"}
    kinds = {}
    for processor, stage in stages.items():
        _, (weights, _) = int8._operands(0, stage, 16, 128)  # pyright: ignore[reportArgumentType]: a stage
        leaves = jax.tree.leaves(weights, is_leaf=lambda each: isinstance(each, QArray | BlockedArray))
        kinds[processor] = any(isinstance(each, QArray) for each in leaves)
    return kinds


def start_twice(path: str) -> None:
    """Each start warms up for one request; the buckets and times of the first are on disk for the second."""
    runs = []
    real = int8_prefill.measured_times

    def counted(*args, **kwargs):
        runs.append(1)
        return real(*args, **kwargs)

    int8_prefill.measured_times = counted
    found = []
    for _ in range(2):
        options = EngineOptions(
            chunk_tokens=(16,), cache_tokens=(64,), context_tokens=64, buckets_bytes=1 << 28,
            prefill=PrefillOptions(processors=2),
        )  # fmt: skip
        engine = Engine.open(path, options=options, warm_up=False)
        runs.clear()
        engine.warm_up(prompt_tokens=20, max_tokens=1)
        runner, table, int8 = engine.runner, engine.runner.buckets, engine.runner.int8
        stages = [bucket for bucket in table.bucket_ms if isinstance(bucket, IntegerStageBucket)]
        integer = [bucket for bucket in stages if bucket.device == "cpu:1"]
        prompt = int8.begin(runner.start(20), [0] * 20, 0)
        times = int8.times(prompt)
        logits, _ = prefill_prompt(runner, runner.start(20), list(range(20)), 0)
        found.append(
            {
                "measured": len(runs),
                "integer": len(integer),
                "loaded": sum(bucket in table.loaded for bucket in integer),
                "times": [times(each) for each in int8.subgraphs(len(prompt.chunks))],
                "logits": logits[0].tolist(),
            }
        )
        engine.close()
    print(json.dumps(found))


def read_prompts(path: str, order: str, integer_bytes: str) -> None:
    """Answers a prompt of four chunks with one processor, with two, and with two of which the integer one is
    placed as a GPU would be, on the second CPU device."""
    prompt = np.random.default_rng(0).integers(0, 256, 60).tolist()
    found: dict[str, object] = {}
    processors.require_gpu = lambda: jax.devices("cpu")[1]
    for system in (1, 2, 3):
        how = PrefillOptions(
            mode="int8",
            processors=min(system, 2),
            integer_device="gpu" if system == 3 else "cpu",
            order=order,  # pyright: ignore[reportArgumentType]: an order
            integer_bytes=int(integer_bytes) * (system == 2),
        )
        options = EngineOptions(
            chunk_tokens=(16,), cache_tokens=(128,), cache_dtype="float32", buckets_bytes=0, prefill=how
        )
        engine = Engine.open(path, options=options, warm_up=False)
        engine.warm_up(prompt_tokens=60, max_tokens=8)
        runner, int8 = engine.runner, engine.runner.int8
        assert int8 is not None
        logits, cache = prefill_prompt(runner, runner.start(60), prompt, 0)
        found[f"logits{system}"] = np.asarray(logits)[0].tolist()
        found[f"keys{system}"] = float(np.abs(np.asarray(cache.past(1).own[0])).sum())
        answer = engine.generate(prompt, GenerationConfig(max_tokens=8, ignore_eos=True))
        found[f"answer{system}"] = answer.tokens
        if system == 2 and int8.shared.processors is not None:
            trace = int8.shared.processors.trace
            assert trace is not None
            places = [run.index for run in trace.runs]
            found["runs"] = len(places)
            found["once"] = len(set(places)) == len(places)
            started = int8.begin(runner.start(60), prompt, 0)
            subgraphs = int8.subgraphs(len(started.chunks))
            ends = {run.index: run.end_ms for run in trace.runs}
            starts = {run.index: run.start_ms for run in trace.runs}
            found["in_time"] = all(
                ends[need] <= starts[place] for place, each in enumerate(subgraphs) for need in each.needs
            )
            found["subgraphs"] = len(subgraphs)
            found["integer"] = sum(each.processor == "integer" for each in subgraphs)
            found["weights"] = sorted({round(int8.times(started)(each), 9) for each in subgraphs})
        if system == 3:
            found["in_rows"] = in_rows(int8)
        engine.close()
    print(json.dumps(found))


if __name__ == "__main__":
    start_twice(*sys.argv[1:]) if len(sys.argv) == 2 else read_prompts(*sys.argv[1:])
