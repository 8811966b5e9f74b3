"""Stores contexts: a folder per app, in it a folder per context with a record and segments.

    ROOT/store.json            marks the folder as a store (`root`)
    ROOT/lock                  locked by the one process that uses the store
    ROOT/APP/CONTEXT/record    the app, the tokens, the names of segments (`record_file`)
    ROOT/APP/CONTEXT/N.kv      chunks (`segment.Segment`)

A call's chunks are written as a new segment, then the record that names it replaces the one before. A kill at
any moment leaves the older record with all segments that it names; segments that no record names are removed
by the context's next commit, or by `sweep`. Opening a store changes nothing in it: what cannot be read stays
and is listed (`catalog`), until `verify` is told to set damaged files aside. Only the owner may read its
folders (0700).

`commit_later` writes in a thread of its own (`write_queue`): until then a context's record is the one that is
coming, and whoever needs its files waits.
"""

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Set
from types import MappingProxyType

from jaxllm.errors import CheckpointError, JaxllmError, one_line
from jaxllm.files.atomic import sync
from jaxllm.kv.recompute import LOST
from serving.contexts.damage import Damage, chunk_damage
from serving.contexts.open_store import OpenStore
from serving.contexts.quotas import BrokenQuota
from serving.contexts.record import Origin, Record
from serving.contexts.root import (
    PREVIOUS,
    RECORD,
    SEGMENT,
    file_size,
    folder_name,
    is_shared,
    new_name,
    next_segment,
    remove_own,
    written,
)
from serving.contexts.row_file import read_rows, row_chunks, write_rows
from serving.contexts.segment import Chunks, file_bytes, write_segment
from serving.contexts.verification import verify
from serving.prompt_rows import PromptRows

# Chunk -> its segment, and the checksum of that.
Linked = Mapping[int, tuple[str, str]]
# The segment of a chunk that `commit_later` has yet to write.
_COMING = "coming"


