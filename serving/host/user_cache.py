"""Protects the user's cache: its folder, its limit, and a check that no other user wrote its files.

A bundle, a profile or a compiled bucket from the cache is used as if this process had just made it. So
folder and file must belong to this user, and others may not write to them; nor may others be able to
replace the folder: every folder above it is checked, from the root of the file system on, and every link on
the way (`trusted_folder`). In a folder with the sticky bit, such as /tmp, others may write, but neither
rename nor remove files of other users. Checksums, which entries also have, detect damage, but not the
writer.
"""

import contextlib
import errno
import json
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import platformdirs
import xxhash

from jaxllm.errors import ConfigError
from jaxllm.files.atomic import is_there

_BUCKETS_BYTES = 1 << 30
_BUCKETS_VARIABLE = "JAXLLM_BUCKETS_BYTES"
_ROOT = Path("/")
_MOST_LINKS = 40


def cache_folder() -> Path:
    """The folder of prepared models and compiled buckets: $JAXLLM_CACHE, else the platform's cache
    directory."""
    return Path(os.environ.get("JAXLLM_CACHE") or platformdirs.user_cache_dir("jaxllm"))


def device_file(facts: Mapping[str, Any], suffix: str) -> Path:
    """Path of a file of times measured on this device, identified by `facts`, plain data."""
    key = xxhash.xxh3_128_hexdigest(json.dumps(facts, sort_keys=True).encode())
    return cache_folder() / "profiles" / f"device-{key}{suffix}"


def make_private_folder(folder: Path) -> None:
    """Makes a folder in the cache and those above it, if missing, closed to others.

    Raises:
      OSError: it cannot be made.
      ConfigError: see `private_folder`.
    """
    folder = folder.absolute()
    missing = [each for each in (folder, *folder.parents) if not is_there(each)]
    if missing:
        # Before anything is made in a folder of others.
        trusted_folder(missing[-1].parent)
    for each in reversed(missing):
        each.mkdir(mode=0o700, exist_ok=True)
    with private_folder(folder):
        pass


@contextlib.contextmanager
def private_folder(folder: Path) -> Iterator[int]:
    """Opens a folder in the cache, and yields its file descriptor.

    Raises:
      OSError: it is missing.
      ConfigError: others may write to it, or to a folder between it and the cache, or put another one in its
        place; or one between it and the cache is a link.
    """
    folder, root = folder.absolute(), cache_folder().absolute()
    if folder == root or root in folder.parents:
        trusted_folder(root)
        for each in reversed([folder, *(each for each in folder.parents if root in each.parents)]):
            if each != root:
                require_private(os.lstat(each), each)
    else:
        require_private(os.stat(folder), folder)
        trusted_folder(folder)
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        require_private(os.fstat(number), folder)
        yield number
    finally:
        os.close(number)


@contextlib.contextmanager
def private_file(path: Path) -> Iterator[int]:
    """Opens a file in the cache to be read, and yields its file descriptor.

    Raises:
      OSError: it is missing, or a link.
      ConfigError: it is not a regular file, or others may write to it or to its folder.
    """
    with private_folder(path.parent) as folder:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        number = os.open(path.name, flags, dir_fd=folder)
    try:
        require_private(os.fstat(number), path)
        yield number
    finally:
        os.close(number)


def clear_entry(path: Path) -> None:
    """Removes a link, pipe or the like at the path of an entry of a private folder.

    Raises:
      OSError: it is a folder, or cannot be removed.
    """
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(path.lstat().st_mode):
            path.unlink()


def require_private(facts: os.stat_result, path: Path) -> None:
    """Raises ConfigError unless a file or folder is this user's, and no other user may write to it."""
    if not (stat.S_ISREG(facts.st_mode) or stat.S_ISDIR(facts.st_mode)):
        raise ConfigError(f"{path} is not a regular file or folder; remove it")
    if not hasattr(os, "geteuid"):  # Where files have no owners.
        return
    if facts.st_uid != os.geteuid() or facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"{path} is not this user's, or others may write to it, so its content cannot be trusted; "
            "remove it, close it to others (chmod go-w), or set JAXLLM_CACHE to a folder of your own"
        )


def buckets_bytes() -> int:
    """Size limit of the cache of compiled buckets: $JAXLLM_BUCKETS_BYTES, else 1 GiB (0 on systems whose
    files have no owners).

    Raises:
      ConfigError: the variable is not a number of bytes.
    """
    text = os.environ.get(_BUCKETS_VARIABLE, "")
    if not text:
        return _BUCKETS_BYTES if hasattr(os, "geteuid") else 0
    if not text.isdecimal():
        raise ConfigError(f"{_BUCKETS_VARIABLE} must be a number of bytes (0: keep none), got {text!r:.80}")
    return int(text)


def trusted_folder(folder: Path) -> Path:
    """Resolves a path to a folder, and checks each folder and each link on the way.

    Returns:
      The folder's path without links.

    Raises:
      OSError: it is missing, or not a folder.
      ConfigError: another user could replace it by another folder.
    """
    if not hasattr(os, "geteuid"):  # Where files have no owners.
        return folder.absolute()
    place, links = _ROOT, 0
    owners = {0, os.geteuid(), os.lstat(place).st_uid}
    todo = [*reversed(folder.absolute().parts[1:])]
    _require_closed(os.lstat(place), place, owners)
    while todo:
        name = todo.pop()
        if name == "..":
            place = place.parent
            continue
        facts = os.lstat(place / name)
        if stat.S_ISLNK(facts.st_mode):
            links += 1
            if links > _MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(folder))
            if facts.st_uid not in owners:
                raise _untrusted(place / name, "a link of another user")
            target = Path(os.readlink(place / name))
            place = _ROOT if target.is_absolute() else place
            todo += reversed(target.parts[1:] if target.is_absolute() else target.parts)
            continue
        place /= name
        if not stat.S_ISDIR(facts.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(place))
        _require_closed(facts, place, owners)
    return place


def others_write(facts: os.stat_result) -> bool:
    """Whether users other than a folder's owner may write to it. Groups of a single user, which many
    systems make for each user, do not count."""
    if facts.st_mode & stat.S_IWOTH:
        return True
    return bool(facts.st_mode & stat.S_IWGRP) and not _is_group_of_one(facts.st_gid, facts.st_uid)


def _require_closed(facts: os.stat_result, path: Path, owners: set[int]) -> None:
    if facts.st_uid not in owners:
        raise _untrusted(path, "another user's folder")
    if others_write(facts) and not facts.st_mode & stat.S_ISVTX:
        raise _untrusted(path, "a folder that others may write to")


def _is_group_of_one(group: int, user: int) -> bool:
    import grp
    import pwd

    try:
        found, owner = grp.getgrgid(group), pwd.getpwuid(user)
    except KeyError:
        return False
    return owner.pw_gid == group and found.gr_name == owner.pw_name and set(found.gr_mem) <= {owner.pw_name}


def _untrusted(path: Path, what: str) -> ConfigError:
    return ConfigError(
        f"{path} is {what}, so what is in it could be replaced; close it to others (chmod go-w), or choose a "
        "folder that only you can write to, below folders that only you and root can (for the cache: set "
        "JAXLLM_CACHE)"
    )
