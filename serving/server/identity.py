"""Identifies the app that calls: by the process behind a Unix socket, or by an API key over HTTP.

    identity = Identity(KeyFile(default_keys_file()))
    app = identity.identify(scope)      # raises ApiError

Over a Unix socket the kernel identifies the process, and keys are neither needed nor checked: ordinary
clients always send one. Over HTTP a key is needed as soon as the key file exists; until then callers on the
loopback are the app `local`, and others are refused.

A key is 32 random bytes, shown once and stored as a plain SHA-256, safe against guessing and search. A
running service sees changes of the key file at its next request.
"""

import contextlib
import dataclasses
import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import platformdirs

from jaxllm.errors import ConfigError, JaxllmError
from jaxllm.files.atomic import atomic_file
from jaxllm.options import check_options
from jaxllm.serving.server.sockets import is_loopback, peer_of, require_name

_log = logging.getLogger(__name__)
_VERSION, _PREFIX, _RANDOM_BYTES, _ID_BYTES = 1, "jaxllm-", 32, 4
_MOST_BYTES, _MOST_KEYS = 1 << 20, 4096
_ID, _DIGEST = re.compile(r"[0-9a-f]{8}"), re.compile(r"[0-9a-f]{64}")
# Longer ones are never keys, and not worth hashing.
_MOST_KEY_CHARACTERS = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredKey:
    """The stored facts of a key.

    Attributes:
      id: name of the key in lists; not part of it.
      app: app of the key.
      sha256: hex digest of the key.
      created_s: creation time in seconds since 1970.
      operator: whether it may read metrics and the dashboard's events of all apps, and change adapters,
        which all apps share. Older files have no operators.
    """

    id: str
    app: str
    sha256: str
    created_s: int
    operator: bool = False

    def __post_init__(self) -> None:
        check_options(self)
        require_name(self.app)
        if not _ID.fullmatch(self.id) or not _DIGEST.fullmatch(self.sha256):
            raise ConfigError("a key has a malformed id or digest")


def default_keys_file() -> Path:
    """The key file: $JAXLLM_KEYS, else `keys.json` in the platform's config folder."""
    return Path(os.environ.get("JAXLLM_KEYS") or platformdirs.user_config_path("jaxllm") / "keys.json")


def digest(key: str) -> str:
    """The stored digest of a key."""
    return hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()


class KeyFile:
    """The key file, reloaded whenever it has changed.

    Once the file has existed, keys are needed, even if it is empty (the last key was removed) or is deleted
    while the service runs: an empty list refuses everyone.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: tuple[int, ...] | None = None
        self._keys: tuple[StoredKey, ...] = ()
        self._was_there = False

    def needed(self) -> bool:
        """Whether callers over HTTP need a key. Raises ConfigError (see `read_keys`)."""
        self._refresh()
        return self._was_there

    def find(self, key: str) -> StoredKey | None:
        """The stored facts of a key; None for an unknown one. Takes constant time. Raises ConfigError (see
        `read_keys`)."""
        self._refresh()
        given = digest(key[:_MOST_KEY_CHARACTERS])
        found = None
        for each in self._keys:
            # No early exit: the time would reveal the key's place.
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
            raise ConfigError(f"{self.path}: the API keys cannot be read ({error.strerror})") from error
        self._was_there = True
        now = (facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)
        if now != self._seen:
            self._keys = read_keys(self.path)
            # Set only now: an unreadable file is tried and refused again at each request.
            self._seen = now


def read_keys(path: Path) -> tuple[StoredKey, ...]:
    """The keys in a file, oldest first; none if it is missing. Raises ConfigError if it is not a key file, or
    users other than its owner may read or write it."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        with open(os.open(path, flags), "rb") as file:
            facts, text = os.fstat(file.fileno()), file.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise ConfigError(f"{path}: the file of API keys cannot be read ({error.strerror})") from error
    if not stat.S_ISREG(facts.st_mode):
        raise ConfigError(f"{path} is not a regular file, which a file of API keys must be")
    if facts.st_uid not in (os.geteuid(), 0) or facts.st_mode & 0o077:
        raise ConfigError(
            f"{path} can be read or written by others (mode {stat.S_IMODE(facts.st_mode):03o}), or is not "
            "this user's; make it so and close it (chmod 600)"
        )
    try:
        if len(text) > _MOST_BYTES:
            raise ValueError("it is too large")
        facts = json.loads(text)
        if not isinstance(facts, dict) or facts.keys() != {"version", "keys"} or facts["version"] != _VERSION:
            raise ValueError(f"it must be an object with version {_VERSION} and keys")
        if not isinstance(facts["keys"], list) or len(facts["keys"]) > _MOST_KEYS:
            raise ValueError("its keys are no list, or too many")
        return tuple(StoredKey(**each) for each in facts["keys"])
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"{path} is not a file of API keys ({error!s:.120}); restore it, or remove it and make new keys"
        ) from error


def add_key(path: Path, app: str, *, operator: bool = False) -> tuple[str, StoredKey]:
    """Makes a key of an app. Raises ConfigError if the app's name is invalid, there are too many keys, or the
    file cannot be used.

    Returns:
      The key, which is not stored, and its stored facts.
    """
    require_name(app)
    key = _PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)
    with _changing(path) as keys:
        if len(keys) >= _MOST_KEYS:
            raise ConfigError(f"{path} has {len(keys)} keys of at most {_MOST_KEYS}; remove some first")
        ids = iter(lambda: secrets.token_hex(_ID_BYTES), "")
        name = next(each for each in ids if each not in {key.id for key in keys})
        now_s = int(time.time())
        stored = StoredKey(id=name, app=app, sha256=digest(key), created_s=now_s, operator=operator)
        keys.append(stored)
    return key, stored


