"""Keeps LiteRT's messages off standard error, where it tells all that it does."""

import contextlib
import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator

_SAID_BYTES = 300
# Its own lines name the file and line of its source, or are one of these.
_OURS = re.compile(
    rb"\b\w+\.(?:cc|h):\d+\]|^INFO: Created TensorFlow Lite|^WARNING: All log messages before|^\xe2\x94\x94"
)
# The process has one standard error: who takes it away must give it back before another thread does. A thread
# may take it twice, for models are closed whenever Python collects them.
_taking = threading.RLock()


@contextlib.contextmanager
def runtime_messages_kept() -> Iterator[Callable[[], str]]:
    """Keeps what the runtime says while the block lasts; `said` gives the last lines of it.

    The whole process's standard error is taken for so long. What others have said on it meanwhile is said
    when the block ends.
    """
    with _taking, tempfile.TemporaryFile() as kept:
        sys.stderr.flush()
        before = os.dup(2)
        os.dup2(kept.fileno(), 2)

        def lines() -> list[bytes]:
            # By number, for the offset of the file is shared with who writes.
            return os.pread(kept.fileno(), os.fstat(kept.fileno()).st_size, 0).splitlines(keepends=True)

        def said() -> str:
            own = b"".join(each for each in lines() if _OURS.search(each))
            return own[-_SAID_BYTES:].decode(errors="replace")

        try:
            yield said
        finally:
            sys.stderr.flush()
            os.dup2(before, 2)
            os.close(before)
            others = b"".join(each for each in lines() if not _OURS.search(each))
            if others:
                os.write(2, others)
