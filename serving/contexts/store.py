"""Stores contexts: their records in a catalog, their chunks in segments in a folder per app with a folder
per context (see `layout`).

A call's chunks are written as a new segment, then the record that names it replaces the one before. A kill
at any moment leaves the older record with all of its segments; segments that no record names are removed by
the context's next commit, or by `sweep`. Opening a store removes nothing: unreadable contexts stay and are
listed, until `verify` sets damaged files aside on request. Only the owner may read it (0700).

`commit_later` writes in a thread (`WriteQueue`): until then the context's record is the future one, and
accesses to its files wait.
"""

import collections
import contextlib
import dataclasses
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jaxllm.errors import BudgetExceeded, CheckpointError, ConfigError, ContextGone, JaxllmError, one_line
from jaxllm.files.atomic import sync
from jaxllm.serving.contexts import layout
from jaxllm.serving.contexts.catalog import Catalog, Damage, chunk_damage, require_store, verify
from jaxllm.serving.contexts.encryption import Vault
from jaxllm.serving.contexts.record import Linked, Origin, Record
from jaxllm.serving.contexts.segment import (
    ROWS_SOURCE,
    Chunks,
    OpenSegments,
    Segment,
    StoredContext,
    file_bytes,
    read_rows,
    row_chunks,
    write_segment,
)
from jaxllm.serving.ground.prompt_embeddings import PromptEmbeddings
from jaxllm.serving.host.storage import Storage

_LOG = logging.getLogger("jaxllm")
_LOOK_S = 0.0005
# Placeholder for the segment of a chunk that `commit_later` has yet to write.
_COMING = "coming"


class WriteQueue:
    """Jobs by context, run sequentially in a thread, with the context's future state. A forked child has
    none: they belong to its parent.

    No locks are used: an interrupt while one is released would leave it locked, and the thread would wait
    forever. Jobs are in a deque, whose operations are atomic, and waiting polls.

    Args:
      most: maximum number of waiting jobs; `put` waits for space.
      thread: name of the thread.
    """

    def __init__(self, most: int = 8, *, thread: str = "jaxllm-contexts") -> None:
        self._most, self._thread_name, self._process = most, thread, os.getpid()
        # Jobs that have not ended; the first one runs.
        self._jobs: collections.deque[tuple[str, Callable[[], None], Any]] = collections.deque()
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._ending = False
        self._thread: threading.Thread | None = None

    @property
    def inside(self) -> bool:
        """Whether this is the thread that runs the jobs."""
        return threading.current_thread() is self._thread

    def start(self) -> None:
        """Starts the thread. It never keeps the interpreter from exiting: `close` waits for its jobs."""
        self._thread = threading.Thread(target=self._run, name=self._thread_name, daemon=True)
        self._thread.start()

    def put(self, name: str, job: Callable[[], None], coming: Any = None) -> None:
        """Adds a job of a context, after waiting for space; `coming` is the context's state after it."""
        while len(self._jobs) > self._most:
            self._wake.put(None)
            time.sleep(_LOOK_S)
        self._jobs.append((name, job, coming))
        self._wake.put(None)

    def coming(self) -> dict[str, Any]:
        """Future states of contexts with pending jobs, by name."""
        return {name: coming for name, _, coming in tuple(self._jobs)}

    def busy(self, name: str = "") -> bool:
        """Whether a job of a context, or any job, is pending."""
        return any(each == name or not name for each, _, _ in tuple(self._jobs))

    def wait(self, name: str = "") -> None:
        """Waits until no job of a context, or no job at all, is pending. Jobs themselves never wait."""
        if self._thread is None or self.inside or self._process != os.getpid():
            return
        while self.busy(name):
            # Repeated: an interrupt may have come between a job and its signal.
            self._wake.put(None)
            time.sleep(_LOOK_S)

    def close(self) -> None:
        """Waits for all jobs, and ends the thread."""
        self.wait()
        if self._thread is None or self._process != os.getpid():
            return
        self._ending = True
        self._wake.put(None)
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._wake.get()
            while self._jobs:
                name, job, coming = self._jobs[0]
                try:
                    job()
                except Exception as error:
                    _LOG.error("a job of the context %s failed: %s", name, one_line(error))
                finally:
                    # Else the job's data would stay in memory until the next one.
                    del job, coming
                    self._jobs.popleft()
            if self._ending:
                return


