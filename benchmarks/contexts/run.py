"""Runs the timed parts: switching on every system, ablations, chunk sizes, sweeps, answering in contexts.

Repeats switching over budgets of memory, lengths of contexts, and intervals between calls (LLMS, figures
10, 11 and 15).

Compares the speed of answers in a context with that of an engine without contexts.

Measures contexts whose chunks are all in memory: the switch, the memory of the one that runs, and answers
at depth by width, beside the same chunks decoded into a cache first and a float cache without contexts.

Two contexts are called in turns: the first when all that the calls before left to encode and to write is
done, so that its switch is the switch itself; the second at once, while chunks of the first are encoded.

Makes rows of switches: times to switch and to keep a context, and how many contexts a limit allows.
"""

import dataclasses
import functools
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import jax
import numpy as np

from benchmarks.contexts.switching import (
    ABLATIONS,
    SYSTEMS,
    Bench,
    Cell,
    Histories,
    Plan,
    Switches,
    System,
    random_tokens,
)
from benchmarks.harness.children import in_turns
from benchmarks.harness.figures import Figure, draw_figures
from benchmarks.harness.machine import Device
from benchmarks.harness.memory import array_bytes
from benchmarks.harness.plan import silent, unheard
from benchmarks.harness.report import OURS, Row, compared, median
from jaxllm.bundle import WeightFormat
from jaxllm.errors import BudgetExceeded
from jaxllm.kernels import native
from jaxllm.serving.contexts.chunk_io import ChunkIO
from jaxllm.serving.contexts.context import Context
from jaxllm.serving.contexts.manager import Contexts
from jaxllm.serving.contexts.memory import Blobs
from jaxllm.serving.contexts.options import ContextOptions
from jaxllm.serving.contexts.saving import least_ratio
from jaxllm.serving.engine.answer import Answer
from jaxllm.serving.engine.request import GenerationConfig, Session
from jaxllm.serving.host.progress import Progress
from jaxllm.serving.opening.engine import Engine


def run(
    model: Path,
    weights: WeightFormat | None,
    plan: Plan,
    progress: Progress = silent,
    tell: Callable[[str], None] = unheard,
) -> list[Row]:
    """Measures all that is timed.

    Args:
      model: a bundle or a Hugging Face folder.
      weights: width of a folder's weights.
      plan: how much.
      progress: of engines that open and contexts that are filled.
      tell: given a line for every system of a case as it has run.
    """
    bench = Bench(model, weights, plan, progress, tell)
    budget, rows = bench.budget_bytes(), []
    if "switching" in plan.parts:
        rows += _switching_rows(bench, budget)
    # Where all of ours fits into the budget, and with twice as many contexts.
    chosen = [each for each in plan.contexts if each in (plan.fitting, 2 * plan.fitting)]
    for device, contexts in itertools.product(plan.devices, chosen):
        cell = Cell(plan.patterns[0], contexts, device, budget)
        if "ablations" in plan.parts:
            # Ours runs again itself, for machines change their pace.
            systems = [each for each in ABLATIONS if native.kernels().native or not each.attend_coded]
            found = bench.all_switches([SYSTEMS[0], *systems], cell)
            rows += switch_rows(f"ablation: {cell.name}", found, device)
        if "chunk-sizes" in plan.parts and device is plan.devices[0]:
            rows += switch_rows(f"chunk size: {cell.name}", _chunked(bench, cell), device)
    for part, rows_of in (("budgets", budget_rows), ("lengths", length_rows), ("intervals", interval_rows)):
        if part in plan.parts:
            rows += rows_of(bench, budget)
    codec = SYSTEMS[0].codec
    if "resident" in plan.parts:
        coded, decoded = bench.engine(codec, coded=True), bench.engine(codec)
        rows += resident_rows(coded, decoded, bench.engine(""), plan.repeats, plan.seed)
    if "answering" in plan.parts:
        rows += speed_rows(bench.engine(codec), bench.engine(""), plan.repeats, plan.seed)
    return rows


