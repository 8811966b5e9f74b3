"""Caches weights that XNNPACK has packed, so that later processes map them.

One file per program folder and width, named by its model, by the runtime that packed it and by its own
checksum: the runtime does not check whose weights a file has, so the name must identify it, and only this
user may have written it (`jaxllm.serving.host.user_cache`). A file is written under a temporary name and
renamed when it is complete: processes that open a program at the same time do not write into each other's
files.
"""

import contextlib
import errno
import logging
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import xxhash

from jaxllm.errors import ConfigError
from jaxllm.serving.host.user_cache import make_private_folder, private_file

SUFFIX = ".bin"
_UNFINISHED = ".tmp"
_STALE_S = 3600
_READ_BYTES = 1 << 20
_log = logging.getLogger(__name__)


class PackedFolder:
    """Packed weights in one folder of this user.

    Args:
      folder: path of the folder; created if missing, private to this user.
      limit_bytes: maximum bytes of files; the least recently used are deleted above it.
    """

    def __init__(self, folder: Path, *, limit_bytes: int) -> None:
        self._folder, self._limit_bytes = folder, limit_bytes

    @contextlib.contextmanager
    def opened(self, program: Path, width: str, made_of: str) -> Iterator[Path | None]:
        """Yields the file that the runtime reads packed weights from, or writes them to during the block.

        Args:
          program: folder of programs; its earlier packed weights are deleted.
          width: width of its weights.
          made_of: names of the model file and the runtime, in any characters.

        Yields:
          The file; None if the folder cannot be used.
        """
        place = f"{_digest(str(program.resolve()))}-{width}-"
        named = f"{place}{_digest(made_of)}-"
        try:
            make_private_folder(self._folder)
            packed = self._found(named)
        except (OSError, ConfigError) as error:
            _log.warning("%s: packed weights are not kept there (%s)", self._folder, error)
            yield None
            return
        if packed is not None:
            yield packed
            return
        written = self._folder / f"{named}{uuid.uuid4().hex}{_UNFINISHED}"
        try:
            yield written
            with contextlib.suppress(OSError):  # A runtime that packed nothing wrote nothing.
                written.chmod(0o600)
                with written.open("rb") as file:
                    os.fsync(file.fileno())
                final = self._folder / f"{named}{_checksum(written)}{SUFFIX}"
                os.replace(written, final)
                self._make_room(place, newest=final.name)
        finally:
            written.unlink(missing_ok=True)

    def _found(self, named: str) -> Path | None:
        """Returns the file whose name begins with `named`, if it is complete and this user's.

        Raises:
          OSError: the folder cannot be read.
        """
        for path in sorted(self._folder.glob(f"{named}*{SUFFIX}")):
            try:
                with private_file(path) as number:
                    if _checksum(path) == path.name.removeprefix(named).removesuffix(SUFFIX):
                        # The time of its last use, by which room is made.
                        os.utime(number)
                        return path
                reason = "its checksum is wrong"
            except ConfigError as error:
                reason = str(error)
            except OSError as error:
                reason = str(error)
                if error.errno != errno.ELOOP:
                    # No link; storage may answer later.
                    _log.warning("%s is not used (%s)", path, reason)
                    continue
            _log.warning("%s is not used, and made again (%s)", path, reason)
            path.unlink(missing_ok=True)
        return None

    def _make_room(self, place: str, *, newest: str) -> None:
        """Deletes earlier files of the same place, the least recently used files above the limit, and old
        leftovers. Files that processes have mapped stay usable for them."""
        kept, gone = [], []
        for each in self._folder.iterdir():
            with contextlib.suppress(FileNotFoundError):  # Another process makes room too.
                facts = each.stat(follow_symlinks=False)
                if each.name.endswith(_UNFINISHED):
                    gone += [each] if time.time() - facts.st_mtime > _STALE_S else []
                elif each.name.startswith(place) and each.name != newest:
                    gone.append(each)
                elif each.suffix == SUFFIX:
                    kept.append((each.name == newest, facts.st_mtime_ns, facts.st_size, each))
        total = sum(size for _, _, size, _ in kept)
        for _, _, size, each in sorted(kept):
            if total <= self._limit_bytes:
                break
            gone.append(each)
            total -= size
        for each in gone:
            each.unlink(missing_ok=True)


def _digest(text: str) -> str:
    return xxhash.xxh3_128_hexdigest(text.encode())


def _checksum(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while part := file.read(_READ_BYTES):
            digest.update(part)
    return digest.hexdigest()
