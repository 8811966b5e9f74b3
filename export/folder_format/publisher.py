"""Signs the manifest of a folder of programs with a publisher's key, and checks it: ed25519 (RFC 8032).

    program.sig        64 bytes, of the bytes of program.json, which has a secure checksum of every other file

Where the key must not leave its place, openssl makes the same file:

    openssl pkeyutl -sign -rawin -inkey publisher.pem -in DIR/program.json -out DIR/program.sig
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxllm.errors import ConfigError, ProgramError
from jaxllm.export.folder_format.manifest import MANIFEST
from jaxllm.files.atomic import atomic_file
from jaxllm.files.input_files import read_bytes

SIGNATURE, SIGNATURE_BYTES, KEY_BYTES = "program.sig", 64, 32
_MAX_KEY_BYTES = 1 << 16
_MAKE = "make one with: openssl genpkey -algorithm ed25519 -out publisher.pem"
_MAKE_PUBLIC = "make it with: openssl pkey -in publisher.pem -pubout -out public.pem"


def read_private_key(path: Path) -> Callable[[bytes], bytes]:
    """What signs with the ed25519 key in a PEM file.

    Raises:
      ConfigError: the file cannot be read, or has another key or an encrypted one; or cryptography is
        missing.
    """
    serialization, keys = _cryptography()
    key = _read(
        path,
        lambda raw: serialization.load_pem_private_key(raw, password=None),
        keys.Ed25519PrivateKey,
        _MAKE,
    )
    return key.sign


def read_public_key(path: Path) -> bytes:
    """The 32 bytes of the ed25519 public key in a PEM file.

    Raises:
      ConfigError: the file cannot be read or has another key, such as a private one; or cryptography is
        missing.
    """
    serialization, keys = _cryptography()
    key = _read(path, serialization.load_pem_public_key, keys.Ed25519PublicKey, _MAKE_PUBLIC)
    return key.public_bytes_raw()


def sign_folder(folder: Path, sign: Callable[[bytes], bytes]) -> None:
    """Signs the manifest of a folder that was just written."""
    signature = sign((folder / MANIFEST).read_bytes())
    with atomic_file(folder / SIGNATURE) as file:
        file.write(signature)


def require_signature(key: bytes, manifest: bytes, signature: bytes, source: Path) -> None:
    """Checks the signature of a manifest's bytes by a public key; errors name `source`.

    Raises:
      ProgramError: there is none (empty), or it is of another key or other bytes.
      ConfigError: cryptography is missing.
    """
    _, keys = _cryptography()
    from cryptography.exceptions import InvalidSignature

    if not signature:
        raise ProgramError(
            f"{source} is not signed ({SIGNATURE}), which this store requires; export it with --sign"
        )
    try:
        keys.Ed25519PublicKey.from_public_bytes(key).verify(signature, manifest)
    except InvalidSignature as error:
        raise ProgramError(
            f"{source}: the signature is not by this store's publisher, or the manifest was changed after it "
            "was signed; take the update from the publisher again"
        ) from error


def _cryptography() -> tuple[Any, Any]:
    """The modules of PEM files and of ed25519 keys."""
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise ConfigError("signatures need a package: pip install cryptography") from error
    return serialization, ed25519


def _read(path: Path, load: Callable[[bytes], Any], kind: type[Any], make: str) -> Any:
    from cryptography.exceptions import UnsupportedAlgorithm

    try:
        key = load(read_bytes(path, _MAX_KEY_BYTES))
    except OSError as error:
        raise ConfigError(f"{path}: the key cannot be read ({error.strerror})") from error
    except TypeError as error:
        raise ConfigError(
            f"{path}: the key is encrypted; give one that is not, or sign by openssl"
        ) from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{path} is not the PEM file of a key as required here; {make}") from error
    if not isinstance(key, kind):
        raise ConfigError(f"{path} is a key of another kind ({type(key).__name__}), not ed25519; {make}")
    return key
