"""Holds a file open, and says whether it is still what was opened.

A mapped file is read when its pages are touched, so whoever changes it in place changes what is computed, and
whoever truncates it ends the process (SIGBUS) at the next touch. Writers of this project never do: they write
beside and rename, and whoever holds the old file goes on with it. Of other writers `require_unchanged` tells,
for a few microseconds, and is asked before every use and behind it. What it cannot tell is a truncation
between the question and the use, and a change whose writer puts the file's time back.
"""

import os
import weakref
from pathlib import Path
from typing import BinaryIO

from jaxllm.errors import BundleError


class HeldFile:
    """An open file, with its size and time as they were."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        """Holds `file`, which may be closed, until nobody holds this."""
        self._path = path
        self._number = os.dup(file.fileno())
        # Not at exit: whoever is ended there still asks, and the system closes what is left.
        weakref.finalize(self, os.close, self._number).atexit = False
        self._facts = _facts(os.fstat(self._number))

    def require_unchanged(self) -> None:
        """Raises BundleError unless the file is as long as it was, and nobody has written to it."""
        if _facts(os.fstat(self._number)) != self._facts:
            raise BundleError(
                f"{self._path} was changed in place while it was open, so its weights are no longer those of "
                "the model; open it again, and replace such a file by renaming another one over it"
            )

    def is_at(self, number: int) -> bool:
        """Whether another open file is this one, and not one that has taken its name meanwhile."""
        return os.path.sameopenfile(self._number, number)


def _facts(facts: os.stat_result) -> tuple[int, int]:
    return facts.st_size, facts.st_mtime_ns
