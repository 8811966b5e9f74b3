"""Keeps a file open, and detects changes of it in place.

A mapped file is read when its pages are touched. So a change in place changes what is computed, and a
truncation ends the process (SIGBUS) at the next touch. Writers of this project never do either: they write
another file and rename it, and processes that have the old file open continue with it. `require_unchanged`
detects changes by other writers; it takes a few microseconds, and is called before and after every use. It
cannot detect a truncation between the check and the use, nor a change whose writer resets the file's
modification time.
"""

import os
import weakref
from pathlib import Path
from typing import BinaryIO

from jaxllm.errors import BundleError


class OpenedFile:
    """An open file, with its size and modification time when it was opened."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        """Keeps `file` open until this object is collected; the caller may close its own handle."""
        self._path = path
        self._number = os.dup(file.fileno())
        # Not at exit: objects that are finalized there still call `require_unchanged`.
        weakref.finalize(self, os.close, self._number).atexit = False
        self._facts = _facts(os.fstat(self._number))

    def require_unchanged(self) -> None:
        """Raises BundleError if the file's size or modification time has changed."""
        if _facts(os.fstat(self._number)) != self._facts:
            raise BundleError(
                f"{self._path} was changed in place while it was open, so its weights are no longer those of "
                "the model; open it again, and replace such a file by renaming another one over it"
            )


def _facts(facts: os.stat_result) -> tuple[int, int]:
    return facts.st_size, facts.st_mtime_ns
