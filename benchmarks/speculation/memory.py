"""Measures the memory of a process that runs a model larger than its budget, and how fast it reads.

Each budget has a process of its own, which runs twice: from its second start on, a service reads its buckets
from disk. The growth of the process's resident memory above that of Python and JAX, before the model was
opened, is compared with the budget.
"""

import concurrent.futures
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.bench import silent
from benchmarks.harness.children import Taken, taken_by
from benchmarks.harness.report import Row, row
from jaxllm.errors import ConfigError
from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.serving.ground.bundles import open_model
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.host.direct_io import PieceReader, aligned
from jaxllm.serving.host.progress import Progress
from jaxllm.serving.opening.engine import Engine

_TOKENS = 9
# The disk is read for comparison in blocks of so many bytes.
_BLOCK_BYTES = 4 << 20


def memory_rows(
    model: Path,
    budgets: Sequence[int],
    progress: Progress = silent,
    *,
    context_tokens: int = 512,
) -> list[Row]:
    """Memory, bytes read and time per token under several budgets.

    Args:
      model: a bundle larger than each budget.
      budgets: in bytes.
      progress: called with ("Measuring", budgets done, budgets in all).
      context_tokens: of the context and of the longest source, at most those of the model's window.

    Raises:
      ConfigError: a run failed.
    """
    rows = []
    for number, budget in enumerate(budgets):
        disk = disk_bytes_per_s(model)
        taken_by(_answered, model, budget, context_tokens)
        taken = taken_by(_answered, model, budget, context_tokens)
        # Measured before and after: disks of shared machines change from minute to minute.
        disk = (disk + disk_bytes_per_s(model)) / 2
        context = taken.found["context_tokens"]
        case = f"{model.stem}, budget {budget / 1e6:,.0f} MB, context of {context:.0f} tokens"
        rows += _rows(case, budget, taken, disk)
        progress("Measuring", number + 1, len(budgets))
    return rows


def disk_bytes_per_s(path: Path) -> float:
    """Bandwidth of a file read in blocks past the page cache, at the best of a few queue depths."""
    return max(_read_once(path, depth) for depth in (1, 2, 4, 8))


def _read_once(path: Path, depth: int) -> float:
    with PieceReader(path) as reader, concurrent.futures.ThreadPoolExecutor(depth) as pool:
        memory = [aligned(_BLOCK_BYTES) for _ in range(depth)]

        def read(lane: int) -> None:
            for offset in range(lane * _BLOCK_BYTES, reader.size_bytes, depth * _BLOCK_BYTES):
                size = min(_BLOCK_BYTES, reader.size_bytes - offset)
                reader.read_into(memory[lane], 0, offset, size)

        began = time.perf_counter()
        list(pool.map(read, range(depth)))
        return reader.size_bytes / (time.perf_counter() - began)


def _rows(case: str, budget: int, taken: Taken, disk: float) -> list[Row]:
    found = taken.found
    speed = found["read_bytes"] / found["took_s"]
    kept = (
        f"{found['resident']:.0f} pieces are resident"
        if "resident" in found
        else f"{found['hit_rate']:.0%} of visits to experts found them resident"
    )
    plan = f"{kept}; reads {found['read_bytes'] / 1e6:,.0f} MB for {_TOKENS} passes"
    note = f"above {taken.idle_bytes / 1e6:,.0f} MB of Python and JAX; {plan}"
    share = f"{speed / 1e9:.2f} of {disk / 1e9:.2f} GB/s of reads alone"
    ratio = budget / taken.peak_bytes
    return [
        row(case, "peak_memory_bytes", taken.peak_bytes, note, baseline="budget", ratio=ratio),
        row(case, "tpot_ms", found["tpot_ms"]),
        row(case, "bandwidth_share", speed / disk, share),
    ]


def _answered(model: Path, budget: int, context_tokens: int) -> dict[str, float]:
    """Answers twice, with the model's buckets compiled or read: facts of the second answer."""
    with open_model(model) as bundle:
        context = min(context_tokens, bundle.cfg.window_tokens)
    engine = Engine.open(model, options=EngineOptions(context_tokens=context, memory_bytes=budget))
    if engine.model.streamed is None:
        raise ConfigError(f"all of the model fits into {budget:,} bytes")
    config = GenerationConfig(max_tokens=_TOKENS, ignore_eos=True)
    # Of encoder-decoders the longest source, which takes the most memory.
    prompt = list(range(engine.options.source_tokens(engine.cfg) or 64))
    counts = engine.model.streamed.counts
    engine.generate(prompt, config)
    read, began = counts.read_bytes, time.perf_counter()
    generation = engine.generate(prompt, config)
    facts = engine.model.streamed.facts()
    # Of layers, or of experts alone.
    how = {"hit_rate": facts["hit_rate"]} if "hit_rate" in facts else {"resident": facts["resident_layers"]}
    return {
        **how,
        "context_tokens": context,
        "tpot_ms": generation.timings.tpot_ms(len(generation.tokens)),
        "read_bytes": counts.read_bytes - read,
        "took_s": time.perf_counter() - began,
    }
