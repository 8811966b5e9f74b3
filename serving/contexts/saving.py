"""Saves chunks after a call: encodes them in a thread, writes them to storage, compacts small segments.

Chunks get their memory before the answer ends: they count in the budget, and a chunk table has their
addresses. A thread fills it. Readers of a context's chunks, and writers of the cache that they are encoded
from, wait first (`wait`); so does writing to storage (`Encoding.require`). A kill meanwhile has the same
effect as a kill before the write: chunks are recomputed from the tokens, which are on storage.
"""

import collections
import contextlib
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence, Set

import numpy as np

from jaxllm.contexts.eviction import Resident
from jaxllm.contexts.recompute import LOST
from jaxllm.errors import BudgetExceeded, CheckpointError, JaxllmError, Unreadable, one_line
from jaxllm.kv.cache import KVCache
from jaxllm.serving.contexts.background import WriteQueue
from jaxllm.serving.contexts.chunk_io import ChunkIO
from jaxllm.serving.contexts.growth import agreeing_record
from jaxllm.serving.contexts.layout import written
from jaxllm.serving.contexts.memory import Stored
from jaxllm.serving.contexts.options import Writing
from jaxllm.serving.contexts.record import Linked, Record
from jaxllm.serving.contexts.segment import Chunks, file_bytes
from jaxllm.serving.contexts.store import ContextStore

_LOG = logging.getLogger("jaxllm")
# A context with more segments than this is rewritten as one.
_MOST_SEGMENTS = 8


class ChunkWriter:
    """Writes chunks to a store at the time given by `writing`.

    The tokens of a call are written at its end in any case, and flushed unless chunks are written in the
    background. Chunks that are written at eviction are not flushed: they can be recomputed.

    Args:
      store: store of the chunks.
      writing: see `ContextOptions`.
      failed: called in the writing thread with a context's name and the error if chunks cannot be written
        in the background.
    """

    def __init__(
        self, store: ContextStore, writing: Writing, failed: Callable[[str, JaxllmError], object]
    ) -> None:
        self._store, self._writing, self._failed = store, writing, failed
        if writing == "background":
            store.write_later()

    def keep(
        self,
        record: Record,
        changed: Set[int],
        coded: Mapping[int, Stored],
        linked: Linked,
        ready: Callable[[], object] | None = None,
    ) -> Record:
        """Stores a context after a call.

        Args:
          record: record of the context.
          changed: numbers of its chunks that are new, or whose width differs from storage.
          coded: encoded chunks by number, including all of `changed`.
          linked: chunks that another context has on storage (see `ContextStore.link`).
          ready: waits until the bytes of `coded` are encoded, with background writing; None if they are
            (see `ContextStore.commit_later`).

        Returns:
          The stored record, or the future one (see `ContextStore.commit_later`).

        Raises:
          BudgetExceeded, CheckpointError: see `ContextStore.commit`.
        """
        if self._writing not in ("background", "ahead"):
            return self._store.commit(record.lose(changed))
        chunks = {n: coded[n] for n in coded if n in changed}
        make_room(self._store, record, chunks)
        if self._writing == "background":
            before = self._store.record(record.name)
            self._store.note(agreeing_record(before, record.tokens, record.origin.chunk_tokens))
            return self._store.commit_later(
                record, chunks, self._failed, self._compacted, linked=linked, ready=ready
            )
        return self._compacted(self._store.commit(record, chunks, linked=linked).name)

    def _compacted(self, name: str) -> Record:
        """Compacts a context whose call is stored, as far as possible."""
        try:
            return compact(self._store, name)
        except BudgetExceeded:
            # No space for two copies: the context stays in many segments.
            return self._store.record(name)
        except CheckpointError:
            # An older chunk is damaged, or the device failed: this call is stored nevertheless.
            with contextlib.suppress(JaxllmError):
                return self._store.repair(name)
            return self._store.record(name)

    def left(self, chunks: Sequence[Resident]) -> None:
        """Writes evicted chunks that are not on storage. Unwritten ones are recomputed later."""
        if self._writing == "background":
            # Until they are written they stay in memory anyway.
            for name in {each.context for each in chunks}:
                self._store.wait(name)
        if self._writing != "at-eviction":
            return
        for name in dict.fromkeys(each.context for each in chunks):
            with contextlib.suppress(JaxllmError):
                self._write(name, [each for each in chunks if each.context == name])

    def _write(self, name: str, chunks: Sequence[Resident]) -> None:
        record = self._store.record(name)
        # A chunk marked lost on storage was in memory only.
        fresh = {
            each.chunk: (each.bits, each.blobs)
            for each in chunks
            if record.bits[each.chunk : each.chunk + 1] == (LOST,)
        }
        if fresh:
            bits = tuple(fresh[n][0] if n in fresh else width for n, width in enumerate(record.bits))
            self._store.commit(dataclasses.replace(record, bits=bits), fresh, flush=False)