def cells(plan: Plan, budget_bytes: int) -> Iterator[Cell]:
    """All patterns on the first device, the first pattern on others."""
    for device in plan.devices:
        for pattern in plan.patterns if device is plan.devices[0] else plan.patterns[:1]:
            for contexts in plan.contexts:
                yield Cell(pattern, contexts, device, budget_bytes)


def _switching_rows(bench: Bench, budget: int) -> list[Row]:
    """Switches on every system, and how many contexts each serves within the limits."""
    rows = []
    found = {cell: bench.all_switches(SYSTEMS, cell) for cell in cells(bench.plan, budget)}
    for cell, each in found.items():
        rows += switch_rows(cell.name, each, cell.device)
    for device, pattern in dict.fromkeys((cell.device, cell.pattern) for cell in found):
        of = {
            cell.contexts: each
            for cell, each in found.items()
            if (cell.device, cell.pattern) == (device, pattern)
        }
        case = f"{pattern}, {budget / 1e6:.0f} MB, {device.name}"
        for limit_ms in LIMITS_MS:
            rows += most_contexts(case, of, limit_ms)
    return rows


def _chunked(bench: Bench, cell: Cell) -> dict[str, Switches]:
    """Ours in chunks of other sizes. Short ones take more for scales: where that is more than our ratio, they
    have the least that they can have, and say so in their name."""
    ours = SYSTEMS[0]
    found = bench.all_switches([ours], cell)
    for size in bench.plan.chunk_tokens:
        least, name = least_ratio(ChunkIO(bench.engine(ours.codec, size).runner)), f"{OURS}-chunks-of-{size}"
        if least > ours.ratio:
            name += f"-ratio-{least:g}"
        system = dataclasses.replace(ours, ratio=max(ours.ratio, least), name=name)
        found[name] = bench.switches(system, cell, size)
    return found


def budget_rows(bench: Bench, budget_bytes: int) -> list[Row]:
    """How many contexts each system switches between within a limit, by memory: shares of `budget_bytes`."""
    rows = []
    for share in bench.plan.budget_shares:
        memory = int(share * budget_bytes)
        rows += _limit_rows(bench, f"budget: {memory / 1e6:.0f} MB", memory)
    return rows


def length_rows(bench: Bench, budget_bytes: int) -> list[Row]:
    """The same by the most tokens of a context, in one budget."""
    rows = []
    for tokens in bench.plan.context_tokens:
        if tokens > bench.window_tokens:
            bench.tell(f"length: without {tokens} tokens, for the model's window has {bench.window_tokens}")
            continue
        shorter = bench.of_length(tokens)
        rows += _limit_rows(shorter, f"length: {tokens} tokens", budget_bytes)
    return rows


def interval_rows(bench: Bench, budget_bytes: int) -> list[Row]:
    """Switches by the mean time between calls, with the most contexts; the calls' times are those of the
    trace, made denser."""
    plan, rows = bench.plan, []
    for interval_s in plan.interval_s:
        cell = Cell(plan.patterns[0], plan.contexts[-1], plan.devices[0], budget_bytes, interval_s)
        found = bench.all_switches(SYSTEMS, cell)
        rows += switch_rows(f"interval: {interval_s:g} s, {cell.name}", found, cell.device)
    return rows


def _limit_rows(bench: Bench, case: str, budget_bytes: int) -> list[Row]:
    """The most contexts of each system within the limits, as far as contexts fit the memory at all."""
    plan = bench.plan
    found: dict[int, Mapping[str, Switches | None]] = {}
    for contexts in plan.contexts:
        cell = Cell(plan.patterns[0], contexts, plan.devices[0], budget_bytes)
        found[contexts] = {system.name: _fitting(bench, system, cell) for system in SYSTEMS}
    case = f"{case}, {plan.patterns[0]}, {plan.devices[0].name}"
    return [row for limit_ms in LIMITS_MS for row in most_contexts(case, found, limit_ms)]


def _fitting(bench: Bench, system: System, cell: Cell) -> Switches | None:
    """A cell's trace on a system; None where one of its contexts alone takes more than the budget."""
    try:
        return bench.switches(system, cell)
    except BudgetExceeded:
        bench.tell(f"{cell.name}: {system.name} no room")
        return None


