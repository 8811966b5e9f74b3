"""Reads files in large pieces, bypassing the page cache if the file system supports it.

Data that is read once and stays in memory needs no second copy in the kernel's cache, which takes memory
from other processes. `PieceReader` reads one file.
"""

import collections
import contextlib
import errno
import mmap
import os
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from jaxllm.errors import CheckpointError, Unreadable
from jaxllm.serving.host.storage import Caching, Storage

PAGE = 4096
# Maximum size of scratch memory that is reused.
_REUSED_BYTES = 4 << 20
# Errors of a file that is missing or not a regular file; all others may be temporary.
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR)


class PieceReader:
    """One open file, read by pieces. Thread-safe.

    Attributes:
      size_bytes: size of the file when it was opened.
      caching: caching in use; "buffered" if direct reads were requested but are not supported.
    """

    def __init__(
        self,
        path: Path,
        storage: Storage | None = None,
        *,
        follow_links: bool = True,
        error: type[CheckpointError] | None = None,
    ) -> None:
        """Opens a file.

        Args:
          path: path of the file.
          storage: options of reads.
          follow_links: whether `path` may be a symbolic link.
          error: class of all errors, to distinguish a model's files from others; None for those below.

        Raises:
          CheckpointError: it is missing, or not a regular file.
          Unreadable: storage refuses.
        """
        self._path, self._storage = path, storage or Storage()
        self._broken, self._refused = error or CheckpointError, error or Unreadable
        self._lock = threading.Lock()
        self.caching: Caching = "buffered"
        # Non-blocking, because opening a pipe would wait.
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow_links else os.O_NOFOLLOW)
        self._file = -1
        try:
            if self._storage.caching == "direct" and hasattr(os, "O_DIRECT"):
                with contextlib.suppress(OSError):
                    self._file = os.open(path, flags | os.O_DIRECT)
                    self.caching = "direct"
            if self._file < 0:
                self._file = os.open(path, flags)
            facts = os.fstat(self._file)
        except OSError as failure:
            self.close()
            raise self._not_read(failure) from failure
        if not stat.S_ISREG(facts.st_mode):
            self.close()
            raise self._broken(f"{path} is not a regular file")
        self.size_bytes = facts.st_size

    def read(self, offset: int, size: int) -> np.ndarray:
        """Reads `size` bytes from `offset`, uint8, into new memory.

        Raises:
          CheckpointError: the file ends before.
          Unreadable: storage refuses.
        """
        self._require(offset, size)
        memory = aligned(pages_bytes(offset, size))
        before = offset % PAGE
        self.read_into(memory, before, offset, size)
        return memory[before : before + size]

    def read_into(self, memory: np.ndarray, place: int, offset: int, size: int) -> None:
        """Reads `size` bytes from `offset` to `place` in `memory`, and the rest of the pages that they touch.

        Args:
          memory: uint8, page-aligned, large enough for all of these pages.
          place: index with the same offset in its page as `offset`.
          offset, size: range of the file.

        Raises:
          CheckpointError: the file ends before.
          Unreadable: storage refuses.
        """
        before = offset % PAGE
        assert place % PAGE == before
        self._require(offset, size)
        began = time.perf_counter()
        pages = memory[place - before : place - before + -(-(before + size) // PAGE) * PAGE]
        self._storage.await_read(began, self._fill(pages.data, offset - before, before + size))

    def close(self) -> None:
        """Closes the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> "PieceReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _not_read(self, error: OSError) -> CheckpointError:
        kind = self._broken if error.errno in _ABSENT else self._refused
        return kind(f"{self._path}: cannot be read ({error.strerror})")

    def _require(self, offset: int, size: int) -> None:
        if offset < 0 or size < 0 or offset + size > self.size_bytes:
            raise self._broken(
                f"{self._path} ends at byte {self.size_bytes}, before {offset + size}: it is truncated"
            )

    def _fill(self, pages: memoryview, first: int, wanted: int) -> int:
        """Reads at least `wanted` bytes into `pages`, from `first` on."""
        done = 0
        while done < wanted:
            try:
                count = os.preadv(self._file, [pages[done:]], first + done)
            except OSError as error:
                if error.errno == errno.EINVAL and self.caching == "direct":
                    # Some file systems open for direct reads and then refuse them.
                    self._buffered()
                    continue
                raise self._not_read(error) from error
            done += count
            if done < wanted and (count == 0 or os.fstat(self._file).st_size < first + wanted):
                # Check the size, because a direct read that continues at whole pages meets the end
                # repeatedly.
                raise self._broken(f"{self._path} has become shorter while it was read")
            if done < wanted and done % PAGE and self.caching == "direct":
                # A direct read continues at whole pages only.
                done = done // PAGE * PAGE
        return done

    def _buffered(self) -> None:
        with self._lock:
            if self.caching == "direct":
                import fcntl

                # On the open file, because another one may have its name by now.
                flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
                fcntl.fcntl(self._file, fcntl.F_SETFL, flags & ~os.O_DIRECT)
                self.caching = "buffered"


class ScratchMemory:
    """Reusable memory for small pieces of files whose parts are copied out at once: getting new pages from
    the system takes longer than filling them. Thread-safe: each reader thread has its own."""

    def __init__(self) -> None:
        self._free = collections.deque[np.ndarray]()

    @contextlib.contextmanager
    def taken(self, size: int) -> Iterator[np.ndarray]:
        """Page-aligned memory of at least `size` bytes, until the end of the block."""
        memory = None
        with contextlib.suppress(IndexError):
            memory = self._free.pop()
        if memory is None or memory.size < size:
            memory = aligned(size)
        try:
            yield memory
        finally:
            if memory.size <= _REUSED_BYTES:
                self._free.append(memory)


def pages_bytes(offset: int, size: int) -> int:
    """Bytes of the pages that `size` bytes from `offset` of a file touch."""
    return -(-(offset % PAGE + size) // PAGE) * PAGE


def aligned(size: int) -> np.ndarray:
    """Uninitialized page-aligned memory of `size` bytes, uint8."""
    return np.frombuffer(mmap.mmap(-1, max(1, size)), np.uint8)[:size]
