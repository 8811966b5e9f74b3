"""Describes ours and the baselines as options of one context manager, and replays a switching trace on each.

Contexts with a history are computed once, for every system to store and keep. How long flushes to storage
take is counted, so that times can be given with and without them.
"""

import contextlib
import dataclasses
import functools
import math
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.contexts import Plan
from benchmarks.harness.bench import Run
from benchmarks.harness.machine import Device, EnergyMeter
from benchmarks.harness.report import OURS
from benchmarks.traces import ContextCall, make_switching
from jaxllm.kv.cache import KVCache
from jaxllm.models.features import require_decoder_alone
from jaxllm.serving.buckets.bucket import no_chunks
from jaxllm.serving.contexts.chunk_io import ChunkIO
from jaxllm.serving.contexts.context import Context
from jaxllm.serving.contexts.manager import Contexts
from jaxllm.serving.contexts.options import ContextOptions
from jaxllm.serving.contexts.saving import most_bytes
from jaxllm.serving.engine.request import Session
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.ground.plan import Restoration
from jaxllm.serving.host.user_cache import cache_folder
from jaxllm.serving.opening.engine import Engine
from jaxllm.serving.runners.runner import prefill_prompt


@dataclasses.dataclass(frozen=True, kw_only=True)
class System:
    """A system that keeps contexts.

    Attributes:
      codec: of `EngineOptions.kv_codec`.
      options: of the manager; folder, budget and storage are those of a measurement.
      attend_quantized_kv: see `EngineOptions`.
    """

    name: str
    codec: str
    options: ContextOptions
    attend_quantized_kv: bool = False


def _system(name: str, codec: str = "channel", *, attend_quantized_kv: bool = False, **how: Any) -> System:
    # No baseline shares anything: a ratio shows the switch alone.
    usual = {"ratio": 0.5, "writing": "ahead", "overlap_prompt": False, "share_beginnings": False}
    options = ContextOptions(folder="", **usual | how)
    return System(name=name, codec=codec, options=options, attend_quantized_kv=attend_quantized_kv)


def _ours(ablation: str = "", **how: Any) -> System:
    return _system(f"{OURS}{ablation}", **{"overlap_prompt": True, **how})


SYSTEMS = (
    _ours(),
    _system("LMK", "raw", policy="whole-contexts", writing="never", recompute=False),
    _system("Swapping", "raw", policy="whole-contexts", writing="at-eviction", recompute=False),
    _system("VLLM-S", "raw", policy="lru", writing="at-eviction", recompute=False),
    _system("VLLM-SQ", ratio=1.0, policy="lru", writing="at-eviction", recompute=False),
)
# Without each of the three techniques in turn, without computing prompts while chunks are read, and with
# chunks that are attended to where they lie.
ABLATIONS = (
    _ours("-no-compression", ratio=1.0),
    _ours("-no-pipeline", recompute=False),
    _ours("-no-lifecycle", policy="lru", writing="at-eviction"),
    _ours("-no-overlap", overlap_prompt=False),
    _ours("-attend-quantized-kv", attend_quantized_kv=True),
)


@dataclasses.dataclass(frozen=True)
class Cell:
    """A trace on a device, on which systems are compared.

    Attributes:
      pattern: of the trace.
      contexts: that are active.
      budget_bytes: of all chunks in memory.
      interval_s: mean time from the end of a call to the next one, whose times are in proportion to the
        trace's; 0 for no wait.
    """

    pattern: str
    contexts: int
    device: Device
    budget_bytes: int
    interval_s: float = 0.0

    @property
    def name(self) -> str:
        """As rows have it."""
        size = f"{self.budget_bytes / 1e6:.0f} MB"
        return f"{self.pattern}, {self.contexts} contexts in {size}, {self.device.name}"


