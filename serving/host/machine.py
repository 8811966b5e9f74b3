"""Queries the machine and the process: devices, cores, instruction sets, open files, forks."""

import contextlib
import functools
import os
import platform
import re
import time
from pathlib import Path
from typing import Any

from jaxllm.errors import ConfigError

_CPUINFO, _PROCESS_FACTS = Path("/proc/cpuinfo"), Path("/proc/self/stat")
# Enough for the first processor's entry; the whole file of a large server takes long to generate.
_CPUINFO_BYTES = 8192
_CPUINFO_KEYS = {
    "vendor_id", "cpu family", "model", "model name", "stepping", "flags",
    "CPU implementer", "CPU architecture", "CPU variant", "CPU part", "Features",
}  # fmt: skip
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


try:
    import resource
except ImportError:  # Systems without limits of this kind.
    resource = None
