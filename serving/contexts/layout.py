"""The files of a store: their names, the lock, the quarantine, and SQLite files.

    ROOT/catalog.sqlite                  the records of all contexts (`catalog`)
    ROOT/lock                            locked by the one process that uses the store
    ROOT/app-QUOTED/0123456789abcdef/    a context's segments `N.kv`
    ROOT/quarantine/app-QUOTED/...       damaged files, unchanged, until the user deletes them

Files with other names and symbolic links are foreign: they are neither read nor removed.
"""

import contextlib
import ctypes
import errno
import os
import re
import secrets
import sqlite3
import stat
import struct
import threading
import time
import urllib.parse
import weakref
from collections.abc import Iterable, Iterator, Set
from pathlib import Path
from typing import Any

from jaxllm.errors import BudgetExceeded, CheckpointError, ConfigError, JaxllmError, Unreadable
from jaxllm.files.atomic import sync, temporary_file

CATALOG = "catalog.sqlite"
CATALOG_HEAD = b"SQLite format 3\0"
LOG_SUFFIX = "-wal"
LOCK = "lock"
QUARANTINE = "quarantine"
# A record that a repair has set aside, and its first bytes.
RECORD, RECORD_HEAD = "record", b'{"jaxllm record":'
# Names of segments, and their first bytes.
SUFFIX, SEGMENT, SEGMENT_HEAD = ".kv", re.compile(r"(0|[1-9][0-9]{0,8})\.kv"), b"JXLKVSEG"
# Temporary files that a killed writer leaves.
UNFINISHED = re.compile(r"\.(\d+\.kv|catalog\.sqlite)\.(jaxllm-)?[0-9a-f]{12}\.tmp(-journal)?")
_APP, _LONGEST_APP = "app-", 200
_CONTEXT = re.compile(r"[0-9a-f]{16}")
_BUSY = (errno.EWOULDBLOCK, errno.EACCES, errno.EAGAIN)
# Offsets of the version and the kind in the header of an SQLite file; sizes in its log.
_VERSION_AT, _KIND_AT, _HEADER_BYTES = 60, 68, 100
_LOG_HEADER_BYTES, _FRAME_BYTES = 32, 24
_PATIENCE_S, _LOOK_S = 5.0, 0.0005
# Open locks and databases.
_OPEN: "weakref.WeakSet[StoreLock | Database]" = weakref.WeakSet()


