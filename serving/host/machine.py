"""Queries the machine and the process: cores, instruction sets, memory, and the process's age."""

import contextlib
import ctypes
import os
import platform
import time
from pathlib import Path

_CPUINFO, _PROCESS_FACTS = Path("/proc/cpuinfo"), Path("/proc/self/stat")
# Enough for the first processor's entry; the whole file of a large server takes long to generate.
_CPUINFO_BYTES = 8192
# A constant of glibc's malloc.h, and a number of arenas with which two threads still allocate concurrently.
_M_ARENA_MAX, _ARENAS = -8, 2
# Of glibc's malloc.h, and the size from which freed blocks go back to the system at once.
_M_MMAP_THRESHOLD, _LARGE_BYTES = -3, 2 << 20
_CPUINFO_KEYS = {
    "vendor_id", "cpu family", "model", "model name", "stepping", "flags",
    "CPU implementer", "CPU architecture", "CPU variant", "CPU part", "Features",
}  # fmt: skip


def usable_cores() -> int:
    """Number of cores that this process may use: in a container or under taskset fewer than the machine
    has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_features() -> list[str]:
    """The facts of this CPU that matter to compilers, as text: model and instruction sets.

    If the system does not report them, the machine's name instead.
    """
    system = platform.uname()
    try:
        with _CPUINFO.open("rb") as file:
            text = file.read(_CPUINFO_BYTES).decode("utf-8", "replace")
    except OSError:
        return [system.machine, system.node]
    first = text.split("\n\n")[0].splitlines()
    known = [line for line in first if line.partition(":")[0].strip() in _CPUINFO_KEYS]
    return [system.machine, *known] if known else [system.machine, system.node]


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
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def give_back_memory() -> None:
    """Makes the C library return freed memory to the system, if supported: compilers free much."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def memory_bytes() -> int | None:
    """Memory of this machine in bytes; None if the system does not report it."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def process_age_ms() -> float | None:
    """Time since this process began, to about 10 ms; None if the system does not report it."""
    try:
        # The second field is the command in parentheses, which may itself contain spaces and parentheses.
        fields = _PROCESS_FACTS.read_text().rpartition(")")[2].split()
        ticks_per_s = os.sysconf("SC_CLK_TCK")
        began_s = int(fields[19]) / ticks_per_s
        return 1000 * (time.clock_gettime(time.CLOCK_BOOTTIME) - began_s)
    except (OSError, AttributeError, IndexError, ValueError):
        return None
