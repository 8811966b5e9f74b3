"""What this user keeps between runs: where, and how much of it."""

import os
from pathlib import Path

import platformdirs

from jaxllm.errors import ConfigError

_EXECUTABLES_BYTES = 1 << 30
_EXECUTABLES_VARIABLE = "JAXLLM_EXECUTABLES_BYTES"


def cache_folder() -> Path:
    """Where prepared folders and compiled graphs are kept: $JAXLLM_CACHE, else the platform's cache
    directory."""
    return Path(os.environ.get("JAXLLM_CACHE") or platformdirs.user_cache_dir("jaxllm"))


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
