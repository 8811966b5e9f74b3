"""Signs and encrypts thoughts that leave the service and may come back.

A thought that a client returns goes into the prompt as the model's own words. So thinking blocks have
signatures, and encrypted thoughts a key: both are the service's, and bound to the app.
"""

import base64
import hmac
import os
import secrets
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

_KEY_BYTES, _NONCE_BYTES = 32, 12


class Seals:
    """Signs thoughts and encrypts them, for one app each."""

    def __init__(self, file: Path | None = None) -> None:
        """Reads the key from a file, or makes one; without a file the key is the process's. Raises OSError if
        the file cannot be read or written."""
        self._key = secrets.token_bytes(_KEY_BYTES) if file is None else _kept_key(file)

    def signature(self, app: str, thought: str) -> str:
        """The signature of a thought."""
        return base64.b64encode(self._mac(app, thought)).decode()

    def verifies(self, app: str, thought: str, signature: Any) -> bool:
        """Whether a signature is this service's, of this thought and app."""
        try:
            given = base64.b64decode(signature, validate=True)
        except (TypeError, ValueError):
            return False
        return hmac.compare_digest(given, self._mac(app, thought))

    def sealed(self, app: str, thought: str) -> str:
        """A thought, encrypted."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        data = AESGCM(self._key).encrypt(nonce, _bytes(thought), _bytes(app))
        return base64.b64encode(nonce + data).decode()

    def opened(self, app: str, sealed: Any) -> str | None:
        """The thought; None if this service has not sealed it for this app."""
        try:
            data = base64.b64decode(sealed, validate=True)
            return (
                AESGCM(self._key)
                .decrypt(data[:_NONCE_BYTES], data[_NONCE_BYTES:], _bytes(app))
                .decode(errors="surrogatepass")
            )
        except (TypeError, ValueError, InvalidTag):
            return None

    def _mac(self, app: str, thought: str) -> bytes:
        return hmac.digest(self._key, b"\0".join((b"thought", _bytes(app), _bytes(thought))), "sha256")


def _bytes(text: str) -> bytes:
    # JSON may have lone surrogates.
    return text.encode(errors="surrogatepass")


def _kept_key(file: Path) -> bytes:
    try:
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as new:
            new.write(key := secrets.token_bytes(_KEY_BYTES))
    except FileExistsError:
        key = file.read_bytes()
    if len(key) != _KEY_BYTES:
        raise OSError(f"{file} is damaged: it must have {_KEY_BYTES} bytes; delete it, and a new one is made")
    return key
