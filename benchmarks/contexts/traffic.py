"""Counts the bytes that switches move, without a model: what storage costs each system at least.

Traces, lengths, budgets, policies and sizes of chunks are those of `replay`; chunks have no content. Of a
switch are counted the bytes that must be read, and those of evicted chunks that must be written first;
divided by a device's bandwidths they are the least time of a switch (`switch_bound_ms`), whatever the
processor does. A system that computes lost chunks again is left out. Ours has widths by a density that is
drawn. A context that fills its window stays as it is, where it would slide.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.contexts import Plan
from benchmarks.contexts.switching import CHUNK_TOKENS, SYSTEMS, UNCOUNTED, System, lengths_after, traced
from benchmarks.harness.bench import Run
from benchmarks.harness.machine import named_devices
from benchmarks.harness.report import Row, compared
from benchmarks.traces import ContextCall
from jaxllm.config import ModelConfig
from jaxllm.contexts.codecs import RAW, ChunkFormat
from jaxllm.contexts.eviction import Resident, find_policy
from jaxllm.contexts.tolerance import allocate
from jaxllm.kv.chunks import chunk_shapes
from jaxllm.serving.contexts.memory import ChunkMemory


class Traffic(NamedTuple):
    """Bytes of each switch of a trace on one system: read, and written before others could be read."""

    read: list[int]
    written: list[int]


@dataclasses.dataclass(frozen=True)
class Chunks:
    """Sizes of chunks of a model.

    Attributes:
      bytes_of: of a chunk by width.
      reference_bytes: by which ratios are counted.
    """

    bytes_of: dict[int, int]
    reference_bytes: int

    @classmethod
    def of(cls, cfg: ModelConfig, codec: str) -> "Chunks":
        """Those of a model with caches in float16."""
        form, shapes = (
            ChunkFormat.named(codec, CHUNK_TOKENS),
            chunk_shapes(cfg, tokens=CHUNK_TOKENS, dtype="float16"),
        )
        layers = [form.sizes(each) for each in shapes]
        sizes = {bits: sum(each[bits] for each in layers) for bits in form.widths}
        return cls(sizes, sum(each.reference_bytes for each in shapes))

    def widths(self, density: np.ndarray, ratio: float) -> list[int]:
        """Widths of a context's chunks."""
        if RAW in self.bytes_of:
            return [RAW] * len(density)
        most = int(ratio * self.reference_bytes * len(density) + 1e-6)
        return allocate(density, most, sizes=self.bytes_of).tolist()


