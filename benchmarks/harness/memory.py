"""Measures this process's resident memory: its peak, and the pages that arrays have taken."""

import ctypes
import mmap
import os
import platform
import resource
from collections.abc import Iterable
from pathlib import Path

import jax
import numpy as np


def peak_resident_bytes() -> int:
    """Peak of resident memory since the process began or since `reset_peak_memory`."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    # Kibibytes, but bytes on macOS.
    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_peak_memory() -> bool:
    """Resets the peak of resident memory to what is resident; False where the system cannot (not Linux)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def array_bytes(arrays: Iterable[jax.Array | np.ndarray]) -> int:
    """Memory that arrays of this process have taken so far: whole pages, which one that is filled from its
    beginning on takes as it fills.

    Args:
      arrays: no views; those of JAX on one device that is a CPU.

    Raises:
      OSError: the system does not tell.
    """
    return sum(_resident(*_place(each)) for each in arrays)


def _place(array: jax.Array | np.ndarray) -> tuple[int, int]:
    """Address and bytes."""
    if isinstance(array, jax.Array):
        return array.addressable_data(0).unsafe_buffer_pointer(), array.nbytes
    return array.ctypes.data, array.nbytes


def _resident(address: int, size: int) -> int:
    """Bytes of a stretch of memory in pages that are there; less than a page counts as it is."""
    begin, end = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, address + size
    pages = (end - begin) // mmap.PAGESIZE
    if pages <= 0:
        return size
    there = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mincore(ctypes.c_void_p(begin), ctypes.c_size_t(pages * mmap.PAGESIZE), there):
        number = ctypes.get_errno()
        raise OSError(number, f"mincore: {os.strerror(number)}")
    whole = pages * mmap.PAGESIZE
    return size - whole + mmap.PAGESIZE * sum(each & 1 for each in bytes(there))
