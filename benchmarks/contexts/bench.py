"""Defines the sizes of a run, and makes the engines, histories and traces of its cells, each once."""

import dataclasses
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.contexts import PARTS
from benchmarks.contexts.cell import Cell
from benchmarks.contexts.histories import Histories
from benchmarks.contexts.replay import Switches, replay
from benchmarks.contexts.systems import SYSTEMS, System
from benchmarks.measuring.storage import PHONES, REAL, Device, named_devices
from jaxllm.bundle import WeightFormat
from jaxllm.models.rooms import require_decoder_alone
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
      budget_shares: budgets to compare, as shares of the one that fits `fitting` contexts.
      context_tokens: most tokens of contexts to compare, as far as the model's window goes.
      interval_s: mean seconds between calls to compare.
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
    budget_shares: tuple[float, ...] = (0.5, 1.0, 1.5)
    context_tokens: tuple[int, ...] = (256, 512, 1024, 2048, 4096)
    interval_s: tuple[float, ...] = (0.0, 0.25, 1.0)

    @property
    def timed(self) -> bool:
        """Whether anything is timed."""
        return not set(self.parts) <= {"quality", "density", "traffic"}

    @classmethod
    def quick(cls) -> "Plan":
        """Fits in a minute for the packaged model."""
        return cls(
            patterns=("random",), contexts=(4,), fitting=4, calls=10, devices=(REAL,), chunk_tokens=(32,),
            repeats=2, budget_shares=(0.5, 1.0), context_tokens=(512,), interval_s=(0.1,),
        )  # fmt: skip


class Bench:
    """Engines by codec and size of chunks, and contexts with a history, each made once.

    Attributes:
      plan: sizes of the run.
    """

    def __init__(
        self,
        model: Path,
        weights: WeightFormat | None,
        plan: Plan,
        progress: Progress | None,
        context_tokens: int = 0,
    ) -> None:
        self.plan, self._context_tokens = plan, context_tokens
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
            options = EngineOptions(
                context_tokens=self._context_tokens, kv_codec=codec, kv_chunk_tokens=chunk_tokens,
                attend_coded=coded,
            )  # fmt: skip
            engine = self._engines[key] = Engine.open(
                self._model, weights=self._weights, options=options, progress=self._progress
            )
            require_decoder_alone(engine.cfg, "bench contexts")
        return self._engines[key]

    @property
    def window_tokens(self) -> int:
        """Most tokens of a context."""
        return self.engine(SYSTEMS[0].codec).options.context_tokens

    def trace(self, pattern: str, contexts: int) -> tuple[list[ContextCall], Histories]:
        """Calls, and histories before them that leave room for them in the window, or in half of it where
        contexts slide."""
        key = pattern, contexts
        if key not in self._traces:
            trace, lengths = traced(self.plan, self.window_tokens, pattern, contexts)
            self._traces[key] = trace, self._history().first(lengths)
        return self._traces[key]

    def of_length(self, tokens: int) -> "Bench":
        """The same with contexts of at most so many tokens."""
        return Bench(self._model, self._weights, self.plan, self._progress, tokens)

    def switches(self, system: System, cell: Cell, chunk_tokens: int = CHUNK_TOKENS) -> Switches:
        """A cell's trace on a system."""
        trace, histories = self.trace(cell.pattern, cell.contexts)
        with tempfile.TemporaryDirectory(prefix="jaxllm-bench-", dir=_scratch()) as folder:
            return replay(
                system,
                self.engine(system.codec, chunk_tokens, coded=system.attend_coded),
                trace,
                histories,
                cell=cell,
                folder=Path(folder),
                seed=self.plan.seed,
            )

    def budget_bytes(self) -> int:
        """Bytes of all chunks of ours, of as many contexts as are to fit, at the trace's end."""
        plan = self.plan
        trace, histories = self.trace(plan.patterns[0], plan.fitting)
        chunk_io = ChunkIO(self.engine(SYSTEMS[0].codec).runner)
        options = SYSTEMS[0].options(Path(), 1, REAL.storage)
        ends = lengths_after([len(tokens) for tokens in histories.tokens], trace, self.window_tokens)
        return sum(most_bytes(chunk_io, options, end // chunk_io.chunk_tokens) for end in ends)

    def _history(self) -> Histories:
        if self._histories is None:
            engine = self.engine(SYSTEMS[0].codec)
            lengths = _lengths(self.plan, self.window_tokens)
            longest = Histories.compute(engine, [max(lengths)], self.plan.seed, self._progress)
            # All contexts begin alike, which no system makes use of: to compute each would take minutes.
            self._histories = longest.repeated(len(lengths)).first(lengths)
        return self._histories


def traced(
    plan: Plan, window_tokens: int, pattern: str, contexts: int
) -> tuple[list[ContextCall], list[int]]:
    """Calls, and tokens of each context before them, which leave room for the calls in the window, or half of
    it where contexts slide.

    Args:
      plan: sizes.
      window_tokens: most tokens of a context.
      pattern: of the calls.
      contexts: that are active.
    """
    share = window_tokens / _WINDOW_TOKENS
    lengths = [(math.ceil(share * prompt), math.ceil(share * answer)) for prompt, answer in _LENGTHS]
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


def _scratch() -> str | None:
    """The folder for stores: in the cache folder, for the one of temporary files may be in memory."""
    from serving.host.user_cache import cache_folder

    folder = cache_folder() / "benchmarks"
    folder.mkdir(parents=True, exist_ok=True)
    return str(folder)
