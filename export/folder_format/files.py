"""Records of the files of a program folder, and checks of values in a manifest, which may come from
anywhere."""

import dataclasses
from pathlib import Path
from typing import Any

import xxhash

from jaxllm.files.input_files import open_regular

# Files of a standalone device folder: the modules of the loop, and its entry point.
LOOP, MAIN = "loop.pyz", "__main__.py"
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
        """The record of a file on disk.

        Raises:
          OSError: the file cannot be read, or is no regular file.
        """
        digest, size = xxhash.xxh3_128(), 0
        with open_regular(path) as file:
            while block := file.read(_READ_BYTES):
                digest.update(block)
                size += len(block)
        return cls(size_bytes=size, xxh3_128=digest.hexdigest())


def require_ints(what: str, values: tuple[Any, ...], low: int, high: int) -> None:
    """Raises ValueError unless all values are whole numbers in [low, high]."""
    for value in values:
        if type(value) is not int or not low <= value <= high:
            raise ValueError(f"{what} has {value!r:.40}, which is no whole number in [{low}, {high}]")


def require_text(what: str, value: Any) -> None:
    """Raises ValueError unless a value is text."""
    if not isinstance(value, str):
        raise ValueError(f"{what} has {value!r:.40}, which is no text")
