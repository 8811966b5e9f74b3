"""Runs the subgraphs of prompts on two processors, each a thread on cores of its own; imports no JAX."""

import contextlib
import dataclasses
import functools
import os
import queue
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jaxllm.errors import ConfigError
from jaxllm.int8_prefill.schedule import PROCESSORS, Dispatcher, Processor


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
        with self._within():
            self.trace = self._run(dispatcher, run)
        return self.trace

    def _run(self, dispatcher: Dispatcher, run: Callable[[Any], Any]) -> Trace:
        free, runs, decisions = set(PROCESSORS), [], []
        began = time.perf_counter()
        while not dispatcher.done:
            for processor in PROCESSORS:
                if processor not in free:
                    continue
                asked = time.perf_counter()
                index = dispatcher.take(processor)
                if index is None:
                    continue
                decisions.append(time.perf_counter() - asked)
                free.remove(processor)
                subgraph = dispatcher.subgraphs[index]
                self._submit(processor, index, functools.partial(run, subgraph))
            if len(free) == len(PROCESSORS):
                raise ConfigError("no subgraph can run, and some are left: they wait for each other")
            index, start, spent_ms = self._answer(len(PROCESSORS) - len(free))
            free.add(dispatcher.subgraphs[index].processor)
            start_ms = 1000 * (start - began)
            runs.append(SubgraphRun(index, start_ms, start_ms + spent_ms))
            dispatcher.finish(index)
        return Trace(tuple(runs), 1e6 * statistics.median(decisions))

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