class StoreLock:
    """A file lock of this process from construction until `close`.

    A forked child inherits a copy of the open file, which would keep the lock after the parent has closed it:
    the copy is closed as soon as the child runs, and `require` refuses everything in the child.
    """

    def __init__(self, path: Path) -> None:
        """Acquires the lock on a file, created if missing.

        Raises:
          ConfigError: another process has the lock.
          OSError: the file cannot be made.
        """
        import fcntl

        self._path, self._process = path, os.getpid()
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
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
        _OPEN.add(self)

    def require(self) -> None:
        """Checks that this process owns the lock.

        Raises:
          ConfigError: it was closed, or belongs to this process's parent.
          CheckpointError: its file was removed or replaced, so that another process may own the new one.
          Unreadable: the device fails.
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
            raise Unreadable(f"{self._path}: cannot be inspected ({error.strerror})") from error
        if not owned:
            raise CheckpointError(
                f"{folder} was removed or replaced while it was open, and may be another process's by now; "
                "close it, and open it again"
            )

    def close(self) -> None:
        """Releases the lock. A forked child leaves it to its parent."""
        import fcntl

        file, self._file = self._file, -1
        if file < 0:
            return
        try:
            if self._process == os.getpid():
                # Closing is not enough: children that were forked by other means have copies.
                fcntl.flock(file, fcntl.LOCK_UN)
        finally:
            os.close(file)

    def _in_place(self) -> bool:
        try:
            current = os.stat(self._path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(current, os.fstat(self._file))


class Database:
    """An open SQLite file: created atomically, private to its user. Thread-safe, statement by statement.

    Each statement is a transaction. Threads take turns: Python's module would give two of them one prepared
    statement of the same text, and the error of one to the other. A file is in WAL mode, for one process: a
    statement appends to the log, which survives a kill but not a power cut; `flush` waits until the device
    has all of it, and empties the log. That costs as much as replacing a file, and only when needed: a turn's
    tokens are stored without it, which a rollback journal could not offer without risking the file.

    Attributes:
      path: path of the file.
      log_lost: whether the end of the log, with committed transactions, was unreadable when the file was
        opened: after a power cut, or by damage.
    """

    def __init__(self, path: Path, schema: str, *, kind: int, version: int, shared: bool = False) -> None:
        """Opens a file of a kind, which a number marks; makes it by the statements of a schema if it is
        missing. If it is `shared`, other processes may open it, too, and each statement waits for the device.

        Raises:
          ConfigError: it is of another kind or version, or damaged.
          OSError: it cannot be made or read.
        """
        self.path, self.log_lost, self._process = path, False, os.getpid()
        # Reentrant, because a finalizer may run in the middle of a statement.
        self._turn = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        if not require_kind(path, kind, version):
            _make(path, schema, kind, version)
        log = Path(f"{path}{LOG_SUFFIX}")
        if os.path.lexists(log) and not stat.S_ISREG(os.lstat(log).st_mode):
            raise ConfigError(f"{log} is not a regular file; move it away")
        try:
            self._connection = sqlite3.connect(
                f"file:{urllib.parse.quote(os.fspath(path))}?mode=rw", uri=True, isolation_level=None,
                check_same_thread=False, timeout=_PATIENCE_S, cached_statements=0,
            )  # fmt: skip
        except sqlite3.Error as error:
            raise _translated(path, error) from error
        _OPEN.add(self)
        try:
            # Deleted data must not stay readable in free pages.
            self.run("PRAGMA secure_delete = ON")
            if shared:
                self.run("PRAGMA synchronous = EXTRA")
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
        file, syncs that, and empties the log. For errors see `run`."""
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
        if connection is None:
            return
        if self._process == os.getpid():
            connection.close()
        else:
            # Closing the last reference would write to the parent's log.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))

    def __del__(self) -> None:
        self.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: [each.close() for each in list(_OPEN)])


def require_kind(path: Path, kind: int, version: int) -> bool:
    """Checks the header of an SQLite file; changes nothing.

    Returns:
      Whether there is a file.

    Raises:
      ConfigError: it is of another kind or version, or damaged.
      OSError: storage refuses.
    """
    try:
        header = _head(path, _HEADER_BYTES)
    except FileNotFoundError:
        return False
    if header is None:
        raise ConfigError(f"{path} is not a regular file; move it away")
    found, marked = (
        int.from_bytes(header[at : at + 4], "big", signed=True) for at in (_VERSION_AT, _KIND_AT)
    )
    if len(header) < _HEADER_BYTES or not header.startswith(CATALOG_HEAD) or marked != kind:
        raise ConfigError(
            f"{path} is damaged, or another program's file: restore it from a copy, or use another folder; "
            "other files stay as they are"
        )
    if found != version:
        raise ConfigError(
            f"{path} is of version {found}, this jaxllm uses {version}; use the jaxllm that made it, or "
            "another folder"
        )
    return True


def folder_name(app: str) -> str:
    """The name of an app's folder, for any characters of the app's name; never one of the store's own names,
    nor `.` or `..`.

    Raises:
      ConfigError: the app's name is empty, too long, or invalid text.
    """
    try:
        name = _APP + urllib.parse.quote(app, safe="")
    except UnicodeEncodeError as error:
        raise ConfigError(f"an app's name must be text, got {app!r:.80}") from error
    if not app or len(name) > _LONGEST_APP:
        raise ConfigError(f"an app needs a name of at most {_LONGEST_APP} bytes, got {app!r:.80}")
    return name


def new_name() -> str:
    """A new, unique name of a context."""
    return secrets.token_hex(8)


def is_name(name: object) -> bool:
    """Whether an object is a valid context name."""
    return isinstance(name, str) and bool(_CONTEXT.fullmatch(name))


def is_app_folder(name: str) -> bool:
    """Whether a name is that of an app's folder."""
    try:
        return name.startswith(_APP) and folder_name(app_of(name)) == name
    except ConfigError:
        return False


