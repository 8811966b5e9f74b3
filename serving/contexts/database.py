"""Opens SQLite files: created atomically, private to their user, with our error types, and safe with forks.

Each statement is a transaction. Threads take turns: Python's module would give two of them one prepared
statement of the same text, and the error of one to the other. A file is in WAL mode, for one process: a
statement appends to the log, which survives a kill but not a power cut; `flush` waits until the device has
all of it, and empties the log. That costs as much as replacing a file, and only when needed: a turn's
tokens are stored without it, which a rollback journal could not offer without risking the file.
"""

import ctypes
import os
import secrets
import sqlite3
import stat
import struct
import threading
import time
import urllib.parse
import weakref
from pathlib import Path
from typing import Any

from jaxllm.errors import BudgetExceeded, CheckpointError, ConfigError, JaxllmError, Unreadable
from jaxllm.files.atomic import remove_abandoned, sync

LOG_SUFFIX = "-wal"
_MAGIC = b"SQLite format 3\0"
# Offsets of the version and the kind in a file's header.
_VERSION_AT, _KIND_AT, _HEADER_BYTES = 60, 68, 100
_LOG_HEADER_BYTES, _FRAME_BYTES = 32, 24
_PATIENCE_S, _LOOK_S = 5.0, 0.0005


class Database:
    """An open SQLite file. Thread-safe, statement by statement.

    Attributes:
      path: path of the file.
      log_lost: whether the end of the log, with committed transactions, was unreadable when the file was
        opened: after a power cut, or by damage.
    """

    def __init__(self, path: Path, schema: str, *, kind: int, version: int, shared: bool = False) -> None:
        """Opens a file, created if missing.

        Args:
          path: path of the file.
          schema: SQL statements that make an empty file's content.
          kind: number that marks files of this kind.
          version: version of the schema.
          shared: whether other processes may open it, too; each statement then waits for the device.

        Raises:
          ConfigError: it is of another kind or version, or damaged.
          OSError: it cannot be made or read.
        """
        self.path, self._process = path, os.getpid()
        # Reentrant, because a finalizer may run in the middle of a statement.
        self._turn = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        if not require_kind(path, kind, version):
            _make(path, schema, kind, version)
        log = Path(f"{path}{LOG_SUFFIX}")
        if os.path.lexists(log) and not stat.S_ISREG(os.lstat(log).st_mode):
            raise ConfigError(f"{log} is not a regular file; move it away")
        uri = f"file:{urllib.parse.quote(os.fspath(path))}?mode=rw"
        try:
            self._connection = sqlite3.connect(
                uri,
                uri=True,
                isolation_level=None,
                check_same_thread=False,
                timeout=_PATIENCE_S,
                cached_statements=0,
            )
        except sqlite3.Error as error:
            raise _translated(path, error) from error
        _OPEN.add(self)
        try:
            # Deleted data must not stay readable in free pages.
            self.run("PRAGMA secure_delete = ON")
            if shared:
                self.run("PRAGMA synchronous = EXTRA")
                self.log_lost = False
                return
            commits = _commits(log)
            self.run("PRAGMA locking_mode = EXCLUSIVE")
            self.run("PRAGMA journal_mode = WAL")
            self.run("PRAGMA synchronous = NORMAL")
            ((_, frames, _),) = self.run("PRAGMA wal_checkpoint(PASSIVE)")
            self.log_lost = any(each > frames for each in commits)
            self.flush()
        except CheckpointError as error:
            self.close()
            raise ConfigError(f"{error}; restore it from a copy, or use another folder") from error
        except BaseException:
            self.close()
            raise

    def run(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """Runs one statement, and returns its rows.

        Raises:
          BudgetExceeded: the device is full.
          CheckpointError: the file is damaged.
          Unreadable: the device failed.
          ConfigError: the file was closed.
        """
        connection = self._connection
        if connection is None:
            raise ConfigError(f"{self.path} was closed")
        with self._turn:
            cursor = connection.cursor()
            try:
                return cursor.execute(statement, values).fetchall()
            except (sqlite3.Error, OverflowError) as error:
                raise _translated(self.path, error) from error
            finally:
                cursor.close()

    def flush(self) -> None:
        """Waits until the device has everything that was written: syncs the log, writes its pages into the
        file, syncs that, and empties the log.

        Raises:
          See `run`.
        """
        until = time.monotonic() + _PATIENCE_S
        while True:
            try:
                ((busy, _, _),) = self.run("PRAGMA wal_checkpoint(TRUNCATE)")
            except Unreadable as error:
                # Another thread is between the rows of a statement.
                busy = _code(error.__cause__) in (sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_BUSY)
                if not busy or time.monotonic() > until:
                    raise
            if not busy:
                return
            if time.monotonic() > until:
                raise Unreadable(f"{self.path} is in use, and cannot be flushed")
            time.sleep(_LOOK_S)

    def faults(self) -> str:
        """SQLite's integrity errors of the file; empty for none."""
        try:
            found = [str(text) for (text,) in self.run("PRAGMA integrity_check(3)")]
        except Unreadable:
            raise
        except CheckpointError as error:
            return str(error)
        return "" if found == ["ok"] else " ".join("; ".join(found).split())[:300]

    def close(self) -> None:
        """Flushes and closes the file; a forked child leaves it to its parent."""
        connection, self._connection = self._connection, None
        if connection is not None and self._process == os.getpid():
            connection.close()

    def __del__(self) -> None:
        self.close()

    def _leave(self) -> None:
        """Prevents a forked child from closing the connection, which would write to its parent's log."""
        if self._connection is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._connection))
            self._connection = None