def traffic_rows(cfg: ModelConfig, bench: Run[Plan]) -> list[Row]:
    """Rows of bytes, and of the least times on emulated devices."""
    plan, rows = bench.plan, []
    systems = [each for each in SYSTEMS if each.writing != "never"]
    trace, lengths = traced(plan, cfg.window_tokens, plan.patterns[0], plan.fitting)
    ours = Chunks.of(cfg, SYSTEMS[0].codec)
    ends = lengths_after(lengths, trace, cfg.window_tokens)
    # As `Systems.budget_bytes`.
    budget = sum(int(SYSTEMS[0].ratio * ours.reference_bytes * (end // CHUNK_TOKENS)) for end in ends)
    for pattern, contexts in itertools.product(plan.patterns, plan.contexts):
        trace, lengths = traced(plan, cfg.window_tokens, pattern, contexts)
        case = f"{pattern}, {contexts} contexts in {budget / 1e6:.0f} MB"
        found = {each.name: count(each, cfg, trace, lengths, budget, plan.seed) for each in systems}
        for name, each in found.items():
            bench.tell(
                f"{case}: {name} reads {np.mean(each.read) / 1e6:.2f} MB and writes "
                f"{np.mean(each.written) / 1e6:.2f}"
            )
        rows += _rows(f"traffic: {case}", found, plan)
    return rows


def count(
    system: System,
    cfg: ModelConfig,
    trace: Sequence[ContextCall],
    lengths: Sequence[int],
    budget: int,
    seed: int,
) -> Traffic:
    """The traffic of a trace.

    Args:
      lengths: tokens of each context before it.
      budget: bytes of chunks in memory.
      seed: of the density of chunks.
    """
    chunks, draw = Chunks.of(cfg, system.codec), np.random.default_rng(seed)
    # What later tokens attend to is far from even.
    density = draw.pareto(1.0, (len(lengths), cfg.window_tokens // CHUNK_TOKENS)) + 1e-3
    stored: set[tuple[str, int]] = set()
    evicted: list[Resident] = []
    memory = ChunkMemory(budget, find_policy(system.policy), evicted.extend)

    def keep(context: int, before: int, tokens: int) -> None:
        count = min(tokens, cfg.window_tokens) // CHUNK_TOKENS
        for n, bits in enumerate(chunks.widths(density[context, :count], system.ratio)):
            there = memory.chunks(str(context)).get(n)
            if n < before // CHUNK_TOKENS and (there is None or bits >= there.bits > 0):
                # Chunks that exist are only stored at fewer bits.
                continue
            memory.load(str(context), n, bits, _blob(chunks.bytes_of[bits]))
            (stored.add if system.writing == "ahead" else stored.discard)((str(context), n))

    said, found, last = list(lengths), Traffic([], []), -1
    widths: dict[tuple[str, int], int] = {}
    for context, tokens in enumerate(said):
        memory.claim(str(context))
        keep(context, 0, tokens)
        memory.release(str(context))
    for number, call in enumerate(trace):
        name, before = str(call.context), said[call.context]
        said[call.context] = after = min(before + call.prompt_tokens + call.answer_tokens, cfg.window_tokens)
        widths |= {(each.context, each.chunk): each.bits for each in evicted}
        _written(evicted, stored)
        missing = {n: widths[name, n] for n in memory.claim(name, before // CHUNK_TOKENS)}
        read = sum(chunks.bytes_of[bits] for bits in missing.values())
        # Room for what the call adds is made before its first token, too.
        new = after // CHUNK_TOKENS - before // CHUNK_TOKENS
        memory.reclaim(read + new * max(chunks.bytes_of.values()))
        for n, bits in missing.items():
            memory.load(name, n, bits, _blob(chunks.bytes_of[bits]))
        widths |= {(each.context, each.chunk): each.bits for each in evicted}
        if number >= UNCOUNTED and call.context != last:
            found.read.append(read)
            found.written.append(_written(evicted, stored))
        keep(call.context, before, after)
        memory.release(name)
        last = call.context
    return found


def _written(evicted: list[Resident], stored: set[tuple[str, int]]) -> int:
    """Bytes of evicted chunks that were not on storage, which they are now."""
    fresh = [each for each in evicted if (each.context, each.chunk) not in stored]
    stored.update((each.context, each.chunk) for each in fresh)
    evicted.clear()
    return sum(each.size_bytes for each in fresh)


def _blob(size: int) -> list[np.ndarray]:
    """A blob of a size that takes no memory."""
    return [np.broadcast_to(np.uint8(0), size)]


def _rows(case: str, found: dict[str, Traffic], plan: Plan) -> list[Row]:
    notes = {name: f"{len(each.read)} switches" for name, each in found.items()}
    means = {name: [float(np.mean(part)) for part in each] for name, each in found.items()}
    rows = []
    for place, metric in enumerate(("switch_read_bytes", "switch_written_bytes")):
        rows += compared(case, metric, {name: each[place] for name, each in means.items()}, notes)
    for device in named_devices(plan.devices):
        read, write = device.storage.bytes_per_s, device.storage.write_bytes_per_s
        # Of this machine's storage no bandwidth is known.
        if read and write:
            bounds = {name: 1000 * (each[0] / read + each[1] / write) for name, each in means.items()}
            rows += compared(f"{case}, {device.name}", "switch_bound_ms", bounds, notes)
    return rows
