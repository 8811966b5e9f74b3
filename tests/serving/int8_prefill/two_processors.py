"""Reads prompts on two real processors, in a process whose JAX was prepared for them: prints the results."""

import json
import sys
from typing import Any

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


def read_prompts(path: str, order: str, integer_bytes: str) -> None:
    """Answers a prompt of four chunks with one processor, with two (started twice), and with two of which the
    integer one is placed as a GPU would be, on the second CPU device."""
    prompt = np.random.default_rng(0).integers(0, 256, 60).tolist()
    found: dict[str, Any] = {"starts": []}
    runs, real = [], int8_prefill.measured_times
    int8_prefill.measured_times = lambda *args: runs.append(1) or real(*args)
    processors.require_gpu = lambda: jax.devices("cpu")[1]
    for system in (1, 2, 2, 3):
        how = PrefillOptions(
            mode="int8",
            processors=min(system, 2),
            integer_device="gpu" if system == 3 else "cpu",
            order=order,  # pyright: ignore[reportArgumentType]: an order
            integer_bytes=int(integer_bytes) * (system == 2),
        )
        options = EngineOptions(
            chunk_tokens=(16,),
            cache_tokens=(128,),
            cache_dtype="float32",
            prefill=how,
            buckets_bytes=(1 << 28) * (system == 2),
        )
        engine = Engine.open(path, options=options, warm_up=False)
        runs.clear()
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
            table = runner.buckets
            stages = [each for each in table.bucket_ms if isinstance(each, IntegerStageBucket)]
            integer = [each in table.loaded for each in stages if each.device == "cpu:1"]
            found["starts"].append([len(runs), [sum(integer), len(integer)]])
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
    read_prompts(*sys.argv[1:])
