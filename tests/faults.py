"""A device that fails: the k-th file operation below a folder raises what a broken or a full one does.

    with FailingDevice(folder, at=None) as all_of_it: act()                    counts the operations
    with FailingDevice(folder, at=17, error=errno.EIO) as one: act()           fails the 17th

Operations are calls of `os` and of open files, and statements of the catalogs of contexts; of what file they
are, this process's table of files says.
"""

import builtins
import errno as errors
import io
import os
import signal
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxllm.serving.contexts import layout

ERRORS = (errors.EIO, errors.ENOSPC)
# Those whose first argument says of what; of these no other leads to a file.
_BY_PATH = (
    "open", "mkdir", "rmdir", "rename", "replace", "unlink", "remove", "listdir", "scandir", "stat", "lstat",
    "link", "truncate",
)  # fmt: skip
_BY_NUMBER = ("fsync", "fdatasync", "fstat", "preadv", "pread", "pwrite", "read", "write", "ftruncate")
# None of them asks for room.
_NEVER_FULL = (
    "rmdir", "unlink", "remove", "listdir", "scandir", "stat", "lstat", "fstat", "preadv", "pread", "read",
)  # fmt: skip
# Those that need a descriptor.
_OPENING = ("open", "listdir", "scandir")


class FailingDevice:
    """Lets one operation below a folder fail, or, where it is the first of many, all from it on.

    Attributes:
      operations: that could have failed.
      hit: the one that did, as "name path"; empty where none did.
    """

    def __init__(
        self, folder: Path, at: int | None, *, error: int = errors.EIO, persistent: bool = False
    ) -> None:
        """Takes the number of the operation, counted from 1; None for none. `persistent` has all that follow
        fail, too."""
        self._folder, self._at = os.path.realpath(folder), at
        self._error, self._persistent = error, persistent
        self.operations, self.hit = 0, ""
        self._real: list[tuple[Any, str, Callable[..., Any]]] = []

    def __enter__(self) -> "FailingDevice":
        for name in (*_BY_PATH, *_BY_NUMBER):
            self._replace(os, name)
        self._replace(io, "open")
        self._replace(builtins, "open")
        self._replace_statements()
        return self

    def _replace_statements(self) -> None:
        """Has the statements of SQLite's files count, and fail as SQLite does."""
        real = layout.Database.run

        def run(self_: layout.Database, statement: str, *values: Any) -> Any:
            if (where := self._where(self_.path)) is not None:
                try:
                    self._count("read" if statement.startswith("SELECT") else "sql", where)
                except OSError as error:
                    failure = sqlite3.OperationalError(f"{error.strerror} (disk I/O error)")
                    full = error.errno == errors.ENOSPC
                    failure.sqlite_errorcode = sqlite3.SQLITE_FULL if full else sqlite3.SQLITE_IOERR
                    raise layout._translated(self_.path, failure) from failure
            return real(self_, statement, *values)

        self._real.append((layout.Database, "run", real))
        layout.Database.run = run  # pyright: ignore[reportAttributeAccessIssue]

    def mend(self) -> None:
        """Lets nothing fail any more."""
        self._at = None

    def fail(self, error: int) -> None:
        """Lets all operations from here on fail by this error, until `mend`."""
        self._error, self._persistent, self._at = error, True, self.operations + 1

    def __exit__(self, *_: object) -> None:
        # An open file keeps its own methods: they must not fail any more.
        self.mend()
        for module, name, real in reversed(self._real):
            setattr(module, name, real)
        self._real.clear()

    def _replace(self, module: Any, name: str) -> None:
        real = getattr(module, name, None)
        if real is None:
            return
        opens = module is not os

        def called(*arguments: Any, **options: Any) -> Any:
            where = self._where(arguments[0] if arguments else None, options.get("dir_fd"))
            if name == "open" and not opens and not arguments[1] & (os.O_CREAT | os.O_WRONLY | os.O_RDWR):
                # It looks at what is there.
                where = where if self._error != errors.ENOSPC else None
            if where is not None:
                self._count(name, where)
            result = real(*arguments, **options)
            if opens and where is not None and result.writable():
                self._watch(result, where)
            return result

        self._real.append((module, name, real))
        setattr(module, name, called)

    def _watch(self, file: Any, where: str) -> None:
        """Has what is written to an open file count, too."""
        for name in ("write", "flush"):
            real = getattr(file, name)

            def called(*arguments: Any, real: Callable[..., Any] = real, name: str = name) -> Any:
                self._count(name, where)
                return real(*arguments)

            setattr(file, name, called)

    def _where(self, of: Any, folder_number: int | None = None) -> str | None:
        """The path that an operation is of, where it lies below the folder."""
        try:
            if isinstance(of, int):
                path = os.readlink(f"/proc/self/fd/{of}")
            elif folder_number is not None:
                path = os.path.join(os.readlink(f"/proc/self/fd/{folder_number}"), os.fspath(of))
            else:
                path = os.path.abspath(os.fspath(of))
        except (OSError, TypeError, ValueError):
            return None
        path = path if isinstance(path, str) else os.fsdecode(path)
        return path if path == self._folder or path.startswith(f"{self._folder}/") else None

    def _count(self, name: str, where: str) -> None:
        if self._error == errors.ENOSPC and name in _NEVER_FULL:
            return
        if self._error == errors.EMFILE and name not in _OPENING:
            return
        self.operations += 1
        if self._at is None:
            return
        if self.operations == self._at or (self._persistent and self.operations > self._at):
            self.hit = self.hit or f"{name} {where}"
            raise OSError(self._error, os.strerror(self._error), where)


class KillingDevice(FailingDevice):
    """Ends this process at one operation, as kill -9 does."""

    def _count(self, name: str, where: str) -> None:
        self.operations += 1
        if self.operations == self._at:
            os.kill(os.getpid(), signal.SIGKILL)