class ContextStore(OpenStore):
    """The contexts of all apps of a device, as `OpenStore` opens them, and all that changes them."""

    def close(self) -> None:
        """Releases the store for other processes. Every later call raises ConfigError."""
        try:
            self._queue.close()
            for name in list(self._unflushed):
                # Chunks that cannot be flushed are computed again: the record on storage does not name them.
                with contextlib.suppress(JaxllmError):
                    self.commit(self.record(name))
        finally:
            super().close()

    def __enter__(self) -> "ContextStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def create(self, app: str, origin: Origin, *, pinned: bool = False, tokenizer: str = "") -> Record:
        """A new, empty context; see `Record`.

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
            name=name, app=app, origin=origin, pinned=pinned, tokenizer=tokenizer,
            used=self._catalog.next_use(), created_s=int(time.time()),
        )  # fmt: skip
        folder = self._catalog.folder(record)
        self._unsettled.begin(name, folder)
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
        self._unsettled.end(name)
        return record

    def link(self, record: Record, source: str, chunks: Mapping[int, int]) -> Linked:
        """Gives a context the segments of another one, without a copy: links that a later commit names.

        Args:
          record: of the context, with its tokens.
          source: name of the other one.
          chunks: width of each chunk that is wanted, by number; tokens up to its end are the same in both.

        Returns:
          The chunks that both have now; none with encryption, or where the file system has no hard links.
        """
        found: dict[int, tuple[str, str]] = {}
        if self.vault is not None:
            # A segment is encrypted for its context.
            return found
        links: dict[str, str] = {}
        with contextlib.suppress(JaxllmError, OSError):
            theirs, own = self.record(source), self._catalog.folder(record)
            for n, bits in sorted(chunks.items()):
                file = (*theirs.files, *[""] * (n + 1))[n]
                same = theirs.bits[n : n + 1] == (bits,) and theirs.sources[n] == record.sources[n]
                if not same or file not in theirs.checksums:
                    continue
                if file not in links:
                    fresh = next_segment([*os.listdir(own), *self.record(record.name).own_files])
                    os.link(self._catalog.folder(theirs) / file, own / fresh, follow_symlinks=False)
                    links[file] = fresh
                found[n] = (links[file], theirs.checksums[file])
        return found

    def commit(
        self,
        record: Record,
        chunks: Chunks | None = None,
        *,
        flush: bool = True,
        linked: Linked = MappingProxyType({}),
        rows: PromptRows | None = None,
    ) -> Record:
        """Stores a context's new state: first its new chunks, then the record that names them.

        Args:
          record: the new record; its `files`, `checksums` and `rows` are ignored and made here. Chunks that
            are `LOST` in it are removed.
          chunks: bits and each layer's blob of those chunks that are new or have another width.
          flush: wait until the device has everything. Otherwise chunks can be read, but a power cut or a kill
            leaves the state before, until the context's next commit or `close`.
          linked: chunks that are in segments of another context, too (see `link`).
          rows: all rows of the context from here on; None for those that it has.

        Returns:
          The stored record.

        Raises:
          ContextGone: the context was deleted.
          BudgetExceeded: a quota or the device has no room; the stored state is as it was.
          CheckpointError: the device failed: `record` tells whether the state is that before or after.
        """
        self.wait(record.name)
        before = self.record(record.name)
        chunks = dict(chunks or {})
        folder, name = self._catalog.folder(record), record.name
        with written(folder):
            names = os.listdir(folder)
        before = _with_links(before, linked)
        taken = [*names, *before.own_files]
        fresh = next_segment(taken)
        of_rows = before.rows if rows is None else next_segment([*taken, fresh])
        files = [fresh if chunk in chunks else file for chunk, file in enumerate(_kept_files(before, record))]
        named = {"files": tuple(files), "rows": of_rows, "checksums": before.checksums}
        record = dataclasses.replace(record, used=self._catalog.next_use(), **named)
        record = record.lose({chunk for chunk, file in enumerate(files) if not file})
        there = {*filter(SEGMENT.fullmatch, names), *before.own_files, fresh}
        with written(folder):
            more = self._more_bytes(record, chunks, there - record.own_files)
            more += 0 if rows is None else file_bytes(row_chunks(rows), encrypted=self.vault is not None)
            self._quotas.require(record.app, more, self.used_bytes)
        self._unsettled.begin(name, folder)
        try:
            with written(folder):
                if chunks:
                    checksum = write_segment(
                        folder / fresh, chunks, record.sources, self._storage, flush=flush, vault=self.vault
                    )
                    record = dataclasses.replace(record, checksums={**record.checksums, fresh: checksum})
                if rows is not None:
                    checksum = write_rows(folder / of_rows, rows, self._storage, self.vault, flush=flush)
                    record = dataclasses.replace(record, checksums={**record.checksums, of_rows: checksum})
                if flush:
                    for each in self._unflushed.get(name, set()) & record.own_files:
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
            for each in there - record.own_files:
                self._catalog.discard(folder / each)
        else:
            self._unflushed[name] = {*there, of_rows} - {""}
        self._unsettled.end(name)
        return record

    def rows(self, name: str) -> PromptRows | None:
        """The rows of a context that stand in place of its tokens; None where it has none.

        Raises:
          ContextGone, CheckpointError, Unreadable: see `record` and `read_rows`.
        """
        self.wait(name)
        record = self.record(name)
        return read_rows(self._catalog.folder(record), record, self._storage, self.vault)

    def write_later(self) -> None:
        """Starts the thread that writes what `commit_later` takes."""
        self._queue.start()

    def note(self, record: Record) -> Record:
        """Stores a context's new tokens without waiting for the device: a kill leaves them, a power cut may
        leave the state before. What was there is removed by the next commit.

        Args:
          record: see `commit`; it has no new chunks.

        Returns, Raises: see `commit`.
        """
        self.wait(record.name)
        before, folder, name = self.record(record.name), self._catalog.folder(record), record.name
        files = tuple(_kept_files(before, record))
        record = dataclasses.replace(
            record, files=files, rows=before.rows, checksums=before.checksums, used=self._catalog.next_use()
        ).lose({chunk for chunk, file in enumerate(files) if not file})
        self._unsettled.begin(name, folder)
        try:
            with written(folder):
                self._catalog.replace(folder, record, flush=False)
        except JaxllmError:
            with contextlib.suppress(JaxllmError):
                self._settle(name)
            raise
        self._catalog.records[name] = record
        self._unsettled.end(name)
        return record

    def commit_later(
        self,
        record: Record,
        chunks: Chunks,
        failed: Callable[[str, JaxllmError], object],
        then: Callable[[str], object] = lambda _: None,
        *,
        linked: Linked = MappingProxyType({}),
        ready: Callable[[], object] | None = None,
    ) -> Record:
        """Stores a context's new state as `commit` does, in the thread that writes (see `write_later`). Waits
        only where too much is waiting already.

        Args:
          record, chunks, linked: see `commit`.
          failed: called in that thread with the context's name and the error; the state is that before.
          then: called in that thread with the name, after the commit.
          ready: called in that thread before the commit: waits until the chunks are encoded, or raises;
            None where they are.

        Returns:
          The record that is coming.
        """
        name = record.name

        def write() -> None:
            try:
                if ready is not None:
                    ready()
                self.commit(record, chunks, linked=linked)
                then(name)
            except JaxllmError as error:
                failed(name, error)
            except Exception as error:
                failed(name, CheckpointError(f"the context {name} cannot be written ({one_line(error)})"))

        there = [*record.files, *[""] * len(record.bits)][: len(record.bits)]
        files = (_COMING if n in chunks or n in linked else file for n, file in enumerate(there))
        coming = dataclasses.replace(record, files=tuple(files), used=self.record(name).used)
        self._queue.put(name, write, coming)
        return coming

    def beyond_quota(self, record: Record, chunks: Chunks) -> BrokenQuota | None:
        """The quota that a context's new chunks would break; None for none. Files that are being written may
        count twice.

        Args:
          record, chunks: see `commit`.
        """
        files = set(_kept_files(self.record(record.name), record)) - {""}
        freed = set(self.record(record.name).segments) - files
        return self._quotas.beyond(record.app, self._more_bytes(record, chunks, freed), self.used_bytes)

    def sweep(self) -> None:
        """Removes what killed processes left: segments that no record names, unfinished files, and folders of
        contexts that were being made or deleted. Files of contexts with damage stay."""
        self._require_settled()
        for record in self.records():
            folder = self._catalog.folder(record)
            if folder not in self._catalog.damage:
                with contextlib.suppress(OSError, JaxllmError):
                    if not (folder / RECORD).exists():
                        # A kill left the one before, and what tells of it is about to go.
                        record = self.commit(record)
                    remove_own(folder, keep={RECORD, PREVIOUS, *record.own_files})
        with contextlib.suppress(JaxllmError):
            self._catalog.sweep()

    def delete(self, name: str) -> None:
        """Removes a context and its files.

        Raises:
          ContextGone: there is no such context.
          CheckpointError: the device failed: `record` tells whether it is still there.
        """
        self.wait(name)
        folder = self._catalog.folder(self.record(name))
        self._unsettled.begin(name, folder)
        with written(folder):
            self._catalog.remove_records(folder)
        self._segments.forget(folder)
        self._settle(name)

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
        self.wait()
        self._require_settled()
        return verify(self._catalog, self._storage, self.vault, self.commit if repair else None)

    def repair(self, name: str) -> Record:
        """Reads all chunks of a context, and marks damaged ones as lost, to be computed again.

        Returns:
          The record for the next call: it also marks as lost the chunks that storage refuses now, which stay
          on storage.

        Raises:
          ContextGone: there is no such context.
        """
        self.wait(name)
        record = self.record(name)
        chunks = chunk_damage(self._catalog.folder(record), record, self._storage, self.vault)
        if chunks.corrupt:
            record = self.commit(record.lose(chunks.corrupt))
        return record.lose(chunks.unread)

    def _more_bytes(self, record: Record, chunks: Chunks, freed: Set[str]) -> int:
        """By how much a commit of chunks grows the store, which removes the files `freed`."""
        folder = self._catalog.folder(record)
        size = file_bytes(chunks, encrypted=self.vault is not None)
        return size - sum(file_size(folder / each) for each in freed if not is_shared(folder / each))


def _with_links(record: Record, linked: Linked) -> Record:
    """A record whose chunks are where links are."""
    count = max([len(record.files), *(n + 1 for n in linked)])
    files = [*record.files, *[""] * (count - len(record.files))]
    for n, (file, _) in linked.items():
        files[n] = file
    checksums = {**record.checksums, **dict(linked.values())}
    return dataclasses.replace(record, files=tuple(files), checksums=checksums)


def _kept_files(before: Record, after: Record) -> list[str]:
    """The segment of each chunk now; empty for chunks that are new or lost."""
    there = [*before.files, *[""] * len(after.bits)]
    return ["" if bits == LOST else file for bits, file in zip(after.bits, there, strict=False)]
