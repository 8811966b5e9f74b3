"""Replays a switching trace on one system, and times each switch."""

import dataclasses
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from benchmarks.contexts.cell import Cell
from benchmarks.contexts.flushes import FlushClock
from benchmarks.contexts.histories import Histories, random_tokens
from benchmarks.contexts.systems import System
from benchmarks.measuring.energy import EnergyMeter
from serving.contexts.manager import Contexts
from serving.contexts.restore import Restoration
from serving.engine import Engine
from serving.traces.switching import ContextCall

# The first calls are not counted: memory is then as the system leaves it, not as it was filled.
_UNCOUNTED = 2


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
    def mean_ms(self) -> float:
        """Of a switch, until its context was there: all of it in a cache, or read while the prompt was
        computed."""
        return float(np.mean(self._switch_ms))

    @property
    def mean_ttft_ms(self) -> float:
        """Of a switch, until the first token."""
        return float(np.mean(self.ttft_ms))

    @property
    def mean_finish_ms(self) -> float:
        """Of a call."""
        return float(np.mean(self.finish_ms))

    @property
    def mean_flush_ms(self) -> float:
        """Of a call."""
        return float(np.mean(self.flush_ms))

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
    histories: Histories,
    *,
    cell: Cell,
    folder: Path,
    seed: int = 0,
) -> Switches:
    """Makes the calls of a trace one after another. Contexts that outgrow the window slide (see
    `Context.generate`).

    Args:
      system: keeps the contexts.
      engine: answers, by the system's codec.
      trace: of contexts that are numbered like the histories.
      histories: of the contexts before the trace; a context's calls fit behind its own.
      cell: memory, storage, and time between calls.
      folder: a store is made in it, and removed.
      seed: of the prompts' tokens.
    """
    draw = np.random.default_rng(seed)
    restorations, ttft_ms, finish_ms, flush_ms = [], [], [], []
    waits = np.diff([call.time_s for call in trace], prepend=trace[0].time_s)
    waits *= cell.interval_s / max(float(waits.mean()), 1e-9)
    meter = EnergyMeter.of_machine()
    with (
        _kept(system, engine, cell, folder) as contexts,
        FlushClock().running() as flushes,
    ):
        made = histories.keep(contexts)
        for number, (call, wait_s) in enumerate(zip(trace, waits.tolist(), strict=True)):
            prompt = random_tokens(engine, call.prompt_tokens, draw)
            context = made[call.context]
            if meter is not None and number == _UNCOUNTED:
                meter.joules()
            time.sleep(wait_s)
            flushes.reset()
            answer = context.generate(
                prompt, max_tokens=call.answer_tokens, ignore_eos=True, slide=True
            ).result()
            if number >= _UNCOUNTED:
                finish_ms.append(answer.finish_ms)
                flush_ms.append(flushes.reset())
                if not answer.restoration.cached:
                    restorations.append(answer.restoration)
                    ttft_ms.append(answer.ttft_ms)
        joules = None if meter is None else meter.joules() / max(1, len(finish_ms))
        caching = ""
        for context in made:
            caching = contexts.store.open(context.name).caching or caching
    return Switches(restorations, ttft_ms, finish_ms, flush_ms, caching, joules)


@contextmanager
def _kept(system: System, engine: Engine, cell: Cell, folder: Path) -> Iterator[Contexts]:
    root = Path(tempfile.mkdtemp(prefix="contexts-", dir=folder))
    try:
        contexts = Contexts(engine, system.options(root / "store", cell.budget_bytes, cell.device.storage))
        try:
            yield contexts
        finally:
            contexts.close()
    finally:
        shutil.rmtree(root, ignore_errors=True)
