"""Options of file reads, with emulated bandwidth."""

import dataclasses
import math
import threading
import time
from typing import Literal

from jaxllm.options import check_options, option

Caching = Literal["direct", "buffered"]


class _Turn:
    """Serializes the reads and writes of an emulated device, and delays each until it would have ended."""

    def __init__(self) -> None:
        self._lock, self._ready_at = threading.Lock(), 0.0

    def __reduce__(self) -> tuple[type, tuple[()]]:
        # Not shared with other processes.
        return _Turn, ()

    def take(self, began: float, takes_s: float, latency_s: float = 0.0) -> None:
        """Returns when the device has finished an operation requested at `began`. Latency overlaps with
        waiting for earlier ones."""
        with self._lock:
            self._ready_at = until = max(self._ready_at, began + latency_s) + takes_s
        time.sleep(max(0.0, until - time.perf_counter()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Storage:
    """Options of file reads.

    Attributes:
      caching: "direct" bypasses the page cache if supported; "buffered" uses it.
      bytes_per_s: emulated read bandwidth: reads take at least as long; 0 for none.
      latency_ms: emulated additional latency of each read.
      write_bytes_per_s: emulated write bandwidth; 0 for none.
    """

    caching: Caching = "direct"
    bytes_per_s: float = option(0.0, low=0, below=math.inf)
    latency_ms: float = option(0.0, low=0, below=math.inf)
    write_bytes_per_s: float = option(0.0, low=0, below=math.inf)

    def __post_init__(self) -> None:
        check_options(self)
        # Not a field: it is the device's state, which equality and `replace` must ignore.
        object.__setattr__(self, "_turn", _Turn())

    @property
    def emulated(self) -> bool:
        """Whether reads are slowed down."""
        return bool(self.bytes_per_s or self.latency_ms)

    @property
    def _device(self) -> _Turn:
        return self.__dict__["_turn"]

    def await_read(self, began: float, size_bytes: int) -> None:
        """Returns when this device would have read so much, requested at `began` by `time.perf_counter`."""
        if self.emulated:
            takes_s = size_bytes / self.bytes_per_s if self.bytes_per_s else 0.0
            self._device.take(began, takes_s, self.latency_ms / 1000)

    def await_written(self, began: float, size_bytes: int) -> None:
        """Returns when this device would have written so much, requested at `began`."""
        if self.write_bytes_per_s:
            self._device.take(began, size_bytes / self.write_bytes_per_s)
