"""Opens and reads untrusted files: regular files only, up to a given limit of bytes.

A pipe may block forever and a device may never end, so neither is opened; a link to a regular file is
followed (Hugging Face's cache consists of them). All refusals are OSErrors with an `strerror`, so that
callers handle them like other unreadable files.
"""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from jaxllm.errors import CheckpointError, one_line

# Far above any config, index or manifest; parsed JSON of this size still fits a small memory.
MAX_JSON_BYTES = 32 << 20

# Size of further reads of files that are longer than their reported size.
_PIECE_BYTES = 64 << 10

# Never wait for a pipe's other end, and never translate line ends.
_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


def open_regular(path: Path) -> BinaryIO:
    """Opens a file to read bytes.

    Raises:
      OSError: the file is missing, cannot be opened, or is no regular file (a pipe, a device, a folder).
    """
    # Checked before opening, because opening some devices has effects, and after, because names may change.
    _require_regular(os.stat(path), path)
    descriptor = os.open(path, _FLAGS)
    try:
        _require_regular(os.fstat(descriptor), path)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def begins_with(path: Path, magic: bytes) -> bool:
    """Whether a path is a regular file that can be read and begins with these bytes."""
    try:
        with open_regular(path) as file:
            return file.read(len(magic)) == magic
    except OSError:
        return False


def read_bytes(path: Path, limit_bytes: int) -> bytes:
    """All of a file.

    Raises:
      OSError: as `open_regular`, or the file is larger than `limit_bytes`.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        # No more than the size: a read allocates memory for its maximum.
        data = b"" if size > limit_bytes else file.read(size + 1)
        # Some file systems (/proc) report 0 for files that are not empty.
        while size < len(data) <= limit_bytes and (more := file.read(_PIECE_BYTES)):
            data += more
    if max(size, len(data)) > limit_bytes:
        raise OSError(errno.EFBIG, f"larger than {limit_bytes} bytes, the most that it may have", str(path))
    return data


def read_text(path: Path, limit_bytes: int = MAX_JSON_BYTES) -> str:
    """A file's text in UTF-8.

    Raises:
      OSError: as `read_bytes`.
      UnicodeDecodeError: the file is not UTF-8.
    """
    return read_bytes(Path(path), limit_bytes).decode("utf-8")


def read_json(path: Path, hint: str, *, limit_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """The JSON object in a file.

    Args:
      hint: remedy for an unreadable file; the end of messages.

    Raises:
      CheckpointError: the file is missing, not a regular file or too large, is not JSON or not an object.
    """
    try:
        value = json.loads(read_bytes(path, limit_bytes).decode("utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; {hint}") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror or error}); {hint}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({one_line(error)}); {hint}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, not a JSON object; {hint}")
    return value


def _require_regular(facts: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(facts.st_mode):
        kind = "a folder" if stat.S_ISDIR(facts.st_mode) else "a pipe or device"
        raise OSError(errno.EINVAL, f"{kind}, not a regular file", str(path))
