"""Two processors, each a thread on cores of its own: runs the subgraphs of prompts on them, times each once,
and plans the chunks of prompts by the times, which are cached for later processes.

A file of times belongs to a bundle, a machine and the options of an engine. It only affects the order of
subgraphs: if it is missing or malformed, times are measured again. Imports no JAX, for exported programs.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import logging
import math
import os
import queue
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jaxllm.errors import ConfigError
from jaxllm.files.atomic import atomic_file
from jaxllm.int8_prefill.schedule import (
    PROCESSORS,
    Dispatcher,
    Order,
    Processor,
    Stage,
    Subgraph,
    Times,
    simulate,
)
from jaxllm.serving.host.user_cache import make_private_folder, private_file
from jaxllm.serving.runners.runner import plan_chunks


@dataclasses.dataclass(frozen=True)
class SubgraphRun:
    """The time span of a subgraph, in milliseconds since its prompt began."""

    index: int
    start_ms: float
    end_ms: float


@dataclasses.dataclass(frozen=True)
class Trace:
    """The schedule of one prompt as it ran.

    Attributes:
      runs: runs of all subgraphs, in the order of their ends.
      decision_us: median time of a scheduling decision, in microseconds.
    """

    runs: tuple[SubgraphRun, ...]
    decision_us: float

    @property
    def makespan_ms(self) -> float:
        """Milliseconds from the start of the first subgraph to the end of the last."""
        return max(run.end_ms for run in self.runs) - min(run.start_ms for run in self.runs)


class ProcessorPair:
    """An integer and a float processor, each a thread that runs one subgraph at a time.

    Attributes:
      trace: schedule of the last prompt; None before the first.
    """

    def __init__(
        self,
        cores: Mapping[Processor, Sequence[int]],
        within: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        """Starts both threads; `close` stops them.

        Args:
          cores: cores of each processor; none for any.
          within: context manager around each run.
        """
        self.trace: Trace | None = None
        self._within = within
        self._answers: queue.Queue[Any] = queue.Queue()
        self._threads = {
            name: ThreadPoolExecutor(1, f"{name} processor", _use_cores, (cores[name],))
            for name in PROCESSORS
        }

    def close(self) -> None:
        """Stops both threads."""
        for thread in self._threads.values():
            thread.shutdown()

    def timed(
        self, processor: Processor, work: Callable[[], Any], beside: Callable[[], Any] | None = None
    ) -> tuple[float, float]:
        """Times `work` on an idle processor, while the other one is idle or repeats `beside`.

        Returns:
          Milliseconds of the work, and of the handover to the thread and back.
        """
        begun, enough = threading.Event(), threading.Event()

        def keep_busy() -> None:
            assert beside is not None
            try:
                while not enough.is_set():
                    beside()
                    begun.set()
            finally:
                begun.set()

        with self._within():
            if beside is not None:
                other: Processor = "float" if processor == "integer" else "integer"
                self._submit(other, 1, keep_busy)
                begun.wait()
            began = time.perf_counter()
            self._submit(processor, 0, work)
            try:
                spent_ms = self._answer(1 + (beside is not None))[2]
                handover_ms = 1000 * (time.perf_counter() - began) - spent_ms
            finally:
                enough.set()
            if beside is not None:
                self._answer()
            return spent_ms, handover_ms

    def run(self, dispatcher: Dispatcher, run: Callable[[Any], Any]) -> Trace:
        """Runs the subgraphs of a prompt in the order of the dispatcher.

        Args:
          dispatcher: dispatcher at the start of the prompt.
          run: runs one subgraph to its end in the calling thread.

        Returns:
          The actual schedule; also stored as `trace`.
        """
        free, runs, decisions = set(PROCESSORS), [], []
        with self._within():
            began = time.perf_counter()
            while not dispatcher.done:
                for processor in PROCESSORS:
                    asked = time.perf_counter()
                    if processor not in free or (index := dispatcher.take(processor)) is None:
                        continue
                    decisions.append(time.perf_counter() - asked)
                    free.remove(processor)
                    self._submit(processor, index, functools.partial(run, dispatcher.subgraphs[index]))
                if len(free) == len(PROCESSORS):
                    raise ConfigError("no subgraph can run, and some are left: they wait for each other")
                index, start, spent_ms = self._answer(len(PROCESSORS) - len(free))
                free.add(dispatcher.subgraphs[index].processor)
                start_ms = 1000 * (start - began)
                runs.append(SubgraphRun(index, start_ms, start_ms + spent_ms))
                dispatcher.finish(index)
        self.trace = Trace(tuple(runs), 1e6 * statistics.median(decisions))
        return self.trace

    def _submit(self, processor: Processor, index: int, work: Callable[[], Any]) -> None:
        """Runs work on a processor's thread; its end is an answer."""

        def run() -> None:
            start, error = time.perf_counter(), None
            try:
                work()
            except BaseException as problem:
                error = problem
            self._answers.put((index, start, 1000 * (time.perf_counter() - start), error))

        self._threads[processor].submit(run)

    def _answer(self, running: int = 1) -> tuple[int, float, float]:
        """Waits for the next work to end: (index, start, milliseconds). If it failed, raises its error after
        all running work has ended."""
        index, start, spent_ms, error = self._answers.get()
        if error is not None:
            for _ in range(running - 1):
                self._answers.get()
            raise error
        return index, start, spent_ms


