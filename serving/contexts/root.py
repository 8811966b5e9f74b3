"""Lays out the folder of a store: its mark, the names of apps and contexts, and the quarantine.

    ROOT/store.json                      marks the folder as a store: format and version
    ROOT/app-QUOTED/0123456789abcdef/    a context: its `record` and the one before, and segments `N.kv`
    ROOT/quarantine/app-QUOTED/...       damaged files as they were found, until the user deletes them

Files of other names and symbolic links belong to others: they are neither read nor removed.
"""

import contextlib
import dataclasses
import errno
import json
import os
import re
import secrets
import stat
import urllib.parse
from collections.abc import Iterable, Iterator
from pathlib import Path

from jaxllm.errors import BudgetExceeded, CheckpointError, ConfigError, Unreadable
from jaxllm.files.atomic import atomic_file, sync
from serving.contexts.segment import MAGIC, SUFFIX

VERSION = 2
MARK = "store.json"
LOCK = "lock"
QUARANTINE = "quarantine"
RECORD, PREVIOUS = "record", "record.previous"
# The first bytes of `record` and `record.previous`.
RECORD_HEAD = b'{"version":'
LONGEST_APP = 200
_FORMAT = "jaxllm contexts"
_APP = "app-"
_MOST_MARK_BYTES = 1 << 12
_CONTEXT = re.compile(r"[0-9a-f]{16}")
SEGMENT = re.compile(r"(0|[1-9][0-9]{0,8})\.kv")
# Temporary files that a killed writer of one of the store's files leaves.
_UNFINISHED = re.compile(r"\.(record|\d+\.kv|store\.json)\.(jaxllm-)?[0-9a-f]{12}\.tmp")


@dataclasses.dataclass(frozen=True)
class ContextFolder:
    """A context's folder, or another kind of file in its place.

    Attributes:
      path: of the folder.
      app: that owns it.
      name: of the context; empty where the folder of the app cannot be listed.
      problem: why nothing in it can be used; None where it can be.
    """

    path: Path
    app: str
    name: str = ""
    problem: CheckpointError | None = None


def folder_name(app: str) -> str:
    """The name of an app's folder, whatever characters the app's name has; never one of the store's own
    names, nor `.` or `..`.

    Raises:
      ConfigError: the app's name is empty, too long, or not valid text.
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


def require_store(root: Path) -> bool:
    """Checks that a folder is a store, or may become one (it is missing or empty); changes nothing.

    Returns:
      Whether it is marked as a store already.

    Raises:
      ConfigError: it is neither, or a store of another version.
    """
    try:
        with os.scandir(root) as found:
            names = sorted(each.name for each in found)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise ConfigError(f"{root}: cannot be a store of contexts ({error.strerror})") from error
    if MARK in names:
        _require_mark(root / MARK)
        return True
    others = [name for name in names if name != LOCK and not _UNFINISHED.fullmatch(name)]
    if others:
        raise ConfigError(
            f"{root} is not a store of contexts, and not empty (it has {others[0]!a:.80}): use an empty "
            f"folder, or, if it is a store whose {MARK} was lost, write {_mark()} into {MARK} there"
        )
    return False


def mark(root: Path) -> None:
    """Marks a folder as a store.

    Raises:
      OSError: it cannot be written.
    """
    with atomic_file(root / MARK) as file:
        file.write(_mark().encode())


def context_folders(root: Path) -> Iterator[ContextFolder]:
    """All entries that have the name of a context's folder, app by app."""
    for app_folder in _entries(root):
        app = urllib.parse.unquote(app_folder.name.removeprefix(_APP))
        if not _is_app_folder(app_folder.name, app):
            continue
        path = Path(app_folder.path)
        try:
            if not app_folder.is_dir(follow_symlinks=False):
                yield ContextFolder(path, app, problem=_foreign(path))
                continue
            entries = _entries(path)
        except OSError as error:
            yield ContextFolder(path, app, problem=not_read(path, error))
            continue
        for each in entries:
            if is_name(each.name):
                real = each.is_dir(follow_symlinks=False)
                problem = None if real else _foreign(Path(each.path))
                yield ContextFolder(Path(each.path), app, each.name, problem)


def read_bytes(path: Path, most: int) -> bytes:
    """The content of one of the store's files.

    Raises:
      FileNotFoundError: the file is missing.
      CheckpointError: it is not a regular file, or has more than `most` bytes.
      Unreadable: storage refuses.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise CheckpointError(f"{path} is not a regular file, and no store makes it")
        with open(path, "rb", opener=lambda each, _: os.open(each, flags)) as file:
            content = file.read(most + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise not_read(path, error) from error
    if len(content) > most:
        raise CheckpointError(f"{path} has more than {most:,} bytes: it is not a file of a store")
    return content


def is_unfinished(name: str, of: str) -> bool:
    """Whether a name is that of a temporary file that a killed writer of the file `of` leaves."""
    found = _UNFINISHED.fullmatch(name)
    return bool(found) and found[1] == of


def set_aside(root: Path, path: Path, *, keep: bool = False) -> Path:
    """Moves a folder of a context, or a file in one, into the quarantine, unchanged.

    Args:
      root: the store's folder.
      path: in it.
      keep: link a file there and keep it in place, where the file system has hard links.

    Returns:
      Its new path.

    Raises:
      OSError: it cannot be moved.
    """
    app, name, *inside = path.relative_to(root).parts
    _require_folders(root, (app, name)[: 2 if inside else 1])
    parent = root / QUARANTINE / app
    for folder in (parent.parent, parent):
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
    _require_folders(root, (QUARANTINE, app))
    place = parent / f"{name}-{secrets.token_hex(4)}"
    if inside:
        place.mkdir(mode=0o700)
        place = place / inside[0]
    if not (keep and _linked(path, place)):
        os.rename(path, place)
    for folder in (path.parent, place.parent):
        sync(folder)
    return place


def quarantined(root: Path) -> list[Path]:
    """Paths in the quarantine."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        _require_folders(root, (QUARANTINE,))
        apps = [Path(each.path) for each in _entries(root / QUARANTINE) if each.is_dir(follow_symlinks=False)]
        return [Path(each.path) for app in apps for each in _entries(app)]
    return []


