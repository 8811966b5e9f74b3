"""What this user keeps between runs: where, how much of it, and that nobody else wrote it.

A bundle, a profile or an executable from the cache is used as if this process had just made it. So each is
taken only from a folder that belongs to this user and that others may not write to, and so must the file
itself. Checksums, which entries have besides, tell damage: they cannot tell who wrote them.
"""

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import platformdirs

from jaxllm.errors import ConfigError

_EXECUTABLES_BYTES = 1 << 30
_EXECUTABLES_VARIABLE = "JAXLLM_EXECUTABLES_BYTES"


def cache_folder() -> Path:
    """Where prepared folders and compiled graphs are kept: $JAXLLM_CACHE, else the platform's cache
    directory."""
    return Path(os.environ.get("JAXLLM_CACHE") or platformdirs.user_cache_dir("jaxllm"))


def make_private_folder(folder: Path) -> None:
    """Makes a folder in the cache if it is missing, closed to others, and those above it.

    Raises:
      OSError: it cannot be made.
      ConfigError: it, or a folder between it and the cache, is not this user's alone.
    """
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(mode=0o700, exist_ok=True)
    with private_folder(folder):
        pass


@contextlib.contextmanager
def private_folder(folder: Path) -> Iterator[int]:
    """The number of an open folder in the cache.

    Raises:
      OSError: there is none.
      ConfigError: it, or a folder between it and the cache, is not this user's alone.
    """
    for each in _within_cache(folder):
        require_private(each.stat(), each)
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        require_private(os.fstat(number), folder)
        yield number
    finally:
        os.close(number)


@contextlib.contextmanager
def private_file(path: Path) -> Iterator[int]:
    """The number of a file in the cache that is open for reading.

    Raises:
      OSError: there is none, or it is a link.
      ConfigError: it is no regular file, or it or its folder is not this user's alone.
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
    """Removes what stands at the name of an entry of a private folder and cannot be one: a link, a pipe.

    Raises:
      OSError: it is a folder, or cannot be removed.
    """
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(path.lstat().st_mode):
            path.unlink()


def require_private(facts: os.stat_result, path: Path) -> None:
    """Raises ConfigError unless a file or folder is this user's, and nobody else may write to it."""
    if not (stat.S_ISREG(facts.st_mode) or stat.S_ISDIR(facts.st_mode)):
        raise ConfigError(f"{path} is no regular file; remove it")
    if not _ours_alone(facts):
        raise ConfigError(
            f"{path} is not this user's, or others may write to it, so anybody could have made it; "
            "remove it, close it to others (chmod go-w), or set JAXLLM_CACHE to a folder of your own"
        )


def executables_bytes() -> int:
    """Most bytes of compiled graphs to keep: $JAXLLM_EXECUTABLES_BYTES, else 1 GiB (none where files have no
    owners).

    Raises:
      ConfigError: the variable is no size.
    """
    text = os.environ.get(_EXECUTABLES_VARIABLE, "")
    if not text:
        return _EXECUTABLES_BYTES if hasattr(os, "geteuid") else 0
    if not text.isdecimal():
        raise ConfigError(
            f"{_EXECUTABLES_VARIABLE} must be a number of bytes (0: keep none), got {text!r:.80}"
        )
    return int(text)


def _ours_alone(facts: os.stat_result) -> bool:
    if not hasattr(os, "geteuid"):  # Where files have no owners.
        return True
    return facts.st_uid == os.geteuid() and not facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _within_cache(folder: Path) -> list[Path]:
    """The folders between the cache and this one; none for one that is elsewhere."""
    root = cache_folder()
    return [each for each in folder.parents if root in each.parents]
