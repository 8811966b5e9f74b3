"""Reads this process's memory use from the system: anonymous pages, and pages of mapped files."""

import dataclasses
import os
import re
from collections.abc import Mapping
from pathlib import Path

from jaxllm.errors import ConfigError

_SMAPS, _STATUS = Path("/proc/self/smaps"), Path("/proc/self/status")
_STATM = Path("/proc/self/statm")
# The first line of a mapping: addresses, rights, offset, device, inode, and the path of its file.
_MAPPING = re.compile(r"[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \d+\s*(.*)")
_KILOBYTE = 1024


@dataclasses.dataclass(frozen=True)
class ProcessMemory:
    """Resident memory of this process, in bytes.

    Attributes:
      anonymous: pages without a file, and changed pages of private mappings.
      files: path -> unchanged pages of that mapped file, shared by all processes.
      peak: peak resident memory; 0 if the system does not report it.
    """

    anonymous: int
    files: Mapping[str, int]
    peak: int

    @property
    def resident(self) -> int:
        """All resident pages."""
        return self.anonymous + sum(self.files.values())


def process_memory() -> ProcessMemory:
    """The memory of this process now.

    Raises:
      ConfigError: the system has no /proc/self/smaps.
    """
    try:
        return parsed(_SMAPS.read_text(), _STATUS.read_text())
    except OSError as error:
        raise ConfigError(
            f"{error.filename}: cannot be read ({error.strerror}); what holds memory is known on Linux "
            "alone, with /proc mounted"
        ) from error


def resident_bytes() -> int:
    """All resident pages of this process, in microseconds where `process_memory` needs milliseconds.

    Raises:
      ConfigError: the system has no /proc/self/statm.
    """
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError as error:
        raise ConfigError(
            f"{_STATM}: cannot be read ({error.strerror}); the memory of the process is known on Linux "
            "alone, with /proc mounted"
        ) from error


def parsed(smaps: str, status: str) -> ProcessMemory:
    """Parses the texts of /proc/self/smaps and /proc/self/status."""
    anonymous, files, path = 0, {}, ""
    for line in smaps.splitlines():
        mapping = _MAPPING.fullmatch(line)
        if mapping is not None:
            path = mapping[1]
            continue
        name, _, value = line.partition(":")
        if name == "Rss":
            files[path] = files.get(path, 0) + _bytes(value)
        elif name == "Anonymous":
            anonymous += _bytes(value)
            files[path] -= _bytes(value)
    peaks = [_bytes(line.partition(":")[2]) for line in status.splitlines() if line.startswith("VmHWM:")]
    return ProcessMemory(anonymous, {each: size for each, size in files.items() if size}, sum(peaks))


def _bytes(value: str) -> int:
    """Bytes of a value such as "12 kB"."""
    return int(value.split()[0]) * _KILOBYTE
