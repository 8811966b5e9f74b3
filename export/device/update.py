"""Reads an update of programs: a folder of `jaxllm export --format device`, or a zip file of one.

It may be hostile: nothing of it is run, and its manifest bounds what it takes of memory and storage.
"""

import contextlib
import dataclasses
import hashlib
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from jaxllm.errors import ConfigError, ProgramError, one_line
from jaxllm.export.folder_format.manifest import (
    LOOP,
    MAIN,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    Manifest,
    StoredFile,
)
from jaxllm.export.folder_format.publisher import SIGNATURE, SIGNATURE_BYTES, require_signature
from jaxllm.files.input_files import open_regular
from jaxllm.layer_configs import require

# Opens a file of an update by its name.
Opener = Callable[[str], BinaryIO]

_BLOCK_BYTES = 1 << 20
# Of an archive: its files, those of a folder being a few dozens, and the bytes of its directory.
_MAX_MEMBERS, _MAX_DIRECTORY_BYTES = 1 << 12, 4 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Update:
    """An update whose manifest was checked.

    Attributes:
      source: where it comes from.
      open: opens one of its files.
      raw: bytes of its manifest.
      signature: signature of the manifest; empty for none.
      manifest: the manifest.
    """

    source: Path
    open: Opener
    raw: bytes
    signature: bytes
    manifest: Manifest

    @property
    def files(self) -> list[str]:
        """Names of all its files."""
        return [*self.manifest.files, MANIFEST, *([SIGNATURE] if self.signature else [])]

    def copy_to(self, folder: Path | None) -> None:
        """Copies all files, comparing each with the manifest; None only compares them.

        Raises:
          ProgramError: a file is missing or damaged.
          OSError: it cannot be written.
        """
        for name, stored in self.manifest.files.items():
            with contextlib.ExitStack() as opened:
                with _named(self.source, name):
                    file = opened.enter_context(self.open(name))
                out = None if folder is None else opened.enter_context((folder / name).open("xb"))
                self._copy(name, stored, file, out)
        if folder is not None:
            (folder / MANIFEST).write_bytes(self.raw)
            if self.signature:
                (folder / SIGNATURE).write_bytes(self.signature)

    def _copy(self, name: str, stored: StoredFile, file: BinaryIO, out: BinaryIO | None) -> None:
        digest, left = hashlib.sha256(), stored.size_bytes
        while left >= 0:
            with _named(self.source, name):
                block = file.read(min(_BLOCK_BYTES, left + 1))
            if not block:
                break
            left -= len(block)
            digest.update(block)
            if out is not None:
                out.write(block)
        if left or digest.hexdigest() != stored.sha256:
            raise ProgramError(
                f"{self.source}: {name} is damaged or cut off; take the update from the publisher again"
            )


@contextlib.contextmanager
def open_update(source: Path, key: bytes) -> Iterator[Update]:
    """Opens an update, and checks its manifest, by the signature if there is a publisher's key."""
    if not source.exists():
        raise ConfigError(f"{source}: no such file or folder")
    with contextlib.ExitStack() as opened:
        with _named(source, MANIFEST):
            opener = _of_folder(source) if source.is_dir() else _of_archive(source, opened)
        raw = _read(source, opener, MANIFEST, MAX_MANIFEST_BYTES)
        signature = _read(source, opener, SIGNATURE, SIGNATURE_BYTES, needed=False)
        if key:
            require_signature(key, raw, signature, source)
        manifest = Manifest.parse(raw, source / MANIFEST)
        if not {LOOP, MAIN} <= manifest.files.keys() or {MANIFEST, SIGNATURE} & manifest.files.keys():
            raise ProgramError(f"{source} is no folder of a device; export it with --format device")
        yield Update(source=source, open=opener, raw=raw, signature=signature, manifest=manifest)


def _of_folder(source: Path) -> Opener:
    return lambda name: open_regular(source / name)


def _of_archive(source: Path, opened: contextlib.ExitStack) -> Opener:
    """Opens files of a zip file, all at its top or in one folder."""
    file = opened.enter_context(open_regular(source))
    archive = opened.enter_context(zipfile.ZipFile(_Bounded(file)))  # pyright: ignore[reportArgumentType]
    members = [each for each in archive.infolist() if not each.is_dir()]
    named = {Path(each.filename).name: each for each in members}
    flat = len({str(Path(each.filename).parent) for each in members}) == 1
    require(len(members) <= _MAX_MEMBERS, f"more than {_MAX_MEMBERS} files")
    require(flat and len(named) == len(members), "its files are not those of one folder")
    # Others take memory by what the archive says.
    known = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
    require(
        all(each.compress_type in known for each in members), "it is compressed otherwise than by deflate"
    )
    return lambda name: archive.open(named[name])  # pyright: ignore[reportReturnType]: it is read alone


class _Bounded:
    """A file of which no more is read at once than the directory of an archive may have."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.seek, self.tell, self.seekable, self.close = file.seek, file.tell, file.seekable, file.close

    def read(self, size: int = -1) -> bytes:
        if size > _MAX_DIRECTORY_BYTES:
            raise zipfile.BadZipFile("its directory is too large")
        return self._file.read(size if size >= 0 else _MAX_DIRECTORY_BYTES)


def _read(source: Path, opener: Opener, name: str, most_bytes: int, *, needed: bool = True) -> bytes:
    """A file of an update; empty if it is missing and not `needed`."""
    with _named(source, name):
        try:
            with opener(name) as file:
                raw = file.read(most_bytes + 1)
        except (KeyError, FileNotFoundError):
            if needed:
                raise
            return b""
        require(len(raw) <= most_bytes, f"it has more than {most_bytes:,} bytes")
    return raw


@contextlib.contextmanager
def _named(source: Path, name: str) -> Iterator[None]:
    """Names an update and its file in errors that it cannot be read."""
    try:
        yield
    except (KeyError, FileNotFoundError) as error:
        raise ProgramError(
            f"{source}: {name} is missing; take the update from the publisher again"
        ) from error
    except (OSError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        reason = one_line(getattr(error, "strerror", None) or error)
        raise ProgramError(
            f"{source}: {name} cannot be read ({reason}); an update is a folder of `jaxllm export --format "
            "device`, or a zip file of one"
        ) from error
