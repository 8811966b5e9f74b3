"""Writes files and folders atomically, and removes leftovers of killed writers."""

import contextlib
import errno
import os
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

try:
    import fcntl
except ImportError:  # Without file locks, leftovers of killed writers stay.
    fcntl = None

# Marks our temporary names.
_MARK, _RANDOM_BYTES = ".jaxllm-", 6
_KINDS = (
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
)


@contextlib.contextmanager
def atomic_file(path: Path, *, flush: bool = True) -> Iterator[BinaryIO]:
    """A binary file that is renamed to `path` if the block succeeds, and removed otherwise.

    It is written next to `path`, flushed to storage, then renamed over it, so that readers see the old file
    or the new one, whatever is interrupted. A killed writer leaves a temporary file, which the next writer
    of the same name removes: the file is locked as long as its writer lives.

    Args:
      flush: whether to wait until the data is on storage; without it a power cut may leave any part of the
        file.

    Raises:
      OSError: the file cannot be written, or `path` is not a regular file (see `require_replaceable`).
    """
    require_replaceable(path)
    with temporary_file(path) as (temporary, file):
        yield file
        file.flush()
        if flush:
            os.fsync(file.fileno())
        # Checked again, because minutes may have passed.
        require_replaceable(path)
        temporary.replace(path)
    if flush:
        sync(path.parent)


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """A new folder that is renamed to `path` if the block succeeds, and removed otherwise.

    As with `atomic_file`, its files are flushed to storage before it is renamed, and the next writer of the
    same name removes leftovers of a killed one.

    Raises:
      OSError: it cannot be written, or `path` exists and is not an empty folder.
    """
    remove_abandoned(path.parent, path.name)
    temporary = _temporary_name(path)
    try:
        temporary.mkdir()
        with _opened(temporary) as number:
            if not _locked_and_there(number):
                raise OSError(errno.EBUSY, "another process writes it now; try again", str(path))
            yield temporary
            for each in temporary.rglob("*"):
                if not each.is_symlink():
                    sync(each)
            os.fsync(number)
            temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync(path.parent)


@contextlib.contextmanager
def temporary_file(path: Path) -> Iterator[tuple[Path, BinaryIO]]:
    """A new temporary binary file next to `path`, removed at the end of the block.

    A leftover of a killed process is removed by the next call with the same name.

    Yields:
      Its path, and the file.

    Raises:
      OSError: it cannot be created.
    """
    remove_abandoned(path.parent, path.name)
    while True:
        # The name is chosen before the file is created, so that after an interrupt at any point it can be
        # removed.
        temporary = _temporary_name(path)
        try:
            with temporary.open("xb") as file:
                if _locked_and_there(file.fileno()):
                    yield temporary, file
                    return
        finally:
            temporary.unlink(missing_ok=True)


def remove_folder(path: Path) -> None:
    """Removes a folder with all that is in it. Its name is free at once; what a killed process left of it is
    removed by the next writer of the same name.

    Raises:
      BlockingIOError: another process has locked it.
      OSError: it is missing, or cannot be removed.
    """
    with _opened(path) as number:
        if _lock(number) is False:
            raise BlockingIOError(errno.EWOULDBLOCK, "a process uses it", str(path))
        temporary = _temporary_name(path)
        path.rename(temporary)
        shutil.rmtree(temporary)
    sync(path.parent)


def require_replaceable(path: Path) -> None:
    """Raises FileExistsError unless `path` is a regular file, or nothing yet.

    A rename would replace a device, a pipe or a link itself, instead of writing to its target.
    """
    if str(path) == "-":
        raise FileExistsError(errno.EEXIST, "it means a pipe, which cannot be replaced; name a file", "-")
    try:
        mode = path.lstat().st_mode
    except OSError:  # Errors of the folder are raised when the file is created.
        return
    if stat.S_ISREG(mode):
        return
    kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "no regular file")
    instead = str(path.resolve()) if stat.S_ISLNK(mode) else "a file"
    raise FileExistsError(errno.EEXIST, f"it is {kind}, which is never replaced; name {instead}", str(path))


def is_there(path: Path) -> bool:
    """Whether a file has this name, including a dangling link.

    Raises:
      OSError: storage refuses.
    """
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def sync(path: Path) -> None:
    """Waits until a file's data, or a folder's entries, are on storage."""
    with _opened(path) as number:
        os.fsync(number)


def remove_abandoned(folder: Path, name: str | None = None) -> None:
    """Removes temporary files of killed writers in a folder; those of living writers stay.

    Args:
      name: name of the written file; None for any, in a folder without other programs' files.
    """
    if fcntl is None:
        return
    written = ".+" if name is None else re.escape(name)
    ours = re.compile(rf"\.{written}{re.escape(_MARK)}[0-9a-f]{{{2 * _RANDOM_BYTES}}}\.tmp")
    with contextlib.suppress(OSError), os.scandir(folder) as found:
        for each in found:
            if not ours.fullmatch(each.name):
                continue
            with contextlib.suppress(OSError), _opened(Path(each.path), os.O_NOFOLLOW) as number:
                if _lock(number):
                    is_folder = stat.S_ISDIR(os.fstat(number).st_mode)
                    shutil.rmtree(each.path, ignore_errors=True) if is_folder else os.unlink(each.path)


def _temporary_name(path: Path) -> Path:
    return path.with_name(f".{path.name}{_MARK}{os.urandom(_RANDOM_BYTES).hex()}.tmp")


@contextlib.contextmanager
def _opened(path: Path, flags: int = 0) -> Iterator[int]:
    """A descriptor of a file or folder, to lock or to flush it."""
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags)
    try:
        yield number
    finally:
        os.close(number)


def _locked_and_there(number: int) -> bool:
    """Locks a new file or folder, and returns whether it still exists: before it was locked, another writer
    of the same name may have removed it as abandoned."""
    return _lock(number) is not False and os.fstat(number).st_nlink > 0


def _lock(number: int) -> bool | None:
    """Locks an open file until it is closed. False if another process has locked it, None without file
    locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
