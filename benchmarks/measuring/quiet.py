"""Detects other processes that computed during a measurement, and waits until they rest.

Linux counts the processor time of all processes together: what others took is that sum less one's own. Other
operating systems do not count it; there nothing is detected and nothing is repeated.
"""

import os
import time
from pathlib import Path

# Other processes may take this share of one core, besides what the kernel's ticks of 10 ms round to.
_SHARE = 0.08
_ROUNDING_S = 0.03
_LOOK_S = 0.02


class Disturbance:
    """Counts the processor time of other processes, from its creation to `ended`."""

    def __init__(self) -> None:
        self._wall = time.perf_counter()
        self._own = time.process_time()
        self._all = _busy_s()

    def ended(self, *, own_s: float) -> bool | None:
        """Whether other processes took noticeable time; None where that is not known.

        Args:
          own_s: processor time of the system under test.
        """
        busy = _busy_s()
        if busy is None or self._all is None:
            return None
        own_s += time.process_time() - self._own
        wall = time.perf_counter() - self._wall
        return busy - self._all - own_s > _SHARE * wall + _ROUNDING_S


def wait_for_quiet(limit_s: float = 2.0) -> None:
    """Returns when other processes have been idle for a moment, or after `limit_s`."""
    until = time.perf_counter() + limit_s
    while time.perf_counter() < until:
        disturbance = Disturbance()
        time.sleep(0.2)
        if not disturbance.ended(own_s=0.0):
            return


def wait_until_asleep(pid: int, limit_s: float = 1.0) -> None:
    """Returns when a process no longer takes processor time, or after `limit_s`."""
    until = time.perf_counter() + limit_s
    before = _process_s(pid)
    if before is None:
        time.sleep(min(limit_s, 0.25))  # about as long as OpenMP's workers spin
        return
    while time.perf_counter() < until:
        time.sleep(_LOOK_S)
        now = _process_s(pid)
        if now is None or now == before:
            return
        before = now


def _busy_s() -> float | None:
    """Processor time of all processes, and of the host of a virtual machine, since boot; None if unknown."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        user, nice, system, _, _, irq, softirq, steal = map(int, fields)
        return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return None


def _process_s(pid: int) -> float | None:
    """Processor time of a process; None where the system does not count it."""
    try:
        # Ticks of 10 ms, over all threads: a single spinning one shows between two looks.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None
