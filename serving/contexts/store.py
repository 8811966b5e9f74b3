"""Contexts on storage: a folder per app, a folder per context in it, a record and segments in that.

    ROOT/store.json            version
    ROOT/lock                  held by the one process that uses the store
    ROOT/APP/CONTEXT/record    whose, which tokens, which segments count (`record.Record`)
    ROOT/APP/CONTEXT/N.kv      chunks (`segment.Segment`)

A call's chunks are written as a new segment, then the record that names it replaces the one before. A kill at
any moment leaves the older record with all that it names; what no record names is removed when the store is
opened. Folders are for their owner's eyes only (0700).
"""

import contextlib
import dataclasses
import errno
import json
import secrets
import shutil
import urllib.parse
from collections.abc import Iterator, Sequence, Set
from pathlib import Path

from jaxllm.atomic import atomic_file, sync
from jaxllm.errors import BudgetExceeded, CheckpointError, ConfigError, ContextGone, JaxllmError
from jaxllm.kv.recompute import LOST
from serving.contexts.lock import StoreLock
from serving.contexts.record import Origin, Record
from serving.contexts.segment import Chunks, Segment, file_bytes, write_segment
from serving.contexts.stored import OpenSegments, StoredContext
from serving.direct_io import Storage

VERSION = 1
VERSION_FILE = "store.json"
_RECORD = "record"
_SUFFIX = ".kv"
_APP = "app-"
_LONGEST_APP = 200
# A context in more files than this is written anew as one.
_MOST_SEGMENTS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Damage:
    """What is wrong with a stored context.

    Attributes:
      app, name: whose and which.
      chunks: that must be computed again.
      reason: of a record that cannot be read: the context is lost.
    """

    app: str
    name: str
    chunks: tuple[int, ...] = ()
    reason: str = ""


