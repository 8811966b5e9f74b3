"""Whether a measurement was alone on its cores.

On a shared machine other processes come and go; what was measured beside them says nothing about the system
under test. Linux counts the time of all processes together, so what others took is what is left when one
subtracts one's own. Other systems do not tell: there, nothing is known and nothing is repeated.
"""

import os
import time
from pathlib import Path

# Others may take this share of one core, and what the kernel's ticks of 10 ms round to.
_SHARE = 0.08
_ROUNDING_S = 0.03
_LOOK_S = 0.02


class Disturbance:
    """Counts what other processes take, from its making to `ended`."""

    def __init__(self) -> None:
        self._wall = time.perf_counter()
        self._own = time.process_time()
        self._all = _busy_s()

    def ended(self, *, own_s: float) -> bool | None:
        """Whether others took noticeable time since; `own_s` is what the system under test took itself."""
        busy = _busy_s()
        if busy is None or self._all is None:
            return None
        own_s += time.process_time() - self._own
        wall = time.perf_counter() - self._wall
        return busy - self._all - own_s > _SHARE * wall + _ROUNDING_S


def wait_for_quiet(limit_s: float = 2.0) -> None:
    """Returns when other processes have let the cores alone for a moment, or after `limit_s`."""
    until = time.perf_counter() + limit_s
    while time.perf_counter() < until:
        disturbance = Disturbance()
        time.sleep(0.2)
        if not disturbance.ended(own_s=0.0):
            return


def wait_until_asleep(pid: int, limit_s: float = 1.0) -> None:
    """Returns when a process no longer takes time of any core, or after `limit_s`."""
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
    """Seconds that all processes together, and the host of a virtual machine, have taken since boot."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        user, nice, system, _, _, irq, softirq, steal = map(int, fields)
        return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return None


def _process_s(pid: int) -> float | None:
    """Seconds of all cores that a process has taken; None where nobody tells."""
    try:
        # Ticks of 10 ms, over all threads: a single spinning one shows between two looks.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None