@contextmanager
def flush_times() -> Iterator[list[float]]:
    """Milliseconds of each `os.fsync` in the block, in all threads. Nothing else in the process may replace
    `os.fsync` meanwhile."""
    flush, taken_ms = os.fsync, []

    def timed(file: int) -> None:
        began = time.perf_counter()
        try:
            flush(file)
        finally:
            taken_ms.append(1000 * (time.perf_counter() - began))

    os.fsync = timed  # pyright: ignore[reportAttributeAccessIssue]: files of other kinds are not flushed here
    try:
        yield taken_ms
    finally:
        os.fsync = flush


# A context's tokens, and its cache with all of them.
History = tuple[list[int], KVCache]


def compute_history(engine: Engine, length: int, draw: np.random.Generator) -> History:
    """Draws and feeds tokens; keys and values do not depend on the engine's codec."""
    tokens, runner = random_tokens(engine, length, draw), engine.runner
    _, cache = prefill_prompt(runner, runner.start(engine.options.context_tokens), tokens, 0)
    return tokens, jax.block_until_ready(cache)


def keep(histories: Sequence[History], contexts: Contexts) -> list[Context]:
    """Contexts with these histories, as if a call had just ended in each, in order."""
    made = []
    for tokens, cache in histories:
        context = Context(contexts, contexts.create("bench"))
        session, length = Session(), len(tokens)
        turn = contexts.begin(context.record, session, prompt_tokens=length, most_tokens=length)
        if contexts.engine.options.attend_quantized_kv and cache.coded is None:
            cache = dataclasses.replace(cache, coded=no_chunks(contexts.engine.options))
        # A copy: dispatches donate the cache.
        session.tokens, session.cache = list(tokens), copied(cache)
        contexts.finish(turn, tokens, 0)
        made.append(context)
    return made


def random_tokens(engine: Engine, count: int, draw: np.random.Generator) -> list[int]:
    """Random tokens: neither the speed nor the size of a context depends on its text."""
    # The first ids of every tokenizer are special tokens.
    return draw.integers(16, engine.cfg.vocab_size, count).tolist()


# The first calls are not counted: memory is then as the system leaves it, not as it was filled.
UNCOUNTED = 2


@dataclasses.dataclass(frozen=True)
class Switches:
    """The switches of a trace on one system.

    Attributes:
      restorations: of each switch, how the context was restored.
      ttft_ms: of each switch, the time to the first token: to restore the context, and to compute the new
        turn and the context's tokens that are in no whole chunk.
      finish_ms: of each call, the time to keep the context after it (see `ContextAnswer`).
      flush_ms: of each call, the part of its switch and of `finish_ms` that flushes to storage took.
      caching: how storage was read; empty where it was not.
      joules: that a call took, from its switch until it was kept and the next one came; None where this
        machine has no meter.
    """

    restorations: Sequence[Restoration]
    ttft_ms: Sequence[float]
    finish_ms: Sequence[float]
    flush_ms: Sequence[float]
    caching: str
    joules: float | None = None

    @property
    def metrics(self) -> dict[str, float]:
        """Means by metric (see `run.METRICS`): of a switch until its context is there, all of it in a cache,
        or read while the prompt is computed; and of the call."""
        switch, finish = float(np.mean(self._switch_ms)), float(np.mean(self.finish_ms))
        found = {
            "switch_ms": switch,
            "ttft_ms": float(np.mean(self.ttft_ms)),
            "finish_ms": finish,
            "finish_unflushed_ms": max(0.0, finish - float(np.mean(self.flush_ms))),
            "switch_and_finish_ms": switch + finish,
        }
        return found if self.joules is None else {**found, "joules_per_call": self.joules}

    @property
    def note(self) -> str:
        """The sources of chunks, and the spread of times."""
        found, times = self.restorations, self._switch_ms
        parts = [(len(each.read), len(each.computed), each.resident) for each in found]
        read, computed, resident = np.mean(parts, axis=0)
        return (
            f"{len(found)} switches, median {np.median(times):.1f} ms, slowest {max(times):.0f} ms; chunks: "
            f"{resident:.0f} in memory, {read:.0f} read, {computed:.0f} computed"
        )

    @property
    def _switch_ms(self) -> list[float]:
        return [each.took_ms - each.fed_ms for each in self.restorations]