class Encoding:
    """Chunks of one call that are being encoded.

    Args:
      queue: queue of the encoding thread.
      name: name of the context.
      chunks: chunks to store.
    """

    def __init__(self, queue: WriteQueue[None], name: str, chunks: Mapping[int, Stored]) -> None:
        self._queue, self._name, self.chunks = queue, name, chunks
        self.error: Exception | None = None

    def require(self) -> None:
        """Waits until they are encoded.

        Raises:
          JaxllmError: encoding failed.
        """
        self._queue.wait(self._name)
        if isinstance(self.error, JaxllmError):
            raise self.error
        if self.error is not None:
            reason = one_line(self.error)
            raise CheckpointError(f"chunks of the context {self._name} cannot be encoded ({reason})")


class ChunkEncoder:
    """Encodes the chunks of calls in a thread. At most one call waits, because its cache stays in memory
    meanwhile: the end of the next one waits for it."""

    def __init__(self) -> None:
        self._queue: WriteQueue[None] = WriteQueue(most=0, thread="jaxllm-encoding")
        self._failed: collections.deque[str] = collections.deque()

    def start(self) -> None:
        """Starts the thread."""
        self._queue.start()

    def later(
        self,
        chunk_io: ChunkIO,
        name: str,
        cache: KVCache,
        chunks: Mapping[int, int],
        stored: Mapping[int, Stored],
    ) -> Encoding:
        """Begins to encode chunks of a context; for `cache`, `chunks` and `stored` see `ChunkIO.encode`.

        Args:
          chunk_io: `ChunkIO` of the context's level.
          name: name of the context.
          cache: cache, which must not be written until they are encoded.
          chunks: width of each chunk, by number.
          stored: current stored chunks.
        """
        coming = Encoding(self._queue, name, chunk_io.room(chunks))

        def encode() -> None:
            try:
                chunk_io.encode(cache, chunks, stored, into=coming.chunks)
            except Exception as error:
                coming.error = error
                self._failed.append(name)

        self._queue.put(name, encode, None)
        return coming

    def busy(self, name: str = "") -> bool:
        """Whether chunks of a context, or of any, are being encoded."""
        return self._queue.busy(name)

    def wait(self, name: str = "") -> list[str]:
        """Waits until the chunks of a context, or of all, are encoded.

        Returns:
          Contexts whose encoding failed since the last call: their chunks in memory are invalid.
        """
        self._queue.wait(name)
        return [self._failed.popleft() for _ in range(len(self._failed))]

    def close(self) -> None:
        """Waits for all chunks, and ends the thread."""
        self._queue.close()


def compact(store: ContextStore, name: str) -> Record:
    """Rewrites a context's chunks as one segment if they are spread over many.

    Raises:
      ContextGone: there is no such context.
      CheckpointError: a chunk cannot be read, or the new segment cannot be written.
      BudgetExceeded: the device has no space for both.
    """
    record = store.record(name)
    return record if len(store.own_segments(record)) <= _MOST_SEGMENTS else _rewritten(store, name)


