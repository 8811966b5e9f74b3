"""Reads the share of time that tasks wait for memory: Linux's pressure stall information."""

import re
from pathlib import Path

_FILE = Path("/proc/pressure/memory")
_SOME = re.compile(r"some avg10=(\d+(?:\.\d+)?) ")
_PERCENT = 100


def memory_pressure() -> float | None:
    """The share of the last ten seconds in which some task waited for memory; None if the system does not
    report it."""
    try:
        return parsed(_FILE.read_text())
    except OSError:
        # Another system, or a kernel without it (`psi=1` on its command line).
        return None


def parsed(text: str) -> float | None:
    """Parses the share in the text of /proc/pressure/memory; None if it has none."""
    found = _SOME.match(text)
    return None if found is None else float(found[1]) / _PERCENT
