"""Encrypts stored contexts with a key per app; erasing the key makes all copies unreadable.

    vault = Vault(Path("/var/lib/jaxllm/keys"), store_folder)     a folder (0700) with a file per app (0600)
    seal = vault.new_seal(app_folder)                             writes a record or a segment
    text, seal = vault.opened_head(app_folder, content, name)     reads one

Every record and segment has a random salt, from which a key of the file is derived with the app's key
(HMAC-SHA256): so its parts can be numbered without repeating a nonce. Parts are encrypted and authenticated
by AES-256-GCM, blob by blob, so that a chunk is still read by its offset.

    KEYS/sealed           marks that unencrypted files and older records are refused
    KEYS/newest.sqlite    the use of each context's newest record (`Vault`)

An attacker who can write to a store, without a key, can put data there: plain, or encrypted earlier. A
record has an increasing use number, and authenticates it; the ledger has the expected number. A record is
written before its number, so that a kill leaves one that is newer than the ledger's, which is accepted. A
new context is entered first: one that is missing in the ledger was deleted, or made elsewhere.
"""

import contextlib
import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path
from typing import Any

from jaxllm.errors import CheckpointError, ConfigError, Unreadable
from jaxllm.files.atomic import atomic_file, is_there, sync, temporary_file
from jaxllm.serving.contexts.layout import Database
from jaxllm.serving.host.user_cache import trusted_folder

_SALT_BYTES = TAG_BYTES = 16
_ID_DIGITS = 16
# Bytes that encryption adds to the first part of a file (see `Seal.head`).
HEAD_BYTES = _ID_DIGITS + _SALT_BYTES + TAG_BYTES
_KEY_BYTES = 32
_NONCE_BYTES = 12
_SUFFIX = ".key"
_SEALED, _NEWEST = "sealed", "newest.sqlite"
_LEDGER_KIND, _LEDGER_VERSION = 0x4A584C44, 1
_SCHEMA = """
CREATE TABLE newest (app TEXT NOT NULL, name TEXT NOT NULL, used INTEGER NOT NULL, PRIMARY KEY (app, name));
"""


class KeyErased(Unreadable):
    """The key of an encrypted file was erased, so that its content is lost."""


