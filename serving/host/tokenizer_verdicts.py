"""Caches which tokenizers consist of well-known parts: the check takes 0.15 s of startup with a vocabulary of
150,000 tokens, and its result only depends on the text."""

import hashlib
import logging
import os
from pathlib import Path

from jaxllm.errors import ConfigError
from jaxllm.files.atomic import atomic_file
from jaxllm.serving.host.user_cache import cache_folder, make_private_folder, private_file
from jaxllm.text import tokenizer_bounds
from jaxllm.text.tokenizer import Tokenizer, TokenizerFiles

# A smaller text is as soon checked.
_MIN_TEXT_BYTES = 1 << 20
_ORDINARY, _UNKNOWN = b"ordinary", b"unknown"
_log = logging.getLogger(__name__)


def open_tokenizer(files: TokenizerFiles) -> Tokenizer:
    """A bundle's tokenizer. Its parts are checked once per text and user; the result is cached.

    Raises:
      CheckpointError: `files` are not a tokenizer's.
    """
    text = files.tokenizer_json.encode(errors="surrogatepass")
    if len(text) < _MIN_TEXT_BYTES:
        return Tokenizer(files)
    path = _path(text)
    kept = _read(path)
    if kept is not None:
        return Tokenizer(files, ordinary=kept)
    ordinary = tokenizer_bounds.is_ordinary(files.tokenizer_json)
    tokenizer = Tokenizer(files, ordinary=ordinary)
    try:
        make_private_folder(path.parent)
        with atomic_file(path) as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(_ORDINARY if ordinary else _UNKNOWN)
    except (OSError, ConfigError) as error:
        _log.warning("each start checks the tokenizer again, because nothing is kept in the cache: %s", error)
    return tokenizer


def _path(text: bytes) -> Path:
    """The path of a text's cached verdict, which depends on the code of the check."""
    digest = hashlib.blake2b(Path(tokenizer_bounds.__file__).read_bytes(), digest_size=16)
    digest.update(hashlib.blake2b(text, digest_size=32).digest())
    return cache_folder() / "tokenizers" / digest.hexdigest()


def _read(path: Path) -> bool | None:
    """The cached verdict; None if there is none that can be trusted."""
    try:
        with private_file(path) as number:
            return {_ORDINARY: True, _UNKNOWN: False}.get(os.read(number, 16))
    except (OSError, ConfigError):
        return None
