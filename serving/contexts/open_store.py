"""Opens a store: finds its records and reads what is stored. Changes nothing, except that it settles what an
interrupted change of this process left."""

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from jaxllm.errors import CheckpointError, ConfigError, ContextGone
from serving.contexts.catalog import Catalog
from serving.contexts.damage import Damage
from serving.contexts.encryption import Vault
from serving.contexts.lock import StoreLock
from serving.contexts.quotas import Quotas
from serving.contexts.record import Record
from serving.contexts.root import LOCK, file_size, folder_bytes, folder_name, is_shared, mark, require_store
from serving.contexts.segment import Segment
from serving.contexts.stored import OpenSegments, StoredContext
from serving.contexts.unsettled import Unsettled
from serving.contexts.write_queue import WriteQueue
from serving.host.direct_io import Storage


class OpenStore:
    """What is known of a store's contexts. For one process at a time, whose threads may read together.

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
        self._quotas = Quotas(quota_bytes, app_quota_bytes)
        self.vault = None if keys is None else Vault(keys, self.root)
        self._segments = OpenSegments(self._storage, self.vault)
        # Of contexts that are about to be written, with their records.
        self._queue: WriteQueue[Record] = WriteQueue()
        self._unsettled = Unsettled(self._queue)
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
        self._segments.close()
        self._lock.release()

    def records(self, app: str | None = None) -> list[Record]:
        """All contexts, or an app's, by name.

        Raises:
          ConfigError: the store was closed (see `StoreLock.require`); so do all methods below.
        """
        self._require_settled()
        there = {**self._catalog.records, **self._queue.coming()}
        found = [each for each in there.values() if app in (None, each.app)]
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
        folder = self._unsettled.folder(name)
        own = app is None or folder is None or folder.parent.name == folder_name(app)
        self._require_settled(name if own else "")
        coming = None if self._queue.inside else self._queue.coming().get(name)
        record = coming or self._catalog.records.get(name)
        # Another app's context takes as much work as a missing one: time must not tell them apart.
        if record is None or app not in (None, record.app):
            record = self._catalog.find_again(name, app)
        if record is None or app not in (None, record.app):
            raise ContextGone(f"there is no context {name!r:.80}; it was deleted, or never made")
        return record

    def wait(self, name: str = "") -> None:
        """Waits until what `commit_later` took of a context is written, or of all."""
        self._queue.wait(name)

    def writing(self, name: str) -> bool:
        """Whether what `commit_later` took of a context is not written yet."""
        return self._queue.busy(name)

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
        self.wait(name)
        record = self.record(name)
        folder, names = self._catalog.folder(record), record.segments
        if chunks is not None:
            names = sorted({record.files[chunk] for chunk in chunks} - {""})
        segments = self._segments.open([folder / each for each in names])
        return StoredContext(record, dict(zip(names, segments, strict=True)))

    @contextlib.contextmanager
    def opened_apart(self, name: str) -> Iterator[StoredContext]:
        """Opens a context's segments, which stay open whatever else the store does meanwhile.

        Raises:
          ContextGone, CheckpointError, Unreadable: see `open`.
        """
        record = self.record(name)
        with contextlib.ExitStack() as stack:
            segments = {
                each: stack.enter_context(
                    Segment(self._catalog.folder(record) / each, self._storage, self.vault)
                )
                for each in record.segments
            }
            yield StoredContext(record, segments)

    def stored_bytes(self, record: Record) -> int:
        """Bytes of a context's own segments."""
        return sum(file_size(self._catalog.folder(record) / each) for each in self.own_segments(record))

    def own_segments(self, record: Record) -> set[str]:
        """Names of a context's segments that no other context shares."""
        folder = self._catalog.folder(record)
        return {each for each in record.segments if not is_shared(folder / each)}

    def used_bytes(self, app: str | None = None) -> int:
        """Bytes of all files, or of an app's."""
        return folder_bytes({self._catalog.folder(each) for each in self.records(app)})

    def _require_settled(self, wanted: str = "") -> None:
        """Checks that the store is open, and settles contexts whose last change may not have ended.

        Raises:
          CheckpointError: the wanted context cannot be read.
        """
        self._lock.require()
        for name in self._unsettled.left():
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
        if (folder := self._unsettled.folder(name)) is not None:
            self._catalog.settle(name, folder)
            self._unflushed.pop(name, None)
            self._unsettled.end(name)
