"""Counts how long flushes to storage take, so that times can be given with and without them."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager


class FlushClock:
    """The time that `os.fsync` took, in all threads.

    Attributes:
      ms: since it was made, or reset.
    """

    def __init__(self) -> None:
        self.ms = 0.0

    def reset(self) -> float:
        """The time so far, which begins anew."""
        taken, self.ms = self.ms, 0.0
        return taken

    @contextmanager
    def running(self) -> Iterator["FlushClock"]:
        """Counts until the end of the block. Nothing else in the process may replace `os.fsync` meanwhile."""
        flush = os.fsync

        def timed(file: int) -> None:
            began = time.perf_counter()
            try:
                flush(file)
            finally:
                self.ms += 1000 * (time.perf_counter() - began)

        os.fsync = timed  # pyright: ignore[reportAttributeAccessIssue]: files of other kinds are not flushed here
        try:
            yield self
        finally:
            os.fsync = flush