PLAIN = "no management"
# Shares of a window.
_PROMPT, _ANSWER = 1 / 4, 1 / 32


def speed_rows(managed: Engine, plain: Engine, repeats: int, seed: int) -> list[Row]:
    """Rates of prefill and decoding, in turns, of a prompt and of the next one behind it.

    Args:
      managed: an engine that keeps contexts: it counts attention, in caches that can be stored.
      plain: the same model without contexts.
      repeats: of each.
      seed: of the prompts.
    """
    draw, engines = np.random.default_rng(seed), {OURS: managed, PLAIN: plain}
    window, times = plain.options.context_tokens, {name: _Times() for name in engines}
    config = GenerationConfig(max_tokens=int(_ANSWER * window), ignore_eos=True)
    both = [[random_tokens(plain, int(_PROMPT * window), draw) for _ in range(2)] for _ in range(repeats + 1)]
    for repeat, prompts, name in in_turns(engines, both):
        session, said = Session(), []
        for prompt in prompts:
            said = [*said, *prompt]
            done = engines[name].stream(said, config, session=session).result()
            said += done.tokens
            if repeat:
                # The first one warms up.
                times[name].add(done)
    return _rate_rows("answering in a context", times)


class _Times(dict[str, list[float]]):
    """What was measured of the calls of one system, by metric."""

    def note(self, metric: str, value: float) -> None:
        """Keeps a value."""
        self.setdefault(metric, []).append(value)

    def add(self, done: Answer) -> None:
        """Keeps the rates of an answer."""
        fed = done.prompt_tokens - done.reused_tokens
        self.note("prefill_tokens_per_s", 1000 * fed / done.timings.ttft_ms)
        self.note("decode_tokens_per_s", 1000 / done.timings.tpot_ms(len(done.tokens)))


def _median_rows(case: str, metric: str, times: Mapping[str, _Times], note: str | None = None) -> list[Row]:
    """Medians of a metric, of the systems that have it."""
    values = {name: median(each[metric]) for name, each in times.items() if metric in each}
    return compared(case, metric, values, dict.fromkeys(values, note))


def _rate_rows(case: str, times: Mapping[str, _Times]) -> list[Row]:
    return [
        row
        for metric in ("prefill_tokens_per_s", "decode_tokens_per_s")
        for row in _median_rows(case, metric, times)
    ]


DECODED = f"{OURS}-decoded"
# Width in bits -> ratio that gives it to all chunks.
_RATIOS = {8: 1.0, 4: 0.6, 2: 0.4}
# Shares of a window: what a context has, each prompt, and each answer.
_HISTORY, _RESIDENT_PROMPT, _RESIDENT_ANSWER = 3 / 4, 1 / 64, 1 / 64


def resident_rows(coded: Engine, decoded: Engine, plain: Engine, repeats: int, seed: int) -> list[Row]:
    """Rows by width, of two contexts that are called in turns.

    Args:
      coded: an engine that attends to coded chunks.
      decoded: the same model and codec, with chunks decoded into a cache.
      plain: the same model without contexts.
      repeats: calls in each context that are timed.
      seed: of the prompts.
    """
    draw, rows = np.random.default_rng(seed), []
    window = plain.options.context_tokens
    repeats = min(repeats, int((1 - _HISTORY) / (_RESIDENT_PROMPT + _RESIDENT_ANSWER)) - 2)
    engines = {OURS: coded, DECODED: decoded}
    lengths = [int(_HISTORY * window)] * 2
    histories = {name: Histories.compute(each, lengths, seed) for name, each in engines.items()}
    prompts = [random_tokens(plain, int(_RESIDENT_PROMPT * window), draw) for _ in range(repeats + 1)]
    for bits, ratio in _RATIOS.items():
        times = {name: _Times() for name in (*engines, PLAIN)}
        with tempfile.TemporaryDirectory(prefix="jaxllm-bench-") as folder:
            kept = {
                name: Contexts(each, ContextOptions(folder=Path(folder) / name, ratio=ratio, newest_chunks=0))
                for name, each in engines.items()
            }
            theirs = {name: histories[name].keep(each) for name, each in kept.items()}
            said = list(histories[OURS].tokens[0])
            session, answer = Session(), int(_RESIDENT_ANSWER * window)
            for repeat, prompt in enumerate(prompts):
                for name, (settled, at_once) in theirs.items():
                    # The first ones warm up.
                    of = times[name] if repeat else _Times()
                    kept[name].store.wait()
                    _call(kept[name], settled, prompt, answer, of)
                    of.note("at_once_ttft_ms", _asked(at_once, prompt, answer)[1])
                # A conversation whose cache is all floats goes on.
                config = GenerationConfig(max_tokens=answer, ignore_eos=True)
                done = plain.stream([*said, *prompt], config, session=session).result()
                said += [*prompt, *done.tokens]
                if repeat:
                    times[PLAIN].add(done)
            for each in kept.values():
                each.close()
        rows += _rows(f"{bits} bits, {int(_HISTORY * window)} tokens", times)
    return rows


