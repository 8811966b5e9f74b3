"""Measures the peak of this process's resident memory."""

import platform
import resource
from pathlib import Path


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
