"""Runs all parts: switching on every system, ablations, chunk sizes, sweeps over budgets of memory, lengths
of contexts and intervals between calls (LLMS, figures 10, 11 and 15), and answers in contexts beside those of
an engine without contexts.

`traffic` counts the bytes that switches move, without a model: what storage costs each system at least.
Traces, lengths, budgets, policies and sizes of chunks are those of `replay`; chunks have no content. Of a
switch are counted the bytes that must be read, and those of evicted chunks that must be written first;
divided by a device's bandwidths they are the least time of a switch (`switch_bound_ms`), whatever the
processor does. A system that computes lost chunks again is left out. Ours has widths by a density that is
drawn. A context that fills its window stays as it is, where it would slide.

Contexts whose chunks are all in memory are measured by themselves: the switch, the memory of the one that
runs, and answers at depth by width, beside the same chunks decoded into a cache first and a float cache
without contexts. Two of them are called in turns: the first when all that the calls before left to encode and
to write is done, so that its switch is the switch itself; the second at once, while chunks of the first are
encoded.
"""

import collections
import contextlib
import dataclasses
import functools
import itertools
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import jax
import numpy as np

from benchmarks.contexts import UNTIMED, Plan, switching
from benchmarks.contexts.quality import density_rows, quality_rows
from benchmarks.harness.bench import Run
from benchmarks.harness.children import in_turns
from benchmarks.harness.machine import Device, array_bytes, named_devices
from benchmarks.harness.report import OURS, Figure, Row, compared, draw_figures
from benchmarks.traces import ContextCall
from jaxllm.config import ModelConfig
from jaxllm.contexts.codecs import RAW, ChunkFormat
from jaxllm.contexts.eviction import Resident, find_policy
from jaxllm.contexts.tolerance import allocate
from jaxllm.errors import BudgetExceeded
from jaxllm.kernels import native
from jaxllm.kv.chunks import chunk_shapes
from jaxllm.serving.contexts.chunk_io import ChunkIO
from jaxllm.serving.contexts.context import Context
from jaxllm.serving.contexts.manager import Contexts
from jaxllm.serving.contexts.memory import Blobs, ChunkMemory
from jaxllm.serving.contexts.options import ContextOptions
from jaxllm.serving.contexts.saving import least_ratio
from jaxllm.serving.engine.request import GenerationConfig, Session
from jaxllm.serving.engine.step import Answer
from jaxllm.serving.opening.engine import Engine


def run(bench: Run[Plan]) -> list[Row]:
    """Measures the parts that the plan names."""
    parts = bench.plan.parts
    rows = traffic_rows(bench.config(), bench) if "traffic" in parts else []
    rows += _timed_rows(switching.Systems(bench)) if set(parts) - {*UNTIMED} else []
    rows += quality_rows(bench) if "quality" in parts else []
    return rows + (density_rows(bench) if "density" in parts else [])


def _timed_rows(systems: switching.Systems) -> list[Row]:
    plan, rows = systems.bench.plan, []
    budget, devices, pattern = systems.budget_bytes(), named_devices(plan.devices), plan.patterns[0]
    if "switching" in plan.parts:
        rows += _switching_rows(systems, budget)
    # Where all of ours fits into the budget, and with twice as many contexts.
    chosen = [each for each in plan.contexts if each in (plan.fitting, 2 * plan.fitting)]
    for device, contexts in itertools.product(devices, chosen):
        cell = switching.Cell(pattern, contexts, device, budget)
        if "ablations" in plan.parts:
            # Ours runs again itself, for machines change their pace.
            ablations = [
                each
                for each in switching.ABLATIONS
                if native.kernels().native or not each.attend_quantized_kv
            ]
            found = systems.all_switches([switching.SYSTEMS[0], *ablations], cell)
            rows += switch_rows(f"ablation: {cell.name}", found, device)
        if "chunk-sizes" in plan.parts and device is devices[0]:
            found = systems.all_switches([switching.SYSTEMS[0]], cell)
            for size in plan.chunk_tokens:
                # Short ones take more for scales: where that is more than our ratio, they have the least that
                # they can have, and say so in their name.
                own, usual = f"{OURS}-chunks-of-{size}", switching.SYSTEMS[0].options
                least = least_ratio(ChunkIO(systems.engine(switching.SYSTEMS[0].codec, size).runner))
                if least > usual.ratio:
                    own, usual = f"{own}-ratio-{least:g}", dataclasses.replace(usual, ratio=least)
                system = dataclasses.replace(switching.SYSTEMS[0], options=usual, name=own)
                found[own] = systems.switches(system, cell, size)
            rows += switch_rows(f"chunk size: {cell.name}", found, device)
    for memory in [int(share * budget) for share in plan.budget_shares if "budgets" in plan.parts]:
        rows += _limit_rows(systems, f"budget: {memory / 1e6:.0f} MB", memory)
    for tokens in plan.context_tokens if "lengths" in plan.parts else ():
        if tokens > systems.window_tokens:
            most = systems.window_tokens
            systems.bench.tell(f"length: without {tokens} tokens, for the model's window has {most}")
        else:
            rows += _limit_rows(switching.Systems(systems.bench, tokens), f"length: {tokens} tokens", budget)
    # The calls' times are those of the trace, made denser.
    for interval_s in plan.interval_s if "intervals" in plan.parts else ():
        cell = switching.Cell(pattern, plan.contexts[-1], devices[0], budget, interval_s)
        found = systems.all_switches(switching.SYSTEMS, cell)
        rows += switch_rows(f"interval: {interval_s:g} s, {cell.name}", found, cell.device)
    codec = switching.SYSTEMS[0].codec
    if "resident" in plan.parts:
        engines = {OURS: systems.engine(codec, coded=True), DECODED: systems.engine(codec)}
        rows += resident_rows(engines, systems.engine(""), plan)
    if "answering" in plan.parts:
        rows += speed_rows({OURS: systems.engine(codec), PLAIN: systems.engine("")}, plan)
    return rows