def _call(contexts: Contexts, context: Context, prompt: list[int], answer: int, times: _Times) -> None:
    """Answers in a context that did not run last."""
    before = len(context.record.bits)
    said, ttft_ms = _asked(context, prompt, answer)
    times.note("switch_ms", said.restoration.took_ms)
    times.note("ttft_ms", ttft_ms)
    times.add(said)
    taken, least = _memory(contexts, context.name, before)
    times["context_bytes"], times["context_bytes_share"] = [taken], [taken / least]


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
}


def _rows(case: str, times: Mapping[str, _Times]) -> list[Row]:
    rows = [
        row
        for metric, note in _RESIDENT.items()
        for row in _median_rows(f"resident: {case}", metric, times, note)
    ]
    return rows + _rate_rows(f"resident: {case}", times)


# Mean switches that are not noticed, or hardly.
LIMITS_MS = (10.0, 25.0)


def switch_rows(case: str, found: Mapping[str, Switches], device: Device) -> list[Row]:
    """Mean switching latency of every system, the mean time to the first token after a switch, and the mean
    time to keep a context after a call, with flushes to storage and without, and the mean energy of a call
    where this machine has a meter; ours against each other."""
    notes = {}
    for name, each in found.items():
        how = device.note or {"direct": "read by O_DIRECT", "buffered": "read through the page cache"}.get(
            each.caching, "nothing on storage"
        )
        notes[name] = f"{each.note}; {how}"
    kept = "makes room for the call's tokens, encodes and stores them"
    measured: list[tuple[str, Callable[[Switches], float | None], str]] = [
        (
            "ttft_ms",
            lambda each: each.mean_ttft_ms,
            "restores the context, and computes the new turn and the tokens that are in no whole chunk",
        ),
        (
            "finish_ms",
            lambda each: each.mean_finish_ms,
            f"{kept}; every system flushes them: what a call said is safe from a power cut when it ends",
        ),
        (
            "finish_unflushed_ms",
            lambda each: max(0.0, each.mean_finish_ms - each.mean_flush_ms),
            f"{kept}, without the time of flushes",
        ),
        (
            "switch_and_finish_ms",
            lambda each: each.mean_ms + each.mean_finish_ms,
            "all that keeping contexts adds to a call, flushes included",
        ),
        (
            "joules_per_call",
            lambda each: each.joules,
            "of all processor packages, from a call's switch until the next call",
        ),
    ]
    rows = compared(case, "switch_ms", {name: each.mean_ms for name, each in found.items()}, notes)
    for metric, of, note in measured:
        values = {name: value for name, each in found.items() if (value := of(each)) is not None}
        rows += compared(case, metric, values, dict.fromkeys(values, note)) if values else []
    return rows


def most_contexts(
    case: str, found: Mapping[int, Mapping[str, Switches | None]], limit_ms: float
) -> list[Row]:
    """The largest number of active contexts, of those tried, whose mean switch stays within a limit.

    Args:
      case: of the rows.
      found: by number of contexts, then by system; None where it could not hold a context in memory.
      limit_ms: of a mean switch.
    """
    tried = sorted(found)
    systems = list(found[tried[0]])
    most = {}
    for system in systems:
        each = [found[count][system] for count in tried]
        within = [one is not None and one.mean_ms <= limit_ms for one in each]
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
