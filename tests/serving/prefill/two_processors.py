"""Reads prompts on two real processors, in a process whose JAX was prepared for them; prints what came
out."""

import json
import sys

import numpy as np

from serving.prefill.processors import prepare_processors

prepare_processors()

from serving.engine import Engine  # noqa: E402
from serving.generation import GenerationConfig  # noqa: E402
from serving.options import EngineOptions  # noqa: E402
from serving.prefill.options import PrefillOptions  # noqa: E402
from serving.prefill.table import IntegerTable  # noqa: E402


def main(path: str, order: str, integer_bytes: str) -> None:
    """Answers a prompt of four chunks with one processor and with two."""
    prompt = np.random.default_rng(0).integers(0, 256, 60).tolist()
    found: dict[str, object] = {}
    for processors in (1, 2):
        how = PrefillOptions(
            mode="int8",
            processors=processors,
            order=order,  # pyright: ignore[reportArgumentType]: an order
            integer_bytes=int(integer_bytes),
        )
        options = EngineOptions(chunk_tokens=(16,), cache_dtype="float32", executables_bytes=0, prefill=how)
        engine = Engine.open(path, options=options, warm_up=False)
        engine.warm_up(prompt_tokens=60, max_tokens=8)
        table = engine.table
        assert isinstance(table, IntegerTable)
        logits, cache = table.prefill(table.start(60), prompt, 0)
        found[f"logits{processors}"] = np.asarray(logits)[0].tolist()
        found[f"keys{processors}"] = float(np.abs(np.asarray(cache.keys[1])).sum())
        answer = engine.generate(prompt, GenerationConfig(max_tokens=8, ignore_eos=True))
        found[f"answer{processors}"] = answer.tokens
        if table.processors is not None:
            trace = table.processors.trace
            assert trace is not None
            places = [run.place for run in trace.runs]
            found["runs"] = len(places)
            found["once"] = len(set(places)) == len(places)
            passing = table.begin_passing(table.start(60), prompt, 0)
            subgraphs = table.subgraphs(passing)
            ends = {run.place: run.end_ms for run in trace.runs}
            starts = {run.place: run.start_ms for run in trace.runs}
            found["in_time"] = all(
                ends[need] <= starts[place] for place, each in enumerate(subgraphs) for need in each.needs
            )
            found["subgraphs"] = len(subgraphs)
            buckets = table.chunk_buckets(16, 64) + table.chunk_buckets(16, 96)
            found["kinds"] = sorted(each.kind for each in dict.fromkeys(buckets) if "int_" in each.kind)
            found["integer"] = sum(each.processor == "integer" for each in subgraphs)
        engine.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
