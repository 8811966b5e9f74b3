"""The lock of a store: one process at a time may write there, and only for as long as it holds it."""

import errno
import os
import weakref
from pathlib import Path

from jaxllm.errors import CheckpointError, ConfigError

_BUSY = (errno.EWOULDBLOCK, errno.EACCES, errno.EAGAIN)


class StoreLock:
    """Held from when it is made until it is released.

    A forked child gets a copy of the open file, with which it would keep the lock after its parent has let go
    of it: the copy is closed as soon as the child runs, which is refused whatever it asks for.
    """

    def __init__(self, path: Path) -> None:
        """Takes the lock.

        Args:
          path: of the file that is locked, made if missing.

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
            # Whoever removes the file while it is being locked has a lock of its own.
            held = self._in_place()
        except OSError as error:
            if error.errno not in _BUSY:
                os.close(self._file)
                raise
            held = False
        if not held:
            os.close(self._file)
            raise ConfigError(
                f"{path.parent} is in use by another process; close that one, or use another folder"
            )
        _HELD.add(self)

    def require(self) -> None:
        """Checks that this process holds the lock.

        Raises:
          ConfigError: it was released, or is a parent's of this process, or its file is another one than it
            was, so that another process may hold that.
          CheckpointError: the device does not say.
        """
        folder = self._path.parent
        if self._process != os.getpid():
            raise ConfigError(
                f"{folder} was opened by the process that forked this one, and is of no use here; ask that "
                "one, or open another folder"
            )
        if self._file < 0:
            raise ConfigError(f"{folder} was closed, and what was opened from it with it; open it again")
        try:
            held = self._in_place()
        except OSError as error:
            raise CheckpointError(f"{self._path}: cannot be looked at ({error.strerror})") from error
        if not held:
            raise ConfigError(
                f"{folder} was removed or replaced while it was open, and may be another process's by now; "
                "close it, and open it again"
            )

    def release(self) -> None:
        """Lets another process have it. A forked child leaves it to its parent."""
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
        """In a forked child."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


_HELD: "weakref.WeakSet[StoreLock]" = weakref.WeakSet()


def _leave_to_parent() -> None:
    for lock in list(_HELD):
        lock._forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)
