"""Reads the machine: other processes' load, energy (RAPL, on Linux), resident memory, and the storage that is
measured.

Linux counts the processor time of all processes together: what others took is that sum less one's own. Other
operating systems do not count it; there nothing is detected and nothing is repeated.

An emulated device reads and writes through the page cache and then waits until a device of the published
bandwidth and latency would have been ready. Computing stays this machine's.
"""

import contextlib
import ctypes
import dataclasses
import mmap
import os
import platform
import resource
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

import jax
import numpy as np

from jaxllm.serving.host.storage import Storage


class Disturbance:
    """Counts the processor time of other processes, from its creation to `ended`."""

    def __init__(self) -> None:
        self._wall = time.perf_counter()
        self._own = time.process_time()
        self._all = _busy_s()

    def ended(self, *, own_s: float) -> bool | None:
        """Whether other processes took noticeable time; None where that is not known."""
        busy = _busy_s()
        if busy is None or self._all is None:
            return None
        own_s += time.process_time() - self._own
        wall = time.perf_counter() - self._wall
        # They may take this share of one core, besides what the kernel's ticks of 10 ms round to.
        return busy - self._all - own_s > 0.08 * wall + 0.03


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
        time.sleep(0.02)
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


class EnergyMeter:
    """The energy of all processor packages together. They share it with whatever else runs.

    Args:
      packages: a folder for each, with its counter.
    """

    def __init__(self, packages: list[Path]) -> None:
        self._packages = packages
        # Counters begin anew beyond their range.
        self._range = {each: _number(each / "max_energy_range_uj") for each in packages}
        self._last = self._read()

    @classmethod
    def of_machine(cls, folder: Path = Path("/sys/class/powercap")) -> "EnergyMeter | None":
        """The meter of this machine; None where there is none, or only the administrator may read it."""
        # One for each processor package; those of its parts have one colon more.
        found = sorted(each for each in folder.glob("intel-rapl:[0-9]*") if each.name.count(":") == 1)
        with contextlib.suppress(OSError, ValueError):
            packages = [each for each in found if (each / "name").read_text().startswith("package")]
            return cls(packages) if packages else None
        return None

    def joules(self) -> float:
        """Taken since it was made, or last asked."""
        before, self._last = self._last, self._read()
        return 1e-6 * sum((now - before[each]) % (self._range[each] + 1) for each, now in self._last.items())

    def _read(self) -> dict[Path, int]:
        return {each: _number(each / "energy_uj") for each in self._packages}


def _number(path: Path) -> int:
    return int(path.read_text(encoding="ascii"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """A storage device.

    Attributes:
      storage: how it is read and written.
      note: its published speeds, where it is emulated.
    """

    name: str
    storage: Storage
    note: str = ""


def emulated(name: str, read_mb_s: float, write_mb_s: float, read_iops: float) -> Device:
    """A device by its published sequential bandwidths and random reads per second."""
    storage = Storage(
        caching="buffered",
        bytes_per_s=1e6 * read_mb_s,
        latency_ms=1000 / read_iops,
        write_bytes_per_s=1e6 * write_mb_s,
    )
    note = f"emulated: reads {read_mb_s:,.0f} MB/s and {read_iops:,.0f} IOPS, writes {write_mb_s:,.0f} MB/s"
    return Device(name=f"emulated {name}", storage=storage, note=note)


REAL = Device(name="real storage", storage=Storage())
# By the names of the command line.
DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        "real": REAL,
        # Samsung's own table of its embedded storage (press release of the 512 GB eUFS 3.1, 17 March 2020).
        "emmc": emulated("eMMC 5.1", 250, 125, 11_000),
        "eufs": emulated("eUFS 3.1", 2100, 1200, 100_000),
        # EdgeMoE's platforms (section 5.1), and a memory card's published speeds (UHS-I, class A1).
        "tx2-ssd": emulated("Jetson TX2 SSD", 550, 500, 90_000),
        "hdd": emulated("HDD", 50, 50, 150),
        "sd": emulated("SD card", 90, 30, 1_500),
    }
)


def named_devices(names: Iterable[str]) -> tuple[Device, ...]:
    """The devices of these names in `DEVICES`."""
    return tuple(DEVICES[name] for name in names)


def memory_of(pid: int | str, name: str, file: str = "status") -> int | None:
    """The bytes that Linux counts of a process under a name; None where the system does not report it."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/{file}").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return None


def peak_resident_bytes() -> int:
    """Peak of resident memory since the process began or since `reset_peak_memory`."""
    # Elsewhere kibibytes, but bytes on macOS.
    unit = 1 if platform.system() == "Darwin" else 1024
    return memory_of("self", "VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


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
    """

    libc, total = ctypes.CDLL(None, use_errno=True), 0
    for array in arrays:
        if isinstance(array, jax.Array):
            address = array.addressable_data(0).unsafe_buffer_pointer()
        else:
            address = array.ctypes.data
        begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        pages = max(0, (address + array.nbytes - begin) // mmap.PAGESIZE)
        there, whole = (ctypes.c_ubyte * pages)(), pages * mmap.PAGESIZE
        if pages and libc.mincore(ctypes.c_void_p(begin), ctypes.c_size_t(whole), there):
            number = ctypes.get_errno()
            raise OSError(number, f"mincore: {os.strerror(number)}")
        # Less than a page counts as it is.
        total += array.nbytes - whole + mmap.PAGESIZE * sum(each & 1 for each in bytes(there))
    return total
