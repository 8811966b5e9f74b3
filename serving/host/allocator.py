"""Sets up the C library's allocator, and follows by how much the memory of this process grows.

    STAGES.end("jax")                  after each stage of a start: by how much memory has grown
    give_back_memory()                 after much was freed

Imported by every command: what reads more of /proc is `process_memory`.
"""

import contextlib
import ctypes
import os
import threading
from pathlib import Path

from jaxllm.errors import ConfigError

# Constants of glibc's malloc.h: a number of arenas with which two threads still allocate concurrently, and
# the size from which freed blocks go back to the system at once.
_M_ARENA_MAX, _ARENAS = -8, 2
_M_MMAP_THRESHOLD, LARGE_BYTES = -3, 2 << 20
_STATM = Path("/proc/self/statm")


class Stages:
    """By how much the memory of this process without files has grown in the stages of a start. Thread-safe.

    Attributes:
      grown: stage -> bytes.
    """

    def __init__(self) -> None:
        self.grown: dict[str, int] = {}
        self._before, self._lock = 0, threading.Lock()

    def end(self, stage: str) -> None:
        """Ends a stage: what has grown since the end of the one before is its own. Costs microseconds."""
        with self._lock, contextlib.suppress(ConfigError):
            now = anonymous_bytes()
            self.grown[stage] = self.grown.get(stage, 0) + now - self._before
            self._before = now


def resident_bytes() -> int:
    """All resident pages of this process, in microseconds where `process_memory` needs milliseconds.

    Raises:
      ConfigError: the system has no /proc/self/statm.
    """
    return int(read_facts(_STATM).split()[1]) * os.sysconf("SC_PAGE_SIZE")


def anonymous_bytes() -> int:
    """Its resident pages without a file, as fast.

    Raises:
      ConfigError: see `resident_bytes`.
    """
    resident, shared = map(int, read_facts(_STATM).split()[1:3])
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def share_arenas() -> None:
    """Limits the C library to few arenas, if supported (glibc); existing ones stay.

    Otherwise each thread that loads or compiles a bucket has its own arena, whose gaps no other fills.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, _ARENAS)


def give_back_large_blocks() -> None:
    """Makes the C library return large blocks to the system whenever they are freed, if supported (glibc).

    By default it retains them after the first, which avoids page faults: some 0.2 ms per MB.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)


def give_back_memory() -> None:
    """Makes the C library return freed memory to the system, if supported: compilers free much."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def read_facts(path: Path) -> str:
    """The text of a file in /proc; raises ConfigError where there is none."""
    try:
        return path.read_text()
    except OSError as error:
        raise unknown_memory(path, error) from error


def unknown_memory(path: Path, error: OSError) -> ConfigError:
    """The error of a system without such a file."""
    return ConfigError(
        f"{path}: cannot be read ({error.strerror}); the memory of a process is known on Linux alone, with "
        "/proc mounted"
    )


STAGES = Stages()
