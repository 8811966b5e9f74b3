"""Loads the native CPU kernels, and stores the tables of addresses that they look up by a handle.

The library is built with the package if there is a C++ compiler (`native/`, `setup.py`); an instruction set
that does not compile is left out of it, and importing one that could not be built raises the reason. A
process has one library and one pool of threads; its choice of instruction set applies to all of its steps.
Without the library, on other devices and in exported programs XLA computes the same functions (`linear.py`,
`layers.py`).

A compiled step has the handle of a weight table, 8 bytes, as input instead of hundreds of arrays, and its
body can be a loop over layers. A kernel finds an array's address, type and shape in the table and checks
them as those of an operand; a handle of no open table is an error before the kernel runs. Handles are
invalid in other processes, so buckets cached on disk contain none.
"""

import contextlib
import contextvars
import dataclasses
import functools
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.errors import ConfigError

# Environment variable: "xla" for no native kernels, or an instruction set from `Kernels.choices`.
CHOICE_VARIABLE = "JAXLLM_KERNELS"
THREADS_VARIABLE = "JAXLLM_THREADS"
_MOST_THREADS = 256
# None with native kernels; else whether XLA's steps may have branches.
_without_native: contextvars.ContextVar[bool | None] = contextvars.ContextVar("without_native", default=None)


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Kernels of this process's CPU.

    Attributes:
      name: instruction set of the native kernels, or "xla".
      reason: reason of the choice.
      choices: instruction sets that were built and that this processor supports, fastest first.
      built: all instruction sets that were built, fastest first; empty without the library, as `choices`.
      left_out: instruction sets of this kind of processor that could not be built, and the reasons.
      missing: whether the native library could not be loaded although it was not switched off.
      branches: whether attention on CPUs reads a prefix of a cache by branches (see
        `jaxllm.nn.layers`).
    """

    name: str
    reason: str
    choices: tuple[str, ...] = ()
    built: tuple[str, ...] = ()
    left_out: Mapping[str, str] = dataclasses.field(default_factory=dict)
    missing: bool = False
    branches: bool = False

    @property
    def native(self) -> bool:
        """Whether the native library is in use."""
        return self.name != "xla"


def switched_off() -> bool:
    """Whether the environment selects XLA's own computations only, on every device."""
    return os.environ.get(CHOICE_VARIABLE) == "xla"


@contextlib.contextmanager
def without_native_kernels(*, branches: bool = False) -> Iterator[None]:
    """Within this context, steps are traced and weights are placed for XLA's kernels, for other machines;
    with `branches` for runtimes that support them (see `Kernels`)."""
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
      ConfigError: the environment selects kernels that this processor does not support, or an invalid
        number of threads.
    """
    choice = os.environ.get(CHOICE_VARIABLE, "")
    if switched_off():
        return Kernels("xla", f"{CHOICE_VARIABLE}=xla")
    try:
        library = native_library()
        choices, built, refused = library.backends(), library.built_backends(), library.refused_backends()
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
    try:
        library.use_backend(choice)
    except ValueError as error:
        raise ConfigError(f"{CHOICE_VARIABLE}: {error}; kernels here: {', '.join(choices)}") from error
    asked, affinity = os.environ.get(THREADS_VARIABLE), getattr(os, "sched_getaffinity", None)
    count = min(_MOST_THREADS, len(affinity(0)) if affinity else (os.cpu_count() or 1))
    if asked is not None:
        count = _check_threads(THREADS_VARIABLE, int(asked) if asked.isdecimal() else asked)
    library.set_threads(count)
    reason = (
        f"{CHOICE_VARIABLE}={choice}" if choice else "the fastest of those built that this processor runs"
    )
    left_out = {name: why for name, why in refused.items() if name not in built}
    return Kernels(library.backend(), reason, choices, built, left_out)


def set_threads(count: int) -> None:
    """Sets the number of threads that share a kernel's work, for the whole process.

    Raises:
      ConfigError: not a number of threads.
    """
    _check_threads("threads", count)
    if kernels().native:
        native_library().set_threads(count)


def threads() -> int:
    """Returns the number of threads that share a kernel's work."""
    return native_library().threads() if kernels().native else 1


def busy_ns() -> int:
    """Returns nanoseconds that this process has spent in native kernels (0 without them)."""
    return native_library().busy_ns() if kernels().native else 0


def read_all(data: np.ndarray) -> None:
    """Reads an array once with all threads, as fast as the kernels read weights; needs the library."""
    native_library().read_all(data)


