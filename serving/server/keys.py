"""Keeps the API keys of apps: random, shown once, stored as digests in a file of the owner's alone.

A key is 32 random bytes, so that a plain SHA-256 of it can be neither guessed nor searched for. A running
service sees changes of the file at its next request.
"""

import contextlib
import dataclasses
import hashlib
import hmac
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import platformdirs

from jaxllm.errors import ConfigError
from jaxllm.files.atomic import atomic_file
from serving.server.peer import require_app

_VERSION = 1
_PREFIX = "jaxllm-"
_RANDOM_BYTES = 32
_ID_BYTES = 4
_MOST_BYTES = 1 << 20
_MOST_KEYS = 4096
_ID = re.compile(r"[0-9a-f]{8}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
# Longer ones are no keys, and not worth hashing.
_MOST_KEY_CHARACTERS = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredKey:
    """What is stored of a key.

    Attributes:
      id: names the key in lists; not part of it.
      app: that the key stands for.
      sha256: of the key, in hex.
      created_s: in seconds since 1970.
      operator: whether it may watch the service, metrics and the dashboard's events of all apps, and change
        what all have: its adapters.
    """

    id: str
    app: str
    sha256: str
    created_s: int
    operator: bool = False


def default_keys_file() -> Path:
    """The file of keys: $JAXLLM_KEYS, else `keys.json` in the platform's config folder."""
    return Path(os.environ.get("JAXLLM_KEYS") or platformdirs.user_config_path("jaxllm") / "keys.json")


def digest(key: str) -> str:
    """The digest of a key, as it is stored."""
    return hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()


class KeyFile:
    """The file of keys, read again whenever it has changed.

    Once a file is there, keys are needed, even where it has none (the last was removed) or where the file
    vanishes while it is watched: an empty list shuts, it never opens.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: tuple[int, ...] | None = None
        self._keys: tuple[StoredKey, ...] = ()
        self._was_there = False

    def needed(self) -> bool:
        """Whether callers over HTTP need a key.

        Raises:
          ConfigError: see `read_keys`.
        """
        self._refresh()
        return self._was_there

    def find(self, key: str) -> StoredKey | None:
        """What is stored of a key; None for an unknown one. Takes as long for one key as for another.

        Raises:
          ConfigError: see `read_keys`.
        """
        self._refresh()
        given = digest(key[:_MOST_KEY_CHARACTERS])
        found = None
        for each in self._keys:
            # No early end: the time would tell of the key's place.
            if hmac.compare_digest(each.sha256, given):
                found = each
        return found if len(key) <= _MOST_KEY_CHARACTERS else None

    def _refresh(self) -> None:
        try:
            facts = os.stat(self.path)
        except FileNotFoundError:
            self._seen, self._keys = None, ()
            return
        except OSError as error:
            raise _not_read(self.path, error) from error
        self._was_there = True
        now = (facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)
        if now != self._seen:
            self._keys = read_keys(self.path)
            # Not before: a file that cannot be read is tried again, and refused again, at each request.
            self._seen = now


def read_keys(path: Path) -> tuple[StoredKey, ...]:
    """The keys in a file, oldest first; none where it is missing.

    Raises:
      ConfigError: it is not a file of keys, or others than its owner may read or write it.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        with open(os.open(path, flags), "rb") as file:
            _require_private(os.fstat(file.fileno()), path)
            text = file.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise _not_read(path, error) from error
    try:
        if len(text) > _MOST_BYTES:
            raise ValueError("it is too large")
        return _checked(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} is not a file of API keys ({error!s:.120}); restore it, or remove it and make new keys"
        ) from error


def add_key(path: Path, app: str, *, operator: bool = False) -> tuple[str, StoredKey]:
    """Makes a key of an app.

    Args:
      path: the file of keys, made with its folder if missing.
      app: its name.
      operator: see `StoredKey`.

    Returns:
      The key, which is nowhere stored, and what is.

    Raises:
      ConfigError: the app's name is not valid, there are too many keys, or the file cannot be used.
    """
    require_app(app)
    key = _PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)
    with _changing(path) as keys:
        if len(keys) >= _MOST_KEYS:
            raise ConfigError(f"{path} has {len(keys)} keys of at most {_MOST_KEYS}; remove some first")
        taken = {each.id for each in keys}
        ids = iter(lambda: secrets.token_hex(_ID_BYTES), "")
        name = next(each for each in ids if each not in taken)
        stored = StoredKey(
            id=name, app=app, sha256=digest(key), created_s=int(time.time()), operator=operator
        )
        keys.append(stored)
    return key, stored


def remove_keys(path: Path, which: str) -> tuple[StoredKey, ...]:
    """Removes a key by its id, or all keys of an app.

    Returns:
      What was removed.

    Raises:
      ConfigError: there is no such key or app, or the file cannot be used.
    """
    with _changing(path) as keys:
        # An id goes before an app of that name.
        gone = [each for each in keys if each.id == which] or [each for each in keys if each.app == which]
        if not gone:
            raise ConfigError(
                f"{path} has no key {which!r:.80} and none of such an app; see `jaxllm keys list`"
            )
        keys[:] = [each for each in keys if each not in gone]
    return tuple(gone)


@contextlib.contextmanager
def _changing(path: Path) -> Iterator[list[StoredKey]]:
    """Yields the keys in a file to be changed, and writes them if the block ends well; for one process at a
    time.

    Raises:
      ConfigError: the file cannot be read or written.
    """
    import fcntl

    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            keys = list(read_keys(path))
            yield keys
            _write(path, keys)
        finally:
            os.close(folder)
    except OSError as error:
        raise ConfigError(f"{path}: the file of API keys cannot be written ({error.strerror})") from error


def _write(path: Path, keys: Sequence[StoredKey]) -> None:
    facts = {"version": _VERSION, "keys": [dataclasses.asdict(each) for each in keys]}
    with atomic_file(path) as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(json.dumps(facts, indent=1).encode() + b"\n")


def _checked(facts: Any) -> tuple[StoredKey, ...]:
    if not isinstance(facts, dict) or facts.keys() != {"version", "keys"} or facts["version"] != _VERSION:
        raise ValueError(f"it must be an object with version {_VERSION} and keys")
    if not isinstance(facts["keys"], list) or len(facts["keys"]) > _MOST_KEYS:
        raise ValueError("its keys are no list, or too many")
    names = {field.name for field in dataclasses.fields(StoredKey)}
    for each in facts["keys"]:
        # Files of before there were operators have none.
        if not isinstance(each, dict) or each.keys() | {"operator"} != names:
            raise ValueError("a key has other fields")
        if type(each.get("operator", False)) is not bool:
            raise ValueError("a key has a malformed operator")
        require_app(each["app"])
        if not _matches(_ID, each["id"]) or not _matches(_DIGEST, each["sha256"]):
            raise ValueError("a key has a malformed id or digest")
        if type(each["created_s"]) is not int:
            raise ValueError("a key has a malformed time")
    return tuple(StoredKey(**each) for each in facts["keys"])


def _matches(pattern: re.Pattern[str], value: object) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def _require_private(facts: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(facts.st_mode):
        raise ConfigError(f"{path} is not a regular file; API keys are kept in one")
    if facts.st_uid not in (os.geteuid(), 0) or facts.st_mode & 0o077:
        raise ConfigError(
            f"{path} can be read or written by others (mode {stat.S_IMODE(facts.st_mode):03o}), or is not "
            "this user's; make it so and close it (chmod 600)"
        )


def _not_read(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{path}: the file of API keys cannot be read ({error.strerror})")
