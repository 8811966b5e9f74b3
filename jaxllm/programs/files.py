"""Files of a folder of programs, which may come from anywhere: opened as files alone, sized, checksummed."""

import contextlib
import dataclasses
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from jaxllm.errors import ProgramError

_READ_BYTES = 1 << 24
_MAX_FILE_BYTES = 1 << 50


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredFile:
    """Size and checksum of a file of the folder."""

    size_bytes: int
    xxh3_128: str

    def __post_init__(self) -> None:
        require_ints("a file", (self.size_bytes,), 0, _MAX_FILE_BYTES)
        require_text("a checksum", self.xxh3_128)

    @classmethod
    def of(cls, path: Path) -> "StoredFile":
        """As the file is."""
        digest, size = xxhash.xxh3_128(), 0
        with opened(path) as file:
            while block := file.read(_READ_BYTES):
                digest.update(block)
                size += len(block)
        return cls(size_bytes=size, xxh3_128=digest.hexdigest())


@contextlib.contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """A file to be read. Nothing else of its name is waited for: a pipe, a device.

    Raises:
      ProgramError: it is no file.
      OSError: it cannot be opened.
    """
    number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    with open(number, "rb") as file:
        if not stat.S_ISREG(os.fstat(number).st_mode):
            raise ProgramError(f"{path} is no file; export the model again")
        yield file


def require_ints(what: str, values: tuple[Any, ...], low: int, high: int) -> None:
    """Raises ValueError unless all values are whole numbers in [low, high]."""
    for value in values:
        if type(value) is not int or not low <= value <= high:
            raise ValueError(f"{what} has {value!r:.40}, which is no whole number in [{low}, {high}]")


def require_text(what: str, value: Any) -> None:
    """Raises ValueError unless a value is text."""
    if not isinstance(value, str):
        raise ValueError(f"{what} has {value!r:.40}, which is no text")