def remove_keys(path: Path, which: str) -> tuple[StoredKey, ...]:
    """Removes a key by its id, or all keys of an app. Raises ConfigError if there is no such key or app, or
    the file cannot be used.

    Returns:
      The facts of removed keys.
    """
    with _changing(path) as keys:
        # Ids have precedence over apps of the same name.
        gone = [each for each in keys if each.id == which] or [each for each in keys if each.app == which]
        if not gone:
            raise ConfigError(f"{path} has no key {which!r:.80} and no such app; see `jaxllm keys list`")
        keys[:] = [each for each in keys if each not in gone]
    return tuple(gone)


@contextlib.contextmanager
def _changing(path: Path) -> Iterator[list[StoredKey]]:
    """Yields the mutable list of a file's keys, and writes it if the block succeeds; locks others out."""
    import fcntl

    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            keys = list(read_keys(path))
            yield keys
            facts = {"version": _VERSION, "keys": [dataclasses.asdict(each) for each in keys]}
            with atomic_file(path) as file:
                os.fchmod(file.fileno(), 0o600)
                file.write(json.dumps(facts, indent=1).encode() + b"\n")
        finally:
            os.close(folder)
    except OSError as error:
        raise ConfigError(f"{path}: the file of API keys cannot be written ({error.strerror})") from error


# Scope entries of an identified app; clients cannot set them.
_APP, _OPERATOR = "jaxllm.app", "jaxllm.operator"


def identified_app(scope: Mapping[str, Any]) -> str:
    """The app of an identified request; empty if it was not identified."""
    return scope.get(_APP, "")


def is_operator(scope: Mapping[str, Any]) -> bool:
    """Whether an identified request may watch the service with all of its apps, and change what they share:
    root and the service's user over the Unix socket, an operator's key over HTTP, and any caller on the
    loopback if no keys are needed."""
    return scope.get(_OPERATOR, False)


class Identity:
    """Identifies the app of a request. For the event loop's thread.

    Attributes:
      keys: keys of apps; None to never use keys.
      remote: whether to serve other machines. Requires keys.
    """

    def __init__(self, keys: KeyFile | None = None, *, remote: bool = False, own_key: str = "") -> None:
        """See the class; `own_key` is a key of the app `local`, an operator, besides those of `keys`."""
        self.keys, self.remote = keys, remote
        self._own = digest(own_key) if own_key else ""

    @property
    def needs_key(self) -> bool:
        """Whether callers over HTTP need a key. Raises ConfigError (see `read_keys`)."""
        return bool(self._own) or (self.keys is not None and self.keys.needed())

    def require_address(self, host: str) -> None:
        """Checks an address that the service is about to listen on. Raises ConfigError if other machines
        could reach it without `remote`, or there are no keys."""
        if is_loopback(host):
            return
        if not self.remote:
            raise ConfigError(
                f"{host!r:.80} is not a loopback address, so other machines could reach the service; use "
                "127.0.0.1, or set remote = true in the file of options (--config)"
            )
        if not self.needs_key:
            raise ConfigError(
                f"{host!r:.80} can be reached by other machines, and there are no API keys; make one with "
                "`jaxllm keys add APP`, or give one (--api-key, $JAXLLM_API_KEY)"
            )

    def identify(self, scope: MutableMapping[str, Any]) -> str:
        """The app of a request, which it adds to the scope (see also `is_operator`). Raises ApiError if the
        request has no key, or an unknown one (401). The server must run
        `jaxllm.serving.server.sockets.protocol`."""
        if not identified_app(scope):
            scope[_APP], scope[_OPERATOR] = self._found(scope)
        return scope[_APP]

    def _found(self, scope: Mapping[str, Any]) -> tuple[str, bool]:
        """The app of a request, and whether it is an operator's."""
        peer = peer_of(scope)
        if peer is not None and peer.app:
            own = peer.credentials is not None and peer.credentials.uid in (0, os.geteuid())
            return peer.app, own
        try:
            if not self.needs_key:
                if peer is not None and is_loopback(peer.address):
                    return "local", True
                message = "other machines may not call this service without an API key, and it has none"
                raise _unknown(message, "unknown_peer")
            if not (key := _key(scope)):
                message = "an API key is missing; send it as `Authorization: Bearer KEY`"
                raise _unknown(message, "missing_api_key")
            if self._own and hmac.compare_digest(digest(key[:_MOST_KEY_CHARACTERS]), self._own):
                return "local", True
            stored = None if self.keys is None else self.keys.find(key)
        except ConfigError as error:
            # Do not reveal errors of the file to callers.
            _log.error("API keys cannot be checked: %s", error)
            raise _unknown("API keys cannot be checked now; see the service's log") from error
        if stored is None:
            raise _unknown("the API key is not valid; make one with `jaxllm keys add APP`")
        return stored.app, stored.operator


def _unknown(message: str, code: str = "invalid_api_key") -> JaxllmError:
    # Imported here: `jaxllm keys` runs without the packages of the service.
    from jaxllm.serving.server.api.errors import ApiError

    return ApiError(message, status=401, code=code)


def _key(scope: Mapping[str, Any]) -> str:
    """The key in a request's headers; empty for none, or if several differ."""
    found = set()
    for name, value in scope.get("headers") or ():
        if name in (b"x-api-key", b"api-key"):
            found.add(value.strip())
        elif name == b"authorization":
            scheme, _, rest = value.strip().partition(b" ")
            if scheme.lower() == b"bearer":
                found.add(rest.strip())
    return found.pop().decode("latin-1") if len(found) == 1 else ""
