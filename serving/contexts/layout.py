"""Lays out the folder of a store: the lock, the names of apps and contexts, and the quarantine.

    ROOT/catalog.sqlite                  the records of all contexts (`catalog`)
    ROOT/lock                            locked by the one process that uses the store
    ROOT/app-QUOTED/0123456789abcdef/    a context's segments `N.kv`
    ROOT/quarantine/app-QUOTED/...       damaged files, unchanged, until the user deletes them

Files with other names and symbolic links are foreign: they are neither read nor removed.
"""

import contextlib
import errno
import os
import re
import secrets
import stat
import urllib.parse
import weakref
from collections.abc import Iterable, Iterator, Set
from pathlib import Path

from jaxllm.errors import BudgetExceeded, CheckpointError, ConfigError, Unreadable
from jaxllm.files.atomic import sync
from jaxllm.serving.contexts.record import SEGMENT
from jaxllm.serving.contexts.segment import MAGIC, SUFFIX

CATALOG = "catalog.sqlite"
LOCK = "lock"
QUARANTINE = "quarantine"
# A record that a repair has set aside, and its first bytes.
RECORD, RECORD_HEAD = "record", b'{"jaxllm record":'
CATALOG_HEAD = b"SQLite format 3\0"
LONGEST_APP = 200
_APP = "app-"
_CONTEXT = re.compile(r"[0-9a-f]{16}")
# Temporary files that a killed writer leaves.
UNFINISHED = re.compile(r"\.(\d+\.kv|catalog\.sqlite)\.(jaxllm-)?[0-9a-f]{12}\.tmp(-journal)?")
_BUSY = (errno.EWOULDBLOCK, errno.EACCES, errno.EAGAIN)


class StoreLock:
    """A file lock of this process from construction until `release`.

    A forked child inherits a copy of the open file, which would keep the lock after the parent's release: the
    copy is closed as soon as the child runs, and `require` refuses everything in the child.
    """

    def __init__(self, path: Path) -> None:
        """Acquires the lock.

        Args:
          path: file to lock, created if missing.

        Raises:
          ConfigError: another process has the lock.
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
          ConfigError: it was released, or belongs to this process's parent.
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

    def release(self) -> None:
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
            there = os.stat(self._path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(there, os.fstat(self._file))

    def _forget(self) -> None:
        """Closes a forked child's copy of the file."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


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
    if not app or len(name) > LONGEST_APP:
        raise ConfigError(f"an app needs a name of at most {LONGEST_APP} bytes, got {app!r:.80}")
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


def context_folders(root: Path) -> list[Path]:
    """All entries with names of context folders, in folders of apps; links are not followed.

    Raises:
      OSError: storage refuses to list them.
    """
    apps = [each for each in _entries(root) if is_app_folder(each.name)]
    real = [Path(each.path) for each in apps if each.is_dir(follow_symlinks=False)]
    return [Path(each.path) for app in real for each in _entries(app) if is_name(each.name)]


def require_real(root: Path, folder: Path) -> None:
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
    """Moves a context's folder into the quarantine unchanged.

    Returns:
      Its new path.

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
    """Empties the quarantine: removes files with the store's names, and folders that become empty.

    Returns:
      Paths with other names, which were not removed.
    """
    for path in quarantined(root):
        with contextlib.suppress(OSError):
            remove_own(path, foreign=True)
            path.parent.rmdir()
    with contextlib.suppress(OSError):
        (root / QUARANTINE).rmdir()
    return quarantined(root)


def remove_own(folder: Path, *, keep: Set[str] | None = None, foreign: bool = False) -> bool:
    """Removes the store's own files from a context's folder, and the folder if that leaves it empty.

    Args:
      folder: folder of the context.
      keep: files to keep, and with them the folder; None for none.
      foreign: whether to also remove links and files of foreign content with names of the store's files.

    Returns:
      Whether the folder is gone.
    """
    if not stat.S_ISDIR(os.lstat(folder).st_mode):
        return False
    for each in _entries(folder):
        if each.name not in (keep or ()) and (
            is_own(Path(each.path)) or (foreign and _has_own_name(each.name))
        ):
            with contextlib.suppress(FileNotFoundError, IsADirectoryError, PermissionError):
                os.unlink(each.path)
    if keep is not None:
        return False
    try:
        folder.rmdir()
    except OSError:
        return False
    return True


def next_segment(names: Iterable[str]) -> str:
    """A segment name above all others, so that a name that a reader may have open is never reused."""
    numbers = [int(each.removesuffix(SUFFIX)) for each in names if SEGMENT.fullmatch(each)]
    return f"{1 + max(numbers, default=-1)}{SUFFIX}"


def file_size(path: Path) -> int:
    """Bytes of a file; 0 if it is missing."""
    try:
        return os.lstat(path).st_size
    except OSError:
        return 0


def is_shared(path: Path) -> bool:
    """Whether a file has several links: its bytes stay when one of them is removed."""
    try:
        return os.lstat(path).st_nlink > 1
    except OSError:
        return False


def folder_bytes(folders: Iterable[Path]) -> int:
    """Bytes of all files in some folders; files with several links count once."""
    sizes: dict[tuple[int, int], int] = {}
    for folder in folders:
        with contextlib.suppress(OSError):
            for each in _entries(folder):
                with contextlib.suppress(OSError):
                    found = os.lstat(each.path)
                    sizes[found.st_dev, found.st_ino] = found.st_size
    return sum(sizes.values())


def is_own(path: Path) -> bool:
    """Whether a file has a name of a store's files, and begins like one.

    Raises:
      OSError: storage refuses.
    """
    if not _has_own_name(path.name):
        return False
    of_segment = path.name.endswith(SUFFIX) or f"{SUFFIX}." in path.name
    head = MAGIC if of_segment else RECORD_HEAD if path.name == RECORD else CATALOG_HEAD
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            return False
        with open(path, "rb", opener=lambda each, _: os.open(each, flags)) as file:
            content = file.read(len(head))
    except (FileNotFoundError, PermissionError):
        return False
    # A temporary file may end anywhere.
    return head.startswith(content) if path.name.endswith(".tmp") else content == head


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


def _entries(folder: Path) -> list[os.DirEntry]:
    with os.scandir(folder) as found:
        return sorted(found, key=lambda each: each.name)


def _require_folders(root: Path, names: tuple[str, ...]) -> None:
    """Raises NotADirectoryError unless all of these nested folders are real ones, not links."""
    folder = root
    for name in names:
        folder = folder / name
        if not stat.S_ISDIR(os.lstat(folder).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, "it is not a folder", str(folder))


_OWNED: "weakref.WeakSet[StoreLock]" = weakref.WeakSet()


def _leave_to_parent() -> None:
    for lock in list(_OWNED):
        lock._forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)