def delete_quarantined(root: Path) -> list[Path]:
    """Empties the quarantine: removes files that have the store's names, and folders that are empty then.

    Returns:
      Paths that were not removed, because they have other names.
    """
    for path in quarantined(root):
        remove_own(path, foreign=True)
        with contextlib.suppress(OSError):
            path.parent.rmdir()
    with contextlib.suppress(OSError):
        (root / QUARANTINE).rmdir()
    return quarantined(root)


def remove_own(folder: Path, *, keep: frozenset[str] | set[str] = frozenset(), foreign: bool = False) -> bool:
    """Removes the store's own files from a context's folder, and the folder if that leaves it empty.

    Args:
      folder: of the context.
      keep: files that stay.
      foreign: also remove links and files of foreign content that have the name of one of the store's files.

    Returns:
      Whether the folder is gone.
    """
    if not stat.S_ISDIR(os.lstat(folder).st_mode):
        return False
    for each in _entries(folder):
        if each.name not in keep and (is_own(Path(each.path)) or (foreign and _has_own_name(each.name))):
            with contextlib.suppress(FileNotFoundError, IsADirectoryError, PermissionError):
                os.unlink(each.path)
    if keep:
        return False
    try:
        folder.rmdir()
    except OSError:
        return False
    return True


def next_segment(names: Iterable[str]) -> str:
    """A segment name above all others, so that a name that a reader may have open is never used again."""
    numbers = [int(each.removesuffix(SUFFIX)) for each in names if SEGMENT.fullmatch(each)]
    return f"{1 + max(numbers, default=-1)}{SUFFIX}"


def file_size(path: Path) -> int:
    """Bytes of a file; 0 where it is missing."""
    try:
        return os.lstat(path).st_size
    except OSError:
        return 0


def is_shared(path: Path) -> bool:
    """Whether a file has other names, too: its bytes stay when one of them is removed."""
    try:
        return os.lstat(path).st_nlink > 1
    except OSError:
        return False


def folder_bytes(folders: Iterable[Path]) -> int:
    """Bytes of all files in some folders; a file with several names counts once."""
    sizes: dict[tuple[int, int], int] = {}
    for folder in folders:
        with contextlib.suppress(OSError):
            for each in _entries(folder):
                with contextlib.suppress(OSError):
                    found = os.lstat(each.path)
                    sizes[found.st_dev, found.st_ino] = found.st_size
    return sum(sizes.values())


def is_own(path: Path) -> bool:
    """Whether a file has a name that a store gives, and begins with the bytes that it writes there."""
    if not _has_own_name(path.name):
        return False
    of_segment = path.name.endswith(SUFFIX) or f"{SUFFIX}." in path.name
    head = MAGIC if of_segment else RECORD_HEAD
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            return False
        with open(path, "rb", opener=lambda each, _: os.open(each, flags)) as file:
            content = file.read(len(head))
    except OSError:
        return False
    # A temporary file may end anywhere.
    return head.startswith(content) if path.name.endswith(".tmp") else content == head


@contextlib.contextmanager
def written(folder: Path) -> Iterator[None]:
    """Turns an OSError of writing or listing a context's folder into a JaxllmError.

    Raises:
      BudgetExceeded: the device has no room.
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
    return name in (RECORD, PREVIOUS) or bool(SEGMENT.fullmatch(name) or _UNFINISHED.fullmatch(name))


def _linked(path: Path, place: Path) -> bool:
    """Links a file to another name; False where the file system has no hard links."""
    try:
        os.link(path, place)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        return False
    return True


def _foreign(path: Path) -> CheckpointError:
    return Unreadable(
        f"{path} is a link or another kind of file, and no store makes it: nothing of it is read"
    )


def _entries(folder: Path) -> list[os.DirEntry]:
    with os.scandir(folder) as found:
        return sorted(found, key=lambda each: each.name)


def _is_app_folder(name: str, app: str) -> bool:
    try:
        return name.startswith(_APP) and folder_name(app) == name
    except ConfigError:
        return False


def _require_folders(root: Path, names: tuple[str, ...]) -> None:
    """Raises NotADirectoryError unless all of these nested folders are real ones, not links."""
    folder = root
    for name in names:
        folder = folder / name
        if not stat.S_ISDIR(os.lstat(folder).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, "it is not a folder", str(folder))


def _mark() -> str:
    return json.dumps({"format": _FORMAT, "version": VERSION})


def _require_mark(path: Path) -> None:
    try:
        facts = json.loads(read_bytes(path, _MOST_MARK_BYTES))
    except CheckpointError as error:
        raise ConfigError(f"{error}; it has to say that {path.parent} is a store of contexts") from error
    except (ValueError, RecursionError):
        facts = None
    facts = facts if isinstance(facts, dict) else {}
    version = facts.get("version")
    if type(version) is not int or facts.get("format", _FORMAT) != _FORMAT:
        raise ConfigError(
            f"{path} does not mark a store of contexts; use another folder, or, if this one is a store whose "
            f"{MARK} was damaged, write {_mark()} into it"
        )
    if version != VERSION or "format" not in facts:
        raise ConfigError(
            f"{path.parent} is a store of version {version!s:.20}, this jaxllm uses {VERSION}; use the "
            "jaxllm that made it, or another folder"
        )