def _switching_rows(systems: switching.Systems, budget: int) -> list[Row]:
    """Switches on every system, and how many contexts each serves within the limits: all patterns on the
    first device, the first pattern on others."""
    plan, rows, most = systems.bench.plan, [], []
    devices = named_devices(plan.devices)
    for device in devices:
        for pattern in plan.patterns if device is devices[0] else plan.patterns[:1]:
            found = {}
            for contexts in plan.contexts:
                cell = switching.Cell(pattern, contexts, device, budget)
                found[contexts] = systems.all_switches(switching.SYSTEMS, cell)
                rows += switch_rows(cell.name, found[contexts], device)
            for limit_ms in LIMITS_MS:
                most += most_contexts(f"{pattern}, {budget / 1e6:.0f} MB, {device.name}", found, limit_ms)
    return rows + most


def _limit_rows(systems: switching.Systems, case: str, budget_bytes: int) -> list[Row]:
    """The most contexts of each system within the limits, as far as contexts fit the memory at all."""
    plan = systems.bench.plan
    (device,) = named_devices(plan.devices[:1])

    def fitting(system: switching.System, cell: switching.Cell) -> switching.Switches | None:
        try:
            return systems.switches(system, cell)
        except BudgetExceeded:
            systems.bench.tell(f"{cell.name}: {system.name} no room")
            return None

    found = {
        contexts: {
            system.name: fitting(system, switching.Cell(plan.patterns[0], contexts, device, budget_bytes))
            for system in switching.SYSTEMS
        }
        for contexts in plan.contexts
    }
    case = f"{case}, {plan.patterns[0]}, {device.name}"
    return [row for limit_ms in LIMITS_MS for row in most_contexts(case, found, limit_ms)]


PLAIN = "no management"


