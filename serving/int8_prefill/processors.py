"""Runs the subgraphs of prompts on two processors: an integer one and a float one.

Each is a thread that runs one subgraph at a time on a JAX device of its own. The float processor is the CPU,
which runs everything but the integer subgraphs, decoding included. The integer processor is a GPU if that is
asked for; else both are CPU devices on cores of their own, in place of a neural processor and a CPU: they
work in parallel, but neither is faster. (Not tested on a GPU yet: tests run integer subgraphs on a second CPU
device with the weights that a GPU gets.)

JAX creates devices and threads once: `prepare_processors` must come before JAX is used.
"""

import contextlib
import dataclasses
import os
import queue
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from jaxllm.errors import ConfigError
from jaxllm.int8_prefill.schedule import PROCESSORS, Dispatcher, Processor
from jaxllm.kernels import native
from serving.host.device import Device
from serving.int8_prefill.options import IntegerDevice

_END = None


def prepare_processors(integer: IntegerDevice = "cpu") -> None:
    """Makes JAX create two CPU devices that compute in the calling thread, with the CPU as its default; must
    be called before JAX is used.

    Args:
      integer: kind of the integer processor.

    Raises:
      ConfigError: JAX is in use already, without two such devices; or it has no GPU.
    """
    try:
        jax.config.update("jax_num_cpu_devices", 2)
        jax.config.update("jax_cpu_enable_async_dispatch", False)
        # The first platform is the default.
        jax.config.update("jax_platforms", "cpu" if integer == "cpu" else "cpu,cuda")
    except RuntimeError as error:
        if len(jax.devices("cpu")) < 2 or jax.config.read("jax_cpu_enable_async_dispatch"):
            raise ConfigError(
                "two processors must be prepared before JAX is used: call "
                "serving.int8_prefill.processors.prepare_processors() first, in a process of its own"
            ) from error
    if integer == "gpu":
        require_gpu()


def require_gpu() -> Device:
    """The first GPU of JAX.

    Raises:
      ConfigError: JAX has no GPU.
    """
    try:
        return jax.devices("gpu")[0]
    except RuntimeError as error:
        raise ConfigError(
            "the integer processor was to be a GPU, and JAX has none here; install JAX for your GPU "
            "(`pip install 'jaxllm[cuda]'`), or let it be a core of the CPU (--integer-device cpu)"
        ) from error


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
      runs: of all subgraphs, in the order of their ends.
      decision_us: median time of a scheduling decision, in microseconds.
    """

    runs: tuple[SubgraphRun, ...]
    decision_us: float

    @property
    def makespan_ms(self) -> float:
        """Milliseconds from the start of the first subgraph to the end of the last."""
        return max(run.end_ms for run in self.runs) - min(run.start_ms for run in self.runs)


class TwoProcessors:
    """An integer and a float processor.

    Attributes:
      trace: of the last prompt; None before the first.
      both_are_cpus: whether both run on cores of the CPU, without an accelerator.
    """

    def __init__(self, integer: IntegerDevice = "cpu") -> None:
        """Starts both threads; `close` stops them.

        Args:
          integer: kind of the integer processor.

        Raises:
          ConfigError: there are no two devices (see `prepare_processors`), no two cores, or no GPU.
        """
        cpus = jax.devices("cpu")
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        self.trace: Trace | None = None
        groups: dict[Processor, Sequence[int]] = {"integer": (), "float": ()}
        self.both_are_cpus = integer == "cpu"
        if self.both_are_cpus:
            if len(cpus) < 2 or jax.config.read("jax_cpu_enable_async_dispatch"):
                raise ConfigError(
                    "two processors take two devices: call "
                    "serving.int8_prefill.processors.prepare_processors() before JAX is used"
                )
            if len(cores) < 2:
                raise ConfigError(f"two processors take two cores, and this process may use {len(cores)}")
            self._devices: dict[Processor, Device] = {"integer": cpus[1], "float": cpus[0]}
            groups = {"integer": cores[1:2], "float": cores[:1]}
        else:
            self._devices = {"integer": require_gpu(), "float": cpus[0]}
            if jax.devices()[0].platform != "cpu":
                raise ConfigError(
                    "beside a GPU the CPU runs all else: call serving.int8_prefill.processors."
                    "prepare_processors('gpu') before JAX is used"
                )
        self._answers: queue.Queue[Any] = queue.Queue()
        self._workers = {name: _Worker(name, groups[name], self._answers) for name in PROCESSORS}

    def device(self, processor: Processor) -> Device:
        """The device of a processor's buckets and weights."""
        return self._devices[processor]

    def close(self) -> None:
        """Stops both threads."""
        for worker in self._workers.values():
            worker.close()

    @contextlib.contextmanager
    def _own_threads(self) -> Iterator[None]:
        """Within this context kernels use the calling thread alone if both processors are CPUs: all kernels
        of a process share one thread pool, and the processors would wait for each other."""
        if not self.both_are_cpus:
            yield
            return
        before = native.threads()
        native.set_threads(1)
        try:
            yield
        finally:
            native.set_threads(before)

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

        with self._own_threads():
            if beside is not None:
                (other,) = (each for each in PROCESSORS if each != processor)
                self._workers[other].submit(1, keep_busy)
                begun.wait()
            began = time.perf_counter()
            self._workers[processor].submit(0, work)
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
          dispatcher: at the prompt's beginning.
          run: runs one subgraph to its end in the calling thread.

        Returns:
          The schedule as it ran; also stored as `trace`.
        """
        with self._own_threads():
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
                self._workers[processor].submit(index, lambda subgraph=subgraph: run(subgraph))
            if len(free) == len(PROCESSORS):
                raise ConfigError("no subgraph can run, and some are left: they wait for each other")
            index, start, spent_ms = self._answer(len(PROCESSORS) - len(free))
            free.add(dispatcher.subgraphs[index].processor)
            start_ms = 1000 * (start - began)
            runs.append(SubgraphRun(index, start_ms, start_ms + spent_ms))
            dispatcher.finish(index)
        return Trace(tuple(runs), 1e6 * statistics.median(decisions))

    def _answer(self, running: int = 1) -> tuple[int, float, float]:
        """Waits for the next work to end: (index, start, milliseconds). If it failed, raises its error after
        all running work has ended."""
        index, start, spent_ms, error = self._answers.get()
        if error is not None:
            for _ in range(running - 1):
                self._answers.get()
            raise error
        return index, start, spent_ms


class _Worker:
    """A thread on cores of its own that runs submitted work in order."""

    def __init__(self, name: str, cores: Sequence[int], answers: queue.Queue[Any]) -> None:
        self._tasks: queue.Queue[Any] = queue.Queue()
        self._answers, self._cores = answers, cores
        self._thread = threading.Thread(target=self._serve, name=f"{name} processor", daemon=True)
        self._thread.start()

    def submit(self, index: int, work: Callable[[], Any]) -> None:
        self._tasks.put((index, work))

    def close(self) -> None:
        self._tasks.put(_END)
        self._thread.join()

    def _serve(self) -> None:
        if self._cores:
            # Applies to the calling thread alone.
            os.sched_setaffinity(0, self._cores)
        while (task := self._tasks.get()) is not _END:
            index, work = task
            start, error = time.perf_counter(), None
            try:
                work()
            except BaseException as problem:
                error = problem
            self._answers.put((index, start, 1000 * (time.perf_counter() - start), error))