def _use_cores(cores: Sequence[int]) -> None:
    """Moves the calling thread to some cores; none for any."""
    if cores:
        os.sched_setaffinity(0, cores)


def halved_cores() -> dict[Processor, Sequence[int]]:
    """The cores of this process, one half for each processor; none if the system has no affinity.

    Raises:
      ConfigError: this process may use only one core.
    """
    if not hasattr(os, "sched_getaffinity"):
        return dict.fromkeys(PROCESSORS, ())
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < len(PROCESSORS):
        raise ConfigError(f"two processors require two cores, and this process may use {len(cores)}")
    half = len(cores) // 2
    return {"integer": cores[half:], "float": cores[:half]}


_VERSION = 1
_MAX_FILE_BYTES = 4 << 20
_log = logging.getLogger(__name__)
# Key of a stage's time: a frozen dataclass of scalars, such as a bucket.
StageKey = Any


@dataclasses.dataclass(frozen=True)
class SubgraphTime:
    """Milliseconds of a subgraph, in an empty cache and in a full one.

    Attributes:
      alone: time while the other processor is idle.
      shared: time while the other processor is busy.
    """

    alone: tuple[float, float]
    shared: tuple[float, float]

    def __post_init__(self) -> None:
        if len(self.alone) != 2 or len(self.shared) != 2:
            raise ValueError("a time is not a pair")
        _require_milliseconds(*self.alone, *self.shared)


