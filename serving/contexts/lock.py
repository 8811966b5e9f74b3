"""Locks a store: one process at a time may write there, and only for as long as it owns the lock."""

import errno
import os
import weakref
from pathlib import Path

from jaxllm.errors import CheckpointError, ConfigError

_BUSY = (errno.EWOULDBLOCK, errno.EACCES, errno.EAGAIN)


class StoreLock:
    """A lock that this process owns from its construction until `release`.

    A forked child gets a copy of the open file, which would keep the lock after the parent has released it:
    the copy is closed as soon as the child runs, and `require` refuses whatever the child asks for.
    """

    def __init__(self, path: Path) -> None:
        """Takes the lock.

        Args:
          path: the file that is locked, made if missing.

        Raises:
          ConfigError: another process has it.
          OSError: the file cannot be made.
        """
        import fcntl

        self._path, self._process = path, os.getpid()
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
        self._file = os.open(path, flags, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A process that replaced the file meanwhile locks another file.
            owned = self._in_place()
        except OSError as error:
            if error.errno not in _BUSY:
                os.close(self._file)
                raise
            owned = False
        if not owned:
            os.close(self._file)
            raise ConfigError(
                f"{path.parent} is in use by another process; close that one, or use another folder"
            )
        _OWNED.add(self)

    def require(self) -> None:
        """Checks that this process owns the lock.

        Raises:
          ConfigError: it was released, belongs to this process's parent, or its file was replaced, so that
            another process may own that one.
          CheckpointError: the device fails.
        """
        folder = self._path.parent
        if self._process != os.getpid():
            raise ConfigError(
                f"{folder} was opened by the process that forked this one, and is of no use here; use it in "
                "that process, or open another folder"
            )
        if self._file < 0:
            raise ConfigError(f"{folder} was closed, and what was opened from it with it; open it again")
        try:
            owned = self._in_place()
        except OSError as error:
            raise CheckpointError(f"{self._path}: cannot be inspected ({error.strerror})") from error
        if not owned:
            raise ConfigError(
                f"{folder} was removed or replaced while it was open, and may be another process's by now; "
                "close it, and open it again"
            )

    def release(self) -> None:
        """Releases the lock. A forked child leaves it to its parent."""
        import fcntl

        file, self._file = self._file, -1
        if file < 0:
            return
        try:
            if self._process == os.getpid():
                # Not by closing alone: children that were forked by other means have copies.
                fcntl.flock(file, fcntl.LOCK_UN)
        finally:
            os.close(file)

    def _in_place(self) -> bool:
        try:
            there = os.stat(self._path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(there, os.fstat(self._file))

    def _forget(self) -> None:
        """Closes a forked child's copy of the file."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


_OWNED: "weakref.WeakSet[StoreLock]" = weakref.WeakSet()


def _leave_to_parent() -> None:
    for lock in list(_OWNED):
        lock._forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)
