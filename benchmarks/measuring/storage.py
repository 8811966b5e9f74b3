"""Describes the storage that weights and contexts lie on: this machine's, or another one, emulated.

An emulated device reads and writes through the page cache and then waits until a device of the published
bandwidth and latency would have been ready. Computing stays this machine's.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from serving.host.direct_io import Storage


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
PHONES = ("real", "emmc", "eufs")
BOARDS = ("real", "tx2-ssd", "hdd", "sd")


def named_devices(names: Iterable[str]) -> tuple[Device, ...]:
    """The devices of these names in `DEVICES`."""
    return tuple(DEVICES[name] for name in names)
