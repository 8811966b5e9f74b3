"""Stores contexts: a folder per app, in it a folder per context with a record and segments.

    ROOT/store.json            marks the folder as a store (`root`)
    ROOT/lock                  locked by the one process that uses the store
    ROOT/APP/CONTEXT/record    the app, the tokens, the names of segments (`record_file`)
    ROOT/APP/CONTEXT/N.kv      chunks (`segment.Segment`)

A call's chunks are written as a new segment, then the record that names it replaces the one before. A kill at
any moment leaves the older record with all segments that it names; segments that no record names are removed
by the context's next commit. Opening a store changes nothing in it: what cannot be read stays and is listed
(`catalog`), until `verify` is told to set damaged files aside. Only the owner may read its folders (0700).
"""

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterable, Set
from pathlib import Path

from jaxllm.errors import BudgetExceeded, CheckpointError, ConfigError, ContextGone, JaxllmError
from jaxllm.files.atomic import sync
from jaxllm.kv.recompute import LOST
from serving.contexts.catalog import Catalog
from serving.contexts.damage import Damage, chunk_damage
from serving.contexts.encryption import Vault
from serving.contexts.lock import StoreLock
from serving.contexts.record import Origin, Record
from serving.contexts.root import (
    LOCK,
    SEGMENT,
    file_size,
    folder_bytes,
    folder_name,
    mark,
    new_name,
    next_segment,
    require_store,
    written,
)
from serving.contexts.segment import Chunks, file_bytes, write_segment
from serving.contexts.stored import OpenSegments, StoredContext
from serving.host.direct_io import Storage


