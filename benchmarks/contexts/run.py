"""Runs the timed parts: switching on every system, ablations, chunk sizes, and answering in contexts."""

import dataclasses
import itertools
import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.contexts import PARTS
from benchmarks.contexts.histories import Histories
from benchmarks.contexts.replay import Switches, replay
from benchmarks.contexts.resident import resident_rows
from benchmarks.contexts.rows import LIMITS_MS, most_contexts, switch_rows
from benchmarks.contexts.speed import speed_rows
from benchmarks.contexts.systems import ABLATIONS, OURS, SYSTEMS, System
from benchmarks.measuring.report import Row
from benchmarks.measuring.storage import PHONES, REAL, Device, named_devices
from jaxllm.bundle import WeightFormat
from jaxllm.errors import ConfigError
from serving.contexts.chunk_io import ChunkIO
from serving.contexts.growth import most_bytes
from serving.engine import Engine
from serving.host.progress import Progress
from serving.options import EngineOptions
from serving.traces.switching import ContextCall, Lengths, make_switching

# Prompts and answers in a window of 2,048 tokens, as short as those of many apps: their tokens have to be
# written. In a shorter window they are the same share.
_WINDOW_TOKENS = 2048
_LENGTHS: tuple[Lengths, ...] = ((32, 4), (64, 6), (96, 8), (128, 12))
CHUNK_TOKENS = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Sizes of one run.

    Attributes:
      patterns: of traces.
      contexts: numbers of active contexts, ascending.
      fitting: number of contexts of ours that fit into the budget with all of their chunks.
      calls: of each trace.
      devices: whose storage chunks are on; the first one runs all patterns, others the first pattern.
      chunk_tokens: sizes of chunks to compare, besides the paper's.
      parts: of `PARTS`, those to run.
      repeats: of each timing of inference.
      seed: of all draws.
    """

    patterns: tuple[str, ...] = ("random", "markov", "gaussian")
    contexts: tuple[int, ...] = (2, 4, 8, 16)
    fitting: int = 8
    calls: int = 30
    devices: tuple[Device, ...] = named_devices(PHONES)
    chunk_tokens: tuple[int, ...] = (8, 32, 64)
    parts: tuple[str, ...] = tuple(PARTS)
    repeats: int = 5
    seed: int = 0

    @property
    def timed(self) -> bool:
        """Whether anything is timed."""
        return not set(self.parts) <= {"quality", "density"}

    @classmethod
    def quick(cls) -> "Plan":
        """Fits in a minute for the packaged model."""
        return cls(
            patterns=("random",), contexts=(4,), fitting=4, calls=10, devices=(REAL,), chunk_tokens=(32,),
            repeats=2,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Cell:
    """A trace on a device, on which systems are compared.

    Attributes:
      pattern: of the trace.
      contexts: that are active.
      device: whose storage chunks are on.
      budget_bytes: of all chunks in memory.
    """

    pattern: str
    contexts: int
    device: Device
    budget_bytes: int

    @property
    def name(self) -> str:
        """As rows have it."""
        size = f"{self.budget_bytes / 1e6:.0f} MB"
        return f"{self.pattern}, {self.contexts} contexts in {size}, {self.device.name}"


class Bench:
    """Engines by codec and size of chunks, and contexts with a history, each made once.

    Attributes:
      plan: sizes of the run.
    """

    def __init__(
        self, model: Path, weights: WeightFormat | None, plan: Plan, progress: Progress | None
    ) -> None:
        self.plan = plan
        self._model, self._progress = model, progress
        self._weights: WeightFormat | None = weights
        self._engines: dict[tuple[str, int, bool], Engine] = {}
        self._histories: Histories | None = None
        self._traces: dict[tuple[str, int], tuple[list[ContextCall], Histories]] = {}

    def engine(self, codec: str, chunk_tokens: int = CHUNK_TOKENS, *, coded: bool = False) -> Engine:
        """The engine that stores by a codec, in chunks of a size, and attends to them where they lie if
        `coded`; an empty codec keeps no contexts."""
        key = codec, chunk_tokens, coded
        if key not in self._engines:
            options = EngineOptions(kv_codec=codec, kv_chunk_tokens=chunk_tokens, attend_coded=coded)
            self._engines[key] = Engine.open(
                self._model, weights=self._weights, options=options, progress=self._progress
            )
        return self._engines[key]

    @property
    def window_tokens(self) -> int:
        """Most tokens of a context."""
        return self.engine(SYSTEMS[0].codec).options.context_tokens

    def trace(self, pattern: str, contexts: int) -> tuple[list[ContextCall], Histories]:
        """Calls, and histories before them that leave room for them in the window."""
        plan, key = self.plan, (pattern, contexts)
        if key not in self._traces:
            share = self.window_tokens / _WINDOW_TOKENS
            lengths = [(math.ceil(share * prompt), math.ceil(share * answer)) for prompt, answer in _LENGTHS]
            trace = make_switching(pattern, lengths, contexts=contexts, calls=plan.calls, seed=plan.seed)
            room = [self.window_tokens] * contexts
            for call in trace:
                room[call.context] -= call.prompt_tokens + call.answer_tokens
            if min(room) < CHUNK_TOKENS:
                raise ConfigError(
                    f"{plan.calls} calls of {contexts} contexts do not fit windows of {self.window_tokens} "
                    "tokens; take a model with a longer one"
                )
            self._traces[key] = (
                trace,
                self._history().first([min(*each) for each in zip(self._lengths(), room, strict=False)]),
            )
        return self._traces[key]

    def switches(self, system: System, cell: Cell, chunk_tokens: int = CHUNK_TOKENS) -> Switches:
        """A cell's trace on a system."""
        trace, histories = self.trace(cell.pattern, cell.contexts)
        with tempfile.TemporaryDirectory(prefix="jaxllm-bench-", dir=_scratch()) as folder:
            return replay(
                system,
                self.engine(system.codec, chunk_tokens),
                trace,
                histories,
                budget_bytes=cell.budget_bytes,
                device=cell.device,
                folder=Path(folder),
                seed=self.plan.seed,
            )

    def budget_bytes(self) -> int:
        """Bytes of all chunks of ours, of as many contexts as are to fit, at the trace's end."""
        plan = self.plan
        trace, histories = self.trace(plan.patterns[0], plan.fitting)
        chunk_io = ChunkIO(self.engine(SYSTEMS[0].codec).runner)
        options = SYSTEMS[0].options(Path(), 1, REAL.storage)
        ends = [len(tokens) for tokens in histories.tokens]
        for call in trace:
            ends[call.context] += call.prompt_tokens + call.answer_tokens
        return sum(most_bytes(chunk_io, options, end // chunk_io.chunk_tokens) for end in ends)

    def _lengths(self) -> list[int]:
        """Tokens of the contexts' histories: from half a window up, evenly, in a fixed shuffled order."""
        most, count = self.window_tokens, max(self.plan.contexts)
        order = [(7 * each) % count for each in range(count)] if count % 7 else range(count)
        return [most // 2 + most // 2 * rank // count for rank in order]

    def _history(self) -> Histories:
        if self._histories is None:
            engine = self.engine(SYSTEMS[0].codec)
            self._histories = Histories.compute(engine, self._lengths(), self.plan.seed, self._progress)
        return self._histories


def run(
    model: Path,
    weights: WeightFormat | None,
    plan: Plan,
    progress: Progress | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> list[Row]:
    """Measures all that is timed.

    Args:
      model: a bundle or a Hugging Face folder.
      weights: width of a folder's weights.
      plan: how much.
      progress: of engines that open and contexts that are filled.
      tell: given a line for every system of a case as it has run.
    """
    bench = Bench(model, weights, plan, progress)
    budget, rows = bench.budget_bytes(), []
    if "switching" in plan.parts:
        rows += _switching_rows(bench, budget, tell)
    # Where all of ours fits into the budget, and with twice as many contexts.
    chosen = [each for each in plan.contexts if each in (plan.fitting, 2 * plan.fitting)]
    for device, contexts in itertools.product(plan.devices, chosen):
        cell = Cell(plan.patterns[0], contexts, device, budget)
        if "ablations" in plan.parts:
            rows += _variant_rows("ablation", cell, _ablated(bench, cell), tell)
        if "chunk-sizes" in plan.parts and device is plan.devices[0]:
            rows += _variant_rows("chunk size", cell, _chunked(bench, cell), tell)
    if "resident" in plan.parts:
        codec = SYSTEMS[0].codec
        coded, decoded = bench.engine(codec, coded=True), bench.engine(codec)
        rows += resident_rows(coded, decoded, bench.engine(""), plan.repeats, plan.seed)
    if "answering" in plan.parts:
        rows += speed_rows(bench.engine(SYSTEMS[0].codec), bench.engine(""), plan.repeats, plan.seed)
    return rows


def cells(plan: Plan, budget_bytes: int) -> Iterator[Cell]:
    """All patterns on the first device, the first pattern on others."""
    for device in plan.devices:
        for pattern in plan.patterns if device is plan.devices[0] else plan.patterns[:1]:
            for contexts in plan.contexts:
                yield Cell(pattern, contexts, device, budget_bytes)


def _switching_rows(bench: Bench, budget: int, tell: Callable[[str], None]) -> list[Row]:
    """Switches on every system, and how many contexts each serves within the limits."""
    rows = []
    found: dict[Cell, dict[str, Switches]] = {}
    for cell in cells(bench.plan, budget):
        found[cell] = {}
        for system in SYSTEMS:
            found[cell][system.name] = each = bench.switches(system, cell)
            tell(
                f"{cell.name}: {system.name} {each.mean_ms:.1f} ms and {each.mean_finish_ms:.1f} ms to keep; "
                f"{each.note}"
            )
        rows += switch_rows(cell.name, found[cell], cell.device)
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


def _ablated(bench: Bench, cell: Cell) -> dict[str, Switches]:
    """Ours with and without each of its techniques. It runs again itself, for machines change their pace."""
    return {system.name: bench.switches(system, cell) for system in (SYSTEMS[0], *ABLATIONS)}


def _chunked(bench: Bench, cell: Cell) -> dict[str, Switches]:
    """Ours in chunks of other sizes."""
    return {OURS: bench.switches(SYSTEMS[0], cell)} | {
        f"{OURS}-chunks-of-{size}": bench.switches(SYSTEMS[0], cell, size) for size in bench.plan.chunk_tokens
    }


def _variant_rows(
    what: str, cell: Cell, found: dict[str, Switches], tell: Callable[[str], None]
) -> list[Row]:
    for name, each in found.items():
        tell(f"{cell.name}: {name} {each.mean_ms:.1f} ms; {each.note}")
    return switch_rows(f"{what}: {cell.name}", found, cell.device)


def _scratch() -> str | None:
    """The folder for stores: in the cache folder, for the one of temporary files may be in memory."""
    from serving.host.user_cache import cache_folder

    folder = cache_folder() / "benchmarks"
    folder.mkdir(parents=True, exist_ok=True)
    return str(folder)
