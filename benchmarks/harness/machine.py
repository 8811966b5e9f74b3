"""Reads the machine: other processes' load, memory's bandwidth, energy (RAPL, on Linux), resident memory, and
the storage that is measured.

Linux counts the processor time of all processes together: what others took is that sum less one's own. Other
operating systems do not count it; there nothing is detected and nothing is repeated.

Memory's read bandwidth is the limit of decoding, which reads all weights per token. On a shared machine it
changes from second to second, so it is measured before and after each sample (`peers/process.py`). The native
library's read loop is tried, and numpy's reductions over the same large buffer, which run without Python's
lock, one thread per core; the fastest counts.

An emulated device reads and writes through the page cache and then waits until a device of the published
bandwidth and latency would have been ready. Computing stays this machine's.
"""

import concurrent.futures
import contextlib
import ctypes
import dataclasses
import mmap
import os
import platform
import resource
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

import jax
import numpy as np

from jaxllm.kernels import native
from jaxllm.serving.ground.storage import Storage


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


class MemoryProbe:
    """Reads a buffer by the loops that are fastest on this machine. A context manager."""

    def __init__(self, threads: int, *, buffer_bytes: int = 1 << 29) -> None:
        """Makes the buffer and finds the fastest loops.

        Args:
          threads: that read together; at most the cores that this process may use.
          buffer_bytes: read at a time; less than the caches hold would measure the caches.
        """
        self._buffer = np.zeros(buffer_bytes // 8, np.int64)
        self._buffer += 1  # written, so that it is memory and not the one page of zeros
        self._threads = threads
        cores = sorted(os.sched_getaffinity(0))[:threads] if hasattr(os, "sched_getaffinity") else None

        def pin() -> None:
            if cores is not None:
                os.sched_setaffinity(0, cores)  # of the calling thread

        self._pool = concurrent.futures.ThreadPoolExecutor(threads, initializer=pin)
        # The same loop (a running maximum) over words of other widths: which of them numpy reads with the
        # widest loads, and enough of them in flight, differs between its builds. Sums are slower than memory.
        words = (np.uint8, np.int32, np.float32, np.int64)
        loops: list[Callable[[], float]] = [self._by_words(word) for word in words]
        if native.kernels().native:
            loops.append(self._by_kernel)
        trials = [min(loop() for _ in range(3)) for loop in loops]
        self._loops = [loops[i] for i in np.argsort(trials)[:2]]

    def __enter__(self) -> "MemoryProbe":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._pool.shutdown()

    def bytes_per_s(self) -> float:
        """Bytes that the threads read per second, in the fastest of a few rounds."""
        return self._buffer.nbytes / min(loop() for _ in range(2) for loop in self._loops)

    def _by_words(self, word: type) -> Callable[[], float]:
        parts = np.array_split(self._buffer.view(word), self._threads)

        def read_s() -> float:
            began = time.perf_counter()
            list(self._pool.map(np.max, parts))
            return time.perf_counter() - began

        return read_s

    def _by_kernel(self) -> float:
        # Set each time: threads belong to the process.
        native.set_threads(self._threads)
        began = time.perf_counter()
        native.read_all(self._buffer)
        return time.perf_counter() - began


class EnergyMeter:
    """The energy of all processor packages together. They share it with whatever else runs.

    Args:
      packages: a folder for each, with its counter.

    Raises:
      OSError, ValueError: a counter cannot be read.
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
      name: as rows have it.
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

    def address(array: jax.Array | np.ndarray) -> int:
        if isinstance(array, jax.Array):
            return array.addressable_data(0).unsafe_buffer_pointer()
        return array.ctypes.data

    return sum(_resident(address(each), each.nbytes) for each in arrays)


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