def app_of(folder: str) -> str:
    """The app of a folder name."""
    return urllib.parse.unquote(folder.removeprefix(_APP))


def next_segment(names: Iterable[str]) -> str:
    """A segment name above all others, so that a name that a reader may have open is never reused."""
    numbers = [int(each.removesuffix(SUFFIX)) for each in names if SEGMENT.fullmatch(each)]
    return f"{1 + max(numbers, default=-1)}{SUFFIX}"


def context_folders(root: Path) -> list[Path]:
    """All entries with names of context folders, in folders of apps; links are not followed.

    Raises:
      OSError: storage refuses to list them.
    """
    apps = [
        each for each in _entries(root) if is_app_folder(each.name) and each.is_dir(follow_symlinks=False)
    ]
    return [Path(each.path) for app in apps for each in _entries(Path(app.path)) if is_name(each.name)]


def require_real(folder: Path) -> None:
    """Checks that a context's folder and its app's are folders, not links; missing ones are allowed.

    Raises:
      Unreadable: one is a link or another kind of file, or storage refuses.
    """
    for path in (folder.parent, folder):
        try:
            if not stat.S_ISDIR(os.lstat(path).st_mode):
                raise Unreadable(
                    f"{path} is a link or another kind of file, and no store makes it: nothing of it is read"
                )
        except FileNotFoundError:
            return
        except OSError as error:
            raise not_read(path, error) from error


def set_aside(root: Path, folder: Path) -> Path:
    """Moves a context's folder into the quarantine unchanged, and returns its new path.

    Raises:
      OSError: it cannot be moved.
    """
    app, name = folder.relative_to(root).parts
    _require_folders(root, (app, name))
    parent = root / QUARANTINE / app
    for each in (parent.parent, parent):
        with contextlib.suppress(FileExistsError):
            each.mkdir(mode=0o700)
    _require_folders(root, (QUARANTINE, app))
    place = parent / f"{name}-{secrets.token_hex(4)}"
    os.rename(folder, place)
    for each in (folder.parent, parent):
        sync(each)
    return place


def quarantined(root: Path) -> list[Path]:
    """Paths in the quarantine."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        _require_folders(root, (QUARANTINE,))
        apps = [Path(each.path) for each in _entries(root / QUARANTINE) if each.is_dir(follow_symlinks=False)]
        return [Path(each.path) for app in apps for each in _entries(app)]
    return []


def delete_quarantined(root: Path) -> list[Path]:
    """Empties the quarantine: removes files with the store's names, and folders that become empty. Returns
    paths with other names, which were not removed."""
    for path in quarantined(root):
        with contextlib.suppress(OSError):
            remove_own(path, foreign=True)
            path.parent.rmdir()
    with contextlib.suppress(OSError):
        (root / QUARANTINE).rmdir()
    return quarantined(root)


def remove_own(folder: Path, *, keep: Set[str] | None = None, foreign: bool = False) -> None:
    """Removes the store's own files from a context's folder, except those to `keep`; without such the folder,
    too, if it is empty then. If `foreign`, removes also links and files of foreign content that have names of
    the store's files."""
    if not stat.S_ISDIR(os.lstat(folder).st_mode):
        return
    for each in _entries(folder):
        if each.name not in (keep or ()) and (
            is_own(Path(each.path)) or (foreign and _has_own_name(each.name))
        ):
            with contextlib.suppress(FileNotFoundError, IsADirectoryError, PermissionError):
                os.unlink(each.path)
    if keep is None:
        with contextlib.suppress(OSError):
            folder.rmdir()


def is_own(path: Path) -> bool:
    """Whether a file has a name of a store's files, and begins like one.

    Raises:
      OSError: storage refuses.
    """
    if not _has_own_name(path.name):
        return False
    of_segment = path.name.endswith(SUFFIX) or f"{SUFFIX}." in path.name
    head = SEGMENT_HEAD if of_segment else RECORD_HEAD if path.name == RECORD else CATALOG_HEAD
    try:
        content = _head(path, len(head))
    except (FileNotFoundError, PermissionError):
        return False
    # A temporary file may end anywhere.
    return content == head or (
        content is not None and path.name.endswith(".tmp") and head.startswith(content)
    )