class ContextStore:
    """The contexts of all apps of a device. One process at a time; threads of it may read together.

    Args:
      root: the store's folder, made if missing.
      storage: how segments are read.
      quota_bytes: of all files together; 0 for no limit.
      app_quota_bytes: of each app's.

    Raises:
      ConfigError: another process uses the store, it is of a newer version, or cannot be made.
    """

    def __init__(
        self,
        root: Path,
        *,
        storage: Storage | None = None,
        quota_bytes: int = 0,
        app_quota_bytes: int = 0,
    ) -> None:
        self.root, self._storage = Path(root), storage or Storage()
        self._quota_bytes, self._app_quota_bytes = quota_bytes, app_quota_bytes
        self._segments = OpenSegments(self._storage)
        # Contexts of which nobody knows whether their last change ended, and where they are.
        self._unsettled: dict[str, Path] = {}
        # Of contexts whose record on storage is older than the one here: the segments since then.
        self._unflushed: dict[str, set[str]] = {}
        try:
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = StoreLock(self.root / "lock")
        except OSError as error:
            raise ConfigError(f"{root}: cannot be a store of contexts ({error.strerror})") from error
        try:
            self._check_version()
            self._records = dict(self._read_all())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Lets another process have the store. What is done with it afterwards is refused."""
        try:
            for name in list(self._unflushed):
                # What cannot be flushed is computed again: its record on storage does not name it.
                with contextlib.suppress(JaxllmError):
                    self.commit(self.record(name))
        finally:
            self._segments.close()
            self._lock.release()

    def __enter__(self) -> "ContextStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def records(self, app: str | None = None) -> list[Record]:
        """All contexts, or an app's, by name.

        Raises:
          ConfigError: the store was closed (see `StoreLock.require`), here and wherever else it is asked.
        """
        self._require_settled()
        found = [each for each in self._records.values() if app in (None, each.app)]
        return sorted(found, key=lambda each: (each.app, each.name))

    def record(self, name: str, app: str | None = None) -> Record:
        """A context by name, if it is the app's; of any app where none is given.

        Raises:
          ContextGone: there is none. What is said is the same where it is another app's.
          CheckpointError: whether its last change ended cannot be read.
        """
        folder = self._unsettled.get(name)
        own = app is None or folder is None or folder.parent.name == _folder_name(app)
        self._require_settled(name if own else "")
        record = self._records.get(name)
        if record is None or app not in (None, record.app):
            raise ContextGone(f"there is no context {name!r:.80}; it was deleted, or never made")
        return record

    def create(self, app: str, origin: Origin, *, pinned: bool = False) -> Record:
        """A new, empty context.

        Raises:
          ConfigError: the app has no name, or too long a one.
          BudgetExceeded: there is no room.
          CheckpointError: it cannot be written.
        """
        if not app or len(_folder_name(app)) > _LONGEST_APP:
            raise ConfigError(f"an app needs a name of at most {_LONGEST_APP} bytes, got {app!r:.80}")
        self._require_settled()
        name = secrets.token_hex(8)
        record = Record(name=name, app=app, origin=origin, pinned=pinned, used=self._next_use())
        folder = self._folder(record)
        self._unsettled[name] = folder
        try:
            with self._written(folder):
                folder.parent.mkdir(mode=0o700, exist_ok=True)
                folder.mkdir(mode=0o700)
                record.write(folder / _RECORD)
                sync(folder.parent)
                sync(self.root)
        except JaxllmError:
            # Nobody was told its name.
            with contextlib.suppress(OSError):
                self._remove(folder)
            raise
        self._records[name] = record
        del self._unsettled[name]
        return record

    def commit(self, record: Record, chunks: Chunks | None = None, *, flush: bool = True) -> Record:
        """Keeps a context's new state: first its new chunks, then the record that names them.

        Args:
          record: with the tokens, bits and the like that hold from now on; in which files its chunks are is
            this store's business. What is `LOST` in it is kept no longer.
          chunks: those that are new or of another width, of each its bits and each layer's blob.
          flush: wait until the device has all of it. Otherwise chunks are where they can be read, and a power
            cut or a kill leaves the state before, until the context's next commit or `close`.

        Returns:
          The record as it is kept.

        Raises:
          ContextGone: the context was deleted.
          BudgetExceeded: a quota or the device has no room; what was kept before is as it was.
          CheckpointError: the device failed: `record` tells whether before or after the change counted.
        """
        before = self.record(record.name)
        chunks = dict(chunks or {})
        folder, name = self._folder(record), record.name
        fresh = f"{self._next_segment(folder, before.segments)}{_SUFFIX}"
        files = [fresh if chunk in chunks else file for chunk, file in enumerate(_kept_files(before, record))]
        record = dataclasses.replace(record, files=tuple(files), used=self._next_use())
        record = record.lose({chunk for chunk, file in enumerate(files) if not file})
        there = {*before.segments, fresh, *self._unflushed.get(name, ())}
        self._require_room(record, chunks, there - set(record.segments))
        self._unsettled[name] = folder
        try:
            with self._written(folder):
                if chunks:
                    write_segment(folder / fresh, chunks, self._storage, flush=flush)
                if flush:
                    for each in self._unflushed.get(name, set()) & set(record.segments):
                        sync(folder / each)
                    # Writing chunks takes long enough for the folder to be taken away.
                    self._lock.require()
                    record.write(folder / _RECORD)
        except JaxllmError:
            # What cannot be settled now is when the context is next asked for.
            with contextlib.suppress(JaxllmError):
                self._settle(name)
            raise
        self._records[name] = record
        if flush:
            self._unflushed.pop(name, None)
            for each in there - set(record.segments):
                self._discard(folder / each)
        else:
            self._unflushed[name] = there
        del self._unsettled[name]
        return record

    def compact(self, name: str) -> Record:
        """Writes a context's chunks anew as one segment, if they are spread over many.

        Raises:
          ContextGone: there is no such context.
          CheckpointError: a chunk cannot be read, or the new segment not be written.
          BudgetExceeded: the device has no room for both.
        """
        record = self.record(name)
        if len(record.segments) <= _MOST_SEGMENTS:
            return record
        opened = self.open(name)
        chunks = {
            chunk: (bits, [opened.read(layer, [chunk])[0] for layer in range(opened.layers)])
            for chunk, bits in enumerate(record.bits)
            if bits != LOST
        }
        return self.commit(record, chunks)

    def open(self, name: str) -> StoredContext:
        """A context's segments, to read from until something else is asked of the store.

        Raises:
          ContextGone: there is no such context.
          CheckpointError: a segment cannot be opened.
        """
        record = self.record(name)
        folder, names = self._folder(record), record.segments
        segments = self._segments.open([folder / each for each in names])
        return StoredContext(record, dict(zip(names, segments, strict=True)))

    def delete(self, name: str) -> None:
        """Removes a context and its files.

        Raises:
          ContextGone: there is none.
          CheckpointError: the device failed: `record` tells whether it is still there.
        """
        folder = self._folder(self.record(name))
        self._unsettled[name] = folder
        with self._written(folder):
            # Without its record it is no context any more, whatever happens next.
            (folder / _RECORD).unlink(missing_ok=True)
            sync(folder)
        self._segments.forget(folder)
        self._settle(name)

    def used_bytes(self, app: str | None = None) -> int:
        """Of all files, or of an app's."""
        folders = {self._folder(each) for each in self.records(app)}
        return sum(file.stat().st_size for folder in folders for file in folder.iterdir())

    def verify(self, *, repair: bool = False) -> list[Damage]:
        """Reads all that is stored.

        Args:
          repair: have what is damaged computed again from the tokens when it is next used; contexts whose
            records cannot be read are removed.
        """
        found = []
        for folder in self._context_folders():
            try:
                record = Record.read(folder / _RECORD)
            except CheckpointError as error:
                app = urllib.parse.unquote(folder.parent.name.removeprefix(_APP))
                found.append(Damage(app=app, name=folder.name, reason=str(error)))
                if repair:
                    shutil.rmtree(folder, ignore_errors=True)
                continue
            lost = self._corrupt_chunks(folder, record)
            if lost:
                found.append(Damage(app=record.app, name=record.name, chunks=tuple(sorted(lost))))
            if lost and repair:
                self._records[record.name] = record
                self.repair(record.name)
        return found

    def repair(self, name: str) -> Record:
        """Reads all of a context, and has what is damaged computed again when it is next used.

        Raises:
          ContextGone: there is no such context.
        """
        record = self.record(name)
        lost = self._corrupt_chunks(self._folder(record), record)
        if not lost:
            return record
        self._records[name] = record.lose(lost)
        return self.commit(self._records[name])

    def _corrupt_chunks(self, folder: Path, record: Record) -> set[int]:
        corrupt: set[int] = set()
        for name in record.segments:
            own = {chunk for chunk, file in enumerate(record.files) if file == name}
            try:
                with Segment(folder / name, self._storage) as segment:
                    kept = {stored.chunk for stored in segment.chunks} - set(segment.verify())
                corrupt |= own - kept
            except CheckpointError:
                corrupt |= own
        return corrupt

    def _require_room(self, record: Record, chunks: Chunks, freed: Set[str]) -> None:
        """Checks the quotas for a commit after which the files `freed` are gone: what does not grow may be
        kept whatever there is already."""
        folder = self._folder(record)
        size = file_bytes(chunks) - sum(_size_bytes(folder / each) for each in freed)
        for quota, used, whose in (
            (self._app_quota_bytes, lambda: self.used_bytes(record.app), f"the contexts of {record.app}"),
            (self._quota_bytes, self.used_bytes, "all contexts"),
        ):
            if quota and size > 0 and used() + size > quota:
                raise BudgetExceeded(
                    f"{whose} may take {quota:,} bytes on storage, and {size:,} more do not fit: delete "
                    "contexts, or raise the quota"
                )

    def _require_settled(self, wanted: str = "") -> None:
        """Checks that the store is open, and reads what an interrupt or an error left unknown.

        Raises:
          CheckpointError: of the context that is wanted that cannot be read.
        """
        self._lock.require()
        for name in list(self._unsettled):
            try:
                self._settle(name)
            except CheckpointError:
                if name == wanted:
                    raise

    def _settle(self, name: str) -> None:
        """Takes a context as it is on storage, and removes what a change of it that did not end left.

        Raises:
          CheckpointError: that cannot be read.
          ConfigError: the store is another process's by now, as is whatever lies there.
        """
        self._lock.require()
        folder = self._unsettled[name]
        with self._written(folder):
            if (folder / _RECORD).exists():
                self._records[name] = record = Record.read(folder / _RECORD)
                for each in folder.glob(f"*{_SUFFIX}"):
                    if each.name not in record.segments:
                        self._discard(each)
            else:
                self._records.pop(name, None)
                self._remove(folder)
        self._unflushed.pop(name, None)
        self._unsettled.pop(name, None)

    def _discard(self, path: Path) -> None:
        """Removes a segment that no record names; one that stays does no harm."""
        self._segments.forget(path)
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)

    def _remove(self, folder: Path) -> None:
        """Removes the folder of a context that has no record any more, and its app's if it was the last."""
        self._segments.forget(folder)
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            folder.parent.rmdir()
            sync(self.root)
        if folder.parent.exists():
            sync(folder.parent)

    @contextlib.contextmanager
    def _written(self, folder: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            kind = BudgetExceeded if full else CheckpointError
            raise kind(f"{folder}: the context cannot be written ({error.strerror})") from error

    def _check_version(self) -> None:
        path = self.root / VERSION_FILE
        try:
            version = json.loads(path.read_bytes())["version"]
        except FileNotFoundError:
            with atomic_file(path) as file:
                file.write(json.dumps({"version": VERSION}).encode())
            return
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is no store of contexts ({error!r:.80})") from error
        if version != VERSION:
            raise ConfigError(
                f"{self.root} is a store of version {version!s:.20}, this jaxllm uses {VERSION}; use the "
                "jaxllm that made it, or another folder"
            )

    def _read_all(self) -> Iterator[tuple[str, Record]]:
        """All records, with what no record names removed."""
        for folder in self._context_folders():
            if not (folder / _RECORD).exists():
                # Half made or half deleted.
                shutil.rmtree(folder, ignore_errors=True)
                continue
            try:
                record = Record.read(folder / _RECORD)
            except CheckpointError:
                # `verify` says why; nothing of it is touched before.
                continue
            for file in folder.iterdir():
                if file.name not in (_RECORD, *record.segments):
                    file.unlink(missing_ok=True)
            yield record.name, record

    def _context_folders(self) -> list[Path]:
        apps = [each for each in sorted(self.root.iterdir()) if each.is_dir()]
        return [each for app in apps for each in sorted(app.iterdir()) if each.is_dir()]

    def _folder(self, record: Record) -> Path:
        return self.root / _folder_name(record.app) / record.name

    def _next_use(self) -> int:
        return 1 + max((each.used for each in self._records.values()), default=0)

    @staticmethod
    def _next_segment(folder: Path, segments: Sequence[str]) -> int:
        """A number that no segment has had of which something is left: readers may have one open."""
        names = {*segments, *(each.name for each in folder.glob(f"*{_SUFFIX}"))}
        numbers = [
            int(each.removesuffix(_SUFFIX)) for each in names if each.removesuffix(_SUFFIX).isdecimal()
        ]
        return 1 + max(numbers, default=-1)


def _kept_files(before: Record, after: Record) -> list[str]:
    """Where each chunk of a context is now; nowhere those that are new or that nobody wants any more."""
    there = [*before.files, *[""] * len(after.bits)]
    return ["" if bits == LOST else file for bits, file in zip(after.bits, there, strict=False)]


def _folder_name(app: str) -> str:
    """A file name for an app's, whatever is in it; never one of the store's own, nor `.` or `..`."""
    return _APP + urllib.parse.quote(app, safe="")


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