class SubgraphTimes(dict[StageKey, SubgraphTime]):
    """Times of subgraphs, by their buckets or programs.

    Attributes:
      handover_ms: handover time of a subgraph, besides its work.
    """

    def __init__(self, path: Path | None, key: Callable[..., StageKey]) -> None:
        """Reads the file if it exists; None for times that are not cached. `key` is the class of the timed
        subgraphs' keys."""
        super().__init__()
        self._path, self._key, self.handover_ms = path, key, 0.0
        if path is not None:
            self._read(path)

    def put(self, times: Mapping[StageKey, SubgraphTime], handover_ms: float) -> None:
        """Replaces the times of some buckets."""
        self.update(times)
        self.handover_ms = handover_ms

    def keep(self) -> None:
        """Merges the times into the file, which another process may have extended; a failure is logged, since
        it must not fail a request."""
        if self._path is None:
            return
        kept = SubgraphTimes(self._path, self._key)
        kept.put(self, self.handover_ms)
        rows = [{**dataclasses.asdict(each), **dataclasses.asdict(time)} for each, time in kept.items()]
        facts = {"version": _VERSION, "handover_ms": self.handover_ms, "times": rows}
        try:
            make_private_folder(self._path.parent)
            with atomic_file(self._path) as file:
                os.fchmod(file.fileno(), 0o600)
                file.write(json.dumps(facts).encode())
        except (OSError, ConfigError) as error:
            _log.warning(
                "%s: times of subgraphs cannot be kept (%s); they are measured at every start",
                self._path,
                error,
            )

    def _read(self, path: Path) -> None:
        try:
            with private_file(path) as number, open(number, "rb", closefd=False) as file:
                raw = file.read(_MAX_FILE_BYTES + 1)
            facts = json.loads(raw) if len(raw) <= _MAX_FILE_BYTES else {}
            if facts["version"] != _VERSION:
                return
            times, handover_ms = {}, facts["handover_ms"]
            for row in facts["times"]:
                alone, shared = tuple(row.pop("alone")), tuple(row.pop("shared"))
                times[self._key(**row)] = SubgraphTime(alone=alone, shared=shared)
            _require_milliseconds(handover_ms)
        except FileNotFoundError:
            return
        except (
            OSError, ConfigError, ValueError, KeyError, TypeError, AttributeError, RecursionError,
        ) as error:  # fmt: skip
            _log.warning("%s: times of subgraphs cannot be read (%s); they are measured again", path, error)
            return
        self.put(times, handover_ms)


def measured_times(
    processors: ProcessorPair,
    begin: Callable[[bool], Any],
    subgraphs: Sequence[Subgraph],
    bucket_of: Callable[[Subgraph], StageKey],
    runs: int,
) -> tuple[dict[StageKey, SubgraphTime], float]:
    """Times each kind of subgraph of one chunk.

    Args:
      processors: idle processors.
      begin: (full) -> a chunk before its first layer, in an empty cache or at the end of a full one, with
        `run` and `repeated` as `PromptPass` has them.
      subgraphs: subgraphs of a chunk.
      bucket_of: returns the bucket of a subgraph.
      runs: number of runs of all layers in each case, for medians.

    Returns:
      Times by bucket, and milliseconds of a handover.
    """
    taken: dict[tuple[StageKey, bool, bool], list[float]] = {}
    handovers: list[float] = []
    for _, full, busy in itertools.product(range(runs), (False, True), (False, True)):
        prompt = begin(full)
        besides = _work_of_each(processors, begin(full), subgraphs) if busy else {}
        for each in subgraphs:
            work = functools.partial(prompt.run, each)
            beside = besides.get("float" if each.processor == "integer" else "integer")
            spent_ms, handover_ms = processors.timed(each.processor, work, beside)
            taken.setdefault((bucket_of(each), full, busy), []).append(spent_ms)
            if not busy:
                handovers.append(handover_ms)
    medians = {key: statistics.median(times) for key, times in taken.items()}

    def both(bucket: StageKey, busy: bool) -> tuple[float, float]:
        return medians[bucket, False, busy], medians[bucket, True, busy]

    buckets = dict.fromkeys(bucket for bucket, _, _ in taken)
    times = {each: SubgraphTime(alone=both(each, False), shared=both(each, True)) for each in buckets}
    return times, statistics.median(handovers)


def _work_of_each(
    processors: ProcessorPair, prompt: Any, subgraphs: Sequence[Subgraph]
) -> dict[Processor, Callable[[], None]]:
    """Work that keeps each processor busy: its subgraphs of the first layer in turn, as in a prompt."""
    found: dict[Processor, list[Callable[[], None]]] = {each: [] for each in PROCESSORS}
    for each in subgraphs:
        if each.layer and all(found.values()):
            break
        found[each.processor].append(prompt.repeated(each))
        processors.timed(each.processor, functools.partial(prompt.run, each))

    def in_turn(work: Sequence[Callable[[], None]]) -> Callable[[], None]:
        turns = itertools.cycle(work)
        return lambda: next(turns)()

    return {processor: in_turn(work) for processor, work in found.items() if work}