def speed_rows(engines: Mapping[str, Engine], plan: Plan) -> list[Row]:
    """Rates of prefill and decoding, in turns, of a prompt and of the next one behind it.

    Args:
      engines: one that keeps contexts, which counts attention in caches that can be stored, and `PLAIN`.
    """
    draw, plain = np.random.default_rng(plan.seed), engines[PLAIN]
    window, times = plain.options.context_tokens, {name: _Times(list) for name in engines}
    config = GenerationConfig(max_tokens=window // 32, ignore_eos=True)
    both = [
        [switching.random_tokens(plain, window // 4, draw) for _ in range(2)] for _ in range(plan.repeats + 1)
    ]
    for repeat, prompts, name in in_turns(engines, both):
        session, said = Session(), []
        for prompt in prompts:
            said = [*said, *prompt]
            done = engines[name].stream(said, config, session=session).result()
            said += done.tokens
            if repeat:
                # The first one warms up.
                _add_rates(times[name], done)
    return _rows("answering in a context", times, dict.fromkeys(_RATES))


# What was measured of the calls of one system, by metric.
_Times = collections.defaultdict[str, list[float]]


def _add_rates(times: _Times, done: Answer) -> None:
    """Keeps the rates of an answer."""
    fed = done.prompt_tokens - done.reused_tokens
    times["prefill_tokens_per_s"].append(1000 * fed / done.timings.ttft_ms)
    times["decode_tokens_per_s"].append(1000 / done.timings.tpot_ms(len(done.tokens)))


_RATES = ("prefill_tokens_per_s", "decode_tokens_per_s")


def _rows(case: str, times: Mapping[str, _Times], metrics: Mapping[str, str | None]) -> list[Row]:
    """Medians of metrics, by what they say, of the systems that have them."""
    rows = []
    for metric, note in metrics.items():
        values = {name: median(each[metric]) for name, each in times.items() if metric in each}
        rows += compared(case, metric, values, dict.fromkeys(values, note))
    return rows


DECODED = f"{OURS}-decoded"


def resident_rows(engines: Mapping[str, Engine], plain: Engine, plan: Plan) -> list[Row]:
    """Rows by width, of two contexts that are called in turns.

    Args:
      engines: one that attends to coded chunks, and one of the same codec that decodes them into a cache.
    """
    draw, rows = np.random.default_rng(plan.seed), []
    window = plain.options.context_tokens
    # What a context has, each prompt, and each answer; the rest of the window has room for six turns.
    length, turn, answer = 3 * window // 4, window // 64, window // 64
    repeats = min(plan.repeats, 6)
    histories = {}
    for name, each in engines.items():
        own = np.random.default_rng(plan.seed)
        histories[name] = [switching.compute_history(each, length, own) for _ in range(2)]
    prompts = [switching.random_tokens(plain, turn, draw) for _ in range(repeats + 1)]
    # Ratios that give all chunks such a width.
    for bits, ratio in {8: 1.0, 4: 0.6, 2: 0.4}.items():
        times = {name: _Times(list) for name in (*engines, PLAIN)}
        with tempfile.TemporaryDirectory(prefix="jaxllm-bench-") as folder, contextlib.ExitStack() as stack:
            kept = {}
            for name, each in engines.items():
                options = ContextOptions(folder=Path(folder) / name, ratio=ratio, newest_chunks=0)
                kept[name] = stack.enter_context(contextlib.closing(Contexts(each, options)))
            theirs = {name: switching.keep(histories[name], each) for name, each in kept.items()}
            said, session = list(histories[OURS][0][0]), Session()
            for repeat, prompt in enumerate(prompts):
                for name, (settled, at_once) in theirs.items():
                    # The first ones warm up.
                    of = times[name] if repeat else _Times(list)
                    kept[name].store.wait()
                    # One that did not run last.
                    before = len(settled.record.bits)
                    got, ttft_ms = _asked(settled, prompt, answer)
                    of["switch_ms"].append(got.restoration.took_ms)
                    of["ttft_ms"].append(ttft_ms)
                    _add_rates(of, got)
                    taken, least = _memory(kept[name], settled.name, before)
                    of["context_bytes"], of["context_bytes_share"] = [taken], [taken / least]
                    of["at_once_ttft_ms"].append(_asked(at_once, prompt, answer)[1])
                # A conversation whose cache is all floats goes on.
                config = GenerationConfig(max_tokens=answer, ignore_eos=True)
                done = plain.stream([*said, *prompt], config, session=session).result()
                said += [*prompt, *done.tokens]
                if repeat:
                    _add_rates(times[PLAIN], done)
        rows += _rows(f"resident: {bits} bits, {length} tokens", times, _RESIDENT)
    return rows


def _asked(context: Context, prompt: list[int], answer: int) -> tuple[Answer, float]:
    """An answer, and the milliseconds from the call for it to its first token."""
    began = time.perf_counter()
    said = context.generate(prompt, max_tokens=answer, ignore_eos=True)
    # What it waits for before its first step is no part of `Answer.ttft_ms`.
    asked_ms = 1000 * (time.perf_counter() - began)
    return said.result(), asked_ms + said.ttft_ms


def _memory(contexts: Contexts, name: str, count: int) -> tuple[int, int]:
    """What the context that ran last took in memory until its call ended: its first `count` chunks and its
    cache. Then what their bytes alone are, and those of the rows behind these chunks."""
    session = contexts._last[1]
    cache, there = session.cache, contexts.memory.chunks(name)
    assert cache is not None
    chunks = [there[n] for n in range(count)]
    arrays = [each for each in jax.tree.leaves(cache) if isinstance(each, jax.Array | np.ndarray)]
    # Each layer's blob is an object by itself, and so is its memory.
    blobs = [blob for each in chunks for blob in each.blobs]
    objects = sum(sys.getsizeof(each) for blob in blobs for each in (blob, blob.base) if each is not None)
    extents = sum(each.blobs.extents.nbytes for each in chunks if isinstance(each.blobs, Blobs))
    taken = objects + extents + array_bytes(arrays)
    rows = sum(each.nbytes for each in jax.tree.leaves((cache.keys, cache.values)))
    behind = len(session.tokens) - count * contexts.engine.options.kv_chunk_tokens
    return taken, sum(each.size_bytes for each in chunks) + rows * behind // cache.capacity_tokens


# Metric -> what is measured, of calls in contexts.
_RESIDENT = {
    "switch_ms": "of a call that finds nothing left to encode or to write",
    "ttft_ms": "of the same calls, with the new turn and the tokens in no whole chunk",
    "at_once_ttft_ms": "asked for as the other context's answer ends, whose chunks are then encoded",
    "context_bytes": "chunks, and pages of the cache that are there, before the call's tokens are encoded",
    "context_bytes_share": "the same, by the bytes of chunks as they are stored and of the rows of tokens "
    "behind them",
    **dict.fromkeys(_RATES),
}


# Mean switches that are not noticed, or hardly.
LIMITS_MS = (10.0, 25.0)


_KEPT = "makes room for the call's tokens, encodes and stores them"
# Metric of switches -> what is measured.
METRICS = {
    "switch_ms": "",
    "ttft_ms": "restores the context, and computes the new turn and the tokens that are in no whole chunk",
    "finish_ms": f"{_KEPT}; every system flushes them: what a call said is safe from a power cut when it "
    "ends",
    "finish_unflushed_ms": f"{_KEPT}, without the time of flushes",
    "switch_and_finish_ms": "all that keeping contexts adds to a call, flushes included",
    "joules_per_call": "of all processor packages, from a call's switch until the next call",
}
_READ = {"direct": "read by O_DIRECT", "buffered": "read through the page cache"}


def switch_rows(case: str, found: Mapping[str, switching.Switches], device: Device) -> list[Row]:
    """Means by metric of every system, ours against each other; of energy where this machine has a meter."""
    rows, means = [], {name: each.metrics for name, each in found.items()}
    for metric, note in METRICS.items():
        values = {name: each[metric] for name, each in means.items() if metric in each}
        notes = {
            name: note or f"{each.note}; {device.note or _READ.get(each.caching, 'nothing on storage')}"
            for name, each in found.items()
        }
        rows += compared(case, metric, values, notes) if values else []
    return rows


def most_contexts(
    case: str, found: Mapping[int, Mapping[str, switching.Switches | None]], limit_ms: float
) -> list[Row]:
    """The largest number of active contexts, of those tried, whose mean switch stays within a limit.

    Args:
      found: by number of contexts, then by system; None where it could not hold a context in memory.
    """
    tried = sorted(found)
    systems = list(found[tried[0]])
    most = {}
    for system in systems:
        each = [found[count][system] for count in tried]
        within = [one is not None and one.metrics["switch_ms"] <= limit_ms for one in each]
        # Numbers below the first that is too large.
        passed = within.index(False) if False in within else len(within)
        most[system] = tried[passed - 1] if passed else 0
    note = f"tried: {', '.join(map(str, tried))}"
    metric = f"contexts_within_{limit_ms:.0f}_ms"
    return compared(case, metric, most, dict.fromkeys(most, note))


_SWITCH = "mean switch (ms)"
# Switching over the number of contexts, ablations, sizes of chunks, and quality.
FIGURES = (
    Figure(
        name="switch", metric="switch_ms", up=_SWITCH, across="active contexts", log=True,
        case=r"(?P<of>\w+), (?P<x>\d+) contexts in [\d.]+ MB, (?P<of_2>.+)",
    ),
    Figure(name="ablation", metric="switch_ms", case="ablation: (?P<x>.+)", up=_SWITCH, kind="bars"),
    Figure(name="chunk_size", metric="switch_ms", case="chunk size: (?P<x>.+)", up=_SWITCH, kind="bars"),
    *(
        # Of density differences are in notes, far smaller than what bars show.
        Figure(name=metric, metric=metric, case="(?!density)(?P<x>.+)", up=up, kind="bars")
        for metric, up in (
            ("perplexity", "perplexity"),
            ("accuracy", "right answers (share)"),
            ("recall", "likelihood that a stored chunk adds to its rest (nats per token)"),
        )
    ),
)  # fmt: skip
draw = functools.partial(draw_figures, "contexts", FIGURES)


class Traffic(NamedTuple):
    """Bytes of each switch of a trace on one system: read, and written before others could be read."""

    read: list[int]
    written: list[int]


@dataclasses.dataclass(frozen=True)
class Chunks:
    """Sizes of chunks of a model."""

    bytes_of: dict[int, int]
    reference_bytes: int

    @classmethod
    def of(cls, cfg: ModelConfig, codec: str) -> "Chunks":
        """Those of a model with caches in float16."""
        form, shapes = (
            ChunkFormat.named(codec, switching.CHUNK_TOKENS),
            chunk_shapes(cfg, tokens=switching.CHUNK_TOKENS, dtype="float16"),
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
    systems = [each for each in switching.SYSTEMS if each.options.writing != "never"]
    trace, lengths = switching.traced(plan, cfg.window_tokens, plan.patterns[0], plan.fitting)
    ours = Chunks.of(cfg, switching.SYSTEMS[0].codec)
    ends = switching.lengths_after(lengths, trace, cfg.window_tokens)
    # As `Systems.budget_bytes`.
    budget = sum(
        int(switching.SYSTEMS[0].options.ratio * ours.reference_bytes * (end // switching.CHUNK_TOKENS))
        for end in ends
    )
    for pattern, contexts in itertools.product(plan.patterns, plan.contexts):
        trace, lengths = switching.traced(plan, cfg.window_tokens, pattern, contexts)
        case = f"{pattern}, {contexts} contexts in {budget / 1e6:.0f} MB"
        found = {each.name: count(each, cfg, trace, lengths, budget, plan.seed) for each in systems}
        for name, each in found.items():
            bench.tell(
                f"{case}: {name} reads {np.mean(each.read) / 1e6:.2f} MB and writes "
                f"{np.mean(each.written) / 1e6:.2f}"
            )
        case, notes = f"traffic: {case}", {name: f"{len(each.read)} switches" for name, each in found.items()}
        means = {name: [float(np.mean(part)) for part in each] for name, each in found.items()}
        for place, metric in enumerate(("switch_read_bytes", "switch_written_bytes")):
            rows += compared(case, metric, {name: each[place] for name, each in means.items()}, notes)
        for device in named_devices(plan.devices):
            read, write = device.storage.bytes_per_s, device.storage.write_bytes_per_s
            # Of this machine's storage no bandwidth is known.
            if read and write:
                bounds = {name: 1000 * (each[0] / read + each[1] / write) for name, each in means.items()}
                rows += compared(f"{case}, {device.name}", "switch_bound_ms", bounds, notes)
    return rows


def count(
    system: switching.System,
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
    density = draw.pareto(1.0, (len(lengths), cfg.window_tokens // switching.CHUNK_TOKENS)) + 1e-3
    stored: set[tuple[str, int]] = set()
    evicted: list[Resident] = []
    memory = ChunkMemory(budget, find_policy(system.options.policy), evicted.extend)

    def keep(context: int, before: int, tokens: int) -> None:
        count = min(tokens, cfg.window_tokens) // switching.CHUNK_TOKENS
        for n, bits in enumerate(chunks.widths(density[context, :count], system.options.ratio)):
            there = memory.chunks(str(context)).get(n)
            if n < before // switching.CHUNK_TOKENS and (there is None or bits >= there.bits > 0):
                # Chunks that exist are only stored at fewer bits.
                continue
            load(str(context), n, bits)
            (stored.add if system.options.writing == "ahead" else stored.discard)((str(context), n))

    def load(context: str, n: int, bits: int) -> None:
        # Of the chunk's size, and takes no memory.
        memory.load(context, n, bits, [np.broadcast_to(np.uint8(0), chunks.bytes_of[bits])])

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
        missing = {n: widths[name, n] for n in memory.claim(name, before // switching.CHUNK_TOKENS)}
        read = sum(chunks.bytes_of[bits] for bits in missing.values())
        # Room for what the call adds is made before its first token, too.
        new = after // switching.CHUNK_TOKENS - before // switching.CHUNK_TOKENS
        memory.reclaim(read + new * max(chunks.bytes_of.values()))
        for n, bits in missing.items():
            load(name, n, bits)
        widths |= {(each.context, each.chunk): each.bits for each in evicted}
        if number >= switching.UNCOUNTED and call.context != last:
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
