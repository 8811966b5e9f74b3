"""Reads how much energy the processors have taken, where this machine has a meter of it (RAPL, on Linux)."""

import contextlib
from pathlib import Path

_POWERCAP = Path("/sys/class/powercap")
# One for each processor package; those of its parts have one colon more.
_PACKAGES = "intel-rapl:[0-9]*"
_J = 1e-6


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
    def of_machine(cls, folder: Path = _POWERCAP) -> "EnergyMeter | None":
        """The meter of this machine; None where there is none, or only the administrator may read it."""
        packages = sorted(each for each in folder.glob(_PACKAGES) if each.name.count(":") == 1)
        with contextlib.suppress(OSError, ValueError):
            packages = [each for each in packages if _text(each / "name").startswith("package")]
            return cls(packages) if packages else None
        return None

    def joules(self) -> float:
        """Taken since it was made, or last asked."""
        before, self._last = self._last, self._read()
        return _J * sum((now - before[each]) % (self._range[each] + 1) for each, now in self._last.items())

    def _read(self) -> dict[Path, int]:
        return {each: _number(each / "energy_uj") for each in self._packages}


def _number(path: Path) -> int:
    return int(_text(path))


def _text(path: Path) -> str:
    return path.read_text(encoding="ascii").strip()
