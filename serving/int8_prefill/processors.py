"""Two processors that run the subgraphs of prompts: an integer one and a float one.

Each is a thread that runs one subgraph at a time on a JAX device of its own. The float one is the CPU, which
does everything but the integer subgraphs, decoding too. The integer one is a GPU if that is asked for; else
both are CPU devices, each bound to cores of its own, as a neural processor and a CPU would be: what they gain
is parallel work, not faster work. (Not tried on a GPU yet: tests place integer subgraphs on a second CPU
device in its stead, with the weights that a GPU gets.)

JAX decides about devices and threads once: `prepare_processors` comes before anything of JAX runs.
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
    """Makes two CPU devices, whose work runs in the thread that asks for it, and the CPU what JAX uses first;
    before JAX is used.

    Args:
      integer: what the integer processor will be.

    Raises:
      ConfigError: JAX is in use already, without them; or it has no GPU.
    """
    try:
        jax.config.update("jax_num_cpu_devices", 2)
        jax.config.update("jax_cpu_enable_async_dispatch", False)
        # The first platform is where everything runs that names none.
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
    """The GPU that JAX has.

    Raises:
      ConfigError: it has none.
    """
    try:
        return jax.devices("gpu")[0]
    except RuntimeError as error:
        raise ConfigError(
            "the integer processor was to be a GPU, and JAX has none here; install JAX for your GPU "
            "(`pip install 'jax[cuda13]'`), or let it be a core of the CPU (--integer-device cpu)"
        ) from error


@dataclasses.dataclass(frozen=True)
class Run:
    """When a subgraph ran, in milliseconds since its prompt began."""

    place: int
    start_ms: float
    end_ms: float


@dataclasses.dataclass(frozen=True)
class Trace:
    """What the processors did with one prompt.

    Attributes:
      runs: of all subgraphs, in the order in which they ended.
      decision_us: median time that a decision took, in microseconds.
    """

    runs: tuple[Run, ...]
    decision_us: float

    @property
    def makespan_ms(self) -> float:
        """From the start of the first to the end of the last."""
        return max(run.end_ms for run in self.runs) - min(run.start_ms for run in self.runs)


class TwoProcessors:
    """An integer and a float processor.

    Attributes:
      trace: of the last prompt; None before the first.
      both_are_cpus: whether each has some of the CPU's cores, and there is no accelerator.
    """

    def __init__(self, integer: IntegerDevice = "cpu") -> None:
        """Starts both; `close` ends them.

        Args:
          integer: what the integer processor is.

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
        """The device that a processor's buckets and weights are on."""
        return self._devices[processor]

    def close(self) -> None:
        """Ends both."""
        for worker in self._workers.values():
            worker.close()

    @contextlib.contextmanager
    def _own_threads(self) -> Iterator[None]:
        """Kernels share one pool of threads per process; while this lasts, each processor's thread does its
        own work where both are CPUs."""
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
        """Runs something on a processor that has nothing to do, while the other one does nothing, or `beside`
        again and again: milliseconds that it took, and that handing it over and hearing of its end took
        besides."""
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
        """Runs the subgraphs of a prompt, in the order that the dispatcher decides.

        Args:
          dispatcher: at the prompt's beginning.
          run: runs one subgraph to its end, in the thread that it is called in.

        Returns:
          When what ran; it is kept as `trace`, too.
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
                place = dispatcher.take(processor)
                if place is None:
                    continue
                decisions.append(time.perf_counter() - asked)
                free.remove(processor)
                subgraph = dispatcher.subgraphs[place]
                self._workers[processor].submit(place, lambda subgraph=subgraph: run(subgraph))
            if len(free) == len(PROCESSORS):
                raise ConfigError("no subgraph can run, and some are left: they wait for each other")
            place, start, spent_ms = self._answer(len(PROCESSORS) - len(free))
            free.add(dispatcher.subgraphs[place].processor)
            start_ms = 1000 * (start - began)
            runs.append(Run(place, start_ms, start_ms + spent_ms))
            dispatcher.finish(place)
        return Trace(tuple(runs), 1e6 * statistics.median(decisions))

    def _answer(self, running: int = 1) -> tuple[int, float, float]:
        """What the next one to end did; an error that it met is raised once nobody runs any more."""
        place, start, spent_ms, error = self._answers.get()
        if error is not None:
            for _ in range(running - 1):
                self._answers.get()
            raise error
        return place, start, spent_ms


class _Worker:
    """A thread on cores of its own that runs one thing after another."""

    def __init__(self, name: str, cores: Sequence[int], answers: queue.Queue[Any]) -> None:
        self._tasks: queue.Queue[Any] = queue.Queue()
        self._answers, self._cores = answers, cores
        self._thread = threading.Thread(target=self._serve, name=f"{name} processor", daemon=True)
        self._thread.start()

    def submit(self, place: int, work: Callable[[], Any]) -> None:
        self._tasks.put((place, work))

    def close(self) -> None:
        self._tasks.put(_END)
        self._thread.join()

    def _serve(self) -> None:
        if self._cores:
            # Of the calling thread alone.
            os.sched_setaffinity(0, self._cores)
        while (task := self._tasks.get()) is not _END:
            place, work = task
            start, error = time.perf_counter(), None
            try:
                work()
            except BaseException as problem:
                error = problem
            self._answers.put((place, start, 1000 * (time.perf_counter() - start), error))
