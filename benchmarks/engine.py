"""`jaxllm bench engine`: load, build and run times apart; prefill and decode rates; peak memory.

The decode rate is measured twice in alternation: as the engine runs (a block of tokens per dispatch)
and with one dispatch per token (`jaxllm-one-token-per-dispatch`), the loop that engines without
on-device sampling run.
"""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.report import Row, median, peak_memory_bytes, reset_peak_memory
from jaxllm.sampling import Sampling, sampler_state
from serving.buckets import MAX_STOP_IDS, Progress
from serving.engine import Engine
from serving.options import EngineOptions

OURS, PER_TOKEN = "jaxllm", "jaxllm-one-token-per-dispatch"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Sizes of one measurement."""

    prompt_tokens: tuple[int, ...] = (64, 256, 1024)
    decode_tokens: int = 128
    rounds: int = 5

    @classmethod
    def quick(cls) -> "Plan":
        """Fits in a minute on two cores for a model of some hundred million parameters."""
        return cls(prompt_tokens=(64, 256), decode_tokens=32, rounds=3)


def run(
    model: Path | None,
    *,
    weights: str | None,
    options: EngineOptions,
    plan: Plan,
    progress: Progress | None = None,
) -> list[Row]:
    """Measures one model; rows as `report` prints them."""
    engine = Engine.open(model, weights=weights, options=options, warm_up=False, progress=progress)
    name = f"{engine.bundle.layout.name} {engine.bundle.layout.weights}"
    engine.warm_up(progress=progress)
    rows = [
        _ours(name, "load_ms", engine.load_ms, "ms"),
        _ours(name, "build_ms", engine.table.build_ms, "ms"),
        _ours(name, "graphs", len(engine.table.bucket_ms), "graphs"),
        _ours(name, "weight_bytes", engine.bundle.weight_bytes, "bytes"),
        _ours(f"{name}, load and build", "peak_memory_bytes", peak_memory_bytes(), "bytes"),
    ]
    run_memory = "run" if reset_peak_memory() else "load, build and run"
    context = engine.options.context_tokens
    lengths = sorted({min(tokens, context) for tokens in plan.prompt_tokens})
    for tokens in lengths:
        rows += _prefill_rows(engine, tokens, plan, name)
    prompt = min(lengths[0], context // 2)
    rows += _decode_rows(engine, prompt, min(plan.decode_tokens, context - prompt), plan, name)
    rows.append(_ours(f"{name}, {run_memory}", "peak_memory_bytes", peak_memory_bytes(), "bytes"))
    return rows


def _ours(case: str, metric: str, value: float, unit: str) -> Row:
    return Row(case=case, system=OURS, metric=metric, value=value, unit=unit)


def _prefill_rows(engine: Engine, tokens: int, plan: Plan, name: str) -> list[Row]:
    prompt = _prompt(engine, tokens)

    def once() -> None:
        sampler = sampler_state(Sampling(), prompt, engine.cfg.vocab_size, 0)
        logits, _ = engine.table.prefill(engine.table.start(tokens), prompt, 0)
        np.asarray(engine.table.sample(logits, sampler)[0])

    once()
    ms = median(_timed_ms(once) for _ in range(plan.rounds))
    case = f"{name}, prompt {tokens}"
    return [
        _ours(case, "ttft_ms", ms, "ms"),
        _ours(case, "prefill_tokens_per_s", 1000 * tokens / ms, "tokens/s"),
    ]


def _decode_rows(engine: Engine, prompt_tokens: int, tokens: int, plan: Plan, name: str) -> list[Row]:
    blocks = {OURS: engine.options.decode_block, PER_TOKEN: 1}
    runs: dict[str, list[float]] = {system: [] for system in blocks}
    for round_ in range(plan.rounds + 1):
        for system, block in blocks.items():
            ms = _decode_ms(engine, prompt_tokens, tokens, block)
            if round_:  # the first round warms caches
                runs[system].append(ms)
    rate = {system: 1000 * tokens / median(ms) for system, ms in runs.items()}
    case = f"{name}, decode {tokens} after {prompt_tokens}"
    metric, unit = "decode_tokens_per_s", "tokens/s"
    return [
        Row(
            case=case,
            system=OURS,
            metric=metric,
            value=rate[OURS],
            unit=unit,
            baseline=PER_TOKEN,
            ratio=rate[OURS] / rate[PER_TOKEN],
        ),
        Row(case=case, system=PER_TOKEN, metric=metric, value=rate[PER_TOKEN], unit=unit),
    ]


def _decode_ms(engine: Engine, prompt_tokens: int, tokens: int, block: int) -> float:
    """Time to decode `tokens` greedily, at most `block` per dispatch, each block read by the host."""
    table, prompt = engine.table, _prompt(engine, prompt_tokens)
    sampler = sampler_state(Sampling(), prompt, engine.cfg.vocab_size, 0)
    logits, cache = table.prefill(table.start(prompt_tokens + tokens), prompt, 0)
    token, sampler = table.sample(logits, sampler)
    token.block_until_ready()
    no_stop = np.full(MAX_STOP_IDS, -1, np.int32)
    done = 0
    began = time.perf_counter()
    while done < tokens:
        rows, count, cache, sampler = table.decode(token, cache, sampler, no_stop, min(block, tokens - done))
        got = np.asarray(rows)[0, : int(count)]
        token = got[-1:]
        done += len(got)
    return 1000 * (time.perf_counter() - began)


def _prompt(engine: Engine, tokens: int) -> list[int]:
    """Token ids spread over the vocabulary, the same at every run."""
    rng = np.random.default_rng(0)
    return rng.integers(0, engine.cfg.vocab_size, tokens).tolist()


def _timed_ms(call: Callable[[], None]) -> float:
    began = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - began)