def target(name: str) -> str:
    """XLA's name of a kernel, after registering the kernels."""
    if not kernels().native:
        raise ConfigError(f"there are no native kernels in this process ({kernels().reason})")
    return f"jaxllm_{name}"


def _check_threads(name: str, count: Any) -> int:
    if not isinstance(count, int) or not 1 <= count <= _MOST_THREADS:
        raise ConfigError(f"{name} must be a whole number in [1, {_MOST_THREADS}], got {count!r:.80}")
    return count


def native_library() -> Any:
    """The native library."""
    # Not `from jaxllm.kernels import ...`: this form raises different errors for a missing and for a broken
    # library.
    import jaxllm.kernels._native as library  # pyright: ignore[reportMissingImports]: may not be built

    return library


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TableArray:
    """An array in a row of a weight table, in the place of an array as an operand of native kernels.

    Attributes:
      table: `[2]` uint32, the handle, lower half first.
      row: int32 scalar.
      column: column of the table.
      shape, dtype: shape and dtype of the array. Kernels use those of the table.
    """

    table: jax.Array
    row: jax.Array
    column: int = dataclasses.field(metadata={"static": True})
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    dtype: np.dtype = dataclasses.field(metadata={"static": True})

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)


# XLA on a CPU uses memory of this alignment without a copy.
_ALIGN_BYTES = 64
# An array as an operand of native kernels.
Operand = jax.Array | TableArray


class OpenTable:
    """An open table of the native library. It references its arrays, and closes when the memory of `operand`
    is free.

    Attributes:
      operand: `[2]` uint32, the handle as an input of compiled steps, aligned so that a CPU device may use
        its memory: then the table is open until the last step with it has ended.
    """

    def __init__(self, handle: int, close: Callable[[int], None]) -> None:
        memory = np.zeros(2 * _ALIGN_BYTES, np.uint8)
        start = -memory.ctypes.data % _ALIGN_BYTES
        self.operand = memory[start : start + 8].view(np.uint32)
        self.operand[:] = handle & 0xFFFFFFFF, handle >> 32
        self._finalizer = weakref.finalize(memory, close, handle)

    def close(self) -> None:
        """Closes the table when no kernel reads it any more: later kernels fail, and the arrays are
        released."""
        self._finalizer()


class WeightTable(OpenTable):
    """Open table of the arrays of all layers, which native kernels look up by handle and row."""

    def __init__(self, rows: Sequence[Sequence[np.ndarray | jax.Array | None]]) -> None:
        """Opens a table.

        Args:
          rows: rows with equal numbers of arrays, which are not copied: C-contiguous, of at most 5
            dimensions, of 8-bit integers, bool, int32, uint16, float16, bfloat16 or float32. None is no
            array.

        Raises:
          ValueError: an array has another form, or 4,096 tables are open.
          BufferError: an array is not contiguous.
        """
        target("copy")
        library = native_library()
        handle = library.open_table([[_buffer(each) for each in row] for row in rows])
        super().__init__(handle, library.close_table)


def _buffer(array: np.ndarray | jax.Array | None) -> np.ndarray | None:
    if array is None:
        return None
    found = np.asarray(array)
    return found.view(np.uint16) if found.dtype == jnp.bfloat16 else found


# The handle of no table.
NO_CHUNKS = np.zeros(2, np.uint32)


class ChunkTable(OpenTable):
    """Open table of the coded chunks of a context, which native attention finds by a handle. It checks once
    that each blob has the bytes of its width, and references their memory until it closes."""

    def __init__(
        self,
        chunks: Sequence[tuple[int, Sequence[np.ndarray]]],
        *,
        heads: Sequence[int],
        tokens: int,
        width: int,
        half: bool,
        keys_by_token: bool,
        values_by_token: bool,
        rotated: bool,
    ) -> None:
        """Opens a table.

        Args:
          chunks: bits and each layer's blob (`jaxllm.contexts.codecs`), in the order of their tokens. Not
            copied; they must not change.
          heads: number of kv heads in the blobs, per layer.
          tokens: number of tokens of a chunk (C).
          width: width of a head (H).
          half: whether the cache that follows them is of float16, else of float32.
          keys_by_token, values_by_token, rotated: see `jaxllm.contexts.codecs.Codec`.

        Raises:
          ValueError: the size of a blob is not that of its width, or too many tables are open.
        """
        target("attention")
        library, form = native_library(), (tokens, width, half, keys_by_token, values_by_token, rotated)
        bits, blobs = [each for each, _ in chunks], [each for _, each in chunks]
        super().__init__(library.open_chunks(form, heads, bits, blobs), library.close_chunks)
        self.chunks = len(bits)