def require_kind(path: Path, kind: int, version: int) -> bool:
    """Checks the header of a file; changes nothing.

    Returns:
      Whether there is a file.

    Raises:
      ConfigError: it is of another kind or version, or damaged.
      OSError: storage refuses.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise ConfigError(f"{path} is not a regular file; move it away")
        with open(path, "rb", opener=lambda each, _: os.open(each, flags)) as file:
            header = file.read(_HEADER_BYTES)
    except FileNotFoundError:
        return False
    found, marked = (
        int.from_bytes(header[at : at + 4], "big", signed=True) for at in (_VERSION_AT, _KIND_AT)
    )
    if len(header) < _HEADER_BYTES or not header.startswith(_MAGIC) or marked != kind:
        raise ConfigError(
            f"{path} is damaged, or another program's file: restore it from a copy, or use another folder; "
            "files beside it stay as they are"
        )
    if found != version:
        raise ConfigError(
            f"{path} is of version {found}, this jaxllm uses {version}; use the jaxllm that made it, or "
            "another folder"
        )
    return True


def _make(path: Path, schema: str, kind: int, version: int) -> None:
    """Makes a file atomically."""
    remove_abandoned(path.parent, path.name)
    temporary = path.with_name(f".{path.name}.jaxllm-{secrets.token_hex(6)}.tmp")
    try:
        os.close(os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        try:
            connection = sqlite3.connect(temporary, isolation_level=None)
        except sqlite3.Error as error:
            raise _translated(path, error) from error
        try:
            connection.execute("PRAGMA journal_mode = MEMORY")
            # Else the file would never shrink.
            connection.execute("PRAGMA auto_vacuum = FULL")
            connection.execute(f"PRAGMA application_id = {kind}")
            connection.execute(f"PRAGMA user_version = {version}")
            connection.executescript(schema)
        except sqlite3.Error as error:
            raise _translated(path, error) from error
        finally:
            connection.close()
        sync(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


def _commits(log: Path) -> list[int]:
    """The numbers of the pages of a log that end transactions, from 1. A log is emptied when its pages are in
    the file, so that all of its pages are from the same period."""
    found: list[int] = []
    if not os.path.lexists(log):
        return found
    with open(log, "rb") as file:
        header = file.read(_LOG_HEADER_BYTES)
        size = os.fstat(file.fileno()).st_size
        if len(header) < _LOG_HEADER_BYTES:
            return found
        page_bytes = int.from_bytes(header[8:12], "big")
        if not 512 <= page_bytes <= 1 << 16:
            # A damaged header: the log was not empty.
            return [size]
        step = _FRAME_BYTES + page_bytes
        for number in range((size - _LOG_HEADER_BYTES) // step):
            file.seek(_LOG_HEADER_BYTES + number * step)
            _, pages_after = struct.unpack(">II", file.read(8))
            if pages_after:
                found.append(number + 1)
    return found


def _code(error: BaseException | None) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _translated(path: Path, error: Exception) -> JaxllmError:
    code = _code(error)
    if code == sqlite3.SQLITE_FULL:
        return BudgetExceeded(f"{path} cannot be written: there is no room on the device ({error})")
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return CheckpointError(f"{path} is damaged ({error})")
    return Unreadable(f"{path}: the device failed ({error})")


_OPEN: "weakref.WeakSet[Database]" = weakref.WeakSet()


def _leave_to_parent() -> None:
    for each in list(_OPEN):
        each._leave()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)
