"""Measures what a reader of a file takes, for files of hostile lengths."""

import contextlib
import dataclasses
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.harness.machine import peak_resident_bytes, reset_peak_memory
from jaxllm.errors import JaxllmError

# Beside the file's own size, for objects that any file costs, and for the allocators of libraries.
_ALLOWANCE_BYTES, _RESIDENT_ALLOWANCE_BYTES = 64 << 10, 16 << 20


@dataclasses.dataclass
class Most:
    """The most that a file took beyond what any file costs, as a share of its size."""

    share: float = 0.0


@contextlib.contextmanager
def traced() -> Iterator[None]:
    """Follows allocations of Python and NumPy while it is open."""
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


@contextlib.contextmanager
def bounded(file_bytes: int, label: str, most: Most) -> Iterator[None]:
    """Fails where more than four times the size of a file is allocated at once in `traced`: by Python and
    NumPy to the byte, and by all libraries, or in mapped pages, as resident memory."""
    known = reset_peak_memory()
    resident = peak_resident_bytes()
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    yield
    peak = tracemalloc.get_traced_memory()[1] - before
    most.share = max(most.share, (peak - _ALLOWANCE_BYTES) / max(1, file_bytes))
    assert peak < 4 * file_bytes + _ALLOWANCE_BYTES, f"{label}: {peak} bytes of a file of {file_bytes}"
    if known:
        grown = peak_resident_bytes() - resident
        most_resident = 4 * file_bytes + _RESIDENT_ALLOWANCE_BYTES
        assert grown < most_resident, f"{label}: {grown} bytes resident of a file of {file_bytes}"


def is_refused(read: Callable[[], object], file_bytes: int, label: str, most: Most) -> bool:
    """Whether a file is refused; fails where that takes more than a line, five seconds or memory."""
    start, message = time.perf_counter(), None
    with bounded(file_bytes, label, most):
        try:
            read()
        except JaxllmError as error:
            message = str(error)
        except Exception as error:
            raise AssertionError(f"{label}: {type(error).__name__}: {error}") from error
    assert "\n" not in (message or ""), f"{label}: {message}"
    assert time.perf_counter() - start < 5, label
    return message is not None


def mapped_bytes(path: Path) -> int | None:
    """Resident memory of a file's mappings in this process; None where the system does not tell."""
    maps = Path("/proc/self/smaps")
    if not maps.exists():
        return None
    found, own, name = 0, False, str(path.resolve())
    # Line by line: a process of many mappings has a hundred MB of them.
    with maps.open(encoding="utf-8") as lines:
        for line in lines:
            if line.split(" ", 1)[0].count("-") == 1 and ":" not in line.split(" ", 1)[0]:
                own = line.rstrip().endswith(name)
            elif own and line.startswith("Rss:"):
                found += int(line.split()[1]) * 1024
    return found