def _require_milliseconds(*values: Any) -> None:
    if not all(type(each) in (int, float) and 0 <= each < math.inf for each in values):
        raise ValueError("a time is not a number of milliseconds")


# Lengths of a prompt's chunks.
Plan = tuple[int, ...]


def chunk_plans(tokens: int, lengths: Sequence[int]) -> list[Plan]:
    """Ways to cut a prompt into chunks: the cheapest first, then the cheapest without the longest lengths."""
    ascending = sorted(lengths)
    plans = (tuple(plan_chunks(tokens, ascending[: count + 1])) for count in reversed(range(len(ascending))))
    return list(dict.fromkeys(plans))


@dataclasses.dataclass(frozen=True, eq=False)
class ChunkPlanner:
    """Plans the chunks of prompts on two processors.

    Attributes:
      lengths: lengths of chunks with buckets.
      order: order of subgraphs.
      measured: times of stages.
      bucket_of: (layer, stage, tokens of a chunk, capacity of the cache) -> bucket.
      subgraphs_of: number of chunks -> the prompt's subgraphs.
      chosen: plans by tokens, position and capacity; cleared when times change.
    """

    lengths: tuple[int, ...]
    order: Order
    measured: SubgraphTimes
    bucket_of: Callable[[int, Stage, int, int], StageKey]
    subgraphs_of: Callable[[int], Sequence[Subgraph]]
    chosen: dict[tuple[int, int, int], Plan] = dataclasses.field(default_factory=dict)

    def plan(self, tokens: int, at: int, capacity: int) -> Plan:
        """The chunks with the minimum simulated time for a prompt of `tokens` tokens after `at` others;
        those of minimum cost if not all stages of all plans are timed."""
        case = tokens, at, capacity
        if case in self.chosen:
            return self.chosen[case]
        plans = chunk_plans(tokens, self.lengths)
        if len(plans) == 1 or not self._timed({length for plan in plans for length in plan}, capacity):
            return plans[0]

        def makespan_ms(plan: Plan) -> float:
            chunks = list(zip(plan, itertools.accumulate(plan, initial=at), strict=False))
            return simulate(
                self.subgraphs_of(len(plan)),
                self.times(chunks, capacity),
                self.order,
                overhead_ms=self.measured.handover_ms,
                shared=self.times(chunks, capacity, shared=True),
            ).makespan_ms

        self.chosen[case] = min(plans, key=makespan_ms)
        return self.chosen[case]

    def times(self, chunks: Sequence[tuple[int, int]], capacity: int, *, shared: bool = False) -> Times:
        """A function for the measured times of subgraphs in milliseconds: with the other processor idle, or
        busy if `shared`; 1 for unmeasured ones. `chunks` are lengths and positions."""

        def time_of(each: Subgraph) -> float:
            length, at = chunks[each.chunk]
            bucket = self.bucket_of(each.layer, each.stage, length, capacity)
            if bucket not in self.measured:
                return 1.0
            known = self.measured[bucket]
            empty, full = known.shared if shared else known.alone
            # Attention is slower with more tokens before it.
            return empty + (full - empty) * min(1.0, at / max(1, capacity - length))

        return time_of

    def measure_missing(self, cases: Iterable[tuple[int, int]], measure: Callable[[int, int], None]) -> None:
        """Measures the stages of chunks and caches of some lengths that have no times yet, by `measure`, and
        caches the times for later processes."""
        missing = [case for case in cases if not self._timed({case[0]}, case[1])]
        for case in missing:
            measure(*case)
        if missing:
            self.measured.keep()

    def _timed(self, lengths: set[int], capacity: int) -> bool:
        return all(
            self.bucket_of(each.layer, each.stage, length, capacity) in self.measured
            for length in lengths
            for each in self.subgraphs_of(1)
        )
