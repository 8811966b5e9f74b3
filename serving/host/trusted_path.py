"""Checks that no other user can replace a folder or its parents.

    trusted_folder(Path("/home/ann/.cache/jaxllm"))      / home ann .cache jaxllm, and links on the way

A path is stable if every folder on the way, from the root of the file system on, belongs to this user or to
the system, and others may not write to it. In a folder with the sticky bit, such as /tmp, others may write,
but neither rename nor remove files of other users.
"""

import errno
import os
import stat
from pathlib import Path

from jaxllm.errors import ConfigError

_ROOT = Path("/")
_MOST_LINKS = 40


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