def replay(
    system: System,
    engine: Engine,
    trace: Sequence[ContextCall],
    histories: Sequence[History],
    *,
    cell: Cell,
    seed: int = 0,
) -> Switches:
    """Makes the calls of a trace one after another, in a store that is removed again. Contexts that outgrow
    the window slide (see `Context.generate`).

    Args:
      engine: answers, by the system's codec.
      trace: of contexts that are numbered like the histories.
      histories: of the contexts before the trace; a context's calls fit behind its own.
      cell: memory, storage, and time between calls.
    """
    draw = np.random.default_rng(seed)
    restorations, ttft_ms, finish_ms, flush_ms = [], [], [], []
    waits = np.diff([call.time_s for call in trace], prepend=trace[0].time_s)
    waits *= cell.interval_s / max(float(waits.mean()), 1e-9)
    meter = EnergyMeter.of_machine()
    with contextlib.ExitStack() as stack:
        # In the cache folder, for the one of temporary files may be in memory.
        (scratch := cache_folder() / "benchmarks").mkdir(parents=True, exist_ok=True)
        root = stack.enter_context(tempfile.TemporaryDirectory(prefix="jaxllm-bench-", dir=scratch))
        own = {"budget_bytes": cell.budget_bytes, "storage": cell.device.storage}
        options = dataclasses.replace(system.options, folder=Path(root) / "store", **own)
        contexts = stack.enter_context(contextlib.closing(Contexts(engine, options)))
        flushes = stack.enter_context(flush_times())
        made = keep(histories, contexts)
        for number, (call, wait_s) in enumerate(zip(trace, waits.tolist(), strict=True)):
            prompt = random_tokens(engine, call.prompt_tokens, draw)
            if meter is not None and number == UNCOUNTED:
                meter.joules()
            time.sleep(wait_s)
            flushes.clear()
            answer = (
                made[call.context]
                .generate(prompt, max_tokens=call.answer_tokens, ignore_eos=True, slide=True)
                .result()
            )
            if number >= UNCOUNTED:
                finish_ms.append(answer.finish_ms)
                flush_ms.append(sum(flushes))
                if not answer.restoration.cached:
                    restorations.append(answer.restoration)
                    ttft_ms.append(answer.ttft_ms)
        joules = None if meter is None else meter.joules() / max(1, len(finish_ms))
        caching = ""
        for context in made:
            caching = contexts.store.open(context.name).caching or caching
    return Switches(restorations, ttft_ms, finish_ms, flush_ms, caching, joules)


CHUNK_TOKENS = 16