class Seal:
    """Encrypts and decrypts the parts of one file, which has a salt and a key."""

    def __init__(self, key: bytes, salt: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._prefix = _key_id(key).encode() + salt
        self._cipher = AESGCM(hmac.digest(key, b"jaxllm context" + salt, hashlib.sha256))

    def head(self, data: bytes, name: str) -> bytes:
        """The file's first part, number 0, preceded by the id of its key and its salt (see
        `Vault.opened_head`)."""
        return self._prefix + self.sealed(0, data, name)

    def sealed(self, number: int, data: bytes | memoryview, name: str = "") -> bytes:
        """Encrypts a part, and appends its tag.

        Args:
          number: number of the part, used once per seal.
          data: the part.
          name: additional authenticated data, required to open the part.
        """
        return self._cipher.encrypt(number.to_bytes(_NONCE_BYTES, "big"), data, name.encode())

    def opened(self, number: int, data: bytes | memoryview, name: str = "") -> bytes:
        """Decrypts a part made by `sealed`.

        Raises:
          CheckpointError: the content has changed.
        """
        from cryptography.exceptions import InvalidTag

        try:
            return self._cipher.decrypt(number.to_bytes(_NONCE_BYTES, "big"), data, name.encode())
        except InvalidTag as error:
            raise CheckpointError("its encrypted content was changed") from error


class Vault:
    """The keys of apps, by the names of their folders in the store, and the ledger: use numbers of the newest
    records of encrypted contexts (see the module). For a single writer thread. Methods that write to the
    ledger raise JaxllmError if that fails.

    Attributes:
      folder: folder of the keys.
      is_sealed: whether all contexts are encrypted and in the ledger, so that others are refused.
      most_used: the largest use number read or written.
      plain: folders of contexts in which plain files were read.
    """

    def __init__(self, folder: Path, store: Path) -> None:
        """Opens the folder of keys, created if missing.

        Raises:
          ConfigError: it cannot be used, others can read or replace it, it is in the store, the ledger is
            damaged, or the encryption package is missing.
        """
        try:
            import cryptography  # noqa: F401
        except ImportError as error:
            raise ConfigError("encrypted contexts need a package: pip install 'jaxllm[serve]'") from error
        self.folder = Path(folder)
        inside = self.folder.resolve()
        if store.resolve() in (inside, *inside.parents):
            raise ConfigError(f"{folder}: keys must not lie in the folder of contexts; choose another")
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            _require_private(os.stat(self.folder), self.folder)
            trusted_folder(self.folder)
            self.is_sealed = is_there(self.folder / _SEALED)
            self._ledger = Database(
                self.folder / _NEWEST, _SCHEMA, kind=_LEDGER_KIND, version=_LEDGER_VERSION, shared=True
            )
            ((most,),) = self._ledger.run("SELECT max(used) FROM newest")
        except OSError as error:
            raise ConfigError(f"{folder}: cannot keep keys ({error.strerror})") from error
        self._keys: dict[str, bytes] = {}
        self.plain: set[Path] = set()
        self.most_used = most or 0

    def close(self) -> None:
        """Closes the ledger."""
        self._ledger.close()

    def new_seal(self, app_folder: str) -> Seal:
        """The seal of a new file. Makes the app's key if there is none.

        Raises:
          OSError, CheckpointError: the key cannot be made or read.
        """
        return Seal(self._key(app_folder) or self._made(app_folder), secrets.token_bytes(_SALT_BYTES))

    def opened_head(self, app_folder: str, content: bytes, name: str) -> tuple[bytes, Seal]:
        """A file's first part, decrypted, and the file's seal (see `Seal.head`).

        Raises:
          KeyErased: the key was erased or replaced.
          Unreadable: the key cannot be read.
          CheckpointError: the content has changed.
        """
        before = _ID_DIGITS + _SALT_BYTES
        key = self._key(app_folder)
        if key is None or _key_id(key) != content[:_ID_DIGITS].decode("latin-1"):
            raise KeyErased(f"the key of {app_folder} was erased, and its encrypted content is gone with it")
        seal = Seal(key, content[_ID_DIGITS:before])
        return seal.opened(0, content[before:], name), seal

    def erase(self, app_folder: str) -> None:
        """Erases the key of an app; its encrypted files are unreadable from here on.

        Raises:
          OSError: the device failed.
        """
        self._keys.pop(app_folder, None)
        self._path(app_folder).unlink(missing_ok=True)
        self._ledger.run("DELETE FROM newest WHERE app = ?", app_folder)
        sync(self.folder)

    def seal(self) -> None:
        """Refuses unencrypted files and contexts without an entry from here on.

        Raises:
          OSError: it cannot be written.
        """
        with atomic_file(self.folder / _SEALED) as file:
            os.fchmod(file.fileno(), 0o600)
        self.is_sealed = True

    def require_newest(self, folder: Path, used: int) -> None:
        """Checks that a record of a context's folder is not an older one that was put back.

        Raises:
          CheckpointError: its use number is older, or the context was deleted, or made by another store.
          Unreadable: the ledger cannot be read now.
        """
        if not self.is_sealed:
            return
        rows = self._run("SELECT used FROM newest WHERE app = ? AND name = ?", folder)
        if not rows:
            raise CheckpointError(f"{folder}: the store has deleted this context, or did not make it")
        if used < rows[0][0]:
            raise CheckpointError(
                f"{folder}: its record is older than the last one that was written (use {used} of "
                f"{rows[0][0]}): it was put back"
            )

    def expect(self, folder: Path) -> None:
        """Adds a context whose first record is about to be written."""
        self._run("INSERT OR IGNORE INTO newest VALUES (?, ?, 0)", folder)

    def wrote(self, folder: Path, used: int) -> None:
        """Updates the use number after a context's new record was written."""
        self._run("INSERT OR REPLACE INTO newest VALUES (?, ?, ?)", folder, used)
        self.most_used = max(self.most_used, used)

    def forget(self, folder: Path) -> None:
        """Removes a deleted context."""
        self._run("DELETE FROM newest WHERE app = ? AND name = ?", folder)

    def _run(self, statement: str, folder: Path, *values: int) -> list[tuple[Any, ...]]:
        return self._ledger.run(statement, folder.parent.name, folder.name, *values)

    def _key(self, app_folder: str) -> bytes | None:
        if app_folder in self._keys:
            return self._keys[app_folder]
        path = self._path(app_folder)
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with open(path, "rb", opener=lambda each, _: os.open(each, flags)) as file:
                _require_private(os.fstat(file.fileno()), path)
                key = file.read(_KEY_BYTES + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise Unreadable(f"{path}: the key cannot be read ({error.strerror})") from error
        except ConfigError as error:
            raise Unreadable(str(error)) from error
        if len(key) != _KEY_BYTES:
            raise Unreadable(f"{path} is no key: it must have {_KEY_BYTES} bytes; restore it from a copy")
        self._keys[app_folder] = key
        return key

    def _made(self, app_folder: str) -> bytes:
        path = self._path(app_folder)
        with temporary_file(path) as (temporary, file):
            os.fchmod(file.fileno(), 0o600)
            file.write(secrets.token_bytes(_KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
            # Not a rename: a key that another store's process made meanwhile must not be replaced.
            with contextlib.suppress(FileExistsError):
                os.link(temporary, path)
        sync(self.folder)
        key = self._key(app_folder)
        if key is None:
            raise Unreadable(f"{path}: the key vanished while it was made")
        return key

    def _path(self, app_folder: str) -> Path:
        return self.folder / f"{app_folder}{_SUFFIX}"


def require_form(path: Path, vault: Vault | None, *, encrypted: bool) -> None:
    """Checks that a file of a store may be read with the store's keys. Plain files that may be read are noted
    in the ledger.

    Raises:
      Unreadable: it is encrypted, and there are no keys.
      CheckpointError: it is plain, in a sealed store.
    """
    if vault is None and encrypted:
        raise Unreadable(f"{path} is encrypted; open its store with the folder of its keys")
    if vault is not None and not encrypted:
        vault.plain.add(path.parent)
        if vault.is_sealed:
            raise CheckpointError(
                f"{path} is not encrypted, as all contexts of this store are: the store did not write it"
            )


def _key_id(key: bytes) -> str:
    """A short digest that identifies a key without revealing it."""
    return hmac.digest(key, b"jaxllm key id", hashlib.sha256).hex()[:_ID_DIGITS]


def _require_private(facts: os.stat_result, path: Path) -> None:
    if facts.st_uid != os.geteuid() or facts.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"{path}: keys must be private to this user; close it to others (chmod go-rwx)")
