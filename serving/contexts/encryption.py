"""Encrypts stored contexts by a key of their app; erasing the key erases them, wherever copies lie.

    vault = Vault(Path("/var/lib/jaxllm/keys"), store_folder)     a folder (0700) with a file per app (0600)
    seal = vault.new_seal(app_folder)                             writes a record or a segment
    seal = vault.seal(app_folder, key_id, salt)                   reads one

Every record and every segment has a random salt, which with the app's key gives a key of its own
(HMAC-SHA256): so its parts may be numbered, and no nonce comes twice. Parts are encrypted and authenticated
by AES-256-GCM, blob by blob, so that a chunk is still read by its offset.
"""

import contextlib
import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path

from jaxllm.errors import CheckpointError, ConfigError, Unreadable
from jaxllm.files.atomic import sync, temporary_file

SALT_BYTES = TAG_BYTES = 16
ID_DIGITS = 16
_KEY_BYTES = 32
_NONCE_BYTES = 12
_SUFFIX = ".key"


class KeyErased(Unreadable):
    """The key of an encrypted file was erased, so that the content is gone."""


class NotOpened(Unreadable):
    """A file is encrypted, and the store was opened without keys."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path} is encrypted; open its store with the folder of its keys")


class Seal:
    """Encrypts and decrypts the parts of one file.

    Attributes:
      salt: of the file.
      key_id: tells whether a key is the file's.
    """

    def __init__(self, key: bytes, salt: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self.salt, self.key_id = salt, key_id(key)
        self._cipher = AESGCM(hmac.digest(key, b"jaxllm context" + salt, hashlib.sha256))

    def sealed(self, number: int, data: bytes | memoryview, name: str = "") -> bytes:
        """A part, encrypted, and its tag behind it.

        Args:
          number: of the part; each is used once for a seal.
          data: the part.
          name: what it belongs to, which is needed to open it.
        """
        return self._cipher.encrypt(number.to_bytes(_NONCE_BYTES, "big"), data, name.encode())

    def opened(self, number: int, data: bytes | memoryview, name: str = "") -> bytes:
        """A part that `sealed` made.

        Raises:
          CheckpointError: it is not what was written.
        """
        from cryptography.exceptions import InvalidTag

        try:
            return self._cipher.decrypt(number.to_bytes(_NONCE_BYTES, "big"), data, name.encode())
        except InvalidTag as error:
            raise CheckpointError("its encrypted content was changed") from error


class Vault:
    """The keys of apps, by the names of their folders in the store. For one thread that writes."""

    def __init__(self, folder: Path, store: Path) -> None:
        """Opens the folder of keys, made if missing.

        Raises:
          ConfigError: it cannot be used, others can read it, it lies in the store, or the package that
            encrypts is missing.
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
        except OSError as error:
            raise ConfigError(f"{folder}: cannot keep keys ({error.strerror})") from error
        self._keys: dict[str, bytes] = {}

    def new_seal(self, app_folder: str) -> Seal:
        """The seal of a new file. Makes the app's key if there is none.

        Raises:
          OSError, CheckpointError: the key cannot be made or read.
        """
        return Seal(self._key(app_folder) or self._made(app_folder), secrets.token_bytes(SALT_BYTES))

    def seal(self, app_folder: str, wanted: str, salt: bytes) -> Seal:
        """The seal of a file that was written.

        Raises:
          KeyErased: the key is gone, or another by now.
          Unreadable: the key cannot be read.
        """
        key = self._key(app_folder)
        if key is None or key_id(key) != wanted:
            raise KeyErased(f"the key of {app_folder} was erased, and its encrypted content is gone with it")
        return Seal(key, salt)

    def erase(self, app_folder: str) -> None:
        """Erases the key of an app; its encrypted files cannot be read by anybody from here on.

        Raises:
          OSError: the device failed.
        """
        self._keys.pop(app_folder, None)
        self._path(app_folder).unlink(missing_ok=True)
        sync(self.folder)

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


def key_id(key: bytes) -> str:
    """Tells keys apart, and nothing of a key."""
    return hmac.digest(key, b"jaxllm key id", hashlib.sha256).hex()[:ID_DIGITS]


def _require_private(facts: os.stat_result, path: Path) -> None:
    if facts.st_uid != os.geteuid() or facts.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"{path}: keys must be this user's alone; close it to others (chmod go-rwx)")
