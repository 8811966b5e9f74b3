"""Measures the resident memory of this process by kind of page, and gives back pages of libraries.

    process_memory().kinds             pages by kind, which together are all resident pages
    give_back_libraries()              after a start: pages of libraries that only the start has used

On Linux; elsewhere nothing is given back, and measuring raises ConfigError.
"""

import contextlib
import ctypes
import dataclasses
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from jaxllm.errors import ConfigError
from jaxllm.serving.host.allocator import LARGE_BYTES, read_facts, unknown_memory

# glibc aligns all arenas but the first to their largest size.
_ARENA_BYTES = 64 << 20
_MADV_DONTNEED = 4
_SMAPS, _STATUS = Path("/proc/self/smaps"), Path("/proc/self/status")
_PAGEMAP = Path("/proc/self/pagemap")
_PRESENT = 1 << 63
_KILOBYTE = 1024
# A mapping: addresses, rights, inode, the path of its file, and its resident and anonymous pages.
_MAPPING = re.compile(
    r"^([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ (\d+) *(.*)\n(?:(?![0-9a-f]+-).*\n)*?Rss: +(\d+) kB\n"
    r"(?:(?![0-9a-f]+-).*\n)*?Anonymous: +(\d+) kB$",
    re.MULTILINE,
)
_LIBRARY = re.compile(r"\.so(\.[\d.]+)?$")
_PEAK = re.compile(r"^VmHWM:\s+(\d+) kB$", re.MULTILINE)
_PSS = re.compile(r"^Pss:\s+(\d+) kB$", re.MULTILINE)
# Kinds of pages without a file, or that differ from it.
HEAP, STACKS, CODE, RELOCATED, BLOCKS = "heap", "stacks", "machine_code", "relocated", "blocks"


@dataclasses.dataclass(frozen=True)
class ProcessMemory:
    """Resident memory of this process, in bytes.

    Attributes:
      kinds: kind -> pages without a file, and changed pages of private mappings: `heap` (the C library's
        arenas), `stacks`, `machine_code` (compiled buckets), `relocated` (changed pages of files), and
        `blocks` (all else: Python's arenas, and large blocks such as caches).
      files: path -> unchanged pages of that mapped file, shared by all processes.
      peak: peak resident memory; 0 if the system does not report it.
    """

    kinds: Mapping[str, int]
    files: Mapping[str, int]
    peak: int

    @property
    def anonymous(self) -> int:
        """All pages of `kinds`."""
        return sum(self.kinds.values())

    @property
    def resident(self) -> int:
        """All resident pages."""
        return self.anonymous + sum(self.files.values())


@dataclasses.dataclass(frozen=True)
class _Mapping:
    start: int
    end: int
    rights: str
    path: str
    resident: int
    anonymous: int


def process_memory() -> ProcessMemory:
    """The memory of this process now; takes some tens of milliseconds.

    Raises:
      ConfigError: the system has no /proc/self/smaps.
    """
    return parsed_memory(read_facts(_SMAPS), read_facts(_STATUS))


def parsed_memory(smaps: str, status: str) -> ProcessMemory:
    """Parses the texts of /proc/self/smaps and /proc/self/status."""
    kinds: dict[str, int] = dict.fromkeys((HEAP, STACKS, CODE, RELOCATED, BLOCKS), 0)
    files: dict[str, int] = {}
    before = None
    for each in _mappings(smaps):
        kinds[_kind(each, before)] += each.anonymous
        if each.resident > each.anonymous:
            files[each.path] = files.get(each.path, 0) + each.resident - each.anonymous
        before = each
    peak = _PEAK.search(status)
    return ProcessMemory(kinds, files, 0 if peak is None else _KILOBYTE * int(peak[1]))


def resident_of(address: int, size: int) -> int:
    """The resident bytes of a block of this process: of a large one only pages that were written are.

    Args:
      address: of its first byte.
      size: in bytes.

    Raises:
      ConfigError: the system has no /proc/self/pagemap.
    """
    # Imported here: the command line imports this module.
    import numpy as np

    page = os.sysconf("SC_PAGE_SIZE")
    first, last = address // page, -(-(address + size) // page)
    try:
        with _PAGEMAP.open("rb", buffering=0) as file:
            file.seek(8 * first)
            entries = np.frombuffer(file.read(8 * (last - first)), np.uint64)
    except OSError as error:
        raise unknown_memory(_PAGEMAP, error) from error
    return min(size, page * int(np.count_nonzero(entries >= _PRESENT)))


def proportional_bytes(pid: int | str = "self") -> int:
    """The proportional share of memory (PSS) of a process.

    Raises:
      OSError: the system has no /proc, or the process ended.
    """
    found = _PSS.search(Path(f"/proc/{pid}/smaps_rollup").read_text())
    return 0 if found is None else _KILOBYTE * int(found[1])


def children_bytes() -> int:
    """The proportional share of memory (PSS) of all child processes and theirs.

    Raises:
      ConfigError: the system has no /proc.
    """
    total, todo = 0, [os.getpid()]
    while todo:
        folder = Path(f"/proc/{todo.pop()}")
        # A child may end at any time.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            if folder.name != str(os.getpid()):
                total += proportional_bytes(folder.name)
            for task in (folder / "task").iterdir():
                todo += map(int, (task / "children").read_text().split())
    return total


def give_back_libraries() -> int:
    """Gives back the unchanged pages of libraries, most of which only a start touches: a page that is used
    again comes back from the page cache by a minor fault. Does nothing where there is no /proc.

    Nothing else can be at their addresses meanwhile: Python unloads no extension module, nor what it links
    to. Pages that relocation changed are not in a file, and stay.

    Returns:
      Bytes that were given back.
    """
    given = 0
    with contextlib.suppress(ConfigError, OSError, AttributeError):
        advise = ctypes.CDLL(None, use_errno=True).madvise
        advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        for each in _mappings(read_facts(_SMAPS)):
            unchanged = "w" not in each.rights and not each.anonymous and each.resident
            if unchanged and _LIBRARY.search(each.path):
                done = advise(each.start, each.end - each.start, _MADV_DONTNEED) == 0
                given += each.resident if done else 0
    return given


def _mappings(smaps: str) -> Iterator[_Mapping]:
    for start, end, rights, inode, path, resident, anonymous in _MAPPING.findall(smaps):
        # Without an inode the text is a name such as "[heap]".
        yield _Mapping(
            int(start, 16), int(end, 16), rights, path if int(inode) or path[:1] == "[" else "",
            _KILOBYTE * int(resident), _KILOBYTE * int(anonymous),
        )  # fmt: skip


def _kind(each: _Mapping, before: _Mapping | None) -> str:
    """The kind of a mapping's pages that differ from its file, by the mapping below it."""
    if each.path == "[heap]":
        return HEAP
    if each.path.startswith("[stack"):
        return STACKS
    if each.path and each.path[0] != "[":
        return RELOCATED
    if "x" in each.rights:
        return CODE
    if each.start % _ARENA_BYTES == 0 and each.end - each.start <= _ARENA_BYTES:
        return HEAP
    # The guard page of a thread's stack.
    if before is None or before.end != each.start or not before.rights.startswith("---"):
        return BLOCKS
    return STACKS if before.end - before.start <= LARGE_BYTES else BLOCKS
