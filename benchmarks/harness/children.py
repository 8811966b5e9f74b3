"""Measures in processes of their own, and systems in turns."""

import concurrent.futures
import dataclasses
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, TypeVar

from jaxllm.errors import JaxllmError, one_line

Found = TypeVar("Found")
Name = TypeVar("Name")


def in_process(
    function: Callable[..., Found], *given: Any, environment: Mapping[str, str] | None = None
) -> Found:
    """What a function of a module returns in a fresh process."""
    before = {name: os.environ.get(name) for name in environment or {}}
    os.environ.update(environment or {})
    try:
        context = multiprocessing.get_context("spawn")
        # What libraries print there must not reach the standard output, which is a bench's JSON.
        pool = concurrent.futures.ProcessPoolExecutor(1, context, initializer=os.dup2, initargs=(2, 1))
        with pool:
            return pool.submit(function, *given).result()
    except BrokenProcessPool as error:
        raise JaxllmError(
            f"{function.__name__} ended with its process, most often for want of memory"
        ) from error
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def run_python(what: str, *words: object, **how: Any) -> str:
    """The standard output of this Python with some arguments, in a process of its own."""
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, **how)
    if done.returncode:
        raise JaxllmError(f"{what} failed: {last_words(done.stderr)}")
    return done.stdout


def last_words(stderr: str) -> str:
    """The last line of a failed process's standard error."""
    lines = stderr.strip().splitlines()
    return one_line(lines[-1]) if lines else "it said nothing"


@dataclasses.dataclass(frozen=True)
class Export:
    """An export that was made: where, how large it is, and how long it took."""

    path: Path
    file_bytes: int
    export_ms: float

    @classmethod
    def of(cls, path: Path, began: float, before_ms: float = 0.0) -> "Export":
        """Of a file or a folder, whose making began at a time of `time.perf_counter`."""
        files = [path] if path.is_file() else list(path.iterdir())
        took_ms = before_ms + 1000 * (time.perf_counter() - began)
        return cls(path, sum(each.stat().st_size for each in files), took_ms)


def exported(bundle: Path, out: Path, *options: object) -> Export:
    """The export that `jaxllm export` makes with some options, in a process of its own."""
    out.parent.mkdir(exist_ok=True)
    if "litertlm" in options:
        out = out.with_suffix(".litertlm")
    began = time.perf_counter()
    run_python("the export", "-m", "jaxllm.cli.main", "export", bundle, "-o", out, *options)
    return Export.of(out, began)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Taken:
    """What a function took in a process of its own.

    Attributes:
      found: what it returned.
      took_s: seconds.
      cpu_s: of them, on processors.
      idle_bytes: resident before, of Python, JAX and the imports.
      peak_bytes: resident at most, above those; mapped pages of files are among them.
    """

    found: Any
    took_s: float
    cpu_s: float
    idle_bytes: int
    peak_bytes: int


def taken_by(
    function: Callable[..., Any], *given: Any, environment: Mapping[str, str] | None = None
) -> Taken:
    """Measures a function of a module in a fresh process; see `in_process`."""
    return in_process(_taken, function, *given, environment=environment)


def _taken(function: Callable[..., Any], *given: Any) -> Taken:
    import jax
    import numpy as np

    from benchmarks.harness.machine import peak_resident_bytes, reset_peak_memory

    # JAX takes memory of its own before there is a model.
    jax.device_put(np.zeros(4)).block_until_ready()
    reset_peak_memory()
    idle, began, began_cpu = peak_resident_bytes(), time.perf_counter(), time.process_time()
    found = function(*given)
    return Taken(
        found=found,
        took_s=time.perf_counter() - began,
        cpu_s=time.process_time() - began_cpu,
        idle_bytes=idle,
        peak_bytes=peak_resident_bytes() - idle,
    )


def in_turns(systems: Iterable[Name], rounds: Iterable[Any]) -> Iterator[tuple[int, Any, Name]]:
    """The number of each round, what it is of, and each system in turn: none always runs behind the same."""
    names = list(systems)
    for number, each in enumerate(rounds):
        for name in names if number % 2 else names[::-1]:
            yield number, each, name
