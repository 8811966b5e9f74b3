"""Queries the machine and the process: devices, cores, instruction sets, memory, open files, forks."""

import contextlib
import ctypes
import dataclasses
import functools
import os
import platform
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxllm.errors import ConfigError

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
_SMAPS, _STATUS = Path("/proc/self/smaps"), Path("/proc/self/status")
_STATM = Path("/proc/self/statm")
# The first line of a mapping: addresses, rights, offset, device, inode, and the path of its file.
_MAPPING = re.compile(r"[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \d+\s*(.*)")
_KILOBYTE = 1024
_PRESSURE = Path("/proc/pressure/memory")
_SOME_WAIT = re.compile(r"some avg10=(\d+(?:\.\d+)?) ")
_PERCENT = 100
# A device of `jax.devices()`. Type checkers do not support `jax.Device`: it comes from an extension module
# without stubs.
Device = Any
# Reserved for files of the store, models and adapters, which must open when all connections are in use.
RESERVED_FILES = 256
_MOST_CONNECTIONS = 4096
_LEAST_CONNECTIONS = 16


@dataclasses.dataclass(frozen=True)
class ProcessMemory:
    """Resident memory of this process, in bytes.

    Attributes:
      anonymous: pages without a file, and changed pages of private mappings.
      files: path -> unchanged pages of that mapped file, shared by all processes.
      peak: peak resident memory; 0 if the system does not report it.
    """

    anonymous: int
    files: Mapping[str, int]
    peak: int

    @property
    def resident(self) -> int:
        """All resident pages."""
        return self.anonymous + sum(self.files.values())


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


def process_memory() -> ProcessMemory:
    """The memory of this process now.

    Raises:
      ConfigError: the system has no /proc/self/smaps.
    """
    return parsed_memory(_read_facts(_SMAPS), _read_facts(_STATUS))


def resident_bytes() -> int:
    """All resident pages of this process, in microseconds where `process_memory` needs milliseconds.

    Raises:
      ConfigError: the system has no /proc/self/statm.
    """
    return int(_read_facts(_STATM).split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _read_facts(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}); the memory of a process is known on Linux alone, "
            "with /proc mounted"
        ) from error


def parsed_memory(smaps: str, status: str) -> ProcessMemory:
    """Parses the texts of /proc/self/smaps and /proc/self/status."""
    anonymous, files, path = 0, {}, ""
    for line in smaps.splitlines():
        mapping = _MAPPING.fullmatch(line)
        if mapping is not None:
            path = mapping[1]
            continue
        name, _, value = line.partition(":")
        if name == "Rss":
            files[path] = files.get(path, 0) + _bytes(value)
        elif name == "Anonymous":
            anonymous += _bytes(value)
            files[path] -= _bytes(value)
    peaks = [_bytes(line.partition(":")[2]) for line in status.splitlines() if line.startswith("VmHWM:")]
    return ProcessMemory(anonymous, {each: size for each, size in files.items() if size}, sum(peaks))


def memory_pressure() -> float | None:
    """The share of the last ten seconds in which some task waited for memory; None if the system does not
    report it."""
    try:
        found = _SOME_WAIT.match(_PRESSURE.read_text())
    except OSError:
        # Another system, or a kernel without it (`psi=1` on its command line).
        return None
    return None if found is None else float(found[1]) / _PERCENT


def raise_open_files() -> None:
    """Raises the limit of open files to the hard limit."""
    if resource is not None:
        with contextlib.suppress(OSError, ValueError):
            _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def most_connections() -> int:
    """Maximum number of concurrent connections of a server that leaves enough files for everything else."""
    if resource is None:
        return _MOST_CONNECTIONS
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return _MOST_CONNECTIONS
    return max(_LEAST_CONNECTIONS, min(_MOST_CONNECTIONS, files - RESERVED_FILES))


# Whether this process was forked from one with an open model. A fork has neither the threads of JAX, of the
# native kernels and of weight readers, nor a release of their locks: its first bucket would wait forever.
_forked = False


@functools.cache
def watch_for_forks() -> None:
    """Marks processes that are forked from this one from now on."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_mark)


def require_not_forked() -> None:
    """Raises ConfigError in a process that was forked from one with an open model."""
    if _forked:
        raise ConfigError(
            "this process was forked from one that had opened a model, whose threads did not come along; "
            "start it by multiprocessing's 'spawn' or 'forkserver', and open the model in it"
        )


def _mark() -> None:
    global _forked
    _forked = True


def _bytes(value: str) -> int:
    # Such as "12 kB".
    return int(value.split()[0]) * _KILOBYTE


try:
    import resource
except ImportError:  # Systems without limits of this kind.
    resource = None