class Systems:
    """Engines by codec and size of chunks, and contexts with a history, each made once for all systems."""

    def __init__(self, bench: Run[Plan], context_tokens: int = 0) -> None:
        self.bench, self._context_tokens = bench, context_tokens
        self._engines: dict[tuple[str, int, bool], Engine] = {}
        self.trace = functools.cache(self._trace)

    def engine(self, codec: str, chunk_tokens: int = CHUNK_TOKENS, *, coded: bool = False) -> Engine:
        """The engine that stores by a codec, in chunks of a size, and attends to them where they lie if
        `coded`; an empty codec keeps no contexts."""
        key, bench = (codec, chunk_tokens, coded), self.bench
        if key in self._engines:
            return self._engines[key]
        options = EngineOptions(
            context_tokens=self._context_tokens, kv_codec=codec, kv_chunk_tokens=chunk_tokens,
            attend_quantized_kv=coded,
        )  # fmt: skip
        weights = bench.plan.weights if bench.shape else None
        engine = Engine.open(bench.path(), weights=weights, options=options, progress=bench.progress)
        require_decoder_alone(engine.cfg, "bench contexts")
        self._engines[key] = engine
        return engine

    @property
    def window_tokens(self) -> int:
        """Most tokens of a context."""
        return self.engine(SYSTEMS[0].codec).options.context_tokens

    @functools.cached_property
    def _history(self) -> History:
        plan = self.bench.plan
        longest, draw = max(_lengths(plan, self.window_tokens)), np.random.default_rng(plan.seed)
        return compute_history(self.engine(SYSTEMS[0].codec), longest, draw)

    def _trace(self, pattern: str, contexts: int) -> tuple[list[ContextCall], list[History]]:
        """Calls, and histories before them that leave room for them in the window, or in half of it where
        contexts slide.

        All contexts begin alike, which no system makes use of: to compute each would take minutes.
        """
        trace, lengths = traced(self.bench.plan, self.window_tokens, pattern, contexts)
        tokens, cache = self._history
        # Attention never reads behind a context's length.
        own = [(tokens[:each], dataclasses.replace(cache, length=np.int32(each))) for each in lengths]
        return trace, own

    def switches(self, system: System, cell: Cell, chunk_tokens: int = CHUNK_TOKENS) -> Switches:
        """A cell's trace on a system."""
        trace, histories = self.trace(cell.pattern, cell.contexts)
        engine = self.engine(system.codec, chunk_tokens, coded=system.attend_quantized_kv)
        found = replay(system, engine, trace, histories, cell=cell, seed=self.bench.plan.seed)
        apart = f", {cell.interval_s:g} s between calls" if cell.interval_s else ""
        means = found.metrics
        self.bench.tell(
            f"{cell.name}{apart}: {system.name} {means['switch_ms']:.1f} ms, {means['ttft_ms']:.1f} ms to "
            f"the first token and {means['finish_ms']:.1f} ms to keep; {found.note}"
        )
        return found

    def all_switches(self, systems: Sequence[System], cell: Cell) -> dict[str, Switches]:
        """A cell's trace on several systems, by name."""
        return {system.name: self.switches(system, cell) for system in systems}

    def budget_bytes(self) -> int:
        """Bytes of all chunks of ours, of as many contexts as are to fit, at the trace's end."""
        plan = self.bench.plan
        trace, histories = self.trace(plan.patterns[0], plan.fitting)
        chunk_io = ChunkIO(self.engine(SYSTEMS[0].codec).runner)
        ends = lengths_after([len(tokens) for tokens, _ in histories], trace, self.window_tokens)
        return sum(most_bytes(chunk_io, SYSTEMS[0].options, end // chunk_io.chunk_tokens) for end in ends)


def traced(
    plan: Plan, window_tokens: int, pattern: str, contexts: int
) -> tuple[list[ContextCall], list[int]]:
    """Calls, and tokens of each context before them, which leave room for the calls in the window, or half of
    it where contexts slide."""
    # Prompts and answers in a window of 2,048 tokens, as short as those of many apps: their tokens have to be
    # written. In a shorter window they are the same share.
    share, usual = window_tokens / 2048, ((32, 4), (64, 6), (96, 8), (128, 12))
    lengths = [(math.ceil(share * prompt), math.ceil(share * answer)) for prompt, answer in usual]
    trace = make_switching(pattern, lengths, contexts=contexts, calls=plan.calls, seed=plan.seed)
    room = [window_tokens] * contexts
    for call in trace:
        room[call.context] -= call.prompt_tokens + call.answer_tokens
    room = [each if each >= CHUNK_TOKENS else window_tokens // 2 for each in room]
    return trace, [min(each) for each in zip(_lengths(plan, window_tokens), room, strict=False)]


def lengths_after(lengths: Sequence[int], trace: Sequence[ContextCall], window_tokens: int) -> list[int]:
    """Tokens of each context when the calls of a trace have ended."""
    ends = list(lengths)
    for call in trace:
        ends[call.context] += call.prompt_tokens + call.answer_tokens
    return [min(end, window_tokens) for end in ends]


def _lengths(plan: Plan, window_tokens: int) -> list[int]:
    """Tokens of the contexts' histories: from half a window up, evenly, in a fixed shuffled order."""
    most, count = window_tokens, max(plan.contexts)
    order = [(7 * each) % count for each in range(count)] if count % 7 else range(count)
    return [most // 2 + most // 2 * rank // count for rank in order]


def copied(cache: KVCache) -> KVCache:
    """A copy of a cache, for a dispatch that donates it."""
    return jax.tree.map(jnp.copy, cache)