def own_bytes(folder: Path, names: Iterable[str]) -> dict[str, int]:
    """Sizes of the files that have no link in another folder, so that removing them frees their bytes; 0 for
    a missing one."""
    sizes = {}
    for name in names:
        try:
            facts = os.lstat(folder / name)
        except OSError:
            sizes[name] = 0
            continue
        if facts.st_nlink <= 1:
            sizes[name] = facts.st_size
    return sizes


def folder_bytes(folders: Iterable[Path]) -> int:
    """Bytes of all files in some folders; files with several links count once."""
    sizes: dict[tuple[int, int], int] = {}
    for folder in folders:
        with contextlib.suppress(OSError):
            for each in _entries(folder):
                with contextlib.suppress(OSError):
                    facts = os.lstat(each.path)
                    sizes[facts.st_dev, facts.st_ino] = facts.st_size
    return sum(sizes.values())


def is_empty(folder: Path) -> bool:
    """Whether a folder is empty; False for links and other kinds of files."""
    return not folder.is_symlink() and folder.is_dir() and not _entries(folder)


@contextlib.contextmanager
def written(folder: Path) -> Iterator[None]:
    """Turns an OSError while writing or listing a context's folder into a JaxllmError.

    Raises:
      BudgetExceeded: the device is full.
      CheckpointError: it failed otherwise.
    """
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        kind = BudgetExceeded if full else CheckpointError
        raise kind(f"{folder}: the context cannot be written ({error.strerror})") from error


def not_read(path: Path, error: OSError) -> CheckpointError:
    """The error of a file that storage refuses, whose content is unknown."""
    return Unreadable(f"{path}: cannot be read ({error.strerror})")


def _has_own_name(name: str) -> bool:
    return name in (RECORD, CATALOG) or bool(SEGMENT.fullmatch(name) or UNFINISHED.fullmatch(name))


def _head(path: Path, size: int) -> bytes | None:
    """The first bytes of a regular file, without following a link or waiting for a pipe; None for another
    kind of file."""
    if not stat.S_ISREG(os.lstat(path).st_mode):
        return None
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(path, "rb", opener=lambda each, _: os.open(each, flags)) as file:
        return file.read(size)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as found:
        return sorted(found, key=lambda each: each.name)


def _require_folders(root: Path, names: tuple[str, ...]) -> None:
    """Raises NotADirectoryError unless all of these nested folders are real ones, not links."""
    folder = root
    for name in names:
        folder = folder / name
        if not stat.S_ISDIR(os.lstat(folder).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, "it is not a folder", str(folder))


def _make(path: Path, schema: str, kind: int, version: int) -> None:
    """Makes an SQLite file atomically."""
    # Without automatic vacuum the file would never shrink.
    script = f"""
        PRAGMA journal_mode = MEMORY; PRAGMA auto_vacuum = FULL;
        PRAGMA application_id = {kind}; PRAGMA user_version = {version}; {schema}
    """
    with temporary_file(path) as (temporary, file):
        os.fchmod(file.fileno(), 0o600)
        try:
            with contextlib.closing(sqlite3.connect(temporary, isolation_level=None)) as connection:
                connection.executescript(script)
        except sqlite3.Error as error:
            raise _translated(path, error) from error
        os.fsync(file.fileno())
        temporary.replace(path)
    sync(path.parent)


def _commits(log: Path) -> list[int]:
    """The numbers of the pages of a log that end transactions, from 1. A log is emptied when its pages are in
    the file, so that all of its pages are from the same period."""
    if not os.path.lexists(log):
        return []
    with open(log, "rb") as file:
        header = file.read(_LOG_HEADER_BYTES)
        size = os.fstat(file.fileno()).st_size
        if len(header) < _LOG_HEADER_BYTES:
            return []
        page_bytes = int.from_bytes(header[8:12], "big")
        if not 512 <= page_bytes <= 1 << 16:
            # A damaged header: the log was not empty.
            return [size]
        found, step = [], _FRAME_BYTES + page_bytes
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
