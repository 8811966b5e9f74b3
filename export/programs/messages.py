"""Captures LiteRT's messages, which it writes to the process's standard error."""

import contextlib
import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator

_MESSAGE_BYTES = 300
# Lines of the runtime: they name a file and line of its source, or are one of these.
_OURS = re.compile(
    rb"\b\w+\.(?:cc|h):\d+\]|^INFO: Created TensorFlow Lite|^WARNING: All log messages before|^\xe2\x94\x94"
)
# The process has one standard error: a thread that redirects it must restore it before another one does. A
# thread may redirect it twice, because models are closed whenever Python collects them.
_taking = threading.RLock()


@contextlib.contextmanager
def runtime_messages_kept() -> Iterator[Callable[[], str]]:
    """Captures the runtime's messages during the block; yields a function that returns the last of them.

    Redirects the whole process's standard error. Messages of others are written when the block ends.
    """
    with _taking, tempfile.TemporaryFile() as kept:
        sys.stderr.flush()
        before = os.dup(2)
        os.dup2(kept.fileno(), 2)

        def lines() -> list[bytes]:
            # By `pread`, because the file's offset is shared with the writers.
            return os.pread(kept.fileno(), os.fstat(kept.fileno()).st_size, 0).splitlines(keepends=True)

        def messages() -> str:
            own = b"".join(each for each in lines() if _OURS.search(each))
            return own[-_MESSAGE_BYTES:].decode(errors="replace")

        try:
            yield messages
        finally:
            sys.stderr.flush()
            os.dup2(before, 2)
            os.close(before)
            others = b"".join(each for each in lines() if not _OURS.search(each))
            if others:
                os.write(2, others)
