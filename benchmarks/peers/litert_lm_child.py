"""Runs Google's LiteRT-LM on a bundle, by its own clock: `python -m benchmarks.peers.litert_lm_child`.

Its runtime takes text and does not give its tokens, so that it cannot be a `Session`. One JSON object on
standard input, one on standard output:

    {"model": path, "threads": 2, "context_tokens": 1024, "prefill": 256, "decode": 128, "rounds": 3,
     "texts": [...], "answer_tokens": 32, "cache": folder}
    -> {"init_ms": [...], "prefill_tokens_per_s": [...], "decode_tokens_per_s": [...], "texts": [...],
        "peak_bytes": n}
"""

import json
import os
import sys
from typing import Any

from benchmarks.harness.machine import peak_resident_bytes


def measure(order: dict[str, Any]) -> dict[str, Any]:
    """Runs the rounds, then answers the texts greedily."""
    import litert_lm

    litert_lm.set_min_log_severity(litert_lm.LogSeverity.ERROR)
    backend = litert_lm.Backend.CPU(thread_count=order["threads"])
    facts: dict[str, Any] = {"init_ms": [], "prefill_tokens_per_s": [], "decode_tokens_per_s": []}
    for _ in range(order["rounds"]):
        info = litert_lm.Benchmark(
            order["model"],
            backend,
            prefill_tokens=order["prefill"],
            decode_tokens=order["decode"],
            max_num_tokens=order["context_tokens"],
            cache_dir=order["cache"],
        ).run()
        facts["init_ms"].append(1000 * info.init_time_in_second)
        facts["prefill_tokens_per_s"].append(info.last_prefill_tokens_per_second)
        facts["decode_tokens_per_s"].append(info.last_decode_tokens_per_second)
    engine = litert_lm.Engine(
        order["model"], backend=backend, max_num_tokens=order["context_tokens"], cache_dir=order["cache"]
    )
    facts["texts"] = [_answer(litert_lm, engine, text, order["answer_tokens"]) for text in order["texts"]]
    return {**facts, "peak_bytes": peak_resident_bytes()}


def _answer(library: Any, engine: Any, text: str, tokens: int) -> str:
    session = engine.create_session(
        sampler_config=library.SamplerConfig(top_k=1, temperature=0.0, seed=1),
        apply_prompt_template=False,
        max_output_tokens=tokens,
    )
    session.run_prefill([text])
    return session.run_decode().texts[0]


def main() -> None:
    """Reads the order, writes the answer."""
    # What the library prints must not reach the parent as the answer.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    out.write(json.dumps(measure(json.load(sys.stdin))))
    out.close()


if __name__ == "__main__":
    main()
