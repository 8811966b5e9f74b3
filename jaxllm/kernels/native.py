"""Loads the native CPU kernels (calls of them: `native_call.py` and the modules that import it).

The library is built with the package if there is a C++ compiler (`native/`, `setup.py`). A process has one
library and one pool of threads; its choice of instruction set applies to all of its steps. Without the
library, on other devices and in exported programs XLA computes the same functions (`linear.py`, `layers.py`).
"""

import contextlib
import contextvars
import dataclasses
import functools
import os
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxllm.errors import ConfigError

# Environment variable: "xla" for no native kernels, or an instruction set from `Kernels.choices`.
CHOICE_VARIABLE = "JAXLLM_KERNELS"
THREADS_VARIABLE = "JAXLLM_THREADS"
_MOST_THREADS = 256
# None where native kernels are in use; else whether XLA's steps may have branches.
_without_native: contextvars.ContextVar[bool | None] = contextvars.ContextVar("without_native", default=None)


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The kernels of this process's CPU.

    Attributes:
      name: the instruction set of the native kernels, or "xla".
      reason: why this one was chosen.
      choices: instruction sets that this processor runs, fastest first; empty without the library.
      missing: whether the native library could not be loaded although it was not switched off.
      branches: whether attention on CPUs reads a prefix of a cache by branches (see
        `jaxllm.nn.used_prefix`).
    """

    name: str
    reason: str
    choices: tuple[str, ...] = ()
    missing: bool = False
    branches: bool = False

    @property
    def native(self) -> bool:
        """Whether the native library is in use."""
        return self.name != "xla"


@contextlib.contextmanager
def without_native_kernels(*, branches: bool = False) -> Iterator[None]:
    """Within this context, steps are traced and weights are placed for XLA's kernels, for other machines;
    with `branches` for runtimes that have these (see `Kernels`)."""
    token = _without_native.set(branches)
    try:
        yield
    finally:
        _without_native.reset(token)


def kernels() -> Kernels:
    """The kernels in use: those of this process, or XLA's within `without_native_kernels`.

    Raises:
      ConfigError: see `process_kernels`.
    """
    branches = _without_native.get()
    if branches is None:
        return process_kernels()
    return Kernels("xla", "the steps are for other machines", branches=branches)


@functools.cache
def process_kernels() -> Kernels:
    """Loads and registers the native library, once.

    Raises:
      ConfigError: the environment asks for kernels that do not run here, or for an invalid number of threads.
    """
    choice = os.environ.get(CHOICE_VARIABLE, "")
    if choice == "xla":
        return Kernels("xla", f"{CHOICE_VARIABLE}=xla")
    try:
        library = _library()
        for name, target in library.targets().items():
            jax.ffi.register_ffi_target(name, target, platform="cpu")
    except Exception as error:
        # Any error: the library is not built, built for another system, or needs a newer XLA.
        reason = "they were not built" if isinstance(error, ModuleNotFoundError) else f"{error}"
        if choice:
            raise ConfigError(
                f"{CHOICE_VARIABLE}={choice}: there are no native kernels ({reason})"
            ) from error
        return Kernels("xla", reason, missing=True)
    choices = library.backends()
    try:
        library.use_backend(choice)
    except ValueError as error:
        raise ConfigError(f"{CHOICE_VARIABLE}: {error}; kernels here: {', '.join(choices)}") from error
    library.set_threads(_threads_wanted())
    reason = f"{CHOICE_VARIABLE}={choice}" if choice else "the fastest that this processor runs"
    return Kernels(library.backend(), reason, choices)


def set_threads(count: int) -> None:
    """Sets how many threads share a kernel's work, for the whole process.

    Raises:
      ConfigError: not a number of threads.
    """
    _check_threads("threads", count)
    if kernels().native:
        _library().set_threads(count)


def threads() -> int:
    """Threads that share a kernel's work."""
    return _library().threads() if kernels().native else 1


def busy_ns() -> int:
    """Nanoseconds that this process has spent in native kernels (0 without them)."""
    return _library().busy_ns() if kernels().native else 0


def read_all(data: np.ndarray) -> None:
    """Reads an array once with all threads, as fast as the kernels read weights; needs the library."""
    _library().read_all(data)


def open_table(rows: Sequence[Sequence[np.ndarray | None]]) -> int:
    """Opens a weight table (see `jaxllm.kernels.weight_table`), and returns its handle."""
    target("copy")
    return _library().open_table(rows)


def close_table(handle: int) -> None:
    """Closes a weight table."""
    _library().close_table(handle)


def open_chunks(
    form: tuple[Any, ...], heads: Sequence[int], bits: Sequence[int], chunks: Sequence[Sequence[np.ndarray]]
) -> int:
    """Opens a table of chunks (see `jaxllm.kernels.chunk_table`), and returns its handle."""
    target("attention")
    return _library().open_chunks(form, heads, bits, chunks)


def close_chunks(handle: int) -> None:
    """Closes a table of chunks."""
    _library().close_chunks(handle)


def target(name: str) -> str:
    """XLA's name of a kernel, after registering the kernels."""
    if not kernels().native:
        raise ConfigError(f"there are no native kernels in this process ({kernels().reason})")
    return f"jaxllm_{name}"


def _threads_wanted() -> int:
    asked = os.environ.get(THREADS_VARIABLE)
    if asked is not None:
        return _check_threads(THREADS_VARIABLE, int(asked) if asked.isdecimal() else asked)
    affinity = getattr(os, "sched_getaffinity", None)
    return min(_MOST_THREADS, len(affinity(0)) if affinity else (os.cpu_count() or 1))


def _check_threads(name: str, count: Any) -> int:
    if not isinstance(count, int) or not 1 <= count <= _MOST_THREADS:
        raise ConfigError(f"{name} must be a whole number in [1, {_MOST_THREADS}], got {count!r:.80}")
    return count


def _library() -> Any:
    # Not `from jaxllm.kernels import ...`: this form raises different errors for a missing and for a broken
    # library.
    import jaxllm.kernels._native as library  # pyright: ignore[reportMissingImports]: may not be built

    return library
