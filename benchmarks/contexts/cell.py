"""Describes a case on which systems are compared."""

import dataclasses

from benchmarks.measuring.storage import Device


@dataclasses.dataclass(frozen=True)
class Cell:
    """A trace on a device, on which systems are compared.

    Attributes:
      pattern: of the trace.
      contexts: that are active.
      device: whose storage chunks are on.
      budget_bytes: of all chunks in memory.
      interval_s: mean time from the end of a call to the next one, whose times are in proportion to the
        trace's; 0 for no wait.
    """

    pattern: str
    contexts: int
    device: Device
    budget_bytes: int
    interval_s: float = 0.0

    @property
    def name(self) -> str:
        """As rows have it."""
        size = f"{self.budget_bytes / 1e6:.0f} MB"
        return f"{self.pattern}, {self.contexts} contexts in {size}, {self.device.name}"