class ContextStore:
    """The contexts of all apps of a device. For one process at a time, whose threads may read together.

    Args:
      root: the store's folder, made if missing.
      storage: how segments are read.
      quota_bytes: of all files together; 0 for no limit.
      app_quota_bytes: of each app's.
      keys: folder of the keys by which contexts are encrypted; None for no encryption.

    Raises:
      ConfigError: another process uses the store, it cannot be made, or the folder is of another kind.
    """

    def __init__(
        self,
        root: Path,
        *,
        storage: Storage | None = None,
        quota_bytes: int = 0,
        app_quota_bytes: int = 0,
        keys: Path | None = None,
    ) -> None:
        self.root, self._storage = Path(root), storage or Storage()
        self._quota_bytes, self._app_quota_bytes = quota_bytes, app_quota_bytes
        self.vault = None if keys is None else Vault(keys, self.root)
        self._segments = OpenSegments(self._storage, self.vault)
        # Folders of contexts whose last change may not have ended, by name.
        self._unsettled: dict[str, Path] = {}
        # Segments of contexts whose record on storage is older than the one in memory, by name.
        self._unflushed: dict[str, set[str]] = {}
        self._catalog = Catalog(self.root, self._segments, self.vault)
        try:
            # Checked before anything is made in a folder that may belong to others.
            require_store(self.root)
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = StoreLock(self.root / LOCK)
        except OSError as error:
            raise ConfigError(f"{root}: cannot be a store of contexts ({error.strerror})") from error
        try:
            if not require_store(self.root):
                mark(self.root)
            self._catalog.find_all()
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise ConfigError(f"{root}: cannot be a store of contexts ({error.strerror})") from error
            raise

    def close(self) -> None:
        """Releases the store for other processes. Every later call raises ConfigError."""
        try:
            for name in list(self._unflushed):
                # Chunks that cannot be flushed are computed again: the record on storage does not name them.
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
          ConfigError: the store was closed (see `StoreLock.require`); so do all methods below.
        """
        self._require_settled()
        found = [each for each in self._catalog.records.values() if app in (None, each.app)]
        return sorted(found, key=lambda each: (each.app, each.name))

    def damage(self) -> list[Damage]:
        """Damage that was found when records were read, and was not mended since."""
        return sorted(self._catalog.damage.values(), key=lambda each: (each.app, each.name))

    def record(self, name: str, app: str | None = None) -> Record:
        """A context's record, if the app owns the context; of any app where `app` is None.

        Raises:
          ContextGone: there is no such context. The message is the same where another app owns it.
          CheckpointError: it is damaged, or its state after its last change cannot be read.
          Unreadable: storage refuses, or a newer version wrote it.
        """
        folder = self._unsettled.get(name)
        own = app is None or folder is None or folder.parent.name == folder_name(app)
        self._require_settled(name if own else "")
        record = self._catalog.records.get(name)
        # Another app's context takes as much work as a missing one: time must not tell them apart.
        if record is None or app not in (None, record.app):
            record = self._catalog.find_again(name, app)
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
        folder_name(app)
        self._require_settled()
        # Leftovers that cannot be removed do no harm.
        with contextlib.suppress(JaxllmError):
            self._catalog.sweep()
        name = new_name()
        record = Record(
            name=name, app=app, origin=origin, pinned=pinned, used=self._catalog.next_use(),
            created_s=int(time.time()),
        )  # fmt: skip
        folder = self._catalog.folder(record)
        self._unsettled[name] = folder
        try:
            with written(folder):
                folder.parent.mkdir(mode=0o700, exist_ok=True)
                folder.mkdir(mode=0o700)
                self._catalog.replace(folder, record)
                sync(folder.parent)
                sync(self.root)
        except JaxllmError:
            # The caller never learns its name.
            with contextlib.suppress(JaxllmError):
                self._catalog.remove(folder)
            raise
        self._catalog.records[name] = record
        del self._unsettled[name]
        return record

    def commit(self, record: Record, chunks: Chunks | None = None, *, flush: bool = True) -> Record:
        """Stores a context's new state: first its new chunks, then the record that names them.

        Args:
          record: the new record; its `files` and `checksums` are ignored and made here. Chunks that are
            `LOST` in it are removed.
          chunks: bits and each layer's blob of those chunks that are new or have another width.
          flush: wait until the device has everything. Otherwise chunks can be read, but a power cut or a kill
            leaves the state before, until the context's next commit or `close`.

        Returns:
          The stored record.

        Raises:
          ContextGone: the context was deleted.
          BudgetExceeded: a quota or the device has no room; the stored state is as it was.
          CheckpointError: the device failed: `record` tells whether the state is that before or after.
        """
        before = self.record(record.name)
        chunks = dict(chunks or {})
        folder, name = self._catalog.folder(record), record.name
        with written(folder):
            names = os.listdir(folder)
        fresh = next_segment([*names, *before.segments])
        files = [fresh if chunk in chunks else file for chunk, file in enumerate(_kept_files(before, record))]
        record = dataclasses.replace(
            record, files=tuple(files), checksums=before.checksums, used=self._catalog.next_use()
        )
        record = record.lose({chunk for chunk, file in enumerate(files) if not file})
        there = {*filter(SEGMENT.fullmatch, names), *before.segments, fresh}
        with written(folder):
            self._require_room(record, chunks, there - set(record.segments))
        self._unsettled[name] = folder
        try:
            with written(folder):
                if chunks:
                    checksum = write_segment(
                        folder / fresh, chunks, record.sources, self._storage, flush=flush, vault=self.vault
                    )
                    record = dataclasses.replace(record, checksums={**record.checksums, fresh: checksum})
                if flush:
                    for each in self._unflushed.get(name, set()) & set(record.segments):
                        sync(folder / each)
                    # Another process may have replaced the folder while chunks were written.
                    self._lock.require()
                    self._catalog.replace(folder, record)
        except JaxllmError:
            # What cannot be settled now is settled when the context is next used.
            with contextlib.suppress(JaxllmError):
                self._settle(name)
            raise
        self._catalog.records[name] = record
        if flush:
            self._unflushed.pop(name, None)
            for each in there - set(record.segments):
                self._catalog.discard(folder / each)
        else:
            self._unflushed[name] = there
        del self._unsettled[name]
        return record

    def open(self, name: str, chunks: Iterable[int] | None = None) -> StoredContext:
        """Opens a context's segments to be read, until the next call of the store.

        Args:
          name: of the context.
          chunks: those that will be read; None for all.

        Raises:
          ContextGone: there is no such context.
          CheckpointError: a segment is not what was written.
          Unreadable: storage refuses one.
        """
        record = self.record(name)
        folder, names = self._catalog.folder(record), record.segments
        if chunks is not None:
            names = sorted({record.files[chunk] for chunk in chunks} - {""})
        segments = self._segments.open([folder / each for each in names])
        return StoredContext(record, dict(zip(names, segments, strict=True)))

    def delete(self, name: str) -> None:
        """Removes a context and its files.

        Raises:
          ContextGone: there is no such context.
          CheckpointError: the device failed: `record` tells whether it is still there.
        """
        folder = self._catalog.folder(self.record(name))
        self._unsettled[name] = folder
        with written(folder):
            self._catalog.remove_records(folder)
        self._segments.forget(folder)
        self._settle(name)

    def used_bytes(self, app: str | None = None) -> int:
        """Bytes of all files, or of an app's."""
        return sum(
            folder_bytes(folder) for folder in {self._catalog.folder(each) for each in self.records(app)}
        )

    def verify(self, *, repair: bool = False) -> list[Damage]:
        """Reads everything in the store, and finds damage.

        Args:
          repair: set damaged files aside (see `root`): a context without a whole record, or a record that has
            a second copy. Damaged chunks are computed again from the tokens when they are next needed. Files
            that storage refuses now, and those of a newer version, stay as they are.

        Returns:
          The damage, and where damaged files were moved.

        Raises:
          CheckpointError: a damaged file cannot be moved or written.
        """
        self._require_settled()
        found = []
        with written(self.root):
            folders = self._catalog.find_all()
        for each in folders:
            if (damage := self._catalog.damage.get(each.path)) is not None:
                if repair and damage.proved:
                    with written(each.path):
                        damage = self._catalog.mend(each.path)
                found.append(damage)
            record = self._catalog.records.get(each.name)
            if record is None or each.path != self._catalog.folder(record):
                continue
            chunks = chunk_damage(each.path, record, self._storage, self.vault)
            if chunks.corrupt:
                lost = tuple(sorted(chunks.corrupt))
                found.append(Damage(app=record.app, name=record.name, chunks=lost))
                if repair:
                    self.commit(record.lose(chunks.corrupt))
            if chunks.unread:
                found.append(Damage(app=record.app, name=record.name, reason=chunks.reason, proved=False))
        if repair:
            self._catalog.sweep()
        return found

    def repair(self, name: str) -> Record:
        """Reads all chunks of a context, and marks damaged ones as lost, to be computed again.

        Returns:
          The record for the next call: it also marks as lost the chunks that storage refuses now, which stay
          on storage.

        Raises:
          ContextGone: there is no such context.
        """
        record = self.record(name)
        chunks = chunk_damage(self._catalog.folder(record), record, self._storage, self.vault)
        if chunks.corrupt:
            record = self.commit(record.lose(chunks.corrupt))
        return record.lose(chunks.unread)

    def _require_room(self, record: Record, chunks: Chunks, freed: Set[str]) -> None:
        """Checks the quotas for a commit that removes the files `freed`; one that does not grow the store
        always passes."""
        folder = self._catalog.folder(record)
        size = -sum(file_size(folder / each) for each in freed)
        size += file_bytes(chunks, encrypted=self.vault is not None)
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
        """Checks that the store is open, and settles contexts whose last change may not have ended.

        Raises:
          CheckpointError: the wanted context cannot be read.
        """
        self._lock.require()
        for name in list(self._unsettled):
            try:
                self._settle(name)
            except CheckpointError:
                if name == wanted:
                    raise

    def _settle(self, name: str) -> None:
        """Takes a context as it is on storage, and removes what an unfinished change left.

        Raises:
          CheckpointError: it cannot be read.
          ConfigError: another process owns the store by now.
        """
        self._lock.require()
        self._catalog.settle(name, self._unsettled[name])
        self._unflushed.pop(name, None)
        self._unsettled.pop(name, None)


def _kept_files(before: Record, after: Record) -> list[str]:
    """The segment of each chunk now; empty for chunks that are new or lost."""
    there = [*before.files, *[""] * len(after.bits)]
    return ["" if bits == LOST else file for bits, file in zip(after.bits, there, strict=False)]