def make_room(store: ContextStore, record: Record, chunks: Chunks) -> None:
    """Makes room for new chunks of a context within the quotas: if they would exceed one, contexts whose
    segments contain obsolete chunks are rewritten, those of the same app first.

    Args:
      store: store of the context.
      record, chunks: see `ContextStore.commit`.

    Raises:
      BudgetExceeded: they still exceed a quota.
    """
    if store.beyond_quota(record, chunks) is None:
        return
    # Files being written count twice until they are complete.
    store.wait()
    for each in sorted(store.records(), key=lambda each: (each.app != record.app, each.used)):
        if (broken := store.beyond_quota(record, chunks)) is None:
            return
        if broken.app in (None, each.app) and store.stored_bytes(each) > _rewritten_bytes(store, each):
            # An unreadable one is repaired when it is used.
            with contextlib.suppress(JaxllmError):
                _rewritten(store, each.name)
    if (broken := store.beyond_quota(record, chunks)) is not None:
        raise BudgetExceeded(broken.reason)


def seal(store: ContextStore) -> None:
    """Seals a store that was opened with keys, before it is used: encrypts plain files, after which plain
    and older data is refused (see `Ledger`). If a context cannot be read or written now, logs a warning:
    the store stays unsealed, and the next start tries again.

    Raises:
      BudgetExceeded, CheckpointError: the ledger cannot be written.
    """
    vault = store.vault
    if vault is None or vault.ledger.is_sealed:
        return
    left = [f"{each.name} of {each.app} ({each.reason})" for each in store.unread()]
    for record in store.records():
        try:
            _encrypt(store, record)
        except JaxllmError as error:
            left.append(f"{record.name} of {record.app} ({one_line(error)})")
    if left:
        _LOG.warning(
            "%s: plain contexts are still read, because not all could be encrypted: %s",
            store.root,
            "; ".join(left)[:1000],
        )
        return
    with written(vault.folder):
        for record in store.records():
            vault.ledger.wrote(store.folder(record), record.used)
        vault.ledger.seal()


def _rewritten(store: ContextStore, name: str) -> Record:
    record = store.record(name)
    with store.opened_apart(name) as opened:
        chunks = {
            chunk: (record.bits[chunk], [opened.read(layer, [chunk])[0] for layer in range(opened.layers)])
            for chunk in _own_chunks(store, record)
        }
    return store.commit(record, chunks)


def _own_chunks(store: ContextStore, record: Record) -> list[int]:
    """The chunks of a context in segments that no other context shares: shared ones are stored once."""
    own = store.own_segments(record)
    return [n for n, file in enumerate(record.files) if file in own]


def _rewritten_bytes(store: ContextStore, record: Record) -> int:
    """The size of the segment of a context's own chunks."""
    sizes = {
        bits: [np.broadcast_to(np.uint8(0), size) for size in record.origin.layer_bytes[bits]]
        for bits in set(record.bits) - {LOST}
    }
    chunks = {n: (record.bits[n], sizes[record.bits[n]]) for n in _own_chunks(store, record)}
    return file_bytes(chunks, encrypted=store.vault is not None)


def _encrypt(store: ContextStore, record: Record) -> None:
    """Encrypts a context that has a plain file; the read adds those to the ledger's `plain`."""
    assert store.vault is not None
    name, folder, plain = record.name, store.folder(record), store.vault.ledger.plain
    rows = store.rows(name)
    try:
        chunks = _all_chunks(store, name)
    except Unreadable:
        raise
    except CheckpointError:
        # Damaged ones are lost, and recomputed when the context is used.
        store.repair(name)
        chunks = _all_chunks(store, name)
    if folder in plain:
        store.commit(store.record(name), chunks, rows=rows)
        plain.discard(folder)


def _all_chunks(store: ContextStore, name: str) -> Chunks:
    with store.opened_apart(name) as opened:
        bits = opened.record.bits
        return {
            n: (width, [opened.read(layer, [n])[0] for layer in range(opened.layers)])
            for n, width in enumerate(bits)
            if width != LOST
        }