class ContextStore:
    """The contexts of all apps of a device. For one process at a time, whose threads may read concurrently.

    Every method raises ConfigError when the store was closed, or belongs to the process that forked this one.

    Attributes:
      root: the store's folder.
      vault: the keys of encrypted contexts; None for no encryption.
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
        self._quotas = (app_quota_bytes, quota_bytes)
        self.vault = None if keys is None else Vault(keys, self.root)
        self._segments = OpenSegments(self._storage, self.vault)
        # Pending writes, with the contexts' future records.
        self._queue = WriteQueue()
        # Folders of contexts that are being changed, or whose change was interrupted, by name; and whether
        # the writing thread does it: while that runs, only it may touch them.
        self._unsettled: dict[str, tuple[Path, bool]] = {}
        try:
            # Check this before making anything in a folder that may be foreign.
            require_store(self.root)
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = layout.StoreLock(self.root / layout.LOCK)
            try:
                require_store(self.root)
                self._catalog = Catalog(self.root, self._segments, self.vault)
                self._catalog.find_all()
            except BaseException:
                self._release()
                raise
        except (OSError, CheckpointError, BudgetExceeded) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(f"{root}: cannot be a store of contexts ({reason})") from error

    def close(self) -> None:
        """Releases the store for other processes. Every later call raises ConfigError."""
        try:
            self._queue.close()
        finally:
            self._release()

    def _release(self) -> None:
        self._segments.close()
        if hasattr(self, "_catalog"):
            self._catalog.close()
        if self.vault is not None:
            self.vault.close()
        self._lock.close()

    def __enter__(self) -> "ContextStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def records(self, app: str | None = None) -> list[Record]:
        """All contexts, or an app's, by name."""
        self._require_settled()
        current = {**self._catalog.records, **self._queue.coming()}
        found = [each for each in current.values() if app in (None, each.app)]
        return sorted(found, key=lambda each: (each.app, each.name))

    def damage(self) -> list[Damage]:
        """Damage that was found when records were read, and was not repaired since."""
        return sorted(self._catalog.damage.values(), key=lambda each: (each.app, each.name))

    def unread(self) -> list[Damage]:
        """Contexts whose state is unknown now; without those whose key was erased."""
        damage, erased = self._catalog.damage, self._catalog.erased
        return [each for path, each in damage.items() if each.lost and not each.proved and path not in erased]

    def folder(self, record: Record) -> Path:
        """A context's folder."""
        return self._catalog.folder(record)

    def record(self, name: str, app: str | None = None) -> Record:
        """A context's record, if the app owns the context or `app` is None.

        Raises:
          ContextGone: there is no such context. The message is the same if another app owns it.
          CheckpointError: it is damaged, or its state after its last change cannot be read.
          Unreadable: storage refuses, or a newer version wrote it.
        """
        folder, _ = self._unsettled.get(name, (None, False))
        own = app is None or folder is None or folder.parent.name == layout.folder_name(app)
        self._require_settled(name if own else "")
        coming = None if self._queue.inside else self._queue.coming().get(name)
        record = coming or self._catalog.records.get(name)
        # Another app's context costs as much time as a missing one, which hides its existence.
        if record is None or app not in (None, record.app):
            record = self._catalog.find_again(name, app)
        if record is None or app not in (None, record.app):
            raise ContextGone(f"there is no context {name!r:.80}; it was deleted, or never made")
        return record

    def wait(self, name: str = "") -> None:
        """Waits until the pending writes of a context, or of all, are done."""
        self._queue.wait(name)

    def open(self, name: str, chunks: Iterable[int] | None = None) -> StoredContext:
        """Opens a context's segments for reads of some chunks, or of all, until the next call of the store.

        Raises:
          ContextGone: there is no such context.
          CheckpointError: a segment has changed.
          Unreadable: storage refuses one.
        """
        self.wait(name)
        record = self.record(name)
        names = sorted({record.files[n] for n in chunks} - {""}) if chunks is not None else record.segments
        segments = self._segments.open([self.folder(record) / each for each in names])
        return StoredContext(record, dict(zip(names, segments, strict=True)))

    def read_chunks(self, name: str, chunks: Iterable[int] | None = None) -> Chunks:
        """Some chunks of a context on storage, or all. Does not wait for pending writes. Raises: see
        `open`."""
        record = self.record(name)
        stored = [n for n, file in enumerate(record.files) if file]
        wanted = stored if chunks is None else sorted(chunks)
        with contextlib.ExitStack() as stack:
            # Apart from `open`, because this may be the writing thread.
            segments = {
                each: stack.enter_context(Segment(self.folder(record) / each, self._storage, self.vault))
                for each in sorted({record.files[n] for n in wanted})
            }
            opened = StoredContext(record, segments)
            layers = [opened.read(layer, wanted) for layer in range(opened.layers)]
        return {n: (record.bits[n], [blobs[at] for blobs in layers]) for at, n in enumerate(wanted)}

    def own_segments(self, record: Record) -> dict[str, int]:
        """Bytes of a context's segments that no other context shares, by name."""
        return layout.own_bytes(self.folder(record), record.segments)

    def used_bytes(self, app: str | None = None) -> int:
        """Bytes of all files and records, or of an app's."""
        records = self.records(app)
        rows = sum(self._catalog.record_bytes.get(each.name, 0) for each in records)
        return rows + layout.folder_bytes({self.folder(each) for each in records})

    def create(self, app: str, origin: Origin, *, pinned: bool = False, tokenizer: str = "") -> Record:
        """A new, empty context; see `Record`.

        Raises:
          ConfigError: the app's name is empty or too long.
          BudgetExceeded: there is no space.
          CheckpointError: it cannot be written.
        """
        layout.folder_name(app)
        self._require_settled()
        # Leftovers that cannot be removed do no harm.
        with contextlib.suppress(JaxllmError):
            self._catalog.sweep()
        name = layout.new_name()
        record = Record(
            name=name, app=app, origin=origin, pinned=pinned, tokenizer=tokenizer,
            used=self._catalog.next_use(), created_s=max(0, int(time.time())),
        )  # fmt: skip
        folder = self.folder(record)
        try:
            with self._changing(record):
                folder.parent.mkdir(mode=0o700, exist_ok=True)
                folder.mkdir(mode=0o700)
                for each in (folder.parent, self.root):
                    sync(each)
                self._catalog.put(record)
                self._catalog.records[name] = record
        except JaxllmError:
            # The caller will never know its name.
            with contextlib.suppress(JaxllmError):
                self.delete(name)
            raise
        return record

    def link(self, record: Record, source: str, chunks: Mapping[int, int]) -> Linked:
        """Shares the segments of another context without a copy: links for a later commit.

        Args:
          record: record of the context, with its tokens.
          source: name of the other one.
          chunks: width of each requested chunk, by number; both have the same tokens up to its end.

        Returns:
          The chunks that both have now; none with encryption, or if the file system has no hard links.
        """
        found: dict[int, tuple[str, str]] = {}
        if self.vault is not None:
            # Segments are encrypted for one context.
            return found
        links: dict[str, str] = {}
        with contextlib.suppress(JaxllmError, OSError):
            theirs, own = self.record(source), self.folder(record)
            for n, bits in sorted(chunks.items()):
                file = (*theirs.files, *[""] * (n + 1))[n]
                same = theirs.bits[n : n + 1] == (bits,) and theirs.sources[n] == record.sources[n]
                if not same or file not in theirs.checksums:
                    continue
                if file not in links:
                    fresh = layout.next_segment([*os.listdir(own), *self.record(record.name).own_files])
                    os.link(self.folder(theirs) / file, own / fresh, follow_symlinks=False)
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
        rows: PromptEmbeddings | None = None,
    ) -> Record:
        """Stores a context's new state: first its new chunks, then the record that names them.

        Args:
          record: the new record; its `files`, `checksums` and `rows` are ignored and set here. Its `LOST`
            chunks are removed.
          chunks: bits and each layer's blob of chunks that are new or have another width.
          flush: whether to wait until the device has everything. Otherwise the new state survives a kill,
            while a power cut may restore the state before, or lose its new chunks; obsolete files are removed
            by the next commit.
          linked: chunks in segments that are shared with another context (see `link`).
          rows: all prompt embeddings of the context from here on; None to keep them.

        Returns:
          The stored record.

        Raises:
          ContextGone: the context was deleted.
          BudgetExceeded: a quota is exceeded or the device full; the stored state is unchanged.
          CheckpointError: the device failed: `record` shows whether the state is the one before or after.
        """
        self.wait(record.name)
        before = self.record(record.name).with_links(linked)
        chunks, new_rows = dict(chunks or {}), row_chunks(rows)
        folder = self.folder(record)
        with layout.written(folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            names = os.listdir(folder)
        taken = [*names, *before.own_files]
        fresh = layout.next_segment(taken)
        of_rows = layout.next_segment([*taken, fresh]) if new_rows else before.rows
        kept = record.kept_files(before)
        files = tuple(fresh if n in chunks else file for n, file in enumerate(kept))
        record = dataclasses.replace(
            record, files=files, rows=of_rows, checksums=before.checksums, used=self._catalog.next_use()
        ).lose({n for n, file in enumerate(files) if not file})
        current = {*filter(layout.SEGMENT.fullmatch, names), *before.own_files, fresh}
        with layout.written(folder):
            more = self._more_bytes(record, chunks, current - record.own_files)
            more += file_bytes(new_rows, encrypted=self.vault is not None)
        if (broken := self._broken_quota(record.app, more)) is not None:
            raise BudgetExceeded(broken[1])
        sources = record.sources if chunks else ()
        with self._changing(record):
            for file, new, of in ((fresh, chunks, sources), (of_rows, new_rows, ROWS_SOURCE)):
                if new:
                    checksum = write_segment(
                        folder / file, new, of, self._storage, flush=flush, vault=self.vault
                    )
                    record = dataclasses.replace(record, checksums={**record.checksums, file: checksum})
            # Another process may have replaced the folder while chunks were written.
            self._lock.require()
            self._catalog.put(record, flush=flush)
            self._catalog.records[record.name] = record
            for each in current - record.own_files if flush else ():
                self._catalog.discard(folder / each)
        return record

    def rows(self, name: str) -> PromptEmbeddings | None:
        """The prompt embeddings of a context; None if it has none. For errors see `record` and
        `read_rows`."""
        self.wait(name)
        record = self.record(name)
        return read_rows(self.folder(record), record, self._storage, self.vault)

    def write_later(self) -> None:
        """Starts the thread that writes for `commit_later`."""
        self._queue.start()

    def note(self, record: Record) -> Record:
        """Stores a context's new tokens without waiting for the device (see `commit`)."""
        return self.commit(record, flush=False)

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
        """Stores a context's new state as `commit` does, in the writing thread (see `write_later`). Waits
        only if too many writes are pending.

        Args:
          record, chunks, linked: see `commit`.
          failed: called in that thread with the context's name and the error; the state is the one before.
          then: called in that thread with the name, after the commit.
          ready: called in that thread before the commit: waits until the chunks are encoded, or raises; None
            if they are.

        Returns:
          The future record.
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

        future = record.with_links(linked)
        files = [*future.files, *[""] * len(record.bits)][: len(record.bits)]
        coming = tuple(_COMING if n in chunks else file for n, file in enumerate(files))
        future = dataclasses.replace(future, files=coming, used=self.record(name).used)
        self._queue.put(name, write, future)
        return future

    def beyond_quota(self, record: Record, chunks: Chunks) -> tuple[str | None, str] | None:
        """The app of the quota that a context's new chunks would exceed, None for that of all contexts, and
        an explanation; None for no quota. Files being written may count twice."""
        before = self.record(record.name)
        freed = {*before.segments} - {*record.kept_files(before)}
        return self._broken_quota(record.app, self._more_bytes(record, chunks, freed))

    def sweep(self) -> None:
        """Removes the leftovers of killed processes: segments that no record names, unfinished files, and
        folders of unfinished or deleted contexts. Files of contexts with damage stay."""
        self._require_settled()
        for record in self.records():
            folder = self.folder(record)
            if folder not in self._catalog.damage:
                with contextlib.suppress(OSError, JaxllmError):
                    layout.require_real(folder)
                    layout.remove_own(folder, keep=record.own_files)
        with contextlib.suppress(JaxllmError):
            self._catalog.sweep()

    def delete(self, name: str) -> None:
        """Removes a context and its files.

        Raises:
          ContextGone: there is no such context.
          CheckpointError: the device failed: `record` shows whether it still exists.
        """
        self.wait(name)
        record = self.record(name)
        with self._changing(record):
            self._catalog.delete(record)
            self._segments.forget(self.folder(record))
            self._settle(name)

    def verify(self, *, repair: bool = False) -> list[Damage]:
        """Reads everything in the store to find damage.

        Args:
          repair: whether to set aside damaged files (see `layout`): a context with a damaged record, or the
            catalog, which is rebuilt from its readable records. Damaged chunks are recomputed from the
            tokens when needed. Unreadable files stay, and so do files of contexts that the catalog does not
            know.

        Returns:
          The damage, and the new places of damaged files.

        Raises:
          CheckpointError: a damaged file cannot be moved or written.
        """
        self.wait()
        self._require_settled()
        return verify(self._catalog, self._storage, self.vault, self.commit if repair else None)

    def repair(self, name: str) -> Record:
        """Reads all chunks of a context, and marks damaged ones as lost, to be recomputed.

        Returns:
          The record for the next call, which also marks unreadable chunks as lost; these stay on storage.

        Raises:
          ContextGone: there is no such context.
        """
        self.wait(name)
        record = self.record(name)
        corrupt, unread, _ = chunk_damage(self.folder(record), record, self._storage, self.vault)
        if corrupt:
            record = self.commit(record.lose(corrupt))
        return record.lose(unread)

    def _more_bytes(self, record: Record, chunks: Chunks, freed: Set[str]) -> int:
        """The growth of the store by a commit of chunks that removes the files `freed`."""
        size = file_bytes(chunks, encrypted=self.vault is not None)
        return size - sum(layout.own_bytes(self.folder(record), freed).values())

    def _broken_quota(self, app: str, more_bytes: int) -> tuple[str | None, str] | None:
        """The quota that files of an app would exceed with `more_bytes` more (see `beyond_quota`). A change
        that does not grow the store exceeds none."""
        for quota, whose, owner in zip(
            self._quotas, (f"the contexts of {app}", "all contexts"), (app, None), strict=True
        ):
            if quota and more_bytes > 0 and self.used_bytes(owner) + more_bytes > quota:
                return owner, (
                    f"{whose} may take {quota:,} bytes on storage, and {more_bytes:,} more do not fit: "
                    "delete contexts, or raise the quota"
                )
        return None

    @contextlib.contextmanager
    def _changing(self, record: Record) -> Iterator[None]:
        """Changes a context. After an error its state is reloaded from storage; if that fails, or after an
        interrupt, it is when the context is next used."""
        name, folder = record.name, self.folder(record)
        self._unsettled[name] = (folder, self._queue.inside)
        try:
            with layout.written(folder):
                yield
        except JaxllmError:
            with contextlib.suppress(JaxllmError):
                self._settle(name)
            raise
        self._unsettled.pop(name, None)

    def _require_settled(self, wanted: str = "") -> None:
        """Checks that the store is open, and reloads contexts whose last change may be incomplete.

        Raises:
          ConfigError: the store was closed, or belongs to another process.
          CheckpointError: the wanted context cannot be read.
        """
        self._lock.require()
        inside = self._queue.inside
        for name, (_, by_queue) in list(self._unsettled.items()):
            if by_queue == inside or (by_queue and not self._queue.busy(name)):
                try:
                    self._settle(name)
                except CheckpointError:
                    if name == wanted:
                        raise

    def _settle(self, name: str) -> None:
        """Reloads a context from storage, and removes leftovers of an unfinished change.

        Raises:
          CheckpointError: it cannot be read.
          ConfigError: another process owns the store now.
        """
        self._lock.require()
        if (change := self._unsettled.get(name)) is not None:
            self._catalog.settle(name, change[0])
            self._unsettled.pop(name, None)
