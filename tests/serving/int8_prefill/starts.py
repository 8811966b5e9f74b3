"""Starts a service on two processors twice, as two processes would; prints what was measured and compiled."""

import json
import sys

from jaxllm.serving.int8_prefill.processors import prepare_processors
from jaxllm.serving.runners.runner import prefill_prompt

prepare_processors()

from jaxllm import Engine  # noqa: E402
from jaxllm.serving.ground.int8_prefill_options import PrefillOptions  # noqa: E402
from jaxllm.serving.ground.options import EngineOptions  # noqa: E402
from jaxllm.serving.int8_prefill import runner as int8_prefill  # noqa: E402
from jaxllm.serving.int8_prefill.stage_bucket import IntegerStageBucket  # noqa: E402


def main(path: str) -> None:
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
            chunk_tokens=(16,),
            cache_tokens=(64,),
            context_tokens=64,
            buckets_bytes=1 << 28,
            prefill=PrefillOptions(processors=2),
        )
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
                "times": [times(each) for each in int8.subgraphs(prompt)],
                "logits": logits[0].tolist(),
            }
        )
        engine.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
